//! Errors: a kind for the program, a retry class and an effect for the retry loop, a message and a source
//! for people.

use crate::name::{LockName, NameError};
use std::{borrow::Cow, error::Error as StdError, fmt, time::Duration};

/// What went wrong, for the program to match on.
///
/// # Examples
/// ```
/// # async fn example(lock: dlock_core::Lock) -> Result<(), dlock_core::Error> {
/// use dlock_core::ErrorKind;
///
/// match lock.acquire().await {
///     Ok(guard) => drop(guard.release().await?),
///     Err(error) if error.kind() == ErrorKind::ShuttingDown => {}
///     Err(error) => return Err(error),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The incarnation that was to be re-entered, renewed or attached is over.
    Gone,
    /// The store may or may not have executed the request. The cleanup makes sure that nothing is left
    /// behind.
    Indeterminate,
    /// The lock can no longer be trusted: see [`Error::loss`].
    Lost,
    /// The caller asked for something that can never work; the message says what and why.
    Misuse,
    /// The hold is not there: released before, expired, broken or taken over.
    NotHeld,
    /// A limit was reached: too many holds of one name, or too many acquisitions with an unknown outcome.
    Overloaded,
    /// The client is shutting down and takes no new locks.
    ShuttingDown,
    /// The caller's time was up.
    Timeout {
        /// What the call was waiting for.
        phase: TimeoutPhase,
    },
    /// The store could not be reached, or refused for a reason of its own.
    Unavailable,
    /// This store, or this setting of it, cannot do that.
    Unsupported,
}

impl ErrorKind {
    /// One word for it, as events have it, and as a field of a response or a label of a metric may.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{ErrorKind, TimeoutPhase};
    ///
    /// assert_eq!(ErrorKind::ShuttingDown.as_str(), "shutting_down");
    /// assert_eq!(ErrorKind::Timeout { phase: TimeoutPhase::Wait }.as_str(), "timeout");
    /// assert_eq!(ErrorKind::Timeout { phase: TimeoutPhase::Request }.as_str(), "store_timeout");
    /// ```
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Indeterminate => "indeterminate",
            Self::Lost => "lost",
            Self::Misuse => "misuse",
            Self::NotHeld => "not_held",
            Self::Overloaded => "overloaded",
            Self::ShuttingDown => "shutting_down",
            Self::Timeout {
                phase: TimeoutPhase::Wait,
            } => "timeout",
            Self::Timeout { .. } => "store_timeout",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
        }
    }
}

/// What the call was waiting for when the time was up.
///
/// # Examples
/// ```
/// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
/// use dlock_core::{ErrorKind, TimeoutPhase};
///
/// match error.kind() {
///     ErrorKind::Timeout { phase: TimeoutPhase::Wait } => println!("another owner held the lock"),
///     ErrorKind::Timeout { .. } => println!("the store was slow"),
///     _ => {}
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimeoutPhase {
    /// For the store to answer.
    Request,
    /// For the lock: another owner held it.
    Wait,
}

/// Whether the same call may succeed later.
///
/// # Examples
/// ```
/// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
/// println!("{:?}", error.retry());
/// assert_eq!(error.is_retryable(), error.retry() != dlock_core::RetryClass::Never);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RetryClass {
    /// At once: the cause is already gone (a connection was replaced, a script loaded).
    Now,
    /// After a pause: the store is down, loading, failing over or overloaded.
    Later,
    /// Not before something is changed: permissions, settings, the call itself.
    Never,
}

/// What the failed call may have done in the store.
///
/// # Examples
/// ```
/// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
/// if error.effect() == dlock_core::Effect::None {
///     println!("the store did nothing");
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing: it was not executed, or executed and refused.
    None,
    /// Perhaps all of it, perhaps at a later time.
    Unknown,
}

