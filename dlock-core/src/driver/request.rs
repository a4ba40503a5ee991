//! Requests: what the core sends to a driver.

use crate::{
    clock::Instant,
    lease::Lease,
    name::LockName,
    owner::{HoldId, MAX_SHARERS, Mode, Owner},
    token::FencingToken,
};
use rustix::{
    io::Errno,
    process::{Pid, test_kill_process},
};
use std::{
    fmt, fs,
    num::NonZeroU64,
    sync::{Arc, LazyLock},
    time::Duration,
};
use uuid::Uuid;

/// A group of names that share a fate: a session, a shard, a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane(pub u32);

/// A request to take a lock.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Clock, HoldId, Lease, Owner, driver::{Acquire, Acquired, DistributedLock, Release, Released}};
///
/// let driver = dlock_memory::MemoryDriver::from_url("memory:requests")?;
/// let (owner, hold) = (Owner::from_seed("me"), HoldId::from_bits(1));
/// let give_up = Clock::boot().now() + std::time::Duration::from_secs(5);
/// let acquire = Acquire::new("orders:42".parse()?, owner, hold, Lease::default(), give_up);
/// assert!(matches!(driver.acquire(&acquire).await?, Acquired::Granted(_)));
///
/// let release = Release::new(acquire.name, owner, hold);
/// assert!(matches!(driver.release(&release).await?, Released::Freed));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Acquire {
    /// The lock.
    pub name: LockName,
    /// The owner to acquire as.
    pub owner: Owner,
    /// The identity of this acquisition; a repeated request has the same one.
    pub hold: HoldId,
    /// The lease to grant.
    pub lease: Lease,
    /// The ticket that enters the queue when the acquire is refused; `None`: leave no trace. On a store
    /// without a queue ([`Wake::Notify`](crate::driver::Wake::Notify)), the client listens for the name from
    /// then on, until [`leave`](crate::driver::DistributedLock::leave) or a grant.
    /// [`Wake::Poll`](crate::driver::Wake::Poll): ignore it.
    pub ticket: Option<Ticket>,
    /// The ticket that enters the queue for this client's further waiters when this acquire is granted. On
    /// a store without a queue, the client listens with this ticket from then on, in place of `ticket`.
    /// [`Wake::Poll`](crate::driver::Wake::Poll): ignore it.
    pub next_ticket: Option<Ticket>,
    /// Re-enter this incarnation only.
    pub join: Option<FencingToken>,
    /// The least token of a new incarnation, for a caller that takes one lock on several stores
    /// ([`Capabilities::raises`](crate::driver::Capabilities::raises)). It takes the place of the store's time: the token
    /// is the floor, or the last one plus one where that is greater. Together with the same token to join it
    /// [restores](Self::restores) a hold.
    pub floor: Option<FencingToken>,
    /// This is not the first attempt, so it is probably refused. A store whose write costs more than a read
    /// can read first. Ignoring it is correct.
    pub retry: bool,
    /// When the core stops waiting for the answer. The driver converts it into its server's time
    /// ([`ServerClock`](crate::driver::kit::ServerClock) helps).
    pub give_up: Instant,
    /// The holder info that `inspect` shows. It ends with the hold.
    pub info: Arc<HolderInfo>,
}

