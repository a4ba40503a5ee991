//! Wake-ups: each waiter watches the one before it, the first one watches the holds.
//!
//! So the end of a hold wakes one waiter, not all. A watch begins behind the revision that the waiter has seen. So nothing is missed between a
//! refusal and the watch, nor while the connection is changed; what the servers have compacted meanwhile is looked up.

use crate::{
    commands::{Line, Place},
    connection::Link,
    driver::Inner,
    table::{Waiter, WaiterKey, Watch},
};
use dlock_core::{Instant, driver::WakeUp};
use etcd_client::{
    Error as Native, WatchFilterType, WatchOptions, WatchRequestSender, WatchResponse,
    WatchResponseStream,
};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

/// A change of what is watched.
#[derive(Debug)]
pub(crate) enum Order {
    Begin(Vec<u8>, WatchOptions),
    End(i64),
}

impl Inner {
    /// Where a waiter stands. Its turn, if it came, is being used.
    pub(crate) fn place(&self, key: &WaiterKey) -> Place {
        let mut table = self.table();
        match table.waiters.get_mut(key) {
            Some(Waiter {
                key,
                created: Some(created),
                turn,
                ..
            }) => {
                *turn = None;
                Place::Stands(key.clone(), *created)
            }
            _ => Place::None,
        }
    }

    /// Records that a waiter with that lease stands since that revision.
    pub(crate) fn stands(&self, key: &WaiterKey, lease: i64, created: i64) {
        if let Some(waiter) = self.table().waiters.get_mut(key)
            && waiter.lease.id == lease
        {
            waiter.created = Some(created);
        }
        self.earlier.notify_one();
    }

    /// Corrects since when a waiter stands: with a wrong revision its turn would never come.
    pub(crate) fn stands_since(&self, key: &WaiterKey, recorded: i64, created: i64) {
        if let Some(waiter) = self.table().waiters.get_mut(key)
            && waiter.created == Some(recorded)
        {
            waiter.created = Some(created);
        }
    }

    /// Watches what a waiter waits for, as a listing shows it. The answer is how many stand before it.
    pub(crate) fn watch_line(&self, key: &WaiterKey, line: &Line) -> Option<usize> {
        let mut table = self.table();
        let waiter = table.waiters.get_mut(key)?;
        let at = line
            .waiters
            .iter()
            .position(|(name, _)| name == waiter.key.as_bytes())?;
        let ahead = at.checked_sub(1).map(|ahead| line.waiters[ahead].0.clone());
        let watched = waiter.watch.as_ref();
        if watched.is_some_and(|watch| watch.ahead == ahead) {
            return Some(at);
        }
        let watch = Watch {
            id: self.next_id(),
            ahead,
            from: line.revision + 1,
        };
        let (id, begin) = (watch.id, self.begin(key, &watch));
        let before = waiter.watch.replace(watch);
        if let Some(before) = before {
            table.watches.remove(&before.id);
            self.order(Order::End(before.id));
        }
        table.watches.insert(id, key.clone());
        self.order(begin);
        Some(at)
    }

    fn begin(&self, key: &WaiterKey, watch: &Watch) -> Order {
        let options = WatchOptions::new()
            .with_watch_id(watch.id)
            .with_start_revision(watch.from)
            .with_filters([WatchFilterType::NoPut]);
        match &watch.ahead {
            Some(ahead) => Order::Begin(ahead.clone(), options),
            None => Order::Begin(self.keys(&key.0).holds().into(), options.with_prefix()),
        }
    }

    pub(crate) fn unwatch(&self, waiter: &Waiter) {
        if let Some(watch) = &waiter.watch {
            self.order(Order::End(watch.id));
        }
    }

    fn order(&self, order: Order) {
        drop(self.orders.send(order)); // an error: the driver is closed
    }

