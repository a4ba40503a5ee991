//! What the author of a driver implements.

use crate::{failure::Failure, testbed::Home};
use async_trait::async_trait;
use dlock_core::{Capabilities, Clock, DistributedLock, LockName, Wake};
use std::{fmt, sync::Arc, time::Duration};

/// Makes stores for cases to run on.
#[async_trait]
pub trait MakeFixture: Send + Sync + 'static {
    /// The first word of its trials: `redis`, `memory-line`.
    fn name(&self) -> &str;

    /// Whose time the store runs in.
    fn time(&self) -> Time;

    /// What its servers run in. In containers only `mutex`, `owner`, `loss` and `crash` are tried, and no mutant, unless
    /// `DLOCK_TEST_CONTAINER=all` asks for every clause: the same server has passed them all as a process.
    fn home(&self) -> Home {
        Home::Process
    }

    /// A fresh store. With [`Time::Simulated`] every case has its own, made inside its paused runtime; with [`Time::Real`]
    /// one serves all cases but those that stop, kill, flush or set the clock of theirs.
    async fn make(&self) -> Result<Arc<dyn Fixture>, Failure>;

    /// A driver of the store at [`Fixture::url`], in a process that the suite starts in order to kill it.
    async fn connect(&self, url: &str) -> Result<Arc<dyn DistributedLock>, Failure> {
        Err(Failure::new(format_args!(
            "{} offers no url, not even {url}",
            self.name()
        )))
    }
}

/// One store. What it cannot offer is a [`Gap`] with the reason, and cases that need it are shown as ignored with that.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// One more driver with connections of its own, as another client process has.
    async fn driver(&self) -> Result<Arc<dyn DistributedLock>, Failure>;

    /// The clock that the drivers run by.
    fn clock(&self) -> Clock {
        Clock::boot()
    }

    /// Where another process finds the store.
    ///
    /// # Errors
    /// Where it lives in one process.
    fn url(&self) -> Result<String, Gap>;

    /// A network between a driver and the store that can be told to fail.
    ///
    /// # Errors
    /// Without one.
    fn network(&self) -> Result<&dyn Network, Gap>;

    /// The server as a process.
    ///
    /// # Errors
    /// Without one.
    fn server(&self) -> Result<&dyn Server, Gap>;

    /// The records behind the driver's back.
    ///
    /// # Errors
    /// Where they cannot be reached.
    fn records(&self) -> Result<&dyn Records, Gap>;

    /// The clock that the store judges leases by.
    ///
    /// # Errors
    /// Where it cannot be set.
    fn store_time(&self) -> Result<&dyn StoreTime, Gap>;
}

/// Whose time a store runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// Tokio's paused time: cases take no real time, and bounds are exact.
    Simulated,
    /// The machine's.
    Real,
}

/// Why a store cannot offer something: a sentence for people, shown beside the case that needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap(pub &'static str);

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Connects drivers through a layer of faults.
#[async_trait]
pub trait Network: Send + Sync {
    /// A driver whose connections go through a layer of their own, and the handle to it.
    async fn faulty_driver(&self) -> Result<(Arc<dyn DistributedLock>, Box<dyn Faults>), Failure>;
}

/// What can happen between one driver and its store.
#[async_trait]
pub trait Faults: Send + Sync {
    /// The next request of that kind is executed, and its reply lost.
    async fn lose_reply(&self, of: Call) -> Result<(), Failure>;

    /// The next request of that kind reaches the store that much later, also when its sender is gone by then.
    async fn hold_back(&self, of: Call, by: Duration) -> Result<(), Failure>;

    /// Every connection breaks; new ones work.
    async fn cut(&self) -> Result<(), Failure>;

    /// Nothing passes, and nobody can connect.
    async fn down(&self) -> Result<(), Failure>;

    /// After [`down`](Self::down): new connections work.
    async fn up(&self) -> Result<(), Failure>;

    /// Every request from now on reaches the store that much later.
    async fn delay(&self, by: Duration) -> Result<(), Failure>;
}

