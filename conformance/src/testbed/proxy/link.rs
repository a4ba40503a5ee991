//! State of one proxied connection, which controls its bytes.

use std::{collections::HashMap, time::Duration};
use tokio::sync::watch;

/// One of the two byte streams of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Requests.
    ClientToServer,
    /// Replies and other bytes that the server sends.
    ServerToClient,
}

/// The treatment of the bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flow {
    /// They are delivered.
    #[default]
    Pass,
    /// They are held, and delivered in order once the flow is [`Pass`](Self::Pass) again.
    Stall,
    /// They are dropped, the end of the stream included: the other side receives nothing.
    Swallow,
}

/// The connections that a condition is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Those that are open now; the setting for new ones stays.
    Existing,
    /// Future ones.
    New,
    /// All of them.
    All,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    pub(super) flow: Flow,
    pub(super) delay: Duration,
}

/// The state of one connection that its two streams check before every delivery.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Link {
    pub(super) lanes: [Lane; 2],
    pub(super) blackhole: bool,
    pub(super) cut: bool,
    /// A reply was lost here. TCP cannot lose a piece and go on, so nothing reaches the client any
    /// more.
    pub(super) deaf: bool,
    /// The client has closed its side.
    pub(super) client_gone: bool,
}

impl Link {
    pub(super) const fn lane(&self, direction: Direction) -> &Lane {
        &self.lanes[direction as usize]
    }

    pub(super) const fn lane_mut(&mut self, direction: Direction) -> &mut Lane {
        &mut self.lanes[direction as usize]
    }

    pub(super) fn stalls(&self, direction: Direction) -> bool {
        self.blackhole || self.lane(direction).flow == Flow::Stall
    }

    pub(super) fn swallows(&self, direction: Direction) -> bool {
        self.lane(direction).flow == Flow::Swallow
    }

    /// The end of a stream may be reported: bytes of this direction pass, or the end goes to a client
    /// that is gone.
    pub(super) fn ends(&self, direction: Direction) -> bool {
        let to_client = direction == Direction::ServerToClient;
        let held_back =
            self.stalls(direction) || self.swallows(direction) || (to_client && self.deaf);
        !held_back || (to_client && self.client_gone)
    }
}

/// The open connections, and the initial state of new ones.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) refuse: bool,
    new: Link,
    open: HashMap<u64, watch::Sender<Link>>,
    next: u64,
}

impl Table {
    pub(super) fn admit(&mut self) -> Option<(u64, watch::Sender<Link>)> {
        if self.refuse {
            return None;
        }
        let link = watch::Sender::new(self.new);
        let number = self.next;
        self.next += 1;
        self.open.insert(number, link.clone());
        Some((number, link))
    }

    pub(super) fn forget(&mut self, number: u64) {
        self.open.remove(&number);
    }

    pub(super) fn change(&mut self, reach: Reach, change: impl Fn(&mut Link)) {
        if reach != Reach::Existing {
            change(&mut self.new);
        }
        if reach != Reach::New {
            self.open
                .values()
                .for_each(|link| link.send_modify(&change));
        }
    }

    pub(super) fn cut(&self) -> usize {
        self.open
            .values()
            .for_each(|link| link.send_modify(|link| link.cut = true));
        self.open.len()
    }
}
