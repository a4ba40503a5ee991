//! Owners and hold ids: the identities of holders.

use rand::Rng;
use sha2::{Digest, Sha256};
use std::{fmt, str::FromStr};
use uuid::{Builder, Uuid};

/// The owner of a lock. It is a value, never a thread or a task: code that has the value may re-enter.
///
/// Each acquisition has a fresh random owner unless the caller gives one. It is a **bearer secret**:
/// `Debug` and `Display` show its [`Fingerprint`] only.
///
/// # Examples
/// ```
/// use dlock_core::Owner;
///
/// let owner = Owner::from_seed("trace-7");
/// println!("{owner}"); // its fingerprint
/// assert_eq!(Owner::from_uuid(owner.expose()), owner);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(Uuid);

impl Owner {
    /// Draws a fresh owner from a source of random bits. Outside tests the source must be cryptographically
    /// secure. Where processes fork or machines are cloned it must be the operating system itself, because
    /// a copied generator repeats its owners.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// let owner = client.owner(); // draws it from the operating system
    /// println!("{owner}");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn random(rng: &mut (impl Rng + ?Sized)) -> Self {
        let mut bytes = [0; 16];
        rng.fill_bytes(&mut bytes);
        Self(Builder::from_random_bytes(bytes).into_uuid())
    }

    /// Derives an owner from a seed, such as a trace id. The same seed gives the same owner in every
    /// process (UUIDv5, RFC 9562).
    ///
    /// Code that can guess the seed can re-enter the lock. Never use it where that matters.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Owner;
    ///
    /// assert_eq!(Owner::from_seed("trace-7"), Owner::from_seed("trace-7"));
    /// ```
    #[must_use]
    pub fn from_seed(seed: &str) -> Self {
        Self(Uuid::new_v5(&SEEDED, seed.as_bytes()))
    }

    /// Restores an owner that [`expose`](Self::expose) gave.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Owner;
    ///
    /// let owner = Owner::from_seed("trace-7");
    /// assert_eq!(Owner::from_uuid(owner.expose()), owner);
    /// ```
    #[must_use]
    pub fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// The secret itself, to send to the store or to hand on.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Owner;
    ///
    /// let owner = Owner::from_seed("trace-7");
    /// assert_eq!(owner.expose().to_string().parse(), Ok(owner));
    /// ```
    #[must_use]
    pub fn expose(&self) -> Uuid {
        self.0
    }

    /// The part of it that logs and errors may show.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Owner;
    ///
    /// let owner = Owner::from_seed("trace-7");
    /// assert_eq!(format!("#{}", owner.fingerprint()), owner.to_string());
    /// ```
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut text = Uuid::encode_buffer();
        Fingerprint::of(self.0.hyphenated().encode_lower(&mut text).as_bytes())
    }
}

/// Parses the text form of [`Owner::expose`], in which stores keep it.
impl FromStr for Owner {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(Self)
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner(#{})", self.fingerprint())
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.fingerprint())
    }
}

/// The first 32 bits of the SHA-256 of an owner's text, shown as 8 hex digits. It is enough to compare log
/// lines and useless to enter a lock.
///
/// Drivers hash the owner's text as the store has it. For dlock's own owners that is the hyphenated UUID in
/// lower case.
///
/// # Examples
/// ```
/// use dlock_core::Owner;
///
/// assert_eq!(Owner::from_seed("trace-7").fingerprint().to_string().len(), 8);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 4]);

impl Fingerprint {
    /// The fingerprint of an owner as the store writes it.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Fingerprint, Owner};
    ///
    /// let owner = Owner::from_seed("trace-7");
    /// assert_eq!(Fingerprint::of(owner.expose().to_string().as_bytes()), owner.fingerprint());
    /// ```
    #[must_use]
    pub fn of(owner: &[u8]) -> Self {
        let hash = Sha256::digest(owner);
        Self([hash[0], hash[1], hash[2], hash[3]])
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", u32::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The identity of one acquisition, which renew and release name. An owner never uses one twice.
///
/// It has 64 random bits: it must be unique among the at most [`MAX_HOLDS`] holds of one owner, not among
/// all holds.
///
/// # Examples
/// ```
/// use dlock_core::HoldId;
///
/// assert_eq!(HoldId::from_bits(7).to_string(), "0000000000000007");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(u64);

/// The most holds that one name can have at a time.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:max-holds")?)?;
/// use dlock_core::{ErrorKind, MAX_HOLDS};
///
/// let lock = client.lock("orders:42")?.with_owner(&client.owner());
/// let mut guards = Vec::new();
/// for _ in 0..MAX_HOLDS {
///     guards.push(lock.acquire().await?);
/// }
/// assert_eq!(lock.try_acquire().await.unwrap_err().kind(), ErrorKind::Overloaded);
/// # Ok(()) }
/// ```
pub const MAX_HOLDS: u32 = 64;

impl HoldId {
    /// Draws a fresh hold id.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HoldId;
    /// use rand::{SeedableRng, rngs::StdRng};
    ///
    /// let mut rng = StdRng::seed_from_u64(7); // in production, from the operating system
    /// assert_ne!(HoldId::random(&mut rng), HoldId::random(&mut rng));
    /// ```
    #[must_use]
    pub fn random(rng: &mut (impl Rng + ?Sized)) -> Self {
        Self(rng.next_u64())
    }

    /// Restores a hold id that was written down.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HoldId;
    ///
    /// assert_eq!(HoldId::from_bits(7).to_bits(), 7);
    /// ```
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits of the id, for the store.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HoldId;
    ///
    /// assert_eq!(HoldId::from_bits(7).to_bits(), 7);
    /// ```
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The UUIDv5 namespace of seeded owners. Do not change it: one seed would then give different owners in
/// different versions.
const SEEDED: Uuid = Uuid::from_u128(0x6b1f_a1c5_2f0e_4c0f_9d43_646c_6f63_6b00);

#[cfg(test)]
mod tests {
    use super::{Fingerprint, Owner};

    #[test]
    fn seeded_owners_are_pinned() {
        let owner = Owner::from_seed("trace-id");
        assert_eq!(owner, Owner::from_seed("trace-id"));
        assert_ne!(owner, Owner::from_seed("trace-ie"));
    }

    #[test]
    fn an_owner_shows_only_its_fingerprint() {
        let owner = Owner::from_seed("canary");
        let secret = owner.expose().to_string();
        for shown in [format!("{owner:?}"), format!("{owner}")] {
            assert!(!shown.contains(&secret[..8]), "{shown}");
            assert!(
                shown.contains(&Fingerprint::of(secret.as_bytes()).to_string()),
                "{shown}"
            );
        }
    }

    #[test]
    fn a_fingerprint_is_the_start_of_the_sha256() {
        assert_eq!(Fingerprint::of(b"abc").to_string(), "ba7816bf");
    }
}
