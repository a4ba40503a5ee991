//! Every fault of the proxy, seen from both of its sides, in front of a server that answers each line.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use dlock_conformance::testbed::Proxy;
use dlock_conformance::testbed::proxy::{Direction, Fault, Flow, Reach, Trigger};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

use super::soon;

pub(crate) const UP: Direction = Direction::ClientToServer;
pub(crate) const DOWN: Direction = Direction::ServerToClient;

/// A proxy in front of a server that answers every line with `re:` and the line, and reports what it
/// has executed.
pub(crate) struct Bed {
    pub(crate) proxy: Proxy,
    executed: mpsc::UnboundedReceiver<String>,
}

impl Bed {
    pub(crate) async fn new() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let proxy = Proxy::start(listener.local_addr()?).await?;
        let (tell, executed) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(answer(client, tell.clone()));
            }
        });
        Ok(Self { proxy, executed })
    }

    pub(crate) async fn client(&self) -> io::Result<Client> {
        Client::connect(self.proxy.addr()).await
    }

    pub(crate) async fn executed(&mut self) -> String {
        soon(self.executed.recv())
            .await
            .expect("the server has ended")
    }
}

async fn answer(client: TcpStream, tell: mpsc::UnboundedSender<String>) {
    let (from, mut to) = client.into_split();
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // Reported first: a client that has the answer finds the line reported.
        drop(tell.send(line.clone()));
        drop(
            to.write_all(
                format!(
                    "re:{line}
"
                )
                .as_bytes(),
            )
            .await,
        );
    }
    drop(tell.send("end".to_owned()));
}

pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) async fn connect(addr: SocketAddr) -> io::Result<Self> {
        Ok(Self(BufReader::new(TcpStream::connect(addr).await?)))
    }

    pub(crate) async fn say(&mut self, text: &str) -> io::Result<()> {
        self.0.get_mut().write_all(text.as_bytes()).await
    }

    pub(crate) async fn hear(&mut self) -> io::Result<String> {
        let mut line = String::new();
        soon(self.0.read_line(&mut line)).await?;
        Ok(line)
    }

    pub(crate) async fn ask(&mut self, text: &str) -> io::Result<String> {
        self.say(text).await?;
        self.hear().await
    }

    /// The remaining bytes before the end, which may be a reset.
    pub(crate) async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        let _end: io::Result<usize> = soon(self.0.read_to_end(&mut rest)).await;
        String::from_utf8_lossy(&rest).into_owned()
    }

    pub(crate) async fn hears_nothing(&mut self, within: Duration) -> bool {
        let mut line = String::new();
        tokio::time::timeout(within, self.0.read_line(&mut line))
            .await
            .is_err()
    }
}

/// Longer than a loopback round trip without faults, so that `hears_nothing` can tell a held one from a
/// passing one.
pub(crate) const WHILE: Duration = Duration::from_millis(30);

#[tokio::test]
async fn bytes_pass_both_ways_and_connections_are_counted() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut client = bed.client().await?;
    assert_eq!(client.ask("one\n").await?, "re:one\n");
    assert_eq!(bed.executed().await, "one");
    drop(client);
    soon(bed.proxy.until(|counters| counters.open == 0)).await;
    let counters = bed.proxy.counters();
    assert_eq!((counters.accepted, counters.refused), (1, 0));
    Ok(())
}

#[tokio::test]
async fn a_client_that_only_finished_speaking_still_hears_the_answer() -> io::Result<()> {
    let bed = Bed::new().await?;
    bed.proxy.set_delay(Reach::New, DOWN, WHILE);
    let mut client = bed.client().await?;
    client.say("one\n").await?;
    client.0.get_mut().shutdown().await?;
    assert_eq!(client.rest().await, "re:one\n");
    Ok(())
}

#[tokio::test]
async fn much_passes_unchanged() -> io::Result<()> {
    let bed = Bed::new().await?;
    let mut client = bed.client().await?;
    let line = "x".repeat(3 << 20);
    assert_eq!(
        client.ask(&format!("{line}\n")).await?,
        format!("re:{line}\n")
    );
    Ok(())
}

#[tokio::test]
async fn delay_postpones_each_direction_and_does_not_add_up() -> io::Result<()> {
    let bed = Bed::new().await?;
    let mut client = bed.client().await?;
    soon(bed.proxy.until(|counters| counters.open == 1)).await;
    bed.proxy
        .set_delay(Reach::Existing, UP, Duration::from_millis(400));
    bed.proxy
        .set_delay(Reach::Existing, DOWN, Duration::from_millis(200));
    let began = Instant::now();
    for _ in 0..20 {
        client.say("x\n").await?;
        tokio::task::yield_now().await;
    }
    for _ in 0..20 {
        assert_eq!(client.hear().await?, "re:x\n");
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(600), "{took:?}");
    // Added up, the delays of the requests alone would be 8 s.
    assert!(took < Duration::from_secs(6), "{took:?}");
    Ok(())
}

#[tokio::test]
async fn stalled_bytes_are_delivered_in_order_afterwards() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut client = bed.client().await?;
    bed.proxy.set_flow(Reach::All, DOWN, Flow::Stall);
    client.say("one\n").await?;
    assert_eq!(bed.executed().await, "one");
    assert!(client.hears_nothing(WHILE).await);
    client.say("two\n").await?;
    bed.proxy.set_flow(Reach::All, DOWN, Flow::Pass);
    assert_eq!(client.hear().await?, "re:one\n");
    assert_eq!(client.hear().await?, "re:two\n");
    Ok(())
}

