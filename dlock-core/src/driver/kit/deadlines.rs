//! Deadline list: one timer task for all waits of a client or of a driver's connection.
//!
//! A fast request should not pay for a runtime timer that would have given it up after 5 s, nor for an
//! entry in a second list of requests that a shutdown cancels. Here both are one slot in one list. A
//! request takes the slot when it has to wait and leaves it when it is answered. A task of the client
//! sleeps until the earliest deadline that it knows of and reads the list again then. Mostly the request
//! with that deadline is long gone, so the list is read once in seconds, however many requests come and go.
//!
//! The task runs on the client's runtime. A waiter on another runtime, or one that finds the task gone,
//! also has a timer of its own, because the client's runtime may stand still.

use crate::clock::{Clock, Instant};
use parking_lot::Mutex;
use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::{
    runtime::{Handle, Id},
    sync::Notify,
};

/// The deadlines of one client, or of one connection of a driver. Setting one and leaving it costs a slot
/// in a list. A timer of the runtime costs the wake-up of a thread when it is the next to fire.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{Clock, driver::kit::Deadlines};
/// use std::time::Duration;
///
/// let clock = Clock::boot();
/// let (deadlines, task) = Deadlines::start(&clock, &tokio::runtime::Handle::current());
/// let end = clock.now() + Duration::from_millis(5);
/// deadlines.at(end).await;
/// assert!(clock.now() >= end);
/// task.abort();
/// # Ok(()) }
/// ```
pub struct Deadlines {
    clock: Clock,
    home: Id,
    list: Mutex<List>,
    /// A deadline is earlier than the end of the task's sleep.
    earlier: Notify,
}

struct List {
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Until when the task sleeps.
    armed: Instant,
    /// A slot was taken since the task last read the list.
    used: bool,
    /// The task is gone.
    stopped: bool,
}

enum Slot {
    Free,
    Set(Instant, Waker),
    /// Its time has come, and its waiter was woken.
    Due,
}

/// How long the task keeps waking when nothing waits, so that the next waiter need not wake it.
const LINGER: Duration = Duration::from_secs(1);

impl Deadlines {
    /// Starts the timer task and returns its handle. The task does not end by itself.
    #[must_use]
    pub fn start(clock: &Clock, handle: &Handle) -> (Arc<Self>, tokio::task::JoinHandle<()>) {
        let deadlines = Arc::new(Self {
            clock: clock.clone(),
            home: handle.id(),
            list: Mutex::new(List {
                slots: Vec::new(),
                free: Vec::new(),
                armed: Instant::FAR,
                used: false,
                stopped: false,
            }),
            earlier: Notify::new(),
        });
        let task = TimerTask(Arc::clone(&deadlines));
        let task = handle.spawn(async move { task.run().await });
        (deadlines, task)
    }

    /// Resolves at `at` and not before. The first poll never resolves.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    #[must_use = "it waits when it is polled"]
    pub fn at(&self, at: Instant) -> impl Future<Output = ()> + Send {
        Deadline {
            deadlines: self,
            at,
            slot: None,
            own: None,
        }
    }

    /// Wakes every waiter, because something changed that each of them checks.
    pub(crate) fn wake_all(&self) {
        let list = self.list.lock();
        let waiting = list.slots.iter().filter_map(|slot| match slot {
            Slot::Set(_, waker) => Some(waker.clone()),
            Slot::Free | Slot::Due => None,
        });
        let woken: Vec<_> = waiting.collect();
        drop(list); // a woken waiter may run at once
        woken.into_iter().for_each(Waker::wake);
    }

    /// Wakes the waiters whose time has come. Returns until when the task may sleep.
    fn wake_due(&self) -> Instant {
        let mut list = self.list.lock();
        let due = list.due(self.clock.now());
        let next = list.armed;
        drop(list); // a woken waiter may run at once
        due.into_iter().for_each(Waker::wake);
        next
    }
}

/// The timer task. When it ends, it wakes every waiter.
struct TimerTask(Arc<Deadlines>);

impl TimerTask {
    async fn run(self) {
        let deadlines = &*self.0;
        loop {
            let next = deadlines.wake_due();
            tokio::select! {
                biased;
                () = deadlines.earlier.notified() => {}
                () = deadlines.clock.sleep_until(next) => {}
            }
        }
    }
}

impl Drop for TimerTask {
    fn drop(&mut self) {
        self.0.list.lock().stopped = true;
        self.0.wake_all();
    }
}

