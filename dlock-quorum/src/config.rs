//! Configuration: the stores of a quorum, and how the driver reaches them.

use dlock_core::{Clock, Error, driver::DistributedLock};
use futures_core::future::BoxFuture;
use std::{collections::BTreeSet, fmt, sync::Arc};

/// A store of a quorum, and how to connect to it.
#[derive(Clone)]
pub struct Store {
    pub(crate) label: String,
    pub(crate) connect: Connect,
}

pub(crate) type Connect =
    Arc<dyn Fn() -> BoxFuture<'static, Result<Arc<dyn DistributedLock>, Error>> + Send + Sync>;

impl Store {
    /// The label names the store in errors and in the identity of the quorum: the same for all clients, without
    /// secrets, different from those of the other stores.
    ///
    /// # Errors
    /// Those of `connect` count when the quorum is connected; a store that cannot be reached is tried again.
    ///
    /// # Cancel safety
    /// An attempt to connect that takes 5 s is dropped, so it must leave nothing behind in the store.
    ///
    /// # Examples
    /// ```
    /// use dlock_quorum::Store;
    /// use std::sync::Arc;
    ///
    /// let store = Store::new("memory:a", || async {
    ///     Ok(Arc::new(dlock_memory::MemoryDriver::from_url("memory:a")?) as _)
    /// });
    /// ```
    pub fn new<F>(label: impl Into<String>, connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Arc<dyn DistributedLock>, Error>> + Send + 'static,
    {
        Self {
            label: label.into(),
            connect: Arc::new(move || Box::pin(connect())),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.label)
    }
}

/// The settings of a quorum.
///
/// As a URL: `quorum:URL URL URL`, with blanks between three, five or seven URLs of stores.
#[derive(Clone, Debug)]
pub struct QuorumConfig {
    pub(crate) stores: Vec<Store>,
    pub(crate) clock: Clock,
}

impl QuorumConfig {
    /// A quorum over these stores.
    ///
    /// # Errors
    /// `Misuse` unless there are three, five or seven of them with different labels.
    ///
    /// # Examples
    /// ```
    /// use dlock_quorum::QuorumConfig;
    ///
    /// assert!(QuorumConfig::new(Vec::new()).is_err());
    /// ```
    pub fn new(stores: Vec<Store>) -> Result<Self, Error> {
        if ![3, 5, 7].contains(&stores.len()) {
            return Err(Error::misuse(format!(
                "a quorum has 3, 5 or 7 stores, not {}: an even number survives no more failures than one store less, \
                 and each store makes every request dearer",
                stores.len()
            )));
        }
        let mut labels = BTreeSet::new();
        if let Some(twice) = stores.iter().find(|store| !labels.insert(&store.label)) {
            return Err(Error::misuse(format!(
                "the store {} is in the quorum twice: it would vote twice, and its loss would lose both votes",
                twice.label
            )));
        }
        Ok(Self {
            stores,
            clock: Clock::boot(),
        })
    }

    /// With the clock of a simulation.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
}
