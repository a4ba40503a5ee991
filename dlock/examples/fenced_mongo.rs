// ci: run mongo
//! Writes that carry the fencing token, into MongoDB: a write of an earlier holder that comes late is refused by the
//! document itself. The lock may be in the same MongoDB, or anywhere.
//!
//! `DLOCK_URL=mongodb://127.0.0.1/shop cargo run -p dlock-rs --features mongo --example fenced_mongo`

use dlock::{
    FencingToken,
    mongo::mongodb::{
        Collection,
        bson::{Document, doc},
        options::ClientOptions,
    },
};
use std::{env, error::Error};

/// `false`: a later holder was here, and nothing was written.
async fn write(
    accounts: &Collection<Document>,
    balance: i64,
    token: FencingToken,
) -> Result<bool, Box<dyn Error>> {
    let fence = i64::try_from(token.0)?;
    let not_later = doc! { "_id": 7, "fence": { "$lte": fence } };
    let update = doc! { "$set": { "balance": balance, "fence": fence } };
    let written = accounts.update_one(not_later, update).await?;
    Ok(written.matched_count == 1)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "mongodb://127.0.0.1/shop".to_owned());
    let lock = dlock::connect(&url).await?.lock("account:7")?;
    let options = ClientOptions::parse(&url).await?;
    let client = dlock::mongo::mongodb::Client::with_options(options)?;
    let accounts = client.database("shop").collection("accounts");
    let empty = doc! { "_id": 7, "balance": 0_i64, "fence": 0_i64 };
    accounts.insert_one(empty).await?;

    let first = lock.acquire().await?;
    let late = first.token(); // of a write that is still under way when the lock is lost
    first.release().await?;
    let second = lock.acquire().await?;
    assert!(write(&accounts, 100, second.token()).await?);
    assert!(!write(&accounts, 50, late).await?);
    second.release().await?;
    println!("the late write was refused");
    Ok(())
}
