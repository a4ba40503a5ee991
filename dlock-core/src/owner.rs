//! Owners and hold ids: the identities of holders.

use rand::Rng;
use sha2::{Digest, Sha256};
use std::{fmt, num::NonZeroU32, str::FromStr};
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

/// Owners that are no secret: every client that shares the lock acquires as the same one, so that to the store
/// it is a re-entry.
impl Owner {
    /// The owner of all who hold a lock shared ([`RwLock::read`](crate::RwLock::read)).
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Mode, Owner};
    ///
    /// assert_eq!(Owner::SHARED.mode(), Mode::Shared);
    /// ```
    pub const SHARED: Self = Self(Uuid::from_u128(SHARERS));

    /// The owner of all who hold one of that many permits ([`Client::semaphore`](crate::Client::semaphore)).
    /// The number is part of it, so that clients that disagree about it never share.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Mode, Owner};
    /// use std::num::NonZeroU32;
    ///
    /// let of = NonZeroU32::new(10).unwrap();
    /// assert_eq!(Owner::permits(of).mode(), Mode::Permit { of });
    /// ```
    #[must_use]
    pub const fn permits(permits: NonZeroU32) -> Self {
        Self(Uuid::from_u128(SHARERS | permits.get() as u128))
    }

    /// How the holds of this owner stand to each other.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Mode, Owner};
    ///
    /// assert_eq!(Owner::from_seed("trace-7").mode(), Mode::Exclusive);
    /// ```
    #[must_use]
    pub fn mode(&self) -> Mode {
        let bits = self.0.as_u128();
        if bits & !u128::from(u32::MAX) != SHARERS {
            return Mode::Exclusive;
        }
        let of = u32::try_from(bits & u128::from(u32::MAX)).ok();
        of.and_then(NonZeroU32::new)
            .map_or(Mode::Shared, |of| Mode::Permit { of })
    }
}

/// How a lock is held.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:modes")?)?;
/// use dlock_core::Mode;
///
/// let _reader = client.rw_lock("orders")?.read().acquire().await?;
/// let shown = client.admin().inspect("orders").await?;
/// assert_eq!(shown.holders[0].owner.mode(), Mode::Shared);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// By one owner, which may re-enter.
    Exclusive,
    /// By any number of readers, up to [`MAX_SHARERS`].
    Shared,
    /// By holders of a permit.
    Permit {
        /// How many permits the lock has.
        of: NonZeroU32,
    },
}

/// The most holds that share one name.
pub const MAX_SHARERS: u32 = 1024;

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
pub struct Fingerprint {
    hash: [u8; 4],
    mode: Mode,
}

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
        let known = std::str::from_utf8(owner)
            .ok()
            .and_then(|text| text.parse().ok());
        Self {
            hash: [hash[0], hash[1], hash[2], hash[3]],
            mode: known.map_or(Mode::Exclusive, |owner: Owner| owner.mode()),
        }
    }

    /// How the holds of this owner stand to each other.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Mode, Owner};
    ///
    /// assert_eq!(Owner::from_seed("trace-7").fingerprint().mode(), Mode::Exclusive);
    /// ```
    #[must_use]
    pub const fn mode(&self) -> Mode {
        self.mode
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", u32::from_be_bytes(self.hash))
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

/// The owner of sharers, a UUID of version 8 that spells its use; the last 32 bits are the number of permits, 0 of
/// a shared lock.
const SHARERS: u128 = 0x646c_6f63_6b2d_8073_8861_7265_0000_0000;

#[cfg(test)]
mod tests {
    use super::{Fingerprint, Mode, Owner};
    use std::num::NonZeroU32;

    #[test]
    fn the_owner_of_sharers_is_pinned_and_shows_its_mode_through_the_store_s_text() {
        let of = NonZeroU32::new(10).unwrap();
        for (owner, text, mode) in [
            (
                Owner::SHARED,
                "646c6f63-6b2d-8073-8861-726500000000",
                Mode::Shared,
            ),
            (
                Owner::permits(of),
                "646c6f63-6b2d-8073-8861-72650000000a",
                Mode::Permit { of },
            ),
        ] {
            assert_eq!(owner.expose().to_string(), text);
            assert_eq!(owner.fingerprint().mode(), mode);
            assert_eq!(Fingerprint::of(text.as_bytes()), owner.fingerprint());
        }
        assert_eq!(Fingerprint::of(b"not ours").mode(), Mode::Exclusive);
    }

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
