// ci: run redis
//! A web service on axum: a lock for each order, errors as responses, a health check, and a clean stop.
//!
//! `DLOCK_URL=redis://127.0.0.1/ cargo run -p dlock-rs --features redis,axum --example web`

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::Result,
    routing::{get, post},
};
use dlock::{Client, FencingToken, ShutdownReport};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    env,
    error::Error,
    io,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    signal::{ctrl_c, unix, unix::SignalKind},
    sync::oneshot,
    time::{sleep, timeout},
};

type AnyError = Box<dyn Error + Send + Sync>;

/// Charges that have begun, and those that are made.
static BEGUN: AtomicUsize = AtomicUsize::new(0);
static MADE: AtomicUsize = AtomicUsize::new(0);

/// A second request for an order meanwhile is answered 409; while the store is away, 503.
async fn pay(State(locks): State<Client>, Path(order): Path<u64>) -> Result<String> {
    // In a task: axum drops the handler of a caller that hangs up, and the charge would end in the middle.
    let paid = tokio::spawn(pay_order(locks, order));
    paid.await
        .map_err(|_panicked| StatusCode::INTERNAL_SERVER_ERROR)?
}

async fn pay_order(locks: Client, order: u64) -> Result<String> {
    let lock = locks.lock(format!("orders:{order}"))?;
    let guard = lock.acquire_timeout(Duration::from_millis(500)).await?;
    let charged = guard.run(charge(order, guard.token())).await?;
    charged.map_err(|_| StatusCode::BAD_GATEWAY)?;
    if let Err(error) = guard.release().await {
        eprintln!("{error}"); // the order is paid, and the lease ends the lock
    }
    Ok(format!("order {order} is paid"))
}

/// The order is the idempotency key of the charge, and the token goes along with each write.
async fn charge(_order: u64, _fence: FencingToken) -> io::Result<()> {
    BEGUN.fetch_add(1, SeqCst);
    sleep(Duration::from_secs(1)).await;
    MADE.fetch_add(1, SeqCst);
    Ok(())
}

async fn health(State(locks): State<Client>) -> StatusCode {
    match timeout(Duration::from_millis(800), locks.ping()).await {
        Ok(Ok(())) => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Serves until SIGTERM or Ctrl-C. Requests in progress then have five seconds, and those that wait for a lock end at
/// once.
async fn serve(
    listener: TcpListener,
    locks: Client,
    mut sigterm: unix::Signal,
) -> Result<ShutdownReport, AnyError> {
    let app = Router::new()
        .route("/orders/{order}/pay", post(pay))
        .route("/health", get(health))
        .with_state(locks.clone());
    let (stop, stopping) = oneshot::channel::<()>();
    let server = axum::serve(listener, app)
        .with_graceful_shutdown(async { stopping.await.unwrap_or_default() });
    let server = tokio::spawn(server.into_future());
    tokio::select! {
        _ = sigterm.recv() => {}
        _ = ctrl_c() => {}
    }
    drop(stop);
    let grace = Duration::from_secs(5);
    let drained = timeout(grace * 2, server);
    let (drained, report) = tokio::join!(drained, locks.shutdown(grace));
    drained???;
    Ok(report?)
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let sigterm = unix::signal(SignalKind::terminate())?; // first, or an early SIGTERM kills the process
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let locks = dlock::connect(&url).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let service = tokio::spawn(serve(listener, locks, sigterm));

    // From here on this program is its own client.
    assert!(ask(addr, "GET /health").await?.starts_with("HTTP/1.1 200"));
    let pay = "POST /orders/42/pay";
    let (one, two) = tokio::try_join!(ask(addr, pay), ask(addr, pay))?;
    let answers = [one, two].map(|answer| answer.lines().next().unwrap_or_default().to_owned());
    println!("{answers:?}");
    assert!(answers.contains(&"HTTP/1.1 200 OK".to_owned()));
    assert!(answers.contains(&"HTTP/1.1 409 Conflict".to_owned()));

    let hangs_up = send(addr, "POST /orders/43/pay").await?;
    let last = tokio::spawn(ask(addr, "POST /orders/44/pay"));
    while BEGUN.load(SeqCst) < 3 {
        sleep(Duration::from_millis(10)).await;
    }
    drop(hangs_up);
    kill_process(getpid(), Signal::TERM)?;
    let last = last.await??;
    println!("{last}");
    assert!(last.starts_with("HTTP/1.1 200"));
    println!("{:?}", service.await??);
    assert_eq!(MADE.load(SeqCst), 3, "also that of the caller that hung up");
    Ok(())
}

async fn send(addr: SocketAddr, what: &str) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(addr).await?;
    let request = format!("{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    Ok(stream)
}

async fn ask(addr: SocketAddr, what: &str) -> io::Result<String> {
    let mut answer = String::new();
    let mut stream = send(addr, what).await?;
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
