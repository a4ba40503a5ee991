//! Lock names: validated text with a cached hash.

use std::{
    fmt,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    str::FromStr,
    sync::{Arc, LazyLock},
};

/// The longest legal name, in bytes of UTF-8. The narrowest store holds this much unhashed: MySQL's primary
/// key beside its other columns.
///
/// # Examples
/// ```
/// use dlock_core::{LockName, MAX_NAME_BYTES};
///
/// assert!(LockName::new("x".repeat(MAX_NAME_BYTES)).is_ok());
/// assert!(LockName::new("x".repeat(MAX_NAME_BYTES + 1)).is_err());
/// ```
pub const MAX_NAME_BYTES: usize = 512;

/// The name of a lock: any UTF-8 text of 1 to [`MAX_NAME_BYTES`] bytes without NUL.
///
/// Names are compared byte by byte: case, trailing blanks and `/ { } %` are all significant, on every backend.
/// Cheap to clone.
///
/// ```
/// use dlock_core::LockName;
/// let name: LockName = "orders:42".parse()?;
/// assert_eq!(name.as_str(), "orders:42");
/// assert!("".parse::<LockName>().is_err());
/// # Ok::<(), dlock_core::NameError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockName {
    text: Arc<str>,
    /// Hash of the text, computed once, because each cycle looks the name up several times. Keyed at
    /// random, because names may come from untrusted input.
    hash: u64,
}

static HASHED: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl LockName {
    /// Validates a name.
    ///
    /// # Errors
    /// [`NameError`] says what is wrong with it.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{LockName, NameError};
    ///
    /// assert!(LockName::new("orders:42").is_ok());
    /// assert_eq!(LockName::new(""), Err(NameError::Empty));
    /// ```
    pub fn new(name: impl AsRef<str>) -> Result<Self, NameError> {
        let name = name.as_ref();
        match name.len() {
            0 => Err(NameError::Empty),
            bytes if bytes > MAX_NAME_BYTES => Err(NameError::TooLong { bytes }),
            _ => match name.find('\0') {
                Some(at) => Err(NameError::Nul { at }),
                None => Ok(Self {
                    text: name.into(),
                    hash: HASHED.hash_one(name),
                }),
            },
        }
    }

    /// The name as text.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::LockName;
    ///
    /// assert_eq!(LockName::new("orders:42")?.as_str(), "orders:42");
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl Hash for LockName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl FromStr for LockName {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        Self::new(name)
    }
}

impl AsRef<str> for LockName {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, f)
    }
}

/// Why a text is not a lock name.
///
/// # Examples
/// ```
/// use dlock_core::{LockName, NameError};
///
/// assert_eq!(LockName::new("a\0b"), Err(NameError::Nul { at: 1 }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// It is empty.
    #[error("a lock name must have at least one byte")]
    Empty,
    /// It is longer than [`MAX_NAME_BYTES`].
    #[error(
        "the lock name has {bytes} bytes, the most is {MAX_NAME_BYTES}: hash the variable part of it"
    )]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
    /// It has a NUL byte, which some stores cannot hold.
    #[error("the lock name has a NUL byte at offset {at}")]
    Nul {
        /// The offset of the first one.
        at: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::{LockName, MAX_NAME_BYTES, NameError};

    #[test]
    fn names_up_to_the_limit_are_kept_byte_for_byte() {
        let longest = "é".repeat(MAX_NAME_BYTES / 2);
        for name in ["a", " ", "A ", "{}%/\u{1}", "žluť", longest.as_str()] {
            assert_eq!(LockName::new(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_reason() {
        assert_eq!(LockName::new(""), Err(NameError::Empty));
        assert_eq!(LockName::new("a\0b"), Err(NameError::Nul { at: 1 }));
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        assert_eq!(LockName::new(long), Err(NameError::TooLong { bytes: 513 }));
    }
}
