//! Faults that strike one request, found by its bytes.

use std::sync::Arc;
use tokio::sync::watch;

/// The request that a fault is for: one whose bytes contain a needle.
#[derive(Clone, Debug)]
pub struct Trigger {
    pub(super) needle: Vec<u8>,
    pub(super) skip: usize,
    pub(super) http2: bool,
}

impl Trigger {
    /// The next request that contains these bytes (1 to 256), wherever TCP happens to split them.
    ///
    /// # Panics
    /// When `needle` is empty or too long.
    #[must_use]
    pub fn on(needle: impl Into<Vec<u8>>) -> Self {
        Self {
            needle: checked(needle.into()),
            skip: 0,
            http2: false,
        }
    }

    /// The connection speaks HTTP/2: the reply begins with the next DATA frame. A server sends frames about
    /// the connection (PING, WINDOW_UPDATE) before it has executed anything, and drops a request whose
    /// connection is then cut.
    #[must_use]
    pub fn in_http2(self) -> Self {
        Self {
            http2: true,
            ..self
        }
    }

    /// Skips the first `n` occurrences.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        Self { skip: n, ..self }
    }
}

/// The fault of the request, or of its reply.
///
/// The proxy knows no protocol but the frames of HTTP/2, and those only on request. It takes for the reply whatever the
/// server sends on that connection after the needle was forwarded. So faults are exact on connections where nothing else is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server executes it; its reply, and everything after it on that connection, never arrives.
    /// The connection stays open. Strikes when the reply has begun to come.
    LoseReply,
    /// Everything up to the needle is forwarded, and nothing from it on. The connection is cut, so the
    /// request is not executed.
    CutBeforeRequest,
    /// The server executes it. The connection is cut when the reply has begun to come, and no byte of
    /// the reply is delivered.
    CutAfterRequest,
    /// The connection is cut when this number of bytes of the reply has been delivered.
    CutMidReply {
        /// The number of bytes; a reply that is not longer arrives whole.
        bytes: usize,
    },
    /// Everything from the needle on is held until [`ArmedFault::release`] and then delivered, even when
    /// the client has closed its connection long ago: the server executes it late.
    HoldRequest,
}

/// An armed fault, which reports when it has struck. Dropping it changes nothing; a held request is
/// then held for ever.
#[derive(Clone, Debug)]
pub struct ArmedFault(Arc<State>);

#[derive(Debug)]
struct State {
    fault: Fault,
    http2: bool,
    phase: watch::Sender<Phase>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Phase {
    struck: bool,
    released: bool,
    disarmed: bool,
}

impl ArmedFault {
    pub(super) fn new(fault: Fault, http2: bool) -> Self {
        Self(Arc::new(State {
            fault,
            http2,
            phase: watch::Sender::default(),
        }))
    }

    /// Waits until the fault has struck; [`Fault`] says when that is for each.
    ///
    /// # Cancel safety
    /// Dropped early, nothing is lost.
    pub async fn struck(&self) {
        self.wait(|phase| phase.struck).await;
    }

    /// Whether the fault has struck.
    #[must_use]
    pub fn has_struck(&self) -> bool {
        self.0.phase.borrow().struck
    }

    /// Lets a held request go on to the server, now or as soon as it is seen. Does not affect other
    /// faults.
    pub fn release(&self) {
        self.0.phase.send_modify(|phase| phase.released = true);
    }

    /// Disarms the fault if it has not found its request yet.
    pub fn disarm(&self) {
        self.0.phase.send_modify(|phase| phase.disarmed = true);
    }

    pub(super) fn is_disarmed(&self) -> bool {
        self.0.phase.borrow().disarmed
    }

    pub(super) fn fault(&self) -> Fault {
        self.0.fault
    }

    /// Whether only a DATA frame begins the reply.
    pub(super) fn needs_data(&self) -> bool {
        self.0.http2
    }

    pub(super) fn set_struck(&self) {
        self.0.phase.send_modify(|phase| phase.struck = true);
    }

    pub(super) async fn released(&self) {
        self.wait(|phase| phase.released).await;
    }

    async fn wait(&self, condition: impl FnMut(&Phase) -> bool + Send) {
        // The sender is in our own `Arc`, so this cannot fail.
        drop(self.0.phase.subscribe().wait_for(condition).await);
    }
}

pub(super) fn checked(needle: Vec<u8>) -> Vec<u8> {
    let length = needle.len();
    assert!(
        (1..=LONGEST_NEEDLE).contains(&length),
        "a needle has 1 to {LONGEST_NEEDLE} bytes, not {length}"
    );
    needle
}

/// Longer than a SHA-1 or a typical lock name, and short enough to keep for every connection.
pub(super) const LONGEST_NEEDLE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a needle has 1 to 256 bytes, not 0")]
    fn an_empty_needle_is_refused() {
        drop(Trigger::on(""));
    }
}