impl List {
    fn take(&mut self, at: Instant, waker: Waker) -> usize {
        self.used = true;
        let set = Slot::Set(at, waker);
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot] = set;
                slot
            }
            None => {
                self.slots.push(set);
                self.slots.len() - 1
            }
        }
    }

    /// Ends the task's sleep at `at` at the latest. Returns whether the task has to be woken for that.
    fn arm(&mut self, at: Instant) -> bool {
        let earlier = at < self.armed;
        if earlier {
            self.armed = at;
        }
        earlier
    }

    fn leave(&mut self, slot: usize) {
        self.slots[slot] = Slot::Free;
        self.free.push(slot);
        if self.free.len() == self.slots.len() && self.slots.len() > MANY {
            // One burst should not cost memory and time for ever.
            (self.slots, self.free) = (Vec::new(), Vec::new());
        }
    }

    /// The waiters whose time has come. The task may then sleep until `armed`.
    fn due(&mut self, now: Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        let mut next = None;
        for slot in &mut self.slots {
            match slot {
                Slot::Set(at, _) if *at <= now => {
                    if let Slot::Set(_, waker) = std::mem::replace(slot, Slot::Due) {
                        due.push(waker);
                    }
                }
                Slot::Set(at, _) => next = Some(next.map_or(*at, |next: Instant| next.min(*at))),
                Slot::Free | Slot::Due => {}
            }
        }
        let idle = match std::mem::take(&mut self.used) {
            true => now + LINGER,
            false => Instant::FAR,
        };
        self.armed = next.unwrap_or(idle);
        due
    }
}

/// Places that an empty list keeps.
const MANY: usize = 1024;

/// A timer of the runtime on which it is polled.
type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A wait until a deadline: see [`Deadlines::at`].
struct Deadline<'a> {
    deadlines: &'a Deadlines,
    at: Instant,
    slot: Option<usize>,
    own: Option<(Option<Id>, Timer)>,
}

impl Future for Deadline<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let deadlines = this.deadlines;
        let stopped = match this.slot {
            None => {
                let mut list = deadlines.list.lock();
                let slot = list.take(this.at, cx.waker().clone());
                let earlier = list.arm(this.at);
                let stopped = list.stopped;
                drop(list);
                this.slot = Some(slot);
                if earlier {
                    deadlines.earlier.notify_one();
                }
                stopped
            }
            Some(slot) => {
                if deadlines.clock.now() >= this.at {
                    return Poll::Ready(());
                }
                let mut list = deadlines.list.lock();
                match &mut list.slots[slot] {
                    Slot::Set(_, waker) => waker.clone_from(cx.waker()),
                    // Its time came just now, and the waker of an earlier poll was woken.
                    Slot::Due => return Poll::Ready(()),
                    Slot::Free => {}
                }
                list.stopped
            }
        };
        let here = Handle::try_current().ok().map(|here| here.id());
        // The future may move to another runtime, and the first one may end: its timers must not be polled
        // then.
        this.own.take_if(|(made, _)| *made != here);
        let elsewhere = here != Some(deadlines.home);
        if this.own.is_none() && (stopped || elsewhere) {
            let (clock, at) = (deadlines.clock.clone(), this.at);
            let own = Box::pin(async move { clock.sleep_until(at).await });
            this.own = Some((here, own));
        }
        match &mut this.own {
            Some((_, own)) => own.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl Drop for Deadline<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.deadlines.list.lock().leave(slot);
        }
    }
}

