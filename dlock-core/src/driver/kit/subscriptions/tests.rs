//! Tests of the subscriptions over a server that says what the test tells it.

use super::{AWAY, CHANNELS, Subscriber, Subscriptions, TICK, channel_of, hash_of};
use crate::{
    driver::{Result, Ticket, WakeUp, kit::Waiters},
    error::DriverError,
    name::LockName,
};
use futures_util::{FutureExt, StreamExt};
use std::{
    num::NonZeroU64,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::mpsc;

#[derive(Clone, Default)]
struct Server(Arc<Inner>);

#[derive(Default)]
struct Inner {
    connects: AtomicU64,
    refuses: AtomicBool,
    /// As a standby does.
    refuses_channels: AtomicBool,
    hangs: AtomicBool,
    /// The channels of the connection, and where to publish on it.
    channels: Mutex<Vec<u64>>,
    publisher: Mutex<Option<mpsc::UnboundedSender<Result<u64>>>>,
}

impl Server {
    fn publish(&self, hash: u64) {
        let publisher = self.0.publisher.lock().unwrap();
        publisher.as_ref().unwrap().send(Ok(hash)).unwrap();
    }

    fn cut(&self) {
        self.0.publisher.lock().unwrap().take();
    }

    fn channels(&self) -> Vec<u64> {
        self.0.channels.lock().unwrap().clone()
    }

    fn connects(&self) -> u64 {
        self.0.connects.load(Ordering::Relaxed)
    }
}

impl Subscriber for Server {
    type Connection = mpsc::UnboundedReceiver<Result<u64>>;

    async fn connect(&self) -> Result<Self::Connection> {
        self.0.connects.fetch_add(1, Ordering::Relaxed);
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(DriverError::unavailable("refused"));
        }
        let (publisher, connection) = mpsc::unbounded_channel();
        *self.0.publisher.lock().unwrap() = Some(publisher);
        self.0.channels.lock().unwrap().clear();
        Ok(connection)
    }

    async fn subscribe(&self, _: &mut Self::Connection, channel: u64) -> Result<()> {
        if self.0.refuses_channels.load(Ordering::Relaxed) {
            return Err(DriverError::unavailable("refused"));
        }
        self.0.channels.lock().unwrap().push(channel);
        Ok(())
    }

    async fn unsubscribe(&self, _: &mut Self::Connection, channel: u64) -> Result<()> {
        self.0
            .channels
            .lock()
            .unwrap()
            .retain(|one| *one != channel);
        Ok(())
    }

    async fn probe(&self, _: &mut Self::Connection) -> Result<()> {
        match self.0.hangs.load(Ordering::Relaxed) {
            true => std::future::pending().await,
            false => Ok(()),
        }
    }

    async fn next(&self, connection: &mut Self::Connection) -> Result<u64> {
        let next = connection.recv().await;
        next.unwrap_or_else(|| Err(DriverError::unavailable("lost")))
    }
}

fn name(text: &str) -> LockName {
    LockName::new(text).unwrap()
}

fn ticket(number: u64) -> Ticket {
    Ticket(NonZeroU64::new(number).unwrap())
}

#[test]
fn the_hash_and_the_channel_of_a_name_are_pinned() {
    assert_eq!(hash_of("orders:42"), 0x8a5f_217d_db0c_9f03);
    assert_eq!(channel_of(0x8a5f_217d_db0c_9f03), 3);
    assert_eq!(CHANNELS, 64);
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_name_hear_of_it_and_the_channel_is_left_after_them() {
    let server = Server::default();
    let subscriptions = Subscriptions::new(server.clone());
    let mut wake_ups = subscriptions.stream();
    let (a, hash) = (name("a"), hash_of("a"));
    assert!(subscriptions.listen(&a, ticket(1)).await);
    assert!(subscriptions.listen(&a, ticket(2)).await);
    assert!(subscriptions.listen(&name("c"), ticket(3)).await);
    let channels = [channel_of(hash), channel_of(hash_of("c"))];
    assert_eq!(server.channels(), channels);
    // One without a waiter here, as of another client or a forged one.
    server.publish(hash.wrapping_add(CHANNELS));
    server.publish(hash);
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(a.clone())));
    assert_eq!(wake_ups.next().now_or_never(), None);

    subscriptions.forget(&a, ticket(1));
    tokio::time::sleep(TICK * 2).await;
    assert_eq!(server.channels(), channels, "a waiter is left");
    subscriptions.forget(&a, ticket(2));
    subscriptions.forget(&a, ticket(2));
    tokio::time::sleep(TICK * 2).await;
    assert_eq!(server.channels(), channels[1..]);
    subscriptions.forget(&name("c"), ticket(3));
    tokio::time::sleep(TICK * 2).await;
    assert!(
        server
            .0
            .publisher
            .lock()
            .unwrap()
            .as_ref()
            .unwrap()
            .is_closed()
    );
    assert_eq!(wake_ups.next().now_or_never(), None, "nothing was missed");

    assert!(subscriptions.listen(&a, ticket(4)).await);
    assert_eq!(server.connects(), 2);
    subscriptions.close();
    assert_eq!(wake_ups.next().await, None);
    assert!(!subscriptions.listen(&a, ticket(5)).await);
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_makes_waiters_poll_and_the_next_one_connects_again() {
    let server = Server::default();
    let subscriptions = Subscriptions::new(server.clone());
    let mut wake_ups = subscriptions.stream();
    let a = name("a");
    assert!(subscriptions.listen(&a, ticket(1)).await);
    server.cut();
    assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
    assert!(subscriptions.listen(&a, ticket(1)).await);
    server.publish(hash_of("a"));
    assert_eq!(wake_ups.next().await, Some(WakeUp::Free(a.clone())));
    // A path that is dead: nothing arrives, not even an end.
    server.0.hangs.store(true, Ordering::Relaxed);
    assert_eq!(wake_ups.next().await, Some(WakeUp::Resync));
    assert_eq!(server.connects(), 2);
}

#[tokio::test(start_paused = true)]
async fn where_there_is_no_connection_a_waiter_is_told_so_and_not_every_one_tries() {
    let switches: [fn(&Inner) -> &AtomicBool; 2] =
        [|server| &server.refuses, |server| &server.refuses_channels];
    for refuses in switches {
        let server = Server::default();
        refuses(&server.0).store(true, Ordering::Relaxed);
        let subscriptions = Subscriptions::new(server.clone());
        let mut wake_ups = subscriptions.stream();
        for _ in 0..5 {
            assert!(!subscriptions.listen(&name("a"), ticket(1)).await);
        }
        assert_eq!(server.connects(), 1);
        refuses(&server.0).store(false, Ordering::Relaxed);
        tokio::time::sleep(AWAY).await;
        assert!(subscriptions.listen(&name("a"), ticket(1)).await);
        assert_eq!(wake_ups.next().now_or_never(), None);
    }
}

#[test]
fn a_runtime_that_has_ended_takes_its_task_along_and_the_next_waiter_begins_another() {
    let subscriptions = Subscriptions::new(Server::default());
    let mut wake_ups = subscriptions.stream();
    for round in 0..2 {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().build().unwrap();
        runtime.block_on(async {
            let a = name("a");
            let listening = subscriptions.listen(&a, ticket(1));
            assert!(
                tokio::time::timeout(Duration::from_secs(60), listening)
                    .await
                    .unwrap()
            );
        });
        drop(runtime);
        assert_eq!(
            wake_ups.next().now_or_never(),
            Some(Some(WakeUp::Resync)),
            "{round}"
        );
    }
}
