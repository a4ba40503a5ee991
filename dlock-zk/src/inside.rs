//! Grant: a seat with none ahead becomes a hold.
//!
//! The grant itself needs no request; the node's data follows it for other readers.

use crate::{
    acquire::{Step, unanswered},
    commands::Use,
    connection::Session,
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    Instant,
    driver::{Acquire, Result},
};
use std::sync::Arc;
use zookeeper_client::Error as Native;

impl Session {
    /// Grants the lock to a seat with none ahead.
    pub(crate) async fn inside(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        node: &Node,
        entered: Instant,
    ) -> Result<Step> {
        if mine.waits && mine.version().is_none() {
            // The outcome of the last write is unknown: the version has to be read before the next write.
            return self.read_version(mine, node).await;
        }
        let end = entered + req.lease.length();
        let there = self.seats.change(mine.id, |mine| {
            mine.phase = Phase::Held(end);
            mine.ticket = None;
            for watch in [mine.own.take(), mine.ahead.take()].into_iter().flatten() {
                watch.handle.abort();
            }
        });
        if there.is_none() {
            return Ok(Step::Anew);
        }
        if mine.waits {
            self.say_held(mine, node);
        }
        Ok(Step::Done(self.granted(mine.token, 1, end, entered)?))
    }

    async fn read_version(&self, mine: &Mine, node: &Node) -> Result<Step> {
        let path = format!("{}/{}", self.root.folder(&mine.name), node.file);
        let Some(stat) = self.client.check_stat(&path).await.map_err(unanswered)? else {
            self.seats.remove(mine.id);
            return Ok(Step::Anew);
        };
        self.seats.change(mine.id, |mine| {
            if let Some(node) = &mut mine.node {
                node.version = Some(stat.version);
            }
        });
        Ok(Step::Again)
    }

    pub(crate) fn version_unknown(&self, id: u64) {
        self.seats.change(id, |mine| {
            mine.alone = false;
            if let Some(node) = &mut mine.node {
                node.version = None;
            }
        });
    }

    /// Writes to the node that it is held. The grant does not depend on it: the data is for clients that
    /// inspect the lock. It is sent before all later requests of the holder.
    fn say_held(self: &Arc<Self>, mine: &Mine, node: &Node) {
        let (path, data) = (
            format!("{}/{}", self.root.folder(&mine.name), node.file),
            mine.record(Use::Held).encode(),
        );
        let (session, id, before) = (Arc::clone(self), mine.id, node.version);
        self.seats.change(id, |mine| {
            mine.waits = false;
            if let Some(node) = &mut mine.node {
                node.version = node.version.map(|version| version + 1);
            }
        });
        let client = self.client.clone();
        // Called here, not in the task: the request is sent when this returns.
        let written = client.set_data(&path, &data, before);
        let written: std::pin::Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(written);
        tokio::spawn(async move {
            match written.await {
                Ok(_) => {}
                // The lock was broken just before: the next renewal and the release report the loss.
                Err(Native::NoNode) => drop(session.seats.remove(id)),
                Err(_) => session.version_unknown(id),
            }
        });
    }
}
