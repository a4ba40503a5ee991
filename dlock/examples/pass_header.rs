// ci: run memory redis
//! A hold that another service enters: the pass travels in a header of the request.
//!
//! `cargo run -p dlock-rs --features axum --example pass_header`; with `--features axum,redis`,
//! `DLOCK_URL=redis://127.0.0.1/` takes a server.

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use dlock::{Client, Pass};
use std::{env, io};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// The header holds a secret: who has it can enter the lock. Send it over TLS, and log no headers.
const HEADER: &str = "x-lock-pass";

/// The other service, which holds the lock beside its caller, and no longer than the lock itself is held.
async fn ship(State(locks): State<Client>, headers: HeaderMap) -> Result<String, Response> {
    let header = headers.get(HEADER).and_then(|value| value.to_str().ok());
    let pass: Pass = header
        .and_then(|value| value.parse().ok())
        .ok_or_else(|| StatusCode::BAD_REQUEST.into_response())?;
    let shipped = async {
        let guard = locks.lock(pass.name())?.join(&pass).await?; // 409 if that hold is over
        guard.run(async { /* … */ }).await?;
        guard.release().await
    };
    let left = shipped.await.map_err(IntoResponse::into_response)?;
    Ok(format!("{left:?}"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two services would connect to one server.
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "memory:orders".to_owned());
    let there = dlock::connect(&url).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let app = Router::new().route("/ship", post(ship)).with_state(there);
    tokio::spawn(async move { axum::serve(listener, app).await });

    let here = dlock::connect(&url).await?;
    let guard = here.lock("orders:42")?.acquire().await?;
    let header = format!("{HEADER}: {}", guard.pass()?.expose());
    let answer = ask(addr, &header).await?;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.ends_with("StillHeld { holds: 1 }"), "{answer}");
    guard.release().await?;

    let answer = ask(addr, &header).await?;
    assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
    Ok(())
}

async fn ask(addr: std::net::SocketAddr, header: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(addr).await?;
    let request =
        format!("POST /ship HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{header}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