impl Acquire {
    /// A first attempt that leaves no trace when it is refused.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId, lease: Lease, give_up: Instant) -> Self {
        // Shared, because the core sets its own at once.
        static NOTHING: LazyLock<Arc<HolderInfo>> = LazyLock::new(Arc::default);
        Self {
            name,
            owner,
            hold,
            lease,
            ticket: None,
            next_ticket: None,
            join: None,
            floor: None,
            retry: false,
            give_up,
            info: Arc::clone(&NOTHING),
        }
    }

    /// How many holds of its owner the lock may have, this one included; `None`: any number, because the owner
    /// is one holder that re-enters.
    ///
    /// A sharer is refused ([`Acquired::Held`](crate::driver::Acquired::Held)) while its owner has that many
    /// holds that live, and while a request of another owner waits before it, so that readers do not starve a
    /// writer. Its `ticket` then waits in the queue like any other. A request that joins is a re-entry and no
    /// new sharer.
    #[must_use]
    pub fn share(&self) -> Option<u32> {
        match self.owner.mode() {
            _ if self.join.is_some() => None,
            Mode::Exclusive => None,
            Mode::Shared => Some(MAX_SHARERS),
            Mode::Permit { of } => Some(of.get().min(MAX_SHARERS)),
        }
    }

    /// Whether it restores a hold of an incarnation that other stores have and this one lost: it is to be joined, and its
    /// token is the floor.
    #[must_use]
    pub fn restores(&self) -> bool {
        self.join.is_some() && self.join == self.floor
    }
}

/// Holder info: what a holder tells people about itself.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:holder-info")?)?;
/// use dlock_core::HolderInfo;
///
/// let guard = client.lock("orders:42")?.acquire().await?;
/// let shown = client.admin().inspect("orders:42").await?;
/// assert_eq!(shown.holders[0].info, HolderInfo::here());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderInfo {
    /// The name of its machine, at most 56 bytes.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// What it says of itself, such as its job; at most 32 bytes, and often empty.
    pub note: String,
    /// The running system whose process it is.
    machine: Option<u32>,
    /// The presence of its client that the hold depends on.
    presence: Option<HoldId>,
}

impl HolderInfo {
    /// Holder info of this process.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HolderInfo;
    ///
    /// assert_eq!(HolderInfo::here().pid, std::process::id());
    /// ```
    #[must_use]
    pub fn here() -> Self {
        let uname = rustix::system::uname();
        let info = Self::new(uname.nodename().to_string_lossy(), std::process::id());
        Self {
            machine: machine(),
            ..info
        }
    }

    /// Whether the process has ended; `None`: that cannot be known here, because it is or was a process of another
    /// machine or container, or of this machine before it was last started.
    ///
    /// A process id that another process has by now counts as one that lives. A process that made its client before it
    /// forked names its parent. A virtual machine that was cloned while it ran is the same machine, until it has another
    /// host name.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HolderInfo;
    ///
    /// assert_eq!(HolderInfo::here().has_ended(), Some(false));
    /// assert_eq!(HolderInfo::new("web7", 4711).has_ended(), None);
    /// ```
    #[must_use]
    pub fn has_ended(&self) -> Option<bool> {
        if self.machine.is_none() || self.machine != machine() || self.host != Self::here().host {
            return None;
        }
        let pid = Pid::from_raw(self.pid.try_into().ok()?)?;
        // The process of another user exists, too, and so does the next one that has its id. The stored form has no room
        // for the start time that would tell that one apart: the lock waits for its lease.
        Some(test_kill_process(pid) == Err(Errno::SRCH))
    }

    /// Builds holder info. The host is cut to 56 bytes and loses its control characters and blanks.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HolderInfo;
    ///
    /// assert_eq!(HolderInfo::new("web 7\n", 4711).host, "web7");
    /// ```
    #[must_use]
    pub fn new(host: impl AsRef<str>, pid: u32) -> Self {
        Self {
            host: cut(host.as_ref(), 56, char::is_whitespace),
            pid,
            note: String::new(),
            machine: None,
            presence: None,
        }
    }

    /// What is left of it when the process that said it has released its hold, and others are inside.
    pub(crate) fn of_another(&self) -> Self {
        Self {
            presence: self.presence,
            ..Self::default()
        }
    }

    /// The same for a hold that depends on a presence.
    pub(crate) fn depending_on(&self, presence: HoldId) -> Self {
        Self {
            presence: Some(presence),
            ..self.clone()
        }
    }

