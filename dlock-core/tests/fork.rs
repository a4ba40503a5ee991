//! A real fork: parent and child have the same memory, generators included, and must not get the same
//! owner.
//!
//! It has its own `main`, because a fork of a process with several threads may deadlock, and the test
//! harness has several.

use dlock_core::{Client, Clock, driver::system_random};
use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
use fork::{Fork, fork};
use std::{
    error::Error,
    io::{Read, Write},
    process,
};
use tokio::runtime::{Builder, Runtime};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let runtime = Builder::new_current_thread().enable_time().build()?;
    let client = runtime.block_on(async {
        let store = MemoryStore::new(Clock::boot());
        let driver = MemoryDriver::connect(&store, MemoryConfig::default());
        Client::new(driver)
    })?;
    drawn(&runtime, &client)?; // lazy random state is initialised before the fork
    let (mut reader, mut writer) = std::io::pipe()?;
    if fork()? == Fork::Child {
        let told = drawn(&runtime, &client)
            .and_then(|ids| Ok(writer.write_all(ids.join(" ").as_bytes())?));
        process::exit(i32::from(told.is_err()));
    }
    drop(writer);
    let ours = drawn(&runtime, &client)?;
    let mut theirs = String::new();
    reader.read_to_string(&mut theirs)?;
    let theirs: Vec<_> = theirs.split(' ').collect();
    assert_eq!(theirs.len(), ours.len(), "the child said what it drew");
    for ((what, ours), theirs) in WHAT.iter().zip(&ours).zip(theirs) {
        assert_ne!(ours, theirs, "{what} in parent and child");
    }
    println!("test no_id_is_drawn_twice_by_parent_and_child ... ok");
    Ok(())
}

const WHAT: [&str; 4] = [
    "the owner of an acquisition",
    "its hold",
    "an owner for `with_owner`",
    "an id of a driver",
];

fn drawn(runtime: &Runtime, client: &Client) -> Result<Vec<String>> {
    runtime.block_on(async {
        let guard = client.lock("forked")?.acquire().await?;
        let owner = guard.pass()?.owner().expose().to_string();
        let detached = guard.detach()?;
        let hold = detached.hold().to_string();
        client.attach(detached).await?.release().await?;
        let given = client.owner().expose().to_string();
        Ok(vec![owner, hold, given, system_random()?.to_string()])
    })
}