    /// Looks in the background what a waiter waits for now.
    pub(crate) fn look_again(self: &Arc<Self>, key: WaiterKey) {
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let looked = timeout(ANSWER, inner.line(&inner.keys(&key.0))).await;
            let Ok(Ok(line)) = looked else {
                return inner.turn(&key); // the next poll looks
            };
            match inner.watch_line(&key, &line) {
                Some(0) if line.taken.is_empty() => inner.turn(&key),
                Some(_) => {}
                None => {
                    inner.forget(&key);
                    inner.turn(&key);
                }
            }
        });
    }

    /// Removes a waiter that did not use its turn, if it was one: the end of one of several holds looks the same.
    pub(crate) fn turn_over(self: &Arc<Self>, key: WaiterKey) {
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let looked = timeout(ANSWER, inner.line(&inner.keys(&key.0))).await;
            let is_free = matches!(&looked, Ok(Ok(line)) if line.taken.is_empty());
            let mut table = inner.table();
            let waiter = table.waiters.get_mut(&key);
            // Otherwise it is used just now.
            let Some(waiter) = waiter.filter(|waiter| waiter.turn == Some(Instant::FAR)) else {
                return;
            };
            waiter.turn = match looked {
                Ok(Ok(_)) => None,
                _ => Some(inner.clock.now() + ANSWER), // looked at again soon
            };
            drop(table);
            if is_free {
                inner.forget(&key);
            } else {
                inner.earlier.notify_one();
            }
        });
    }

    /// Tells the core that it is the turn of a waiter. Not used soon, the turn passes on.
    fn turn(&self, key: &WaiterKey) {
        self.table().begin_turn(key, self.clock.now());
        self.earlier.notify_one();
        let (name, ticket) = key.clone();
        self.wake_ups.send(WakeUp::Turn { name, ticket });
    }

    /// Handles what a watch tells.
    fn heard(self: &Arc<Self>, told: &WatchResponse) {
        let has_ended = told.canceled() || told.compact_revision() > 0;
        if told.events().is_empty() && !has_ended {
            return;
        }
        let mut table = self.table();
        let Some(key) = table.watches.get(&told.watch_id()).cloned() else {
            return;
        };
        let watch = table.waiters.get_mut(&key).map(|waiter| &mut waiter.watch);
        let Some(Some(watch)) = watch else { return };
        let events = told.events().iter().filter_map(|event| event.kv());
        let revision = events
            .map(etcd_client::KeyValue::mod_revision)
            .max()
            .unwrap_or(0);
        watch.from = watch.from.max(revision + 1);
        let is_first = watch.ahead.is_none();
        if has_ended {
            // Forgotten, so that the next look sets a new one.
            let id = watch.id;
            table.watches.remove(&id);
            if let Some(waiter) = table.waiters.get_mut(&key) {
                waiter.watch = None;
            }
        }
        drop(table);
        if is_first && !has_ended {
            self.turn(&key);
        } else {
            self.look_again(key);
        }
    }

    /// All watches, from the first revision that each has not seen.
    fn watches(&self) -> VecDeque<Order> {
        let table = self.table();
        let watches = table.waiters.iter().filter_map(|(key, waiter)| {
            let watch = waiter.watch.as_ref()?;
            Some(self.begin(key, watch))
        });
        watches.collect()
    }
}

/// Runs the stream of watches, one for all waiters, and opens it anew when it breaks.
pub(crate) async fn listen(inner: Arc<Inner>, mut orders: mpsc::UnboundedReceiver<Order>) {
    let mut is_again = false;
    loop {
        if inner.watches().is_empty() {
            if orders.recv().await.is_none() {
                return;
            }
            continue;
        }
        let Ok(link) = inner.connection.link().await else {
            sleep(PAUSE).await;
            continue;
        };
        // What they say is in the table.
        while orders.try_recv().is_ok() {}
        let mut watches = inner.watches();
        let Some(Order::Begin(key, options)) = watches.pop_front() else {
            continue;
        };
        let mut client = link.client.watch_client();
        let opened = tokio::select! {
            opened = client.watch(key, Some(options)) => opened,
            () = link.lost() => continue,
        };
        match opened {
            Ok(stream) => {
                if std::mem::replace(&mut is_again, true) {
                    inner.wake_ups.send(WakeUp::Resync);
                }
                let ended = carry(&inner, &mut orders, watches, stream.split(), &link).await;
                if let Err(error) = ended {
                    tracing::debug!(target: "dlock::etcd", %error, "the watches have to be set again");
                }
            }
            Err(_) => {}
        }
        link.lose();
        sleep(PAUSE).await;
    }
}

/// Carries orders and what the watches tell over one stream until it ends.
async fn carry(
    inner: &Arc<Inner>,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    mut unsent: VecDeque<Order>,
    (mut sender, mut stream): (WatchRequestSender, WatchResponseStream),
    link: &Link,
) -> Result<(), Native> {
    loop {
        tokio::select! {
            Some(order) = orders.recv() => unsent.push_back(order),
            sent = send_first(&mut sender, &unsent), if !unsent.is_empty() => {
                sent?;
                unsent.pop_front();
            }
            told = stream.message() => match told? {
                // It does not say which one: the token with which the stream was opened has expired.
                Some(told) if told.canceled() && told.watch_id() == REFUSED => return Ok(()),
                Some(told) => inner.heard(&told),
                None => return Ok(()),
            },
            () = link.lost() => return Ok(()),
        }
    }
}

/// Sends the first order when there is room. Dropped before that, it has sent nothing.
async fn send_first(
    sender: &mut WatchRequestSender,
    unsent: &VecDeque<Order>,
) -> Result<(), Native> {
    match unsent.front() {
        Some(Order::Begin(key, options)) => {
            sender.watch(key.as_slice(), Some(options.clone())).await
        }
        Some(Order::End(id)) => sender.cancel(*id).await,
        None => Ok(()),
    }
}

/// The number in place of that of a watch that is refused.
const REFUSED: i64 = -1;
/// How long a look may take; after that the core polls.
const ANSWER: Duration = Duration::from_millis(500);
/// Between two attempts to open the stream.
const PAUSE: Duration = Duration::from_millis(50);
