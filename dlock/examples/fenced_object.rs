// ci: run memory
//! Writes that carry the fencing token, into an object store: a write of an earlier holder that comes late is refused, by
//! the conditional put that S3, Google Cloud Storage and Azure have.
//!
//! `cargo run -p dlock-rs --example fenced_object`. Here the objects are in memory; `AmazonS3Builder::from_env().build()?`
//! with the feature `aws` of the crate is a store like it.

use dlock::FencingToken;
use object_store::{
    Error::{AlreadyExists, NotFound, Precondition},
    ObjectStore, ObjectStoreExt, PutMode, UpdateVersion,
    memory::InMemory,
    path::Path,
};

/// Puts a balance, with the token before it. `false`: a later holder was here, and nothing was written.
async fn put(
    store: &dyn ObjectStore,
    place: &Path,
    balance: i64,
    token: FencingToken,
) -> object_store::Result<bool> {
    loop {
        let mode = match store.get(place).await {
            Ok(found) => {
                let version = UpdateVersion {
                    e_tag: found.meta.e_tag.clone(),
                    version: found.meta.version.clone(),
                };
                let text = String::from_utf8_lossy(&found.bytes().await?).into_owned();
                let fence = text.split(' ').next().and_then(|fence| fence.parse().ok());
                if fence.is_none_or(|fence: u64| fence > token.0) {
                    return Ok(false);
                }
                PutMode::Update(version)
            }
            Err(NotFound { .. }) => PutMode::Create,
            Err(error) => return Err(error),
        };
        let object = format!("{} {balance}", token.0);
        match store.put_opts(place, object.into(), mode.into()).await {
            Ok(_) => return Ok(true),
            // Another write came between: its token decides.
            Err(Precondition { .. } | AlreadyExists { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (store, place) = (InMemory::new(), Path::from("account/7"));
    let lock = dlock::connect("memory:bank").await?.lock("account:7")?;
    let first = lock.acquire().await?;
    assert!(put(&store, &place, 50, first.token()).await?);
    let late = first.token(); // a write that is still under way
    first.release().await?;
    let second = lock.acquire().await?;
    assert!(put(&store, &place, 100, second.token()).await?);
    assert!(!put(&store, &place, 70, late).await?, "it was refused");
    assert!(put(&store, &place, 110, second.token()).await?);
    second.release().await?;
    println!("{:?}", store.get(&place).await?.bytes().await?);
    Ok(())
}
