//! Tests with a slow disk: the server has answered, but the write is only in its own memory.
//!
//! The slow fsync is a preloaded library. `cc` exists wherever Rust links; a tracer for system calls may
//! be forbidden in containers.

use crate::bed::{SECOND, Testbed};
use dlock_conformance::testbed::{
    RedisServer,
    redis::{Aof, RedisOptions},
};
use dlock_core::driver::{Released, Renewed};
use dlock_redis::RedisDriver;
use std::{
    env, fs,
    path::PathBuf,
    process::{self, Command},
    sync::Arc,
    time::Instant,
};

/// A preloaded library that delays each fsync of a server, switched on by a file.
struct SlowDisk {
    library: PathBuf,
    flag: PathBuf,
}

impl SlowDisk {
    fn build() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let library = folder.join(format!("slow_fsync-{}.so", process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/slow_fsync.c");
        let built = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .args([source, "-ldl"])
            .status();
        assert!(
            built
                .expect("a C compiler, which Rust links with")
                .success()
        );
        let flag = library.with_extension("slow");
        Self { library, flag }
    }

    fn is_slow(&self, slow: bool) {
        if slow {
            fs::write(&self.flag, "").unwrap();
        } else {
            fs::remove_file(&self.flag).unwrap();
        }
    }

    fn environment(&self) -> Vec<(String, String)> {
        let all = [("LD_PRELOAD", &self.library), ("SLOW_FSYNC", &self.flag)];
        all.map(|(name, path)| (name.to_owned(), path.to_str().unwrap().to_owned()))
            .to_vec()
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.library));
        drop(fs::remove_file(&self.flag));
    }
}

fn persistence(t: &Testbed, field: &str) -> u64 {
    let info = t.server.command(&["INFO", "persistence"]).unwrap();
    let info = info.text().unwrap();
    let mut lines = info.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| *name == field).unwrap();
    value.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn with_everysec_a_killed_server_forgets_what_it_answered_while_an_fsync_was_slow() {
    let disk = SlowDisk::build();
    let server = RedisServer::start(RedisOptions {
        aof: Aof::EverySec,
        env: disk.environment(),
        ..RedisOptions::default()
    })
    .unwrap();
    let mut t = Testbed::start().await;
    t.driver = Arc::new(RedisDriver::connect(&server.url()).await.unwrap());
    t.server = server;
    let (kept, forgotten, postponed) = loop {
        disk.is_slow(true);
        // An fsync begins at most once a second, after a write.
        t.until(async || {
            let req = t.acquire("other", SECOND * 30);
            t.granted(&req).await;
            t.release(&req).await;
            persistence(&t, "aof_pending_bio_fsync") > 0
        })
        .await;
        let kept = t.acquire("kept", SECOND * 60);
        t.granted(&kept).await;
        let answered = Instant::now();
        t.until(async || persistence(&t, "aof_buffer_length") == 0)
            .await;
        let postponed = answered.elapsed();
        assert!(persistence(&t, "aof_pending_bio_fsync") > 0);
        let asked = Instant::now();
        let forgotten = t.acquire("forgotten", SECOND * 60);
        t.granted(&forgotten).await;
        t.process().kill().unwrap();
        let took = asked.elapsed();
        disk.is_slow(false);
        t.process().restart().unwrap();
        // The server counts two seconds in whole seconds. After a later kill the request may have been
        // written.
        if took < SECOND {
            break (kept, forgotten, postponed);
        }
        let released = t.release(&kept).await;
        assert!(matches!(released, Released::Freed), "{released:?}");
    };
    println!("written {postponed:?} after it was answered");
    // The forgotten lock has two holders until the first one renews.
    t.granted(&t.acquire("forgotten", SECOND)).await;
    assert_eq!(t.renew(&[&forgotten]).await, [Some(Renewed::NotHeld)]);
    t.held(&t.acquire("kept", SECOND)).await;
    let renewed = t.renew(&[&kept]).await;
    assert!(matches!(renewed[..], [Some(Renewed::Until { .. })]));
}
