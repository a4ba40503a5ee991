// ci: run redis
//! A web service on axum: a lock for each order, errors as responses, a health check, and a clean stop.
//!
//! `DLOCK_URL=redis://127.0.0.1/ cargo run -p dlock-rs --features redis,axum --example web`

use axum::{
    Router,
    extract::{Path, State},
    routing::{get, post},
};
use dlock::{Client, Error, ShutdownReport};
use std::{env, io, net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

/// A second request for an order meanwhile is answered 409; while the store is away, 503.
async fn pay(State(locks): State<Client>, Path(order): Path<u64>) -> Result<String, Error> {
    let lock = locks.lock(format!("orders:{order}"))?;
    let guard = lock.acquire_timeout(Duration::from_millis(500)).await?;
    guard.run(charge(order)).await?; // send guard.token() along with each write
    if let Err(error) = guard.release().await {
        eprintln!("{error}"); // the order is paid, and the lease ends the lock
    }
    Ok(format!("order {order} is paid"))
}

async fn charge(_order: u64) {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

async fn health(State(locks): State<Client>) -> Result<&'static str, Error> {
    locks.ping().await.map(|()| "ok")
}

/// Serves until `stop`. Requests in progress then have five seconds, and those that wait for a lock end at once.
async fn serve(
    listener: TcpListener,
    locks: Client,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<Result<ShutdownReport, Error>> {
    let app = Router::new()
        .route("/orders/{order}", post(pay))
        .route("/health", get(health))
        .with_state(locks.clone());
    let (stopping, stopped) = oneshot::channel();
    let stop = async move {
        stop.await;
        stopping.send(()).ok();
    };
    let server = axum::serve(listener, app).with_graceful_shutdown(stop);
    let locks_end = async {
        stopped.await.ok();
        locks.shutdown(Duration::from_secs(5)).await
    };
    let (served, report) = tokio::join!(server.into_future(), locks_end);
    served.map(|()| report)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let locks = dlock::connect(&url).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    // A service of your own stops by a signal: `async { tokio::signal::ctrl_c().await.ok(); }`, or SIGTERM.
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.unwrap_or_default() };
    let service = tokio::spawn(serve(listener, locks, stopped));

    // From here on this program is its own client.
    assert!(ask(addr, "GET /health").await?.starts_with("HTTP/1.1 200"));
    let (one, two) = tokio::try_join!(ask(addr, "POST /orders/42"), ask(addr, "POST /orders/42"))?;
    let answers = [one, two].map(|answer| answer.lines().next().unwrap_or_default().to_owned());
    println!("{answers:?}");
    assert!(answers.contains(&"HTTP/1.1 200 OK".to_owned()));
    assert!(answers.contains(&"HTTP/1.1 409 Conflict".to_owned()));

    let last = tokio::spawn(ask(addr, "POST /orders/43"));
    tokio::time::sleep(Duration::from_millis(200)).await;
    stop.send(()).ok();
    println!("{}", last.await??);
    println!("{:?}", service.await???);
    Ok(())
}

async fn ask(addr: SocketAddr, what: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(addr).await?;
    let request = format!("{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