/// Why a lock can no longer be trusted.
///
/// # Examples
/// ```
/// # async fn example(guard: dlock_core::Guard) -> Result<(), dlock_core::Error> {
/// use dlock_core::LossReason;
///
/// if guard.lost().await == LossReason::Deadline {
///     println!("no renewal succeeded for a whole lease");
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease expired or could not be renewed in time: renewals failed, nothing ran (a pause, a
    /// suspend), or a fixed lease ended.
    Deadline,
    /// The store reports that the hold is not there: broken, taken over after expiry, or the record was lost.
    NotHeld,
    /// The session that carried the hold is over.
    Session,
    /// The client was shut down and left the lock to its lease.
    Shutdown,
    /// The client's presence, on which the lock depended, is over. See [`ClientBuilder::presence`](crate::ClientBuilder::presence).
    Presence,
}

impl LossReason {
    /// Each at the index that it is as a number.
    pub(crate) const ALL: [Self; 5] = [
        Self::Deadline,
        Self::NotHeld,
        Self::Session,
        Self::Shutdown,
        Self::Presence,
    ];

    /// One word for it, as events and metrics have it.
    ///
    /// # Examples
    /// ```
    /// assert_eq!(dlock_core::LossReason::NotHeld.as_str(), "not_held");
    /// ```
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::NotHeld => "not_held",
            Self::Session => "session",
            Self::Shutdown => "shutdown",
            Self::Presence => "presence",
        }
    }
}

const _: () = {
    let mut at = 0;
    while at < LossReason::ALL.len() {
        assert!(
            LossReason::ALL[at] as usize == at,
            "the order of the variants"
        );
        at += 1;
    }
};

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadline => "its lease expired or could not be renewed in time",
            Self::NotHeld => {
                "the store no longer has it: broken, expired there, or its record was lost"
            }
            Self::Session => "the session that carried it is over",
            Self::Shutdown => "the client was shut down and left it to its lease",
            Self::Presence => {
                "the client's presence expired, could not be renewed in time, or was broken"
            }
        })
    }
}

/// The error of a driver's call.
///
/// # Examples
/// ```
/// use dlock_core::{Effect, ErrorKind, driver::DriverError};
///
/// let refused = DriverError::new(ErrorKind::Unsupported, "the server is older than 6.2").with_effect(Effect::None);
/// assert_eq!(refused.kind(), ErrorKind::Unsupported);
/// ```
#[derive(Debug)]
pub struct DriverError {
    kind: ErrorKind,
    retry: RetryClass,
    effect: Effect,
    message: Cow<'static, str>,
    source: Option<Source>,
}

type Source = Box<dyn StdError + Send + Sync + 'static>;

