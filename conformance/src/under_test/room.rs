//! Room: the resource that a lock guards. It checks that there are never two holders, and that tokens grow.

use super::until;
use dlock_core::{Client, Guard, Lease, Lock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::task::JoinHandle;

/// The resource that one lock guards.
#[derive(Debug, Default)]
pub struct Room {
    is_taken: AtomicBool,
    last: AtomicU64,
    cycles: AtomicU64,
}

impl Room {
    /// Enters and leaves once.
    ///
    /// # Panics
    /// When another holder is inside, or the token is none that is greater than the last one.
    pub async fn visit(&self, guard: &Guard) {
        let is_shared = self.is_taken.swap(true, Ordering::SeqCst);
        assert!(!is_shared, "two are inside");
        let token = guard.token().0;
        let last = self.last.swap(token, Ordering::SeqCst);
        assert!(last < token, "{token} after {last}");
        tokio::task::yield_now().await;
        self.is_taken.store(false, Ordering::SeqCst);
        self.cycles.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it was entered and left.
    pub fn cycles(&self) -> u64 {
        self.cycles.load(Ordering::Relaxed)
    }

    /// Enters and leaves until `over`, whatever happens to the server. The client's cleanup releases requests
    /// that got no answer.
    async fn besiege(self: Arc<Self>, lock: Lock, over: Arc<AtomicBool>) {
        while !over.load(Ordering::Relaxed) {
            let Ok(guard) = lock.acquire().await else {
                continue;
            };
            self.visit(&guard).await;
            drop(guard.release().await);
        }
    }
}

/// Tasks of several clients that contend for a few names.
#[derive(Debug)]
pub struct Crowd {
    rooms: Vec<Arc<Room>>,
    clients: Vec<Client>,
    over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// Begins with so many names and tasks of each client.
    ///
    /// # Panics
    /// Outside a runtime.
    #[must_use]
    pub fn of(clients: Vec<Client>, names: usize, tasks: usize) -> Self {
        let rooms: Vec<_> = (0..names).map(|_| Arc::new(Room::default())).collect();
        let over = Arc::new(AtomicBool::new(false));
        let mut all = Vec::new();
        for client in &clients {
            for task in 0..tasks {
                let at = task % names;
                let lock = client.lock(name(at)).expect("it is a name");
                let lock = lock.lease(Lease::renewed(LEASE));
                let room = Arc::clone(&rooms[at]);
                all.push(tokio::spawn(room.besiege(lock, Arc::clone(&over))));
            }
        }
        Self {
            rooms,
            clients,
            over,
            tasks: all,
        }
    }

    /// Waits until there were so many grants more.
    pub async fn goes_on(&self, by: u64) {
        let cycles = || self.rooms.iter().map(|room| room.cycles()).sum::<u64>();
        let enough = cycles() + by;
        until("the locks were taken again", async || cycles() >= enough).await;
    }

    /// Ends the tasks, and waits until no lock is held.
    ///
    /// # Panics
    /// When a task saw two holders, or a lock stays held.
    pub async fn ends(self) {
        self.over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no task panicked");
        }
        for at in 0..self.rooms.len() {
            until("no lock is held any more", async || {
                // The first attempt may meet its ended session.
                let shown = self.clients[0].admin().inspect(name(at)).await;
                shown.is_ok_and(|shown| shown.holders.is_empty())
            })
            .await;
        }
    }
}

fn name(at: usize) -> String {
    format!("n{at}")
}

/// Longer than a server is away in a test.
const LEASE: Duration = Duration::from_secs(60);
