//! Deployment: the kind of server that answers.

use crate::error;
use dlock_core::driver::{DriverError, Finding};
use mongodb::bson::{Bson, Document};

/// The kind of deployment that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One server without an oplog: no change streams, and a majority of one.
    Standalone,
    /// A replica set.
    Replicated,
    /// Routers in front of several shards.
    Routed,
}

impl Kind {
    /// The read concern of a read that an answer rests on. A standalone server has no other member to ask.
    ///
    /// `linearizable`: after the read the primary proves, by a write that a majority confirms, that it still
    /// is the primary. So neither a cut-off primary nor a direct connection to another member shows an
    /// outdated document, and what was read cannot be rolled back.
    pub(crate) fn proven(self) -> &'static str {
        match self {
            Self::Standalone => "local",
            Self::Replicated | Self::Routed => "linearizable",
        }
    }

    /// The read concern of a read after a write that a majority confirmed: it shows that write, and nothing
    /// that no majority has.
    pub(crate) fn confirmed(self) -> &'static str {
        match self {
            Self::Standalone => "local",
            Self::Replicated | Self::Routed => "majority",
        }
    }

    /// Reads the answer to `hello`, and refuses a server that is too old or is no primary.
    pub(crate) fn of(hello: &Document) -> Result<Self, DriverError> {
        let wire = hello.get_i32("maxWireVersion").unwrap_or_default();
        if wire < OLDEST {
            return Err(error::unsupported(format!(
                "the server is too old (wire version {wire}): dlock needs MongoDB 5.0 or newer"
            )));
        }
        if !hello.get_bool("isWritablePrimary").unwrap_or_default() {
            return Err(DriverError::unavailable(
                "this member is no primary: leave out directConnection, or wait for the election to end",
            ));
        }
        let is_router = hello.get_str("msg").is_ok_and(|what| what == "isdbgrid");
        Ok(match (is_router, hello.contains_key("setName")) {
            (true, _) => Self::Routed,
            (false, true) => Self::Replicated,
            (false, false) => Self::Standalone,
        })
    }

    /// What the answer to `hello` means for a lock, and the number of voting members where it is known: `hello` does
    /// not show whether a member of priority 0 votes, nor hidden members.
    pub(crate) fn findings(self, hello: &Document, voters: Option<usize>) -> Vec<Finding> {
        let members = |key| hello.get_array(key).map_or(0, Vec::len);
        let (electable, passive) = (members("hosts"), members("passives"));
        let (data, arbiters) = (electable + passive, members("arbiters"));
        match self {
            Self::Standalone => vec![Finding::warning(
                "a standalone server keeps locks no longer than its disk does, and waiters poll",
                "use a replica set",
            )],
            Self::Routed => vec![Finding::warning(
                "these are routers in front of shards, over which dlock is not tested",
                "use a replica set",
            )],
            Self::Replicated if arbiters > 0 => vec![Finding::warning(
                format!(
                    "the replica set has {data} members with data and {arbiters} without: once one of the former is lost, no majority may \
                     confirm a lock"
                ),
                "replace the arbiter by a member with data",
            )],
            Self::Replicated => match voters.or((passive == 0).then_some(electable)) {
                Some(voters) => vec![Finding::voters(
                    format!("the replica set has {voters} voting members"),
                    voters,
                )],
                None => vec![Finding::ok(
                    "not checked: how many members vote; grant the role clusterMonitor to have it checked",
                )],
            },
        }
    }
}

/// The number of voting members in the answer to `replSetGetConfig`.
pub(crate) fn voters(answer: &Document) -> Option<usize> {
    let config = answer.get_document("config").ok()?;
    let has_vote = |member: &&Bson| {
        let votes = member.as_document().and_then(|it| it.get("votes"));
        !matches!(votes, Some(Bson::Int32(0) | Bson::Int64(0)))
    };
    let members = config.get_array("members").ok()?.iter();
    Some(members.filter(has_vote).count())
}

/// `$$NOW` in projections and `let` in updates need MongoDB 5.0.
const OLDEST: i32 = 13;

#[cfg(test)]
mod tests {
    use super::{Kind, voters};
    use dlock_core::{ErrorKind, driver::Severity};
    use mongodb::bson::doc;

    #[test]
    fn a_server_that_is_too_old_or_no_primary_is_refused_and_a_router_is_known() {
        let kind = |hello| Kind::of(&hello).map_err(|error| error.kind());
        let old = doc! { "isWritablePrimary": true, "maxWireVersion": 9, "setName": "rs0" };
        assert_eq!(kind(old), Err(ErrorKind::Unsupported));
        assert_eq!(kind(doc! {}), Err(ErrorKind::Unsupported));
        let second = doc! { "isWritablePrimary": false, "maxWireVersion": 17, "setName": "rs0" };
        assert_eq!(kind(second), Err(ErrorKind::Unavailable));
        let set = doc! { "isWritablePrimary": true, "maxWireVersion": 13, "setName": "rs0" };
        assert_eq!(kind(set), Ok(Kind::Replicated));
        let alone = doc! { "isWritablePrimary": true, "maxWireVersion": 17 };
        assert_eq!(kind(alone), Ok(Kind::Standalone));
        let router = doc! { "isWritablePrimary": true, "maxWireVersion": 17, "msg": "isdbgrid" };
        assert_eq!(kind(router), Ok(Kind::Routed));
    }

    #[test]
    fn members_that_cannot_confirm_are_found() {
        let set = Kind::Replicated;
        for (kind, hello, known, severity, words) in [
            (set, doc! { "hosts": ["a"] }, None, Severity::Ok, "1 voting"),
            (
                set,
                doc! { "hosts": ["a", "b"] },
                None,
                Severity::Warning,
                "2 voting",
            ),
            // The third one is hidden.
            (
                set,
                doc! { "hosts": ["a", "b"] },
                Some(3),
                Severity::Ok,
                "3 voting",
            ),
            (
                set,
                doc! { "hosts": ["a"], "passives": ["b"] },
                None,
                Severity::Ok,
                "not checked",
            ),
            (
                set,
                doc! { "hosts": ["a"], "passives": ["b"] },
                Some(2),
                Severity::Warning,
                "2 voting",
            ),
            (
                set,
                doc! { "hosts": ["a", "b"], "arbiters": ["c"] },
                Some(3),
                Severity::Warning,
                "2 members with data and 1 without",
            ),
            (
                Kind::Standalone,
                doc! {},
                None,
                Severity::Warning,
                "a standalone server",
            ),
        ] {
            let found = kind.findings(&hello, known);
            assert!(
                found.len() == 1 && found[0].severity == severity && found[0].what.contains(words),
                "{hello}, {known:?}: {found:?}"
            );
        }
    }

    #[test]
    fn members_without_a_vote_are_not_counted() {
        let silent = doc! { "_id": 2, "priority": 0, "votes": 0 };
        let members = [doc! { "_id": 0 }, doc! { "_id": 1, "votes": 1 }, silent];
        let answer = doc! { "config": { "members": members.to_vec() }, "ok": 1 };
        assert_eq!(voters(&answer), Some(2));
        assert_eq!(voters(&doc! { "ok": 1 }), None);
    }
}
