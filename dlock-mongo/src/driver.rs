//! MongoDB driver: the record driver over the documents of a collection.

use crate::{config::MongoConfig, connection::Connection, store::MongoStore};
use dlock_core::driver::{
    Result, check_runtime,
    kit::{RecordBacked, RecordDriver},
};

/// Locks in a MongoDB collection.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_mongo::MongoDriver::connect("mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MongoDriver(RecordDriver<MongoStore>);

impl MongoDriver {
    /// Connects to the servers that a URL names: see [`MongoConfig`].
    ///
    /// # Errors
    /// `Misuse` when the URL or one of its settings cannot be read, or when the URL or the collection would
    /// weaken a lock. `Unavailable` when no primary can be reached or the primary refuses the log-in.
    /// `Unsupported` when the server is too old. The driver connects once and does not retry.
    ///
    /// # Cancel safety
    /// A dropped future leaves nothing behind.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_mongo::MongoDriver::connect("mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with settings that are made in code.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_mongo::{MongoConfig, MongoDriver};
    ///
    /// let config: MongoConfig = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let driver = MongoDriver::open(config.with_collection("billing")?).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        Self::greeted(Connection::open(&config).await?, &config).await
    }

    /// Uses the application's own client with its servers, log-in, pool and time-outs. The read and write
    /// concerns of that client do not count: each command carries dlock's own.
    ///
    /// The servers in `config` are only used to name the store, by which a `Pass` is matched. Make `config`
    /// from the URL that the client was made from.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: mongodb::Client) -> dlock_core::driver::Result<()> {
    /// let config = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let driver = dlock_mongo::MongoDriver::from_client(client, config).await?;
    /// # Ok(()) }
    /// ```
    pub async fn from_client(client: mongodb::Client, config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        Self::greeted(Connection::of(&client, &config), &config).await
    }

    async fn greeted(connection: Connection, config: &MongoConfig) -> Result<Self> {
        let store = MongoStore::greeted(connection.clone(), config).await;
        let store = store.inspect_err(|_| connection.close())?;
        Ok(Self(RecordDriver::new(store)))
    }
}

impl RecordBacked for MongoDriver {
    type Store = MongoStore;

    fn record_driver(&self) -> &RecordDriver<MongoStore> {
        &self.0
    }
}
