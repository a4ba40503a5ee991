//! Clock: the one time source of the core.
//!
//! On Linux it reads `CLOCK_BOOTTIME`, which counts suspend and never lags the monotonic clock that timers
//! use. Runtime timers stop in suspend. Every sleep of the core is therefore taken in steps of at most a
//! second, after each of which the clock is read again.

use crate::runtime;
use std::{
    fmt,
    ops::{Add, Sub},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::sync::oneshot;

/// A point on a [`Clock`]: nanoseconds since its origin (boot, outside tests). Points are comparable within
/// one machine and boot.
///
/// # Examples
/// ```
/// use dlock_core::Instant;
/// use std::time::Duration;
///
/// let later = Instant::from_nanos(7) + Duration::from_nanos(3);
/// assert_eq!(later.since(Instant::from_nanos(7)), Duration::from_nanos(3));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The clock's origin.
    pub const ORIGIN: Self = Self(0);
    /// Later than any other.
    pub const FAR: Self = Self(u64::MAX);

    /// The point that many nanoseconds after the origin.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Instant;
    ///
    /// assert_eq!(Instant::from_nanos(7).as_nanos(), 7);
    /// ```
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Instant;
    ///
    /// assert_eq!(Instant::from_nanos(7).as_nanos(), 7);
    /// ```
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this point, zero if it is not earlier.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Instant;
    ///
    /// assert_eq!(Instant::ORIGIN.since(Instant::FAR), std::time::Duration::ZERO);
    /// ```
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, rest: Duration) -> Self {
        Self(self.0.saturating_add(nanos(rest)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, rest: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(rest)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", Duration::from_nanos(self.0))
    }
}

/// Nanoseconds of a duration; 584 years and more are as good as for ever.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The time source of the core. Cheap to clone.
///
/// # Examples
/// ```
/// use dlock_core::Clock;
///
/// let clock = Clock::boot();
/// assert!(clock.now() <= clock.now());
/// ```
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Simulation>>); // none: the machine's

struct Simulation {
    origin: tokio::time::Instant,
    jumped: AtomicU64,
}

impl Clock {
    /// The machine's boot clock.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    ///
    /// assert!(!Clock::boot().is_simulated());
    /// ```
    #[must_use]
    pub fn boot() -> Self {
        Self(None)
    }

    /// A clock that follows tokio's paused time, starting one hour after its origin.
    ///
    /// Call it inside a runtime with `start_paused`: time then advances only when every task waits.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use std::time::Duration;
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(async {
    /// let clock = Clock::simulated();
    /// let before = clock.now();
    /// tokio::time::sleep(Duration::from_secs(30)).await; // takes no time
    /// assert!(clock.now().since(before) >= Duration::from_secs(30));
    /// # })
    /// ```
    #[must_use]
    pub fn simulated() -> Self {
        Self(Some(Arc::new(Simulation {
            origin: tokio::time::Instant::now(),
            jumped: AtomicU64::new(nanos(Duration::from_secs(3600))),
        })))
    }

    /// Sets a simulated clock forward without waking any timer, as a suspend or a stopped process does.
    /// Other clocks do not change.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use std::time::Duration;
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(async {
    /// let clock = Clock::simulated();
    /// let before = clock.now();
    /// clock.jump(Duration::from_secs(60)); // as if the machine had slept
    /// assert!(clock.now().since(before) >= Duration::from_secs(60));
    /// # })
    /// ```
    pub fn jump(&self, by: Duration) {
        if let Some(simulation) = &self.0 {
            simulation.jumped.fetch_add(nanos(by), Ordering::SeqCst);
        }
    }

    /// Whether it follows tokio's time.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    ///
    /// assert!(!Clock::boot().is_simulated());
    /// ```
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.0.is_some()
    }

    /// The time now.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    ///
    /// let clock = Clock::boot();
    /// let before = clock.now();
    /// assert!(before <= clock.now());
    /// ```
    #[must_use]
    pub fn now(&self) -> Instant {
        match &self.0 {
            None => boot(),
            Some(simulation) => Instant(
                nanos(simulation.origin.elapsed()) + simulation.jumped.load(Ordering::SeqCst),
            ),
        }
    }

    /// Waits until `at`. It never returns earlier, and returns at most a second late after a suspend.
    /// Outside a runtime with timers, a thread is the timer.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    ///
    /// # Examples
    /// ```
    /// # async fn example(client: dlock_core::Client) -> Result<(), dlock_core::Error> {
    /// # use std::time::Duration;
    /// let clock = dlock_core::Clock::boot();
    /// clock.sleep_until(clock.now() + Duration::from_secs(1)).await; // also when the machine sleeps meanwhile
    /// # Ok(()) }
    /// ```
    pub async fn sleep_until(&self, at: Instant) {
        if at == Instant::FAR {
            return std::future::pending().await;
        }
        loop {
            let rest = at.since(self.now());
            if rest.is_zero() {
                return;
            }
            match runtime::timer(rest.min(REREAD)) {
                Some(timer) => timer.await,
                None => sleep_in_thread(rest.min(REREAD)).await,
            }
        }
    }
}

async fn sleep_in_thread(length: Duration) {
    let (over, told) = oneshot::channel::<()>();
    let timer = move || {
        thread::sleep(length);
        drop(over);
    };
    match thread::Builder::new()
        .name("dlock-timer".to_owned())
        .spawn(timer)
    {
        Ok(_) => drop(told.await),
        Err(_) => thread::sleep(NO_THREAD.min(length)),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // The boot clock is never negative.
    Instant(now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs())
}

/// Elsewhere it is the standard library's clock, which may stand still in suspend. A lock may then be
/// believed for as long as the machine slept.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot() -> Instant {
    static ORIGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    Instant(nanos(ORIGIN.get_or_init(std::time::Instant::now).elapsed()))
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match &self.0 {
            None => "boot",
            Some(_) => "simulated",
        };
        write!(f, "Clock({source}, {:?})", self.now())
    }
}

/// How long the caller's own thread is blocked at a time when no other thread can be started.
const NO_THREAD: Duration = Duration::from_millis(10);

/// How long a timer may run before the clock is read again: runtime timers stop in suspend.
const REREAD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::{Clock, Instant};
    use std::time::Duration;

    #[test]
    fn the_boot_clock_goes_forward() {
        let clock = Clock::boot();
        let first = clock.now();
        assert!(clock.now() >= first);
        assert!(first > Instant::ORIGIN);
    }

    #[tokio::test(start_paused = true)]
    async fn sleep_ends_at_its_instant_and_not_before() {
        let clock = Clock::simulated();
        let end = clock.now() + Duration::from_millis(2_500);
        clock.sleep_until(end).await;
        assert!(clock.now() >= end);
        assert!(clock.now() < end + Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_jump_is_noticed_within_a_second_by_a_sleeper() {
        let clock = Clock::simulated();
        let start = tokio::time::Instant::now();
        let end = clock.now() + Duration::from_secs(60);
        clock.jump(Duration::from_secs(3600));
        clock.sleep_until(end).await;
        assert!(start.elapsed() <= Duration::from_secs(1));
    }
}
