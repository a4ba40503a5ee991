//! Sharing: readers and permits of several clients, which are told when they can enter.

use crate::bed::{SESSION, server};
use dlock_conformance::testbed::{
    ZooKeeperServer,
    worker::Worker,
    zookeeper::{TICK, ZooKeeperOptions},
};
use dlock_core::{
    HoldId, Instant, Lease, LockName, Mode, Owner,
    driver::{Acquire, Acquired, DistributedLock, Grant, Held, Release, Released, Ticket, WakeUp},
};
use dlock_zk::ZkDriver;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, future::join_all};
use std::num::NonZeroU64;
use tokio::{sync::Mutex, time::timeout};

/// A client that waits with one ticket, and polls only when it is told.
struct Asker {
    driver: ZkDriver,
    wake_ups: Mutex<BoxStream<'static, WakeUp>>,
    ask: Acquire,
}

impl Asker {
    async fn new(server: &ZooKeeperServer, name: &str, owner: Owner, hold: u64) -> Self {
        let url = format!("{}/dlock?dlock.session=12s&dlock.sessions=1", server.url());
        let driver = ZkDriver::connect(&url).await.unwrap();
        let (name, hold) = (LockName::new(name).unwrap(), HoldId::from_bits(hold));
        Self {
            wake_ups: Mutex::new(driver.wake_ups()),
            ask: Acquire::new(name, owner, hold, Lease::default(), Instant::FAR),
            driver,
        }
    }

    async fn asks(&self) -> Acquired {
        self.driver.acquire(&self.ask).await.unwrap()
    }

    async fn is_granted(&self) -> Grant {
        match self.asks().await {
            Acquired::Granted(grant) => grant,
            refused => panic!("{refused:?}"),
        }
    }