impl DriverError {
    /// An error with no effect that repeating does not help; the other builders change that.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            retry: RetryClass::Never,
            effect: Effect::None,
            message: message.into(),
            source: None,
        }
    }

    /// The store is down or refuses for now. The call had no effect and is worth repeating later.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{RetryClass, driver::DriverError};
    ///
    /// assert_eq!(DriverError::unavailable("connection refused").retry(), RetryClass::Later);
    /// ```
    #[must_use]
    pub fn unavailable(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unavailable, message).with_retry(RetryClass::Later)
    }

    /// The program asks for what cannot work, such as a wrong setting. The call had no effect.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{ErrorKind, driver::DriverError};
    ///
    /// assert_eq!(DriverError::misuse("the URL has no host").kind(), ErrorKind::Misuse);
    /// ```
    #[must_use]
    pub fn misuse(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Misuse, message)
    }

    /// The request was sent and no answer came: it may have been executed, or may be later.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Effect, driver::DriverError};
    ///
    /// assert_eq!(DriverError::unanswered("the connection broke").effect(), Effect::Unknown);
    /// ```
    #[must_use]
    pub fn unanswered(message: impl Into<Cow<'static, str>>) -> Self {
        Self::unavailable(message).with_effect(Effect::Unknown)
    }

    /// Changes the retry class.
    #[must_use]
    pub fn with_retry(mut self, retry: RetryClass) -> Self {
        self.retry = retry;
        self
    }

    /// Changes the effect.
    #[must_use]
    pub fn with_effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Begins the message with the address of the server, for people.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::driver::DriverError;
    ///
    /// let error = DriverError::unavailable("no connection").with_address("db:3306");
    /// assert_eq!(error.to_string(), "db:3306: no connection");
    /// ```
    #[must_use]
    pub fn with_address(mut self, address: impl fmt::Display) -> Self {
        self.message = format!("{address}: {}", self.message).into();
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn retry(&self) -> RetryClass {
        self.retry
    }

    /// What the call may have done.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// The error and its source, in one line.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::driver::DriverError;
    ///
    /// let error = DriverError::unavailable("no connection").with_source("connection refused");
    /// assert_eq!(error.chain(), "no connection: connection refused");
    /// ```
    #[must_use]
    pub fn chain(&self) -> String {
        match &self.source {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for DriverError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Every error of the public API.
///
/// Match on [`kind`](Self::kind). For people, use `Display`, which names the lock and the backend and says
/// what to do. The store's own error is its [`source`](StdError::source). Owners, passes and passwords
/// never appear in it.
///
/// # Examples
/// ```
/// # async fn example(lock: dlock_core::Lock) -> Result<(), dlock_core::Error> {
/// if let Err(error) = lock.acquire().await {
///     println!("{error}"); // for logs: with lock name and backend
///     println!("{}", error.summary()); // for others: without
/// }
/// # Ok(()) }
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    what: DriverError,
    loss: Option<LossReason>,
    backend: &'static str,
    name: Option<LockName>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        DriverError::new(kind, message).into()
    }

    /// A mistake of the caller. Backends also use it to refuse a URL or an option before there is a client.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Error, ErrorKind};
    ///
    /// assert_eq!(Error::misuse("the URL has no host").kind(), ErrorKind::Misuse);
    /// ```
    #[must_use]
    pub fn misuse(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Misuse, message)
    }

    /// The caller's time was up in this phase.
    pub(crate) fn timeout(phase: TimeoutPhase, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Timeout { phase }, message).with_retry(RetryClass::Later)
    }

    /// A hold of a lock that is shared was to be entered again.
    pub(crate) fn shared() -> Self {
        Self::misuse(
            "a reader or the holder of a permit cannot enter its lock again, nor upgrade: go on with its guard, \
             or release it first",
        )
    }

    /// A hold that depends on its client's presence was to be handed on.
    pub(crate) fn depends_on_presence() -> Self {
        Self::new(
            ErrorKind::Unsupported,
            "the lock depends on its client's presence and cannot be handed on: acquire it with an owner \
             (`with_owner`), or through a client without presence",
        )
    }

    pub(crate) fn lost(reason: LossReason) -> Self {
        Self::lost_because(reason, "")
    }

    /// As [`lost`](Self::lost), with the cause in parentheses, a space before them.
    pub(crate) fn lost_because(reason: LossReason, why: &str) -> Self {
        let mut error = Self::new(
            ErrorKind::Lost,
            format!("the lock is lost: {reason}{why}; stop the work it protects and acquire again"),
        );
        error.0.loss = Some(reason);
        error
    }

    pub(crate) fn at(mut self, backend: &'static str, name: &LockName) -> Self {
        self.0.backend = backend;
        self.0.name = Some(name.clone());
        self
    }

    pub(crate) fn of(mut self, backend: &'static str) -> Self {
        self.0.backend = backend;
        self
    }

    pub(crate) fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.what.source = Some(source.into());
        self
    }

    /// Appends the driver's last error and keeps its cause, or the error itself if it has none. An error
    /// without a source came from no driver.
    pub(crate) fn after(mut self, mut error: DriverError) -> Self {
        let message = format!("{}: {error}", self.0.what.message);
        self.0.what.message = message.into();
        self.0.what.source = error.source.take().or_else(|| Some(error.into()));
        self
    }

    pub(crate) fn with_effect(mut self, effect: Effect) -> Self {
        self.0.what.effect = effect;
        self
    }

    pub(crate) fn with_retry(mut self, retry: RetryClass) -> Self {
        self.0.what.retry = retry;
        self
    }

    /// What went wrong.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{:?}", error.kind());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.what.kind
    }

    /// Whether the same call may succeed later.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{:?}", error.retry());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn retry(&self) -> RetryClass {
        self.0.what.retry
    }

    /// What the failed call may have done in the store. The client undoes it in the background: the caller
    /// has nothing to clean up.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{:?}", error.effect());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.0.what.effect
    }

    /// Whether the caller's time limit ran out, either because the lock was held or because the store did
    /// not answer.
    ///
    /// # Examples
    /// ```
    /// # use dlock_core::{Client, Error};
    /// # use std::time::Duration;
    /// # async fn example(client: Client) -> Result<(), Error> {
    /// match client.lock("report")?.acquire_timeout(Duration::from_secs(1)).await {
    ///     Ok(guard) => drop(guard.release().await?),
    ///     Err(error) if error.is_contended() => println!("another client makes the report"),
    ///     Err(error) if error.is_retryable() => println!("again later: {}", error.summary()),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.kind(), ErrorKind::Timeout { .. })
    }

    /// Whether another owner held the lock until the time limit ran out.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// let status = if error.is_contended() { 409 } else { 503 };
    /// # let _ = status;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_contended(&self) -> bool {
        let phase = TimeoutPhase::Wait;
        self.kind() == ErrorKind::Timeout { phase }
    }

    /// Whether the lock that the call relied on is lost; [`loss`](Self::loss) says why.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// if error.is_lost() {
    ///     println!("{:?}", error.loss());
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.kind() == ErrorKind::Lost
    }

    /// Whether the same call may succeed later.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// if !error.is_retryable() {
    ///     return Err(error);
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.retry() != RetryClass::Never
    }

    /// A short text for a response that leaves the service. It has no lock name, host, process, path or
    /// text of the store. `Display` is for logs.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// let body = format!("try again later: {}", error.summary());
    /// # let _ = body;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn summary(&self) -> &'static str {
        match self.kind() {
            ErrorKind::Gone => "the hold to re-enter is over",
            ErrorKind::Indeterminate => "the lock store did not confirm the request",
            ErrorKind::Lost => "the lock was lost",
            ErrorKind::Misuse => "the lock was used wrongly",
            ErrorKind::NotHeld => "the lock is not held",
            ErrorKind::Overloaded => "too many requests for the lock are pending",
            ErrorKind::ShuttingDown => "the service is shutting down",
            ErrorKind::Timeout {
                phase: TimeoutPhase::Wait,
            } => "the lock is held by another",
            ErrorKind::Timeout { .. } => "the lock store did not answer in time",
            ErrorKind::Unavailable => "the lock store is unavailable",
            ErrorKind::Unsupported => "the lock store cannot do that",
        }
    }

    /// Why the lock was lost, when the kind is [`ErrorKind::Lost`].
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{:?}", error.loss());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn loss(&self) -> Option<LossReason> {
        self.0.loss
    }

    /// The backend in which it happened, by the name of its cargo feature; empty before one was chosen.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{}", error.backend());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.0.backend
    }

    /// The lock that it concerns, if any.
    ///
    /// # Examples
    /// ```
    /// # async fn example(error: dlock_core::Error) -> Result<(), dlock_core::Error> {
    /// println!("{:?}", error.name());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn name(&self) -> Option<&LockName> {
        self.0.name.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.0.name {
            write!(f, "lock {name:?} ({}): ", self.0.backend)?;
        }
        f.write_str(&self.0.what.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { what, .. } = &*self.0;
        f.debug_struct("Error")
            .field("kind", &what.kind)
            .field("retry", &what.retry)
            .field("effect", &what.effect)
            .field("loss", &self.0.loss)
            .field("backend", &self.0.backend)
            .field("name", &self.0.name)
            .field("message", &what.message)
            .field("source", &what.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.what.source()
    }
}

impl From<DriverError> for Error {
    fn from(what: DriverError) -> Self {
        Self(Box::new(Inner {
            what,
            loss: None,
            backend: "",
            name: None,
        }))
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::misuse(error.to_string())
    }
}

/// Why a lock was lost that the client could not renew, although the store may have been well.
pub(crate) const UNATTENDED: &str = " (nothing was renewed because the client's runtime did not run: it was not polled, \
    its workers were blocked, or the process was paused)";

/// A time span as a field of an event.
pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Formats a time span for a message.
pub(crate) fn about(span: Duration) -> String {
    if span >= Duration::from_secs(1) {
        format!("{:.1} s", span.as_secs_f64())
    } else {
        format!("{:.0} ms", span.as_secs_f64() * 1e3) // rounded: a limit is told as it was given
    }
}
