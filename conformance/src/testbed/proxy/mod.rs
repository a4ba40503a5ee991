//! Fault proxy: a network between a client and its server that can be broken on purpose while it is in
//! use.

mod connection;
mod fault;
mod frames;
mod link;
mod tally;
mod triggers;

use connection::Registered;
use link::{Link, Table};
use parking_lot::Mutex;
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use triggers::Triggers;

pub use fault::{ArmedFault, Fault, Trigger};
pub use link::{Direction, Flow, Reach};
pub use tally::{Counters, Watch};

/// A TCP proxy on a free port of 127.0.0.1 in front of one server, or on several in front of the nodes of a cluster.
///
/// By default bytes pass unchanged and in order. There are two kinds of faults. *Conditions*
/// ([`set_flow`](Self::set_flow), [`set_delay`](Self::set_delay), [`blackhole`](Self::blackhole),
/// [`refuse`](Self::refuse)) last until they are cleared. An armed [`Fault`]
/// ([`on_next`](Self::on_next)) strikes one request.
///
/// - When a client closes its connection, the server sees that after all the client's bytes, also held
///   ones.
/// - When the server closes a connection, the client sees that after all the server's bytes.
/// - With the server down, connecting to the proxy succeeds and the connection is closed at once.
/// - Per connection and direction at most 1 MiB is held; beyond that the sender is slowed down, as by TCP.
///
/// It runs in the tokio runtime in which it was started, one task per connection. Dropping it ends all
/// of them at once.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    /// Dropping it ends all tasks: those of connections are in a set that the accepting task owns.
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// Starts a proxy for the server at `upstream`, which need not be up yet.
    ///
    /// # Errors
    /// When no loopback port can be bound.
    ///
    /// # Cancel safety
    /// If dropped early, nothing runs and no port is taken.
    pub async fn start(upstream: SocketAddr) -> io::Result<Self> {
        Self::before(&[upstream]).await
    }

    /// Starts one proxy for several servers that tell clients each other's addresses: in what they send, the address of
    /// each is replaced by the one at which the proxy stands for it. Both must be as long, and a server must send an
    /// address in one piece.
    ///
    /// # Errors
    /// When no loopback port can be bound.
    ///
    /// # Panics
    /// When there is no server.
    ///
    /// # Cancel safety
    /// As [`start`](Self::start).
    pub async fn before(upstreams: &[SocketAddr]) -> io::Result<Self> {
        let (mut listeners, mut renamed) = (Vec::new(), Vec::new());
        for upstream in upstreams {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let (from, to) = (upstream.to_string(), listener.local_addr()?.to_string());
            if upstreams.len() > 1 && from.len() == to.len() {
                renamed.push((from.into_bytes(), to.into_bytes()));
            }
            listeners.push((listener, *upstream));
        }
        let addr = listeners[0].0.local_addr()?;
        let shared = Arc::new(Shared {
            renamed,
            table: Mutex::default(),
            triggers: Mutex::default(),
            tally: watch::Sender::default(),
        });
        let accept = |(listener, upstream)| accept(listener, upstream, Arc::clone(&shared));
        let accepting = listeners.into_iter().map(accept).collect::<JoinSet<_>>();
        Ok(Self {
            addr,
            shared,
            _accepting: accepting,
        })
    }

    /// The address for clients; of the first server, where there are several.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets the flow of one direction from now on, also for bytes already held.
    ///
    /// Going back to [`Flow::Pass`] after [`Flow::Swallow`] leaves a hole in the stream, which no real network makes:
    /// [`cut`](Self::cut) such connections, or let the client close them.
    pub fn set_flow(&self, reach: Reach, direction: Direction, flow: Flow) {
        self.change(reach, |link| link.lane_mut(direction).flow = flow);
    }

    /// Delays the bytes of one direction by this time from now on. Bytes already in flight keep their
    /// time.
    pub fn set_delay(&self, reach: Reach, direction: Direction, delay: Duration) {
        self.change(reach, |link| link.lane_mut(direction).delay = delay);
    }

    /// While on, delivers nothing in either direction; connections are accepted, but not yet passed on
    /// to the server.
    ///
    /// When it is switched off, everything held is delivered, as TCP does after a partition.
    pub fn blackhole(&self, reach: Reach, on: bool) {
        self.change(reach, |link| link.blackhole = on);
    }

    /// While on, closes new connections as they are accepted.
    pub fn refuse(&self, on: bool) {
        self.shared.table.lock().refuse = on;
    }

    /// Closes both sides of all connections now; held bytes are lost. Returns the number of
    /// connections.
    pub fn cut(&self) -> usize {
        self.shared.table.lock().cut()
    }

    /// Clears every condition, and disarms every fault that has not struck.
    ///
    /// A held request stays held until its [`ArmedFault`] is released.
    pub fn heal(&self) {
        self.shared.triggers.lock().disarm_all();
        self.refuse(false);
        self.change(Reach::All, |link| {
            link.lanes = Default::default();
            link.blackhole = false;
        });
    }

    /// Arms a fault for one future request, on whichever connection it comes.
    ///
    /// Several may be armed: each occurrence of a needle goes to the first fault, in the order of arming, that does not
    /// skip it. Arming the same fault `n` times thus strikes `n` requests.
    #[must_use = "the armed fault tells when the fault has struck, and releases a held request"]
    pub fn on_next(&self, trigger: Trigger, fault: Fault) -> ArmedFault {
        self.shared.triggers.lock().arm(trigger, fault)
    }

    /// Counts occurrences of some bytes (1 to 256) in one direction from now on, whether or not they are delivered.
    ///
    /// # Panics
    /// When `needle` is empty or too long.
    #[must_use]
    pub fn watch(&self, direction: Direction, needle: impl Into<Vec<u8>>) -> Watch {
        self.shared.triggers.lock().watch(direction, needle.into())
    }

    /// The counters so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        *self.shared.tally.borrow()
    }

    /// Waits until the counters satisfy a condition, such as `|c| c.open == 2`.
    ///
    /// # Cancel safety
    /// Dropped early, nothing is lost.
    pub async fn until(&self, condition: impl Fn(&Counters) -> bool + Send) {
        // We hold the sender, so this cannot fail.
        drop(self.shared.tally.subscribe().wait_for(condition).await);
    }

    fn change(&self, reach: Reach, change: impl Fn(&mut Link)) {
        self.shared.table.lock().change(reach, change);
    }
}

/// The state that the proxy and the tasks of its connections share.
#[derive(Debug)]
struct Shared {
    /// What to replace in the bytes of servers.
    renamed: Vec<(Vec<u8>, Vec<u8>)>,
    table: Mutex<Table>,
    triggers: Mutex<Triggers>,
    /// The counters, and the tasks that wait for a change of them.
    tally: watch::Sender<Counters>,
}

async fn accept(listener: TcpListener, upstream: SocketAddr, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    if let Some(registered) = Registered::new(&shared) {
                        connections.spawn(connection::serve(client, upstream, registered));
                    }
                }
                // Most likely out of file descriptors: the backlog keeps the client until there is one.
                Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Short enough not to delay a connect noticeably, long enough not to spin.
const ACCEPT_AGAIN: Duration = Duration::from_millis(5);
