//! Fault script: the faults between a driver and its server.

use crate::inbox::Inbox;
use dlock_core::{LockName, driver::WakeUp};
use fastrand::Rng;
use parking_lot::Mutex;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

/// The kinds of call that faults and counters distinguish.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::Clock;
/// use dlock_memory::{Call, MemoryConfig, MemoryDriver, MemoryStore};
///
/// let store = MemoryStore::new(Clock::boot());
/// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
/// for call in Call::ALL {
///     assert_eq!(driver.faults().made(call), 0);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `acquire`.
    Acquire,
    /// `leave`.
    Leave,
    /// `renew`, one per batch.
    Renew,
    /// `release`.
    Release,
    /// `inspect`.
    Inspect,
    /// `list`, one per page.
    List,
    /// `break_lock`.
    Break,
}

impl Call {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Acquire,
        Self::Leave,
        Self::Renew,
        Self::Release,
        Self::Inspect,
        Self::List,
        Self::Break,
    ];

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// What happens to one call.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Client, Clock};
/// use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
///
/// let store = MemoryStore::new(Clock::boot());
/// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
/// driver.faults().always(Call::Renew, Fault::Never);
/// let client = Client::new(driver)?; // its renewals are not answered
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No fault: the call is executed and answered at once.
    #[default]
    Ok,
    /// The call fails and is not executed: `Unavailable`, effect none.
    ErrorBefore,
    /// The call is executed at once and the answer is lost: `Unavailable`, effect unknown.
    ErrorAfter,
    /// The call is executed at once and answered after this delay.
    Slow(Duration),
    /// The call is executed at once and never answered.
    Never,
    /// The call is neither executed nor answered.
    NeverExecuted,
    /// The call fails at once (`Unavailable`, effect unknown) and is executed after this delay, even if its
    /// sender is gone.
    Late(Duration),
    /// The call is executed and answered after this delay, also if its future is dropped before.
    Delayed(Duration),
}

/// What happens to the wake-ups of one driver.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::Clock;
/// use dlock_memory::{WakeUpFault, MemoryConfig, MemoryDriver, MemoryStore};
///
/// let store = MemoryStore::new(Clock::boot());
/// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
/// driver.faults().wake_ups(WakeUpFault::Lose);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WakeUpFault {
    /// No fault.
    #[default]
    Deliver,
    /// Wake-ups are lost, and the server does not know: a client that is stopped or cut off.
    Lose,
    /// Wake-ups cannot be sent, and the server knows: the connection for wake-ups is down, the client has no
    /// receivers. The end of this fault is a reconnect, so [`WakeUp::Resync`] follows.
    Cut,
    /// Each wake-up comes twice.
    Double,
}

/// The faults of one driver. Cheap to clone; every clone is the same script.
///
/// A call takes the first of: the oldest [`once`](Self::once) of its kind, the [`always`](Self::always) of
/// its kind, a draw from the [`plan`](Self::plan).
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Client, Clock};
/// use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
///
/// let store = MemoryStore::new(Clock::boot());
/// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
/// let faults = driver.faults().clone();
/// let lock = Client::new(driver)?.lock("orders:42")?;
/// faults.once(Call::Acquire, Fault::ErrorBefore);
/// assert!(lock.try_acquire().await?.is_some()); // the client repeats what was not executed
/// assert_eq!(faults.made(Call::Acquire), 2);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Faults {
    script: Arc<Mutex<Script>>,
    inbox: Arc<Inbox>,
}

#[derive(Debug, Default)]
struct Script {
    made: [u64; Call::ALL.len()],
    once: [VecDeque<Fault>; Call::ALL.len()],
    always: [Fault; Call::ALL.len()],
    plan: Option<FaultPlan>,
    stuck: BTreeSet<LockName>,
}

impl Faults {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Self {
        Self {
            script: Arc::default(),
            inbox,
        }
    }

