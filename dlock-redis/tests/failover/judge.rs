//! Judge: what the guards of all clients believed, and whether two of them overlapped.

use dlock_core::{Guard, LossReason};
use std::{
    collections::BTreeMap,
    sync::Mutex,
    time::{Duration, Instant},
};

/// What a guard was good for, as its holder saw it.
#[derive(Debug)]
pub(crate) struct Span {
    name: String,
    token: u64,
    from: Instant,
    /// The last time at which the guard was good.
    to: Instant,
}

#[derive(Debug, Default)]
pub(crate) struct Judge(Mutex<Vec<Span>>);

/// The figures of all spans.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) holds: usize,
    /// Pairs of guards of one name that were good at the same time, and for how long at most.
    pub(crate) double: usize,
    pub(crate) longest: Duration,
    /// Tokens that were no greater than an earlier one of the name.
    pub(crate) backwards: usize,
}

impl Judge {
    /// Holds the lock for this long, or until it is lost.
    pub(crate) async fn hold(&self, guard: &Guard, stay: Duration) -> Option<LossReason> {
        let from = Instant::now();
        let mut to = from;
        let over = loop {
            let now = Instant::now();
            if guard.check().is_err() {
                break true;
            }
            to = now;
            if now > from + stay {
                break false;
            }
            tokio::time::sleep(Duration::from_millis(3)).await; // between two looks
        };
        let span = Span {
            name: guard.name().to_string(),
            token: guard.token().0,
            from,
            to,
        };
        self.0.lock().unwrap().push(span);
        if over { Some(guard.lost().await) } else { None }
    }

    pub(crate) fn verdict(&self) -> Verdict {
        let spans = self.0.lock().unwrap();
        let mut names: BTreeMap<&str, Vec<&Span>> = BTreeMap::new();
        for span in &*spans {
            names.entry(&span.name).or_default().push(span);
        }
        let mut verdict = Verdict {
            holds: spans.len(),
            ..Verdict::default()
        };
        for spans in names.values_mut() {
            spans.sort_by_key(|span| span.from);
            let mut last = spans[0];
            let mut most = last.token;
            for span in &spans[1..] {
                if span.from < last.to {
                    verdict.double += 1;
                    verdict.longest = verdict.longest.max(last.to.min(span.to) - span.from);
                }
                if span.token <= most {
                    verdict.backwards += 1;
                }
                most = most.max(span.token);
                if span.to > last.to {
                    last = span;
                }
            }
        }
        verdict
    }
}

#[test]
fn two_guards_that_were_good_at_once_and_a_token_that_went_back_are_found() {
    let base = Instant::now();
    let at = |millis| base + Duration::from_millis(millis);
    let span = |name: &str, token, from, to| Span {
        name: name.to_owned(),
        token,
        from: at(from),
        to: at(to),
    };
    let judge = Judge::default();
    judge.0.lock().unwrap().extend([
        span("a", 1, 0, 10),
        span("b", 1, 0, 100),
        span("a", 2, 10, 30),
        span("a", 3, 25, 28),
        span("b", 1, 100, 120),
    ]);
    let verdict = judge.verdict();
    assert_eq!(
        (verdict.holds, verdict.double, verdict.backwards),
        (5, 1, 1)
    );
    assert_eq!(verdict.longest, Duration::from_millis(3));
}