    /// The id of the [presence](crate::ClientBuilder::presence) that the hold depends on, if any: the lock `~alive:ID`
    /// is held while the holder's client is there.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{HoldId, HolderInfo};
    ///
    /// assert_eq!(HolderInfo::here().presence(), None);
    /// let info = HolderInfo::parse("4711 web7 ~0000000000000007 nightly report");
    /// assert_eq!(info.presence(), Some(HoldId::from_bits(7)));
    /// ```
    #[must_use]
    pub fn presence(&self) -> Option<HoldId> {
        self.presence
    }

    /// Adds a note for people who inspect the lock. It is cut to [`MAX_NOTE_BYTES`](Self::MAX_NOTE_BYTES), and loses
    /// its control characters, the blanks round it, and each `@` and `~` before it.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HolderInfo;
    ///
    /// let info = HolderInfo::here().with_note("nightly report");
    /// assert_eq!(info.note, "nightly report");
    /// ```
    #[must_use]
    pub fn with_note(mut self, note: impl AsRef<str>) -> Self {
        let kept = cut(note.as_ref(), Self::MAX_NOTE_BYTES, |_| false);
        self.note = kept.trim().trim_start_matches(['@', '~', ' ']).to_owned();
        self
    }

    /// The longest note, in bytes of UTF-8.
    pub const MAX_NOTE_BYTES: usize = 32;

    /// Parses what `Display` wrote. Any other text gives empty holder info.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::HolderInfo;
    ///
    /// let info = HolderInfo::new("web7", 4711).with_note("nightly report");
    /// assert_eq!(HolderInfo::parse(&info.to_string()), info);
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let Some((pid, rest)) = text.split_once(' ') else {
            return Self::default();
        };
        let Ok(pid) = pid.parse() else {
            return Self::default();
        };
        let (host, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let (machine, rest) = marked(rest, '@');
        let (presence, note) = marked(rest, '~');
        Self {
            machine: machine.and_then(|it| u32::from_str_radix(it, 16).ok()),
            presence: presence
                .and_then(|it| u64::from_str_radix(it, 16).ok())
                .map(HoldId::from_bits),
            ..Self::new(host, pid).with_note(note)
        }
    }
}

/// The beginning of a text without its control characters, and without what is `unwanted`.
fn cut(text: &str, bytes: usize, unwanted: fn(char) -> bool) -> String {
    let mut kept = String::new();
    for c in text.chars() {
        if kept.len() + c.len_utf8() > bytes {
            break;
        }
        if !c.is_control() && !unwanted(c) {
            kept.push(c);
        }
    }
    kept
}

/// The word with that mark at the beginning, without the mark, and what follows it.
fn marked(text: &str, mark: char) -> (Option<&str>, &str) {
    match text.strip_prefix(mark) {
        Some(rest) => {
            let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
            (Some(word), rest)
        }
        None => (None, text),
    }
}

/// Identifies this running system and the namespace of its process ids, in which no two processes have one id.
fn machine() -> Option<u32> {
    static MACHINE: LazyLock<Option<u32>> = LazyLock::new(|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let ids = fs::read_link("/proc/self/ns/pid").ok()?;
        let text = format!("{boot}{}", ids.display());
        let hash = Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes());
        Some(hash.as_fields().0)
    });
    *MACHINE
}

/// `PID HOST`, with ` @MACHINE`, ` ~PRESENCE` and ` NOTE` if there are such, one line of at most 128 bytes: the stored
/// form.
impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.host)?;
        if let Some(machine) = self.machine {
            write!(f, " @{machine:08x}")?;
        }
        if let Some(id) = self.presence {
            write!(f, " ~{id}")?;
        }
        match self.note.as_str() {
            "" => Ok(()),
            note => write!(f, " {note}"),
        }
    }
}

/// One entry of a batch of renewals.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renew {
    /// The lock.
    pub name: LockName,
    /// Its owner.
    pub owner: Owner,
    /// The hold to renew.
    pub hold: HoldId,
    /// How long it is to last from now. `None` only checks that it is still there (a fixed lease, or one
    /// that already lasts to its maximum hold).
    pub lease: Option<Duration>,
    /// The token of the hold's incarnation, for a driver that keeps one lock on several stores; others need not read it.
    /// `None`: the caller does not know it.
    pub token: Option<FencingToken>,
}