    /// The next call of that kind without a queued fault meets this one.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
    /// use std::time::Duration;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().once(Call::Acquire, Fault::Slow(Duration::from_millis(50)));
    /// # Ok(()) }
    /// ```
    pub fn once(&self, call: Call, fault: Fault) {
        self.script.lock().once[call.index()].push_back(fault);
    }

    /// Every call of that kind meets this fault from now on; [`Fault::Ok`] ends it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{Call, Fault, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().always(Call::Renew, Fault::ErrorBefore);
    /// # Ok(()) }
    /// ```
    pub fn always(&self, call: Call, fault: Fault) {
        self.script.lock().always[call.index()] = fault;
    }

    /// Every call of every kind meets this fault from now on.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{Fault, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().always_all(Fault::Never);
    /// # Ok(()) }
    /// ```
    pub fn always_all(&self, fault: Fault) {
        self.script.lock().always.fill(fault);
    }

    /// Calls and wake-ups meet what the plan draws, until [`clear`](Self::clear) or another plan.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{FaultPlan, MemoryConfig, MemoryDriver, MemoryStore, Rates};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let rates = Rates { error_after: 0.1, ..Rates::default() };
    /// driver.faults().plan(FaultPlan::seeded(7, rates));
    /// # Ok(()) }
    /// ```
    pub fn plan(&self, plan: FaultPlan) {
        self.inbox.plan(Some(plan.clone()));
        self.script.lock().plan = Some(plan);
    }

    /// In every batch of renewals from now on, the entry of this name alone fails (effect none), like a
    /// locked row.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Clock, LockName};
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().stick(LockName::new("orders:42")?);
    /// # Ok(()) }
    /// ```
    pub fn stick(&self, name: LockName) {
        self.script.lock().stuck.insert(name);
    }

    /// From now on nothing fails. Calls that are already late, slow or unanswered stay so.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{Fault, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().always_all(Fault::Never);
    /// driver.faults().clear();
    /// # Ok(()) }
    /// ```
    pub fn clear(&self) {
        let mut script = self.script.lock();
        *script = Script {
            made: script.made,
            ..Script::default()
        };
        drop(script);
        self.inbox.plan(None);
        self.inbox.set_fault(WakeUpFault::Deliver);
    }

    /// Sets the fault of this driver's wake-ups from now on.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{WakeUpFault, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().wake_ups(WakeUpFault::Double);
    /// # Ok(()) }
    /// ```
    pub fn wake_ups(&self, fault: WakeUpFault) {
        self.inbox.set_fault(fault);
    }

    /// Delivers a wake-up that the server never sent.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::Clock;
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// driver.faults().inject(dlock_core::driver::WakeUp::Resync);
    /// # Ok(()) }
    /// ```
    pub fn inject(&self, wake_up: WakeUp) {
        self.inbox.put(wake_up);
    }

    /// The number of calls of that kind that this driver was asked for, including failed ones.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{Call, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let faults = driver.faults().clone();
    /// let _guard = Client::new(driver)?.lock("orders:42")?.acquire().await?;
    /// assert_eq!(faults.made(Call::Acquire), 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn made(&self, call: Call) -> u64 {
        self.script.lock().made[call.index()]
    }

    /// Counts the call and returns its fault.
    pub(crate) fn next(&self, call: Call) -> Fault {
        let (mut script, at) = (self.script.lock(), call.index());
        script.made[at] += 1;
        if let Some(fault) = script.once[at].pop_front() {
            return fault;
        }
        match (script.always[at], &mut script.plan) {
            (Fault::Ok, Some(plan)) => plan.draw(call),
            (standing, _) => standing,
        }
    }

    /// The names that cannot be renewed.
    pub(crate) fn stuck(&self) -> BTreeSet<LockName> {
        self.script.lock().stuck.clone()
    }
}

