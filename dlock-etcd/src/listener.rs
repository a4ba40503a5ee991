//! Wake-ups: each waiter watches the one before it, the first one watches the holds.
//!
//! So the end of a hold wakes one waiter, not all. A watch begins behind the revision that the waiter has seen. So nothing is missed between a
//! refusal and the watch, nor while the connection is changed; what the servers have compacted meanwhile is read.

use crate::{
    commands::{Line, QueuePosition},
    connection::Link,
    driver::Inner,
    table::{WaiterKey, Watch},
};
use dlock_core::{Instant, driver::WakeUp};
use etcd_client::{
    Error as Native, KeyValue, WatchFilterType, WatchOptions, WatchRequestSender, WatchResponse,
};
use std::{sync::Arc, time::Duration};
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
    pub(crate) fn position(&self, key: &WaiterKey) -> QueuePosition {
        if let Some(waiter) = self.table().waiters.get_mut(key)
            && let Some(created) = waiter.created
        {
            waiter.turn = None;
            return QueuePosition::Stands(waiter.key.clone(), created);
        }
        QueuePosition::None
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

    pub(crate) fn order(&self, order: Order) {
        drop(self.orders.send(order)); // an error: the driver is closed
    }

    /// Reads the lock of a waiter; `None`: not answered in time.
    async fn answer(&self, key: &WaiterKey) -> Option<Line> {
        let keys = self.keys(&key.0);
        timeout(ANSWER, self.line(&keys)).await.ok()?.ok()
    }

    /// Reads in the background what a waiter waits for now.
    pub(crate) fn read_again(self: &Arc<Self>, key: WaiterKey) {
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let Some(line) = inner.answer(&key).await else {
                return inner.turn(&key); // the next poll reads it
            };
            match inner.watch_line(&key, &line) {
                // One that cannot share it tries in vain, and stays the first.
                Some(0) if line.is_open() => inner.turn(&key),
                Some(_) => {}
                None => inner.wait_again(&key),
            }
        });
    }

    /// Removes a waiter that stands no longer: its next request enters the queue anew.
    pub(crate) fn wait_again(&self, key: &WaiterKey) {
        self.forget(key);
        self.turn(key);
    }

    /// Removes a waiter that did not use its turn, if it was one: the end of one of several holds looks the same, but where
    /// sharers may enter beside the others.
    pub(crate) fn turn_over(self: &Arc<Self>, key: WaiterKey) {
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let line = inner.answer(&key).await;
            let mut table = inner.table();
            let waiter = table.waiters.get_mut(&key);
            // Otherwise it is used just now.
            let Some(waiter) = waiter.filter(|waiter| waiter.turn == Some(Instant::FAR)) else {
                return;
            };
            // Not answered, it is read again soon.
            waiter.turn = line.is_none().then(|| inner.clock.now() + ANSWER);
            drop(table);
            if line.is_some_and(|line| line.is_open()) {
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
        let mut guard = self.table();
        let table = &mut *guard; // so that its fields are borrowed apart
        let Some(key) = table.watches.get(&told.watch_id()).cloned() else {
            return;
        };
        let Some(waiter) = table.waiters.get_mut(&key) else {
            return;
        };
        let Some(watch) = &mut waiter.watch else {
            return;
        };
        let events = told.events().iter().filter_map(|event| event.kv());
        let newest = events.map(KeyValue::mod_revision).max();
        watch.from = watch.from.max(newest.unwrap_or(0) + 1);
        let is_first = watch.ahead.is_none();
        if has_ended {
            // Forgotten, so that the next poll sets a new one.
            table.watches.remove(&watch.id);
            waiter.watch = None;
        }
        drop(guard);
        if is_first && !has_ended {
            self.turn(&key);
        } else {
            self.read_again(key);
        }
    }

    /// All watches, from the first revision that each has not seen, in place of the orders so far.
    fn watches(&self, orders: &mut mpsc::UnboundedReceiver<Order>) -> Vec<Order> {
        // Under the lock orders are given as well: none is missed, and none is carried twice.
        let table = self.table();
        while orders.try_recv().is_ok() {}
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
        while inner.table().watches.is_empty() {
            if orders.recv().await.is_none() {
                return;
            }
        }
        if let Ok(link) = inner.connection.link().await {
            let watches = inner.watches(&mut orders);
            // The last waiter left meanwhile.
            if watches.is_empty() {
                continue;
            }
            let ended = tokio::select! {
                ended = carry(&inner, watches, &mut orders, &link, &mut is_again) => ended,
                () = link.lost() => Ok(()),
            };
            if let Err(error) = ended {
                tracing::debug!(target: "dlock::etcd", %error, "the watches have to be set again");
            }
            link.lose();
        }
        sleep(PAUSE).await;
    }
}

/// Carries orders and what the watches tell over one stream until it ends.
async fn carry(
    inner: &Arc<Inner>,
    mut watches: Vec<Order>,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    link: &Link,
    is_again: &mut bool,
) -> Result<(), Native> {
    let Some(Order::Begin(key, options)) = watches.pop() else {
        return Ok(());
    };
    let opened = link.client.watch_client().watch(key, Some(options)).await?;
    let (mut sender, mut stream) = opened.split();
    if std::mem::replace(is_again, true) {
        inner.wake_ups.send(WakeUp::Resync);
    }
    let sending = async {
        for order in watches {
            send(&mut sender, order).await?;
        }
        while let Some(order) = orders.recv().await {
            send(&mut sender, order).await?;
        }
        Ok(())
    };
    let hearing = async {
        while let Some(told) = stream.message().await? {
            // It does not say which one: the token with which the stream was opened has expired.
            if told.canceled() && told.watch_id() == REFUSED {
                break;
            }
            inner.heard(&told);
        }
        Ok(())
    };
    tokio::select! {
        ended = sending => ended,
        ended = hearing => ended,
    }
}

async fn send(sender: &mut WatchRequestSender, order: Order) -> Result<(), Native> {
    match order {
        Order::Begin(key, options) => sender.watch(key, Some(options)).await,
        Order::End(id) => sender.cancel(id).await,
    }
}

/// The number in place of that of a watch that is refused.
const REFUSED: i64 = -1;
/// How long a read may take; after that the core polls.
const ANSWER: Duration = Duration::from_millis(500);
/// Between two attempts to open the stream.
const PAUSE: Duration = Duration::from_millis(50);
