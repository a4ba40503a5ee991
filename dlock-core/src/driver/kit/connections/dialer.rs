//! Dialer: what a driver tells its connection list about its store's client.

use crate::driver::{Result, kit::error_table::Failure};
use std::{sync::Arc, time::Duration};

/// How a driver opens and closes the connections of its store's client, and what their errors mean.
pub trait Dialer: Send + Sync + 'static {
    /// A native connection and what the driver knows of its server.
    type Session: Send + 'static;
    /// What the native client reports.
    type Error: Send;

    /// Opens a connection to a server that can keep locks, and reads the server's time last.
    ///
    /// # Errors
    /// Of effect none: no request was sent. After one that is worth repeating the list tries again, with
    /// pauses, while the request has time.
    fn dial(&self) -> impl Future<Output = Result<Dialed<Self::Session>>> + Send;

    /// Reads the server's time.
    fn time(
        &self,
        session: &mut Self::Session,
    ) -> impl Future<Output = Result<Duration, Self::Error>> + Send;

    /// What a failed statement means. `ended`: it ran for too long and [`end`](Self::end) was called.
    fn failure(&self, error: Self::Error, ended: bool) -> Failure<ConnectionOutcome>;

    /// The error of a statement that the server did not answer: of unknown effect.
    fn silent() -> Self::Error;

    /// Says goodbye on a connection without a request in flight.
    fn hang_up(&self, session: Self::Session) -> impl Future<Output = ()> + Send;

    /// For a server that does not limit how long a statement runs: by what [`end`](Self::end) finds this connection.
    fn endless(_: &Self::Session) -> Option<u64> {
        None
    }

    /// Ends the statement that runs on that connection, from another one. The connection is not used again,
    /// so a late end hits no other statement.
    fn end(self: Arc<Self>, _id: u64) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// A new connection.
#[derive(Clone, Copy, Debug)]
pub struct Dialed<S> {
    /// The connection.
    pub session: S,
    /// The server's time, read last.
    pub time: Duration,
}

/// What happens to the connection on which a statement failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionOutcome {
    /// The server answered; the connection stays in use.
    Kept,
    /// The connection is closed.
    Closed,
    /// The connection is closed, and so are those opened before it, which are no better.
    AllClosed,
}