/// How often each fault is drawn: probabilities from 0 to 1, their sum at most 1. The rest is
/// [`Fault::Ok`].
///
/// # Examples
/// ```
/// use dlock_memory::{FaultPlan, Rates};
/// use std::time::Duration;
///
/// let rates = Rates { slow: 0.2, longest: Duration::from_millis(50), ..Rates::default() };
/// let plan = FaultPlan::seeded(7, rates);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Probability of [`Fault::ErrorBefore`].
    pub error_before: f64,
    /// Probability of [`Fault::ErrorAfter`].
    pub error_after: f64,
    /// Probability of [`Fault::Slow`].
    pub slow: f64,
    /// Probability of [`Fault::Never`].
    pub never: f64,
    /// Probability of [`Fault::NeverExecuted`].
    pub never_executed: f64,
    /// Probability of [`Fault::Late`].
    pub late: f64,
    /// Probability of [`Fault::Delayed`].
    pub delayed: f64,
    /// The longest delay of a slow, late or delayed call; each is drawn evenly between zero and this.
    pub longest: Duration,
    /// Probability that a wake-up is lost, unknown to the client and the server.
    pub wake_up_lost: f64,
    /// Probability that a wake-up comes twice.
    pub wake_up_doubled: f64,
}

/// Faults drawn at random; the same seed and the same calls give the same faults.
///
/// # Examples
/// ```
/// use dlock_memory::{FaultPlan, Rates};
///
/// let plan = FaultPlan::seeded(7, Rates { never: 0.01, ..Rates::default() });
/// ```
#[derive(Clone, Debug)]
pub struct FaultPlan {
    rng: Rng,
    rates: Rates,
    calls: [bool; Call::ALL.len()],
}

impl FaultPlan {
    /// Faults for calls of every kind.
    ///
    /// # Examples
    /// ```
    /// use dlock_memory::{FaultPlan, Rates};
    ///
    /// let plan = FaultPlan::seeded(7, Rates { late: 0.05, ..Rates::default() });
    /// ```
    #[must_use]
    pub fn seeded(seed: u64, rates: Rates) -> Self {
        Self {
            rng: Rng::with_seed(seed),
            rates,
            calls: [true; Call::ALL.len()],
        }
    }

    /// Faults for some kinds only; the others never fail.
    ///
    /// # Examples
    /// ```
    /// use dlock_memory::{Call, FaultPlan, Rates};
    ///
    /// let rates = Rates { error_before: 0.5, ..Rates::default() };
    /// let plan = FaultPlan::seeded(7, rates).only(&[Call::Renew]);
    /// ```
    #[must_use]
    pub fn only(mut self, calls: &[Call]) -> Self {
        self.calls = [false; Call::ALL.len()];
        for call in calls {
            self.calls[call.index()] = true;
        }
        self
    }

    fn draw(&mut self, call: Call) -> Fault {
        if !self.calls[call.index()] {
            return Fault::Ok;
        }
        // Both numbers are always drawn, so that one call's fault does not shift those of all later calls.
        let (mut left, part) = (self.rng.f64(), self.rng.f64());
        let rates = &self.rates;
        let span = rates.longest.mul_f64(part);
        let faults = [
            (rates.error_before, Fault::ErrorBefore),
            (rates.error_after, Fault::ErrorAfter),
            (rates.slow, Fault::Slow(span)),
            (rates.never, Fault::Never),
            (rates.never_executed, Fault::NeverExecuted),
            (rates.late, Fault::Late(span)),
            (rates.delayed, Fault::Delayed(span)),
        ];
        for (rate, fault) in faults {
            if left < rate {
                return fault;
            }
            left -= rate;
        }
        Fault::Ok
    }

    pub(crate) fn draw_wake_up(&mut self) -> WakeUpFault {
        let drawn = self.rng.f64();
        if drawn < self.rates.wake_up_lost {
            WakeUpFault::Lose
        } else if drawn < self.rates.wake_up_lost + self.rates.wake_up_doubled {
            WakeUpFault::Double
        } else {
            WakeUpFault::Deliver
        }
    }
}