// A list of wakers is of no use in output.
impl fmt::Debug for Deadlines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deadlines").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Deadlines, LINGER, MANY};
    use crate::clock::Clock;
    use std::{
        future::{Future, poll_fn},
        pin::pin,
        sync::Arc,
        task::{Context, Poll, Waker},
        time::Duration,
    };
    use tokio::runtime::{Builder, Handle};

    fn started(clock: &Clock) -> Arc<Deadlines> {
        Deadlines::start(clock, &Handle::current()).0
    }

    fn taken(deadlines: &Deadlines) -> usize {
        let list = deadlines.list.lock();
        list.slots.len() - list.free.len()
    }

    #[tokio::test(start_paused = true)]
    async fn each_rings_at_its_time_and_not_before() {
        let clock = Clock::simulated();
        let deadlines = started(&clock);
        let began = clock.now();
        let after = |millis| began + Duration::from_millis(millis);
        // The second is set while the task sleeps until the first, and is earlier.
        let (mut late, mut early) = (
            pin!(deadlines.at(after(5_000))),
            pin!(deadlines.at(after(70))),
        );
        assert!(poll_fn(|cx| Poll::Ready(late.as_mut().poll(cx).is_pending())).await);
        tokio::time::sleep(Duration::from_millis(10)).await;
        early.as_mut().await;
        assert!(clock.now() >= after(70) && clock.now() < after(75));
        late.as_mut().await;
        assert!(clock.now() >= after(5_000) && clock.now() < after(5_005));
    }

    #[tokio::test(start_paused = true)]
    async fn one_whose_time_is_past_rings_at_once() {
        let clock = Clock::simulated();
        let deadlines = started(&clock);
        let began = clock.now();
        deadlines.at(began).await;
        assert!(clock.now() < began + Duration::from_millis(5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_is_left_and_a_crowd_forgotten() {
        let clock = Clock::simulated();
        let deadlines = started(&clock);
        let end = clock.now() + Duration::from_secs(5);
        let mut crowd: Vec<_> = (0..=MANY).map(|_| Box::pin(deadlines.at(end))).collect();
        let mut cx = Context::from_waker(Waker::noop());
        for deadline in &mut crowd {
            assert!(deadline.as_mut().poll(&mut cx).is_pending());
        }
        assert_eq!(taken(&deadlines), MANY + 1);
        drop(crowd);
        assert_eq!(
            (taken(&deadlines), deadlines.list.lock().slots.len()),
            (0, 0)
        );
        let mut alone = pin!(deadlines.at(end));
        assert!(alone.as_mut().poll(&mut cx).is_pending());
        assert_eq!(taken(&deadlines), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_is_not_woken_by_what_comes_and_goes() {
        let clock = Clock::simulated();
        let deadlines = started(&clock);
        tokio::task::yield_now().await;
        let mut cx = Context::from_waker(Waker::noop());
        let mut wakes = 0;
        for _ in 0..10_000 {
            let mut deadline = pin!(deadlines.at(clock.now() + Duration::from_secs(5)));
            let before = deadlines.list.lock().armed;
            assert!(deadline.as_mut().poll(&mut cx).is_pending());
            wakes += u32::from(deadlines.list.lock().armed < before);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(wakes, 1, "the first one");
        // Nothing waits: it goes to sleep for good.
        tokio::time::sleep(Duration::from_secs(5) + LINGER * 2).await;
        assert_eq!(deadlines.list.lock().armed, crate::clock::Instant::FAR);
    }

    #[tokio::test]
    async fn who_waits_is_polled_when_shaken() {
        let deadlines = started(&Clock::boot());
        let mut deadline = Box::pin(deadlines.at(Clock::boot().now() + Duration::from_secs(3600)));
        let mut polls = 0;
        poll_fn(|cx| {
            polls += 1;
            assert!(deadline.as_mut().poll(cx).is_pending());
            if polls == 1 {
                deadlines.wake_all();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!(polls, 2);
    }

    /// On a runtime that is gone, and on one that is not polled.
    #[test]
    fn who_waits_elsewhere_needs_no_task() {
        let runtime = || Builder::new_current_thread().enable_time().build().unwrap();
        let elsewhere = runtime();
        let clock = Clock::boot();
        for gone in [true, false] {
            let home = runtime();
            let deadlines = home.block_on(async { started(&clock) });
            let home = (!gone).then_some(home);
            let end = clock.now() + Duration::from_millis(20);
            elsewhere.block_on(deadlines.at(end));
            assert!(clock.now() >= end);
            drop(home);
        }
    }

    /// A request that is given up moves to its client's runtime. The runtime of the caller may end, or the
    /// client's.
    #[test]
    fn who_waits_may_move_from_one_runtime_to_another() {
        let runtime = || Builder::new_current_thread().enable_time().build().unwrap();
        let clock = Clock::boot();
        for first_at_home in [true, false] {
            let (home, other) = (runtime(), runtime());
            let deadlines = home.block_on(async { started(&clock) });
            let (first, then) = if first_at_home {
                (home, other)
            } else {
                (other, home)
            };
            let end = clock.now() + Duration::from_millis(20);
            let mut deadline = Box::pin(deadlines.at(end));
            let polled = poll_fn(|cx| Poll::Ready(deadline.as_mut().poll(cx).is_pending()));
            let is_pending = first.block_on(polled);
            drop(first);
            if is_pending {
                then.block_on(deadline);
            }
            assert!(clock.now() >= end);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_fired_for_another_task_has_fired() {
        let clock = Clock::simulated();
        let deadlines = started(&clock);
        let mut deadline = pin!(deadlines.at(clock.now() + LINGER));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(deadline.as_mut().poll(&mut cx).is_pending());
        // As if the task had read a later time than the next poll does.
        drop(deadlines.list.lock().due(clock.now() + LINGER));
        assert!(deadline.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn a_waiter_whose_timer_task_ended_goes_on_alone() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let clock = Clock::boot();
        runtime.block_on(async {
            let (deadlines, task) = Deadlines::start(&clock, &Handle::current());
            let end = clock.now() + Duration::from_millis(20);
            let mut deadline = pin!(deadlines.at(end));
            let is_pending =
                poll_fn(|cx| Poll::Ready(deadline.as_mut().poll(cx).is_pending())).await;
            task.abort();
            if is_pending {
                deadline.await;
            }
            assert!(clock.now() >= end);
        });
    }
}
