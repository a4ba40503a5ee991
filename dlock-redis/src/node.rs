//! Node: what a client has open to one server, which is the only one or a master of a cluster.

use crate::{
    config::{Keys, RedisConfig},
    connection::{Connection, Link, Reply, Request, Shared},
    dialer::{Dialer, ShortestLease},
    error,
    listener::{Inbox, Listener},
    scripts::Lua,
};
use dlock_core::{Instant, driver::Result};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) connection: Arc<Connection>,
    /// Carries the acquires, which are to be confirmed, and those whose order with them counts. The same
    /// connection where nothing is confirmed.
    pub(crate) confirmed: Arc<Connection>,
    /// Carries the renewals, which must not wait until an acquire is confirmed. The same again.
    pub(crate) renewals: Arc<Connection>,
    pub(crate) wake_ups: Arc<Listener>,
}

/// A script to run for some locks, which share a slot.
pub(crate) struct Call<'a> {
    pub(crate) lua: &'a Lua,
    pub(crate) keys: &'a [Keys],
    pub(crate) give_up: Instant,
    /// Which connection of the node carries it.
    pub(crate) over: fn(&Node) -> &Arc<Connection>,
    /// In a cluster, where the client has to listen before.
    pub(crate) channel: Option<&'a str>,
}

/// What a node answered.
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) link: Arc<Link>,
    pub(crate) node: Arc<Node>,
}

impl Node {
    /// Connects to the server of that configuration.
    pub(crate) async fn open(
        config: &RedisConfig,
        inbox: Inbox,
        shortest: ShortestLease,
        shared: Option<Shared>,
    ) -> Result<Self> {
        let dialer = Dialer::new(config, shortest).map_err(|cause| error::failed(cause).error);
        let dialer = Arc::new(dialer?);
        let wake_ups = Listener::new(dialer.clone(), inbox);
        let is_shared = shared.is_some();
        let connection = Connection::open(dialer.clone(), shared).await?;
        if is_shared {
            let database = config.server.redis_settings().db();
            connection.check_database(database).await?;
        }
        // The nodes of a cluster are judged together.
        if !config.is_cluster() {
            connection.log_settings(&config.acks).await;
        }
        wake_ups.ready(&connection).await?;
        let [confirmed, renewals] = match config.acks.are_wanted() {
            true => [
                Connection::open(dialer.clone(), None).await?,
                Connection::open(dialer, None).await?,
            ],
            false => [Arc::clone(&connection), Arc::clone(&connection)],
        };
        confirmed.can_confirm(&config.acks).await?;
        Ok(Self {
            connection,
            confirmed,
            renewals,
            wake_ups,
        })
    }

    /// Runs a script. `asking`: its slot is being moved to this node.
    pub(crate) async fn eval(
        self: Arc<Self>,
        call: &Call<'_>,
        asking: bool,
        build: &(impl Fn(&Link) -> Request + Send + Sync),
    ) -> Result<Answer> {
        if let Some(channel) = call.channel {
            self.wake_ups.allowed()?;
            // Boxed: the future of every request would be larger.
            let subscribed = Box::pin(self.wake_ups.subscribe(channel, asking)).await;
            subscribed.map_err(|cause| error::failed(cause).error)?;
        }
        let build = |link: &Link| Request {
            asking,
            ..build(link)
        };
        let connection = (call.over)(&self);
        let (reply, link) = connection.eval(call.lua, call.give_up, build).await?;
        Ok(Answer {
            reply,
            link,
            node: self,
        })
    }

    /// Requests in flight keep their connection until they are answered; new requests are refused.
    pub(crate) async fn close(&self) {
        self.connection.close();
        self.confirmed.close();
        self.renewals.close();
        self.wake_ups.close().await;
    }
}