    async fn is_refused(&self) -> Held {
        match self.asks().await {
            Acquired::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    async fn waits(mut self) -> Self {
        self.ask.ticket = Some(Ticket(NonZeroU64::MIN));
        self.is_refused().await;
        self
    }

    /// Asks at each wake-up until it is granted.
    async fn enters(&self) -> Grant {
        let mut wake_ups = self.wake_ups.lock().await;
        let told = async {
            loop {
                let wake_up = wake_ups.next().await.expect("the driver is open");
                let WakeUp::Turn { .. } = wake_up else {
                    continue;
                };
                if let Acquired::Granted(grant) = self.asks().await {
                    return grant;
                }
            }
        };
        timeout(SESSION * 10, told).await.expect("it is told")
    }

    async fn releases(&self) -> Released {
        let Acquire {
            name, owner, hold, ..
        } = &self.ask;
        let release = Release::new(name.clone(), *owner, *hold);
        self.driver.release(&release).await.unwrap()
    }
}

/// The owner of readers (0), or of that many permits.
fn sharer(permits: u8) -> Owner {
    let owner = format!("646c6f63-6b2d-8073-8861-7265000000{permits:02x}");
    owner.parse().unwrap()
}

pub(crate) async fn waiting_readers_enter_together_when_told_and_none_passes_a_writer() {
    let server = server(ZooKeeperOptions::default()).await;
    let asker = async |owner, hold| Asker::new(&server, "read", owner, hold).await;
    let first = asker(Owner::from_seed("first"), 1).await;
    let before = first.is_granted().await;
    let mut readers = Vec::new();
    for hold in 2..8 {
        readers.push(asker(sharer(0), hold).await.waits().await);
    }
    let second = asker(Owner::from_seed("second"), 8).await.waits().await;
    let late = asker(sharer(0), 9).await.waits().await;
    assert!(matches!(first.releases().await, Released::Freed));
    let grants = join_all(readers.iter().map(Asker::enters)).await;
    assert!(grants.iter().all(|grant| grant.token == grants[0].token));
    assert!(grants[0].token > before.token);
    for asker in [&second, &late, &asker(sharer(0), 10).await] {
        let by = asker.is_refused().await.by.expect("it is held");
        assert_eq!(by.owner.mode(), Mode::Shared);
    }
    for (at, reader) in readers.iter().enumerate() {
        let released = reader.releases().await;
        let is_last = at + 1 == readers.len();
        assert_eq!(matches!(released, Released::Freed), is_last, "{released:?}");
    }
    let written = second.enters().await;
    assert!(written.token > grants[0].token);
    late.is_refused().await;
    second.releases().await;
    assert!(late.enters().await.token > written.token);
}

pub(crate) async fn a_permit_that_is_given_back_or_dies_goes_to_the_first_that_waits() {
    let server = server(ZooKeeperOptions::default()).await;
    let asker = async |hold| Asker::new(&server, "permits", sharer(2), hold).await;
    let (one, two) = (asker(1).await, asker(2).await);
    assert_eq!(one.is_granted().await.holds.get(), 1);
    assert_eq!(two.is_granted().await.holds.get(), 2);
    assert_eq!(two.is_granted().await.holds.get(), 2, "a repeat");
    let (three, four) = (asker(3).await.waits().await, asker(4).await.waits().await);
    let by = asker(5).await.is_refused().await.by.expect("it is held");
    assert!(matches!(by.owner.mode(), Mode::Permit { .. }));
    for (out, next) in [(&one, &three), (&two, &four)] {
        let left = out.releases().await;
        assert!(matches!(left, Released::StillHeld { holds } if holds.get() == 1));
        next.enters().await;
        asker(5).await.is_refused().await;
    }
    let arguments = [
        ("url", &*server.url()),
        ("name", "permits"),
        ("permits", "2"),
    ];
    three.releases().await;
    let mut killed = Worker::spawn("hold", &arguments).unwrap();
    killed.expect("holds ", SESSION * 3).await.unwrap();
    let last = asker(6).await.waits().await;
    killed.kill_9().await.unwrap();
    // The session of the process ends, and no client polls.
    let entered = timeout((SESSION + 2 * TICK) * 3, last.enters()).await;
    assert_eq!(
        entered.expect("its session ends").token,
        four.is_granted().await.token
    );
}

/// None is refused while there is room, and none enters beyond it, however many ask at once.
pub(crate) async fn of_many_that_try_at_once_as_many_enter_as_may() {
    let server = server(ZooKeeperOptions::default()).await;
    let mut askers = Vec::new();
    for hold in 1..=30 {
        askers.push(Asker::new(&server, "many", sharer(0), hold).await);
    }
    for (permits, most) in [(0, askers.len()), (4, 4), (1, 1)].repeat(4) {
        for asker in &mut askers {
            asker.ask.owner = sharer(permits);
        }
        let answers = join_all(askers.iter().map(Asker::asks)).await;
        let is_granted = |answer: &Acquired| matches!(answer, Acquired::Granted(_));
        let entered = answers.iter().filter(|answer| is_granted(answer)).count();
        assert_eq!(entered, most, "with {permits} permits: {answers:?}");
        for (asker, answer) in askers.iter().zip(&answers) {
            if is_granted(answer) {
                let released = asker.releases().await;
                assert!(
                    !matches!(released, Released::NotHeld { .. }),
                    "{released:?}"
                );
            }
        }
    }
}

/// A reader whose turn has come lets others in beside its seat. Then its task ends, and a writer takes the ticket:
/// while they are inside, or after they have left with the seat's token.
pub(crate) async fn a_ticket_that_passes_to_a_writer_is_not_granted_beside_readers() {
    let server = server(ZooKeeperOptions::default()).await;
    for (name, have_left) in [("inside", false), ("left", true)] {
        let asker = async |owner, hold| Asker::new(&server, name, owner, hold).await;
        let first = asker(Owner::from_seed("first"), 1).await;
        first.is_granted().await;
        let mut passed = asker(sharer(0), 2).await.waits().await;
        first.releases().await;
        let reader = asker(sharer(0), 3).await;
        let token = reader.is_granted().await.token;
        passed.ask.owner = Owner::from_seed("writer");
        passed.ask.hold = HoldId::from_bits(4);
        if !have_left {
            passed.is_refused().await;
        }
        reader.releases().await;
        assert!(passed.enters().await.token > token, "{name}");
    }
}

/// A reader whose hold lapsed before it knew of the grant asks again, and its client's next seat stands already.
pub(crate) async fn a_reader_does_not_wait_behind_the_seat_for_the_next_one() {
    let server = server(ZooKeeperOptions::default()).await;
    let asker = async |hold| Asker::new(&server, "next", sharer(0), hold).await;
    let (inside, mut late) = (asker(1).await, asker(2).await);
    inside.is_granted().await;
    let usual = late.ask.lease;
    late.ask.lease = Lease::fixed(SESSION / 10);
    [late.ask.ticket, late.ask.next_ticket] =
        [5, 6].map(|ticket| NonZeroU64::new(ticket).map(Ticket));
    late.is_granted().await;
    let holds = async || {
        let shown = inside.driver.inspect(&late.ask.name).await;
        shown.unwrap().holds
    };
    let lapses = async {
        while holds().await > 1 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SESSION * 10, lapses).await.expect("it lapses");
    (late.ask.lease, late.ask.hold) = (usual, HoldId::from_bits(3));
    late.is_granted().await;
}