#[tokio::test]
async fn a_stalled_request_is_executed_late_even_without_its_client() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    bed.proxy.set_flow(Reach::New, UP, Flow::Stall);
    let sent = bed.proxy.watch(UP, "one\n");
    let mut client = bed.client().await?;
    client.say("one\n").await?;
    soon(sent.reaches(1)).await;
    drop(client);
    assert!(bed.executed.try_recv().is_err());
    bed.proxy.heal();
    assert_eq!(bed.executed().await, "one");
    assert_eq!(bed.executed().await, "end");
    Ok(())
}

#[tokio::test]
async fn swallowed_requests_never_arrive() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut client = bed.client().await?;
    bed.proxy.set_flow(Reach::All, UP, Flow::Swallow);
    client.say("one\n").await?;
    soon(bed.proxy.until(|counters| counters.swallowed == 4)).await;
    bed.proxy.heal();
    assert_eq!(client.ask("two\n").await?, "re:two\n");
    assert_eq!(bed.executed().await, "two");
    Ok(())
}

#[tokio::test]
async fn swallowed_replies_are_executed_and_never_heard() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut client = bed.client().await?;
    bed.proxy.set_flow(Reach::All, DOWN, Flow::Swallow);
    client.say("one\n").await?;
    assert_eq!(bed.executed().await, "one");
    soon(bed.proxy.until(|counters| counters.swallowed == 7)).await;
    assert!(client.hears_nothing(WHILE).await);
    drop(client);
    soon(bed.proxy.until(|counters| counters.open == 0)).await;
    Ok(())
}

#[tokio::test]
async fn conditions_reach_existing_or_new_connections_as_told() -> io::Result<()> {
    let bed = Bed::new().await?;
    let mut old = bed.client().await?;
    soon(bed.proxy.until(|counters| counters.open == 1)).await;
    bed.proxy.set_flow(Reach::New, DOWN, Flow::Stall);
    let mut new = bed.client().await?;
    assert_eq!(old.ask("old\n").await?, "re:old\n");
    new.say("new\n").await?;
    assert!(new.hears_nothing(WHILE).await);
    bed.proxy.set_flow(Reach::Existing, DOWN, Flow::Pass);
    assert_eq!(new.hear().await?, "re:new\n");
    let mut newest = bed.client().await?;
    newest.say("x\n").await?;
    assert!(newest.hears_nothing(WHILE).await);
    Ok(())
}

#[tokio::test]
async fn blackhole_holds_everything_until_healed() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut old = bed.client().await?;
    soon(bed.proxy.until(|counters| counters.open == 1)).await;
    bed.proxy.blackhole(Reach::All, true);
    let mut new = bed.client().await?;
    old.say("old\n").await?;
    new.say("new\n").await?;
    assert!(new.hears_nothing(WHILE).await && old.hears_nothing(WHILE).await);
    assert!(bed.executed.try_recv().is_err());
    bed.proxy.heal();
    assert_eq!(old.hear().await?, "re:old\n");
    assert_eq!(new.hear().await?, "re:new\n");
    Ok(())
}

#[tokio::test]
async fn cut_ends_open_connections_on_both_sides_and_no_later_ones() -> io::Result<()> {
    let mut bed = Bed::new().await?;
    let mut clients = [bed.client().await?, bed.client().await?];
    for client in &mut clients {
        assert_eq!(client.ask("x\n").await?, "re:x\n");
        assert_eq!(bed.executed().await, "x");
    }
    assert_eq!(bed.proxy.cut(), 2);
    for client in &mut clients {
        assert_eq!(client.rest().await, "");
        assert_eq!(bed.executed().await, "end");
    }
    assert_eq!(bed.client().await?.ask("y\n").await?, "re:y\n");
    Ok(())
}

#[tokio::test]
async fn refused_connections_are_closed_at_once() -> io::Result<()> {
    let bed = Bed::new().await?;
    let mut old = bed.client().await?;
    soon(bed.proxy.until(|counters| counters.open == 1)).await;
    bed.proxy.refuse(true);
    assert_eq!(bed.client().await?.rest().await, "");
    assert_eq!(old.ask("old\n").await?, "re:old\n");
    bed.proxy.refuse(false);
    assert_eq!(bed.client().await?.ask("new\n").await?, "re:new\n");
    assert_eq!(bed.proxy.counters().refused, 1);
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_down_closes_the_client() -> io::Result<()> {
    // Bound, so that no other program gets the port, and not listening.
    let server = TcpSocket::new_v4()?;
    server.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let proxy = Proxy::start(server.local_addr()?).await?;
    assert_eq!(Client::connect(proxy.addr()).await?.rest().await, "");
    Ok(())
}

#[tokio::test]
async fn dropping_the_proxy_ends_everything() -> io::Result<()> {
    let Bed {
        proxy,
        mut executed,
    } = Bed::new().await?;
    let mut client = Client::connect(proxy.addr()).await?;
    assert_eq!(client.ask("x\n").await?, "re:x\n");
    let addr = proxy.addr();
    let _held = proxy.on_next(Trigger::on("y"), Fault::HoldRequest);
    client.say("y\n").await?;
    drop(proxy);
    assert_eq!(client.rest().await, "");
    assert_eq!(soon(executed.recv()).await.as_deref(), Some("x"));
    assert_eq!(soon(executed.recv()).await.as_deref(), Some("end"));
    assert!(TcpStream::connect(addr).await.is_err());
    Ok(())
}