impl Renew {
    /// Builds an entry without a token.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId, lease: Option<Duration>) -> Self {
        Self {
            name,
            owner,
            hold,
            lease,
            token: None,
        }
    }
}

/// A request to release a lock.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Release {
    /// The lock.
    pub name: LockName,
    /// Its owner.
    pub owner: Owner,
    /// The holds to release.
    pub holds: Holds,
    /// The rest of the minimum hold. When no hold is left, the name stays unavailable that long.
    pub min_hold: Option<Duration>,
}

impl Release {
    /// Builds a release of one hold.
    #[must_use]
    pub fn new(name: LockName, owner: Owner, hold: HoldId) -> Self {
        Self {
            name,
            owner,
            holds: Holds::One(hold),
            min_hold: None,
        }
    }
}

/// A choice of an owner's holds.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// # let client = dlock_core::Client::new(dlock_memory::MemoryDriver::from_url("memory:holds")?)?;
/// use dlock_core::Holds;
///
/// let owner = client.owner();
/// let lock = client.lock("orders:42")?.with_owner(&owner);
/// let (outer, inner) = (lock.acquire().await?, lock.acquire().await?);
/// client.admin().release("orders:42", &owner, Holds::All).await?;
/// assert_eq!(client.admin().inspect("orders:42").await?.holds, 0);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// This one.
    One(HoldId),
    /// All of them, for the command line. Guards elsewhere notice at their next renewal.
    All,
}

/// A place in a store's queue: one per (client, name) while a task waits. A client never uses one twice.
///
/// The driver prefixes its own client id, so that tickets of two clients differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub NonZeroU64);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::{HoldId, HolderInfo};

    #[test]
    fn the_longest_holder_info_has_128_bytes_and_is_read_as_it_was_written() {
        let long = HolderInfo {
            machine: Some(u32::MAX),
            ..HolderInfo::new("h".repeat(70), u32::MAX).with_note("n".repeat(40))
        };
        let long = long.depending_on(HoldId::from_bits(u64::MAX));
        for info in [
            HolderInfo::here(),
            HolderInfo::here().with_note("@ a job"),
            HolderInfo::here().with_note("~ a job"),
            HolderInfo::new("web7", 1).depending_on(HoldId::from_bits(7)),
            long,
        ] {
            let text = info.to_string();
            assert!(text.len() <= 128, "{text}");
            assert_eq!(HolderInfo::parse(&text), info);
        }
    }

    #[test]
    fn only_a_process_of_this_system_whose_id_none_has_is_known_to_have_ended() {
        let with = |pid| HolderInfo {
            pid,
            ..HolderInfo::here()
        };
        // The kernel gives no id as great as that.
        let ended = with(i32::MAX.unsigned_abs());
        assert_eq!(ended.has_ended(), Some(true));
        // Another user's process, which may have got the id of one that has ended.
        assert_eq!(with(1).has_ended(), Some(false));
        for no_id in [0, u32::MAX] {
            assert_eq!(with(no_id).has_ended(), None, "{no_id}");
        }
        let (host, machine) = (format!("{}x", ended.host), ended.machine.map(|it| it ^ 1));
        // A container of the same host name, and one of this machine's process ids with a host name of its own.
        let elsewhere = [
            HolderInfo {
                machine,
                ..ended.clone()
            },
            HolderInfo { host, ..ended },
        ];
        for info in elsewhere {
            assert_eq!(info.has_ended(), None, "{info}");
        }
    }

    #[test]
    fn text_without_a_machine_is_of_a_process_that_is_not_known_here() {
        let host = HolderInfo::here().host;
        for text in [
            format!("1 {host}"),
            format!("1 {host} a job"),
            format!("1 {host} @xyz"),
        ] {
            assert_eq!(HolderInfo::parse(&text).has_ended(), None, "{text}");
        }
    }
}
