// ci: run memory redis
//! One of several replicas leads. A leader that ends, or loses its lock, is followed by another.
//!
//! `cargo run -p dlock-rs --example leader`; with `--features redis`, `DLOCK_URL=redis://127.0.0.1/` takes a server.

use dlock::{Error, Term};
use std::{env, ops::ControlFlow, time::Duration};

/// The work of a leader: dropped when the term is lost, so each await in here is a point where it may end.
async fn lead(replica: usize, term: Term) -> ControlFlow<()> {
    println!("replica {replica} leads, term {}", term.token());
    tokio::time::sleep(Duration::from_millis(100)).await;
    ControlFlow::Break(()) // `Continue(())` resigns and campaigns again
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "memory:cluster".to_owned());
    let mut replicas = tokio::task::JoinSet::new();
    for replica in 1..=3 {
        let client = dlock::connect(&url).await?; // each replica is a process of its own, in a service
        replicas.spawn(async move {
            let election = client.election("scheduler")?;
            election.run(move |term| lead(replica, term)).await?;
            Ok::<_, Error>(())
        });
    }
    while let Some(done) = replicas.join_next().await {
        done??;
    }
    Ok(())
}
