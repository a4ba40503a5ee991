//! Passes: the right to enter one incarnation of one lock, as a value and as text.

use crate::{
    identity::{FencingToken, Owner},
    name::LockName,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::{fmt, str::FromStr, sync::Arc};
use uuid::Uuid;

/// The right to enter one incarnation of one lock, as a value: what [`Guard::pass`](crate::Guard::pass) gives and
/// [`Lock::join`](crate::Lock::join) takes, in this process or another one.
///
/// It is a bearer secret: whoever has it may enter or end this incarnation, and nothing else. `Debug` shows a fingerprint;
/// `Display` writes **the secret itself**, as text without blanks, commas or control characters, for an RPC header or an
/// environment variable, and `FromStr` reads it. With the feature `serde` it is that text.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Pass {
    pub(crate) store: Arc<str>,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
}

impl Pass {
    /// Puts a pass together from its parts.
    #[must_use]
    pub fn new(
        store: impl Into<Arc<str>>,
        name: LockName,
        owner: Owner,
        token: FencingToken,
    ) -> Self {
        Self {
            store: store.into(),
            name,
            owner,
            token,
        }
    }

    /// The store it is valid in, as [`Capabilities::store`](crate::Capabilities::store) names it.
    #[must_use]
    pub fn store(&self) -> &str {
        &self.store
    }

    /// The lock it opens.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// The owner it makes its bearer be.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The incarnation it is good for.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass")
            .field("store", &self.store)
            .field("name", &self.name)
            .field("owner", &self.owner)
            .field("token", &self.token)
            .finish()
    }
}

/// `1:OWNER:TOKEN:STORE:NAME`, the last two percent-encoded. Do not change: passes travel between versions.
impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{VERSION}:{}:{}:{}:{}",
            self.owner.expose(),
            self.token,
            utf8_percent_encode(&self.store, PLAIN),
            utf8_percent_encode(self.name.as_str(), PLAIN)
        )
    }
}

impl FromStr for Pass {
    type Err = PassError;

    fn from_str(text: &str) -> Result<Self, PassError> {
        let fields: Vec<&str> = text.split(':').collect();
        let [version, owner, token, store, name] = fields[..] else {
            return Err(PassError::Fields {
                count: fields.len(),
            });
        };
        if version != VERSION {
            return Err(PassError::Version);
        }
        let owner = Uuid::try_parse(owner).map_err(|_| PassError::Owner)?;
        let token = token.parse().map_err(|_| PassError::Token)?;
        let name = LockName::new(plain(name)?).map_err(|_| PassError::Text)?;
        let owner = Owner::from_uuid(owner);
        Ok(Self::new(plain(store)?, name, owner, FencingToken(token)))
    }
}

fn plain(text: &str) -> Result<String, PassError> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| PassError::Text)?.into_owned())
}

/// Why a text is no pass. It never repeats the text, which may be a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    /// It has another number of fields.
    #[error("a pass has 5 fields with ':' between them, this text has {count}")]
    Fields {
        /// How many.
        count: usize,
    },
    /// It is of a version that this program does not know.
    #[error("the pass was written by a newer version of dlock")]
    Version,
    /// Its owner is not one.
    #[error("the owner in the pass is no UUID")]
    Owner,
    /// Its token is not one.
    #[error("the token in the pass is no number")]
    Token,
    /// Its store or name is not one.
    #[error("the store or the lock name in the pass is no legal text")]
    Text,
}

#[cfg(feature = "serde")]
impl serde::Serialize for Pass {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Pass {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

const VERSION: &str = "1";

/// What stands for itself in the text.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'/')
    .remove(b'_')
    .remove(b'~');

#[cfg(test)]
mod tests {
    use super::{Pass, PassError};
    use crate::{FencingToken, LockName, Owner};

    fn pass(name: &str) -> Pass {
        let name = LockName::new(name).unwrap();
        let owner = Owner::from_seed("canary");
        Pass::new("redis://a:6379/0", name, owner, FencingToken(u64::MAX))
    }

    #[test]
    fn a_pass_survives_its_text() {
        for name in ["orders:42", " a,b:c%\u{1}", "žluť", "{}"] {
            let text = pass(name).to_string();
            assert_eq!(text.parse::<Pass>().unwrap(), pass(name));
            assert!(
                text.bytes().all(|b| b.is_ascii_graphic() && b != b','),
                "{text}"
            );
        }
    }

    #[test]
    fn its_text_is_pinned() {
        let owner = Owner::from_seed("canary").expose();
        let text = format!("1:{owner}:18446744073709551615:redis%3A//a%3A6379/0:a%20b");
        assert_eq!(pass("a b").to_string(), text);
    }

    #[test]
    fn other_texts_are_refused_without_being_repeated() {
        let good = pass("x").to_string();
        let cases = [
            ("secret", PassError::Fields { count: 1 }),
            (&good.replacen('1', "2", 1), PassError::Version),
            (&good.replacen(":x", ":", 1), PassError::Text),
            ("1:no:1:s:n", PassError::Owner),
        ];
        for (text, error) in cases {
            assert_eq!(text.parse::<Pass>().unwrap_err(), error, "{text}");
            assert!(!error.to_string().contains("secret"));
        }
    }

    #[test]
    fn debug_shows_no_owner() {
        let secret = Owner::from_seed("canary").expose().to_string();
        assert!(!format!("{:?}", pass("x")).contains(&secret));
    }
}
