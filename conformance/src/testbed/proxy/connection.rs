//! One proxied connection: two streams, each read into a bounded queue and delivered from it.

use super::{
    Shared,
    fault::{ArmedFault, Fault},
    frames::Frames,
    link::{Direction, Link},
    triggers::Tail,
};
use parking_lot::Mutex;
use std::{future::pending, net::SocketAddr, sync::Arc};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

/// The registration of a connection in the proxy. It ends on drop, so also when the connection's task
/// is aborted.
#[derive(Debug)]
pub(super) struct Registered {
    number: u64,
    link: watch::Sender<Link>,
    shared: Arc<Shared>,
    /// Faults whose request has been forwarded and whose reply has not begun to come.
    unanswered: Mutex<Vec<ArmedFault>>,
}

impl Registered {
    pub(super) fn new(shared: &Arc<Shared>) -> Option<Self> {
        let Some((number, link)) = shared.table.lock().admit() else {
            shared.tally.send_modify(|c| c.refused += 1);
            return None;
        };
        shared.tally.send_modify(|c| {
            c.accepted += 1;
            c.open += 1;
        });
        let shared = Arc::clone(shared);
        Some(Self {
            number,
            link,
            shared,
            unanswered: Mutex::default(),
        })
    }

    async fn wait(&self, condition: impl FnMut(&Link) -> bool + Send) {
        // We hold the sender, so this cannot fail.
        drop(self.link.subscribe().wait_for(condition).await);
    }

    fn swallowed(&self, bytes: usize) {
        self.shared
            .tally
            .send_modify(|c| c.swallowed += bytes as u64);
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.table.lock().forget(self.number);
        self.shared.tally.send_modify(|c| c.open -= 1);
    }
}

/// Serves one client until either side ends the connection, or [`Link::cut`] does.
pub(super) async fn serve(client: TcpStream, upstream: SocketAddr, here: Registered) {
    let served = async {
        here.wait(|link| !link.blackhole).await;
        if let Ok(server) = TcpStream::connect(upstream).await {
            relay(client, server, &here).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = here.wait(|link| link.cut) => {}
    }
}

async fn relay(mut client: TcpStream, mut server: TcpStream, here: &Registered) {
    // A proxy that waits to fill packets would be a fault of its own.
    drop((client.set_nodelay(true), server.set_nodelay(true)));
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let requests = async {
        let (feed, queue) = mpsc::channel(QUEUE);
        let delivered = deliver(queue, to_server, Direction::ClientToServer, here);
        match until_second(read_requests(from_client, feed, here), delivered).await {
            // The client has sent everything; the server may still be answering.
            End::Closed => pending().await,
            End::Broken => {}
        }
    };
    let replies = async {
        let (feed, queue) = mpsc::channel(QUEUE);
        let delivered = deliver(queue, to_client, Direction::ServerToClient, here);
        until_second(read_replies(from_server, feed, here), delivered).await
    };
    tokio::select! {
        () = requests => {}
        _ = replies => {}
    }
}

/// Runs both, and ends with the second.
async fn until_second<T>(first: impl Future<Output = ()>, second: impl Future<Output = T>) -> T {
    let first = async {
        first.await;
        pending().await
    };
    tokio::select! {
        result = first => result,
        result = second => result,
    }
}

/// One step of a stream, in its order.
enum Step {
    Bytes {
        due: Instant,
        bytes: Vec<u8>,
    },
    /// A fault takes effect before the bytes that follow.
    Fault(ArmedFault),
}

enum End {
    /// The stream has ended, and the receiver has been told.
    Closed,
    /// The connection is to be cut, or is.
    Broken,
}

async fn read_requests(mut from: ReadHalf<'_>, feed: mpsc::Sender<Step>, here: &Registered) {
    let direction = Direction::ClientToServer;
    let (mut buffer, mut stream) = (vec![0; PIECE], Tail::default());
    while let Some(mut piece) = read(&mut from, &mut buffer, direction, here).await {
        let mut start = 0;
        let hits = here
            .shared
            .triggers
            .lock()
            .scan(direction, &mut stream, piece);
        for (at, armed) in hits {
            let (before, rest) = piece.split_at(at - start);
            (piece, start) = (rest, at);
            if !(hand_on(&feed, before, direction, here).await
                && feed.send(Step::Fault(armed)).await.is_ok())
            {
                return;
            }
        }
        if !hand_on(&feed, piece, direction, here).await {
            return;
        }
    }
    here.link.send_modify(|link| link.client_gone = true);
}

async fn read_replies(mut from: ReadHalf<'_>, feed: mpsc::Sender<Step>, here: &Registered) {
    let direction = Direction::ServerToClient;
    let (mut buffer, mut stream) = (vec![0; PIECE], Tail::default());
    let (mut frames, mut cut) = (Frames::default(), None::<(ArmedFault, usize)>);
    while let Some(mut piece) = read(&mut from, &mut buffer, direction, here).await {
        here.shared
            .triggers
            .lock()
            .scan(direction, &mut stream, piece);
        let has_data = frames.pass(piece);
        let is_answered = |armed: &mut ArmedFault| has_data || !armed.needs_data();
        let answered: Vec<_> = here.unanswered.lock().extract_if(.., is_answered).collect();
        for armed in answered {
            match armed.fault() {
                Fault::LoseReply => {
                    here.link.send_modify(|link| link.deaf = true);
                    armed.set_struck();
                }
                Fault::CutAfterRequest => cut = cut.or(Some((armed, 0))),
                Fault::CutMidReply { bytes } => cut = cut.or(Some((armed, bytes))),
                Fault::CutBeforeRequest | Fault::HoldRequest => {}
            }
        }
        if here.link.borrow().deaf {
            here.swallowed(piece.len());
            continue;
        }
        if let Some((_, left)) = &mut cut {
            piece = &piece[..piece.len().min(*left)];
            *left -= piece.len();
        }
        if !hand_on(&feed, piece, direction, here).await {
            return;
        }
        if let Some((armed, _)) = cut.take_if(|(_, left)| *left == 0) {
            drop(feed.send(Step::Fault(armed)).await);
            return pending().await; // the delivering end cuts
        }
    }
}

async fn read<'b>(
    from: &mut ReadHalf<'_>,
    buffer: &'b mut [u8],
    direction: Direction,
    here: &Registered,
) -> Option<&'b [u8]> {
    // A reset counts as an end: everything read before it was sent, and is delivered.
    let length = from.read(buffer).await.ok().filter(|length| *length > 0)?;
    if direction == Direction::ServerToClient {
        rename(&mut buffer[..length], &here.shared.renamed);
    }
    Some(&buffer[..length])
}

