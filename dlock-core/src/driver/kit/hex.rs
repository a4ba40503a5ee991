//! Hex: names as keys and columns of stores that do not take every character of a name.

use std::fmt::Write;

/// Bytes as two digits each, in lower case. The texts of two names are in the order of the names.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::{from_hex, to_hex};
///
/// assert_eq!(to_hex("a.*"), "612e2a");
/// assert_eq!(from_hex("612e2a").as_deref(), Some(b"a.*".as_slice()));
/// ```
#[must_use]
pub fn to_hex(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _infallible = write!(hex, "{byte:02x}");
    }
    hex
}

/// The bytes of a text; `None`: [`to_hex`] writes no such text.
#[must_use]
pub fn from_hex(hex: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let pairs = hex.as_bytes().chunks(2);
    let bytes = pairs.map(|pair| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    });
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use super::{from_hex, to_hex};

    #[test]
    fn bytes_come_back_and_other_texts_are_refused() {
        let all: Vec<u8> = (0..=255).collect();
        for bytes in [b"".as_slice(), b"a", &all] {
            assert_eq!(from_hex(&to_hex(bytes)).as_deref(), Some(bytes));
        }
        for text in ["6", "616", "6A", "+a", " 6", "zz", "ž"] {
            assert_eq!(from_hex(text), None, "{text}");
        }
    }
}
