// ci: run memory
//! Metrics for Prometheus: any exporter of the crate `metrics` counts what clients do that are made after it.
//!
//! `cargo run -p dlock-rs --features axum,metrics --example prometheus`

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use std::{error::Error, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let slack = Matcher::Full("dlock_renew_slack_ratio".to_owned());
    let exporter = PrometheusBuilder::new()
        .set_buckets_for_metric(slack, &[0.1, 0.2, 0.3, 0.5, 0.7])? // for the alert in docs/telemetry.md
        .install_recorder()?; // before the first client
    let upkeep = exporter.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep(); // merges what histograms collected
        }
    });
    let locks = dlock::connect("memory:shop").await?;
    let lock = locks.lock("orders:42")?.class("orders"); // the class is a label, never the name
    let guard = lock.acquire().await?;
    guard.release().await?;
    let _held = lock.acquire().await?;

    let app = Router::new().route("/metrics", get(move || async move { exporter.render() }));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let mut scrape = TcpStream::connect(listener.local_addr()?).await?;
    tokio::spawn(async move { axum::serve(listener, app).await });

    scrape
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await?;
    let mut page = String::new();
    scrape.read_to_string(&mut page).await?;
    println!("{page}");
    for line in [
        r#"dlock_acquire_total{backend="memory",class="orders",outcome="acquired"} 2"#,
        r#"dlock_holds{backend="memory",class="orders"} 1"#,
    ] {
        assert!(page.contains(line), "{line} is missing");
    }
    Ok(())
}
