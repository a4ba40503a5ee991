// ci: run redis
//! Writes that carry the fencing token, into SQL and into Redis: a write of an earlier holder that comes late is refused
//! by the resource itself.
//!
//! `DLOCK_URL=redis://127.0.0.1/ cargo run -p dlock-rs --features redis,sqlite --example fenced`

use dlock::{
    FencingToken,
    redis::redis::{self, Script, aio::MultiplexedConnection},
    sqlite::sqlx::{self, SqlitePool},
};
use std::{env, error::Error};

/// `false`: a later holder was here, and nothing was written. The token is a whole number that fits the column: it is
/// less than 2^63.
async fn into_sql(
    pool: &SqlitePool,
    balance: i64,
    token: FencingToken,
) -> Result<bool, Box<dyn Error>> {
    let update = "UPDATE account SET balance = ?1, fence = ?2 WHERE id = 7 AND fence <= ?2";
    let fence = i64::try_from(token.0)?;
    let written = sqlx::query(update)
        .bind(balance)
        .bind(fence)
        .execute(pool)
        .await?;
    Ok(written.rows_affected() == 1)
}

/// The same for a hash in Redis, compared as text of equal length: numbers of Lua are exact up to 2^53 only.
const WRITE: &str = r"
local fence = ARGV[2]
local last = redis.call('HGET', KEYS[1], 'fence')
if last and last > fence then return 0 end
redis.call('HSET', KEYS[1], 'balance', ARGV[1], 'fence', fence)
return 1";

async fn into_redis(
    connection: &mut MultiplexedConnection,
    balance: i64,
    token: FencingToken,
) -> redis::RedisResult<bool> {
    let write = Script::new(WRITE);
    let mut write = write.key("account:7");
    write.arg(balance).arg(format!("{:020}", token.0));
    write.invoke_async(connection).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let lock = dlock::connect(&url).await?.lock("account:7")?;
    let pool = SqlitePool::connect("sqlite::memory:").await?;
    for sql in [
        "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL)",
        "INSERT INTO account VALUES (7, 0, 0)",
    ] {
        sqlx::query(sql).execute(&pool).await?;
    }
    let client = redis::Client::open(url.replace("redis+unix:", "unix:"))?;
    let mut connection = client.get_multiplexed_async_connection().await?;

    let first = lock.acquire().await?;
    let late = first.token(); // of a write that is still under way when the lock is lost
    first.release().await?;
    let second = lock.acquire().await?;
    assert!(into_sql(&pool, 100, second.token()).await?);
    assert!(into_redis(&mut connection, 100, second.token()).await?);
    assert!(!into_sql(&pool, 50, late).await?);
    assert!(!into_redis(&mut connection, 50, late).await?);
    assert!(into_sql(&pool, 120, second.token()).await?);
    assert!(into_redis(&mut connection, 120, second.token()).await?);
    second.release().await?;
    println!("the late writes were refused");
    Ok(())
}
