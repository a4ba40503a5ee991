//! Passes: bearer secrets to re-enter one incarnation of one lock, as a value and as text.

use crate::{error::Error, name::LockName, owner::Owner, token::FencingToken};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::{fmt, str::FromStr, sync::Arc};
use uuid::Uuid;

/// The right to re-enter one incarnation of one lock, as a value. [`Guard::pass`](crate::Guard::pass) gives
/// it and [`Lock::join`](crate::Lock::join) takes it, in this process or another.
///
/// It is a bearer secret: its bearer may re-enter or end this incarnation, and nothing else. `Debug` and
/// `Display` show a fingerprint. [`expose`](Self::expose) gives the secret as text, for an RPC header or an
/// environment variable, and `FromStr` reads it. With the feature `serde`, `exposed_pass` writes and reads
/// that text in fields with `#[serde(with = "dlock::exposed_pass")]`.
///
/// # Examples
/// ```
/// # async fn example(lock: dlock_core::Lock, guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
/// use dlock_core::Pass;
///
/// let text = guard.pass()?.expose(); // a secret
/// let pass: Pass = text.parse().expect("a pass that was exposed");
/// let inner = lock.join(&pass).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Pass {
    pub(crate) store: Arc<str>,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
}

impl Pass {
    /// Builds a pass from its parts. Its bearer can use everything else that the owner owns, so only the
    /// pass of an owner with this one lock is safe to hand on.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{FencingToken, LockName, Owner, Pass};
    ///
    /// let name = LockName::new("orders:42")?;
    /// let pass = Pass::new("redis://db:6379/0", name, Owner::from_seed("trace-7"), FencingToken(3));
    /// assert_eq!(pass.expose().parse(), Ok(pass));
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
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

    /// The store in which it is valid, as [`Capabilities::store`](crate::driver::Capabilities::store) names it.
    ///
    /// # Examples
    /// ```
    /// # async fn example(pass: dlock_core::Pass) -> Result<(), dlock_core::Error> {
    /// println!("valid in {}", pass.store());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn store(&self) -> &str {
        &self.store
    }

    /// The lock that it is for.
    ///
    /// # Examples
    /// ```
    /// # async fn example(pass: dlock_core::Pass) -> Result<(), dlock_core::Error> {
    /// println!("opens {}", pass.name());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// The owner that its bearer acts as.
    ///
    /// # Examples
    /// ```
    /// # async fn example(pass: dlock_core::Pass) -> Result<(), dlock_core::Error> {
    /// println!("acts as {}", pass.owner()); // the fingerprint
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The token of the incarnation that it is for.
    ///
    /// # Examples
    /// ```
    /// # async fn example(pass: dlock_core::Pass) -> Result<(), dlock_core::Error> {
    /// println!("of the incarnation {}", pass.token());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The secret itself, as text without blanks, commas or control characters: `1:OWNER:TOKEN:STORE:NAME`,
    /// the last two percent-encoded.
    ///
    /// # Examples
    /// ```
    /// # fn example(pass: dlock_core::Pass) {
    /// println!("{pass}"); // safe to log: the fingerprint
    /// let header = pass.expose(); // the secret
    /// assert_eq!(header.parse::<dlock_core::Pass>().as_ref(), Ok(&pass));
    /// # }
    /// ```
    // Do not change: passes travel between versions.
    #[must_use]
    pub fn expose(&self) -> String {
        format!(
            "{VERSION}:{}:{}:{}:{}",
            self.owner.expose(),
            self.token,
            utf8_percent_encode(&self.store, PLAIN),
            utf8_percent_encode(self.name.as_str(), PLAIN)
        )
    }

    pub(crate) fn refused() -> Error {
        Error::misuse(
            "the owner was given by `with_owner` and may own other locks, which a pass would open too: hand on the owner itself, \
             or acquire this lock without `with_owner`",
        )
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

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "pass {} of {:?} (token {})",
            self.owner, self.name, self.token
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

/// Why a text is not a pass. The error never repeats the text, which may be a secret.
///
/// # Examples
/// ```
/// use dlock_core::{Pass, PassError};
///
/// assert_eq!("secret".parse::<Pass>(), Err(PassError::Fields { count: 1 }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    /// It has the wrong number of fields.
    #[error("a pass has 5 fields with ':' between them, this text has {count}")]
    Fields {
        /// How many.
        count: usize,
    },
    /// It is of a version that this program does not know.
    #[error("the pass was written by a newer version of dlock")]
    Version,
    /// Its owner is not a UUID.
    #[error("the owner in the pass is not a UUID")]
    Owner,
    /// Its token is not a number.
    #[error("the token in the pass is not a number")]
    Token,
    /// Its store or name is not legal text.
    #[error("the store or the lock name in the pass is not legal text")]
    Text,
}

/// [`Pass`] as its secret text, for a field with `#[serde(with = "dlock::exposed_pass")]`. Code that reads
/// the output has the pass.
///
/// # Examples
/// ```
/// use dlock_core::{FencingToken, Owner, Pass, exposed_pass};
/// use serde::de::{IntoDeserializer, value::Error};
///
/// let text = format!("1:{}:7:memory:orders", Owner::from_seed("me").expose());
/// let read: Result<Pass, Error> = exposed_pass::deserialize(text.as_str().into_deserializer());
/// assert_eq!(read?.token(), FencingToken(7));
/// # Ok::<(), Error>(())
/// ```
#[cfg(feature = "serde")]
pub mod exposed_pass {
    use super::Pass;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::borrow::Cow;

    /// Writes the secret.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(pass: &Pass, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&pass.expose())
    }

    /// Reads it.
    ///
    /// # Errors
    /// When the text is not a pass; the error does not repeat it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Pass, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

const VERSION: &str = "1";

/// Everything but these characters is percent-encoded.
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
            let text = pass(name).expose();
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
        assert_eq!(pass("a b").expose(), text);
    }

    #[test]
    fn other_texts_are_refused_without_being_repeated() {
        let good = pass("x").expose();
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
    fn a_pass_shows_no_owner_unless_it_is_exposed() {
        let (secret, shown) = (pass("x").owner().expose(), pass("x").owner().fingerprint());
        for text in [format!("{:?}", pass("x")), pass("x").to_string()] {
            assert!(!text.contains(&secret.to_string()), "{text}");
            assert!(text.contains(&shown.to_string()), "{text}");
            text.parse::<Pass>().unwrap_err();
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_writes_the_secret_where_it_is_asked_to() {
        use super::exposed_pass;
        use serde::de::{IntoDeserializer, value::Error};
        use std::fmt;

        struct Written(Pass);

        impl fmt::Display for Written {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                exposed_pass::serialize(&self.0, f)
            }
        }

        let text = Written(pass("x")).to_string();
        assert_eq!(text, pass("x").expose());
        let read = |text: &str| {
            let reader: serde::de::value::StrDeserializer<'_, Error> = text.into_deserializer();
            exposed_pass::deserialize(reader)
        };
        assert_eq!(read(&text).unwrap(), pass("x"));
        let refused = read("secret").unwrap_err().to_string();
        assert!(!refused.contains("secret"), "{refused}");
    }
}