/// A call that faults can be aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`DistributedLock::acquire`].
    Acquire,
    /// [`DistributedLock::renew`].
    Renew,
    /// [`DistributedLock::release`].
    Release,
}

/// A server that can be stopped and killed.
#[async_trait]
pub trait Server: Send + Sync {
    /// It stands still (SIGSTOP): what is sent to it waits.
    async fn stop(&self) -> Result<(), Failure>;

    /// It goes on (SIGCONT).
    async fn cont(&self) -> Result<(), Failure>;

    /// It is killed (SIGKILL) and started again at the same place; returns when it answers.
    async fn restart(&self) -> Result<(), Failure>;

    /// What it finds again after that.
    fn keeps(&self) -> Keeps;
}

/// What a server still has after it was killed and started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// Every answered change.
    Everything,
    /// Nothing: the store is empty, its counters too.
    Nothing,
}

/// A store whose data can be changed without a driver.
#[async_trait]
pub trait Records: Send + Sync {
    /// The record of that name is gone; its token counter stays.
    async fn delete(&self, name: &LockName) -> Result<(), Failure>;

    /// Everything is gone.
    async fn flush(&self) -> Result<(), Failure>;
}

/// A store whose clock can be set.
#[async_trait]
pub trait StoreTime: Send + Sync {
    /// Sets it forward.
    async fn forward(&self, by: Duration) -> Result<(), Failure>;

    /// Sets it back.
    async fn back(&self, by: Duration) -> Result<(), Failure>;
}

/// What a case cannot run without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// A store that keeps a line ([`Wake::Line`]).
    Line,
    /// A store that notifies, in order or not ([`Wake::Line`] or [`Wake::Hints`]).
    Push,
    /// A store that notifies without an order ([`Wake::Hints`]).
    Hints,
    /// A store that only answers ([`Wake::Poll`]).
    Poll,
    /// A store that tells the second in line when to look.
    Told,
    /// Fencing tokens.
    Fencing,
    /// Holds that outlive their client.
    Detached,
    /// [`Fixture::network`].
    Network,
    /// [`Fixture::server`], a store of its own.
    Server,
    /// [`Fixture::records`].
    Records,
    /// [`Fixture::records`], of a server of its own.
    Flush,
    /// [`Fixture::store_time`], a store of its own.
    StoreTime,
    /// [`Fixture::url`].
    Processes,
    /// A simulated clock: time that can be passed without anything running.
    Jump,
}

impl Need {
    /// Whether other cases on the same store would suffer.
    #[must_use]
    pub const fn is_exclusive(self) -> bool {
        matches!(self, Self::Server | Self::Flush | Self::StoreTime)
    }

    /// Why that store cannot offer it, if it cannot.
    pub(crate) fn gap(self, fixture: &dyn Fixture, store: &Capabilities) -> Result<(), Gap> {
        let unless = |ok: bool, why| if ok { Ok(()) } else { Err(Gap(why)) };
        match self {
            Self::Line => unless(store.wake == Wake::Line, "the store keeps no line"),
            Self::Push => unless(store.wake != Wake::Poll, "the store only answers"),
            Self::Hints => unless(
                store.wake == Wake::Hints,
                "the store is not one that notifies without an order",
            ),
            Self::Poll => unless(store.wake == Wake::Poll, "the store pushes"),
            Self::Told => unless(
                !store.session_bound,
                "each waiter watches the one ahead itself: nobody has to be told when to look",
            ),
            Self::Fencing => unless(store.fencing, "the store numbers no grants"),
            Self::Detached => unless(
                !store.session_bound,
                "holds end with their client's session",
            ),
            Self::Network => fixture.network().map(drop),
            Self::Server => fixture.server().map(drop),
            Self::Records => fixture.records().map(drop),
            // A server that is not ours has other users.
            Self::Flush => fixture.server().and(fixture.records()).map(drop),
            Self::StoreTime => fixture.store_time().map(drop),
            Self::Processes => fixture.url().map(drop),
            Self::Jump => unless(
                fixture.clock().is_simulated(),
                "time passes as it does, and cannot be told to",
            ),
        }
    }
}
