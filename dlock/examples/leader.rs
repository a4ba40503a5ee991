// ci: run
//! One of several replicas leads. A leader that ends, or loses its lock, is followed by another.
//!
//! `cargo run -p dlock-rs --example leader`

use dlock::{Error, Term};
use std::{ops::ControlFlow, time::Duration};

/// The work of a leader: dropped when the term is lost, so each await in here is a point where it may end.
async fn lead(replica: usize, term: Term) -> ControlFlow<()> {
    println!("replica {replica} leads, term {}", term.token());
    tokio::time::sleep(Duration::from_millis(100)).await;
    ControlFlow::Break(()) // `Continue(())` resigns and campaigns again
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut replicas = tokio::task::JoinSet::new();
    for replica in 1..=3 {
        // Replicas of a service would connect to one server.
        let client = dlock::connect("memory:cluster").await?;
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
