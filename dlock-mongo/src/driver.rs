//! MongoDB driver: the record driver over the documents of a collection.

use crate::{config::MongoConfig, connection::Connection, store::MongoStore};
use dlock_core::driver::{
    Result, check_runtime,
    kit::{RecordBacked, RecordDriver},
};

/// Locks in a MongoDB collection.
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
    pub async fn open(config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        let connection = Connection::open(&config).await?;
        let greeted = Self::greeted(connection.clone(), &config).await;
        if greeted.is_err() {
            connection.close();
        }
        greeted
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
    pub async fn from_client(client: mongodb::Client, config: MongoConfig) -> Result<Self> {
        check_runtime()?;
        Self::greeted(Connection::of(client, &config), &config).await
    }

    async fn greeted(connection: Connection, config: &MongoConfig) -> Result<Self> {
        let store = MongoStore::greeted(connection, config).await?;
        Ok(Self(RecordDriver::new(store)))
    }
}

impl RecordBacked for MongoDriver {
    type Store = MongoStore;

    fn record_driver(&self) -> &RecordDriver<MongoStore> {
        &self.0
    }
}