/// Replaces each occurrence of a name by the other one, which is as long.
fn rename(bytes: &mut [u8], renamed: &[(Vec<u8>, Vec<u8>)]) {
    for (from, to) in renamed {
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(from.len()).position(|it| it == from) {
            bytes[at + found..][..to.len()].copy_from_slice(to);
            at += found + to.len();
        }
    }
}

async fn hand_on(
    feed: &mpsc::Sender<Step>,
    bytes: &[u8],
    direction: Direction,
    here: &Registered,
) -> bool {
    if bytes.is_empty() {
        return true;
    }
    let due = Instant::now() + here.link.borrow().lane(direction).delay;
    let bytes = bytes.to_vec();
    feed.send(Step::Bytes { due, bytes }).await.is_ok()
}

async fn deliver(
    mut queue: mpsc::Receiver<Step>,
    mut to: WriteHalf<'_>,
    direction: Direction,
    here: &Registered,
) -> End {
    let mut reachable = true;
    while let Some(step) = queue.recv().await {
        match step {
            Step::Bytes { due, bytes } => {
                wait_until(due).await;
                here.wait(|link| !link.stalls(direction)).await;
                if here.link.borrow().swallows(direction) {
                    here.swallowed(bytes.len());
                    continue;
                }
                if !reachable {
                    continue;
                }
                match (to.write_all(&bytes).await, direction) {
                    (Ok(()), _) => {}
                    (Err(_), Direction::ClientToServer) => return End::Broken,
                    // The client is gone; its requests, also held ones, are still to be executed.
                    (Err(_), Direction::ServerToClient) => reachable = false,
                }
            }
            Step::Fault(armed) => match (armed.fault(), direction) {
                (Fault::CutBeforeRequest, _) | (_, Direction::ServerToClient) => {
                    armed.set_struck();
                    return End::Broken;
                }
                (Fault::HoldRequest, _) => {
                    armed.set_struck();
                    armed.released().await;
                }
                (Fault::LoseReply | Fault::CutAfterRequest | Fault::CutMidReply { .. }, _) => {
                    here.unanswered.lock().push(armed);
                }
            },
        }
    }
    here.wait(|link| link.ends(direction)).await;
    drop(to.shutdown().await);
    End::Closed
}

async fn wait_until(due: Instant) {
    if due > Instant::now() {
        sleep_until(due).await;
    }
}

/// Bytes read at once. With [`QUEUE`] this bounds what a stalled stream holds to 1 MiB.
const PIECE: usize = 16 * 1024;

/// Steps between reading and delivering.
const QUEUE: usize = 64;
