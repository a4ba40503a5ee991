//! Contention backoff: growing, jittered pauses before a write that lost a race is tried again.

use std::time::Duration;

/// Pauses that double from `shortest` to `longest`, each shortened at random by up to a half, so that of
/// several losers one gets through.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::Backoff;
/// use std::time::Duration;
///
/// let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));
/// assert!(backoff.pause() <= Duration::from_millis(10));
/// assert!(backoff.pause() <= Duration::from_millis(20));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// A backoff whose first pause is `shortest` at most.
    #[must_use]
    pub const fn new(shortest: Duration, longest: Duration) -> Self {
        Self {
            next: shortest,
            longest,
        }
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next.mul_f64(1.0 - fastrand::f64() / 2.0);
        self.next = self.longest.min(self.next * 2);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::Backoff;
    use std::time::Duration;

    #[test]
    fn pauses_double_up_to_the_longest_and_lose_at_most_a_half() {
        let milli = Duration::from_millis;
        let mut backoff = Backoff::new(milli(1), milli(3));
        for most in [1, 2, 3, 3] {
            let pause = backoff.pause();
            assert!(
                milli(most) / 2 <= pause && pause <= milli(most),
                "{pause:?}"
            );
        }
    }
}
