//! `DLOCK_PASS`: the incarnations that the command, and whatever it starts, may enter.
//!
//! A list with commas between, the innermost last. The same user and root can read it; its reader can enter or end these
//! incarnations, nothing else.

use dlock::{LockName, Pass};
use std::env;

pub(super) const VARIABLE: &str = "DLOCK_PASS";

/// The most entries: an environment is bounded, and so should nesting be.
const MOST: usize = 16;

pub(super) struct Passes {
    /// As they came: entries of other versions are handed on unread.
    texts: Vec<String>,
    read: Vec<Pass>,
}

impl Passes {
    pub(super) fn inherited() -> Self {
        Self::parse(&env::var(VARIABLE).unwrap_or_default())
    }

    fn parse(list: &str) -> Self {
        let texts: Vec<String> = list
            .split(',')
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
            .collect();
        let read = texts.iter().filter_map(|text| text.parse().ok()).collect();
        Self { texts, read }
    }

    /// The pass for a lock: the innermost one counts. Those of another store or name are none of its business.
    pub(super) fn of(&self, store: &str, name: &LockName) -> Option<&Pass> {
        let mut passes = self.read.iter().rev();
        passes.find(|pass| pass.store() == store && pass.name() == name)
    }

    /// The list for the command; the outermost entries go when there are too many.
    pub(super) fn with(&self, pass: Option<&Pass>) -> Option<String> {
        let mut texts = self.texts.clone();
        texts.extend(pass.map(ToString::to_string));
        let surplus = texts.len().saturating_sub(MOST);
        let texts = texts.split_off(surplus);
        (!texts.is_empty()).then(|| texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, Passes};
    use dlock::{FencingToken, LockName, Owner, Pass};

    fn pass(store: &str, name: &str, token: u64) -> Pass {
        let name = LockName::new(name).unwrap();
        Pass::new(store, name, Owner::from_seed("me"), FencingToken(token))
    }

    #[test]
    fn the_innermost_pass_of_a_lock_counts_and_others_are_ignored() {
        let list = [
            pass("s", "a", 1),
            pass("t", "a", 2),
            pass("s", "a", 3),
            pass("s", "b", 4),
        ];
        let list = list.map(|pass| pass.to_string()).join(",");
        let passes = Passes::parse(&list);
        let name = LockName::new("a").unwrap();
        assert_eq!(passes.of("s", &name).unwrap().token(), FencingToken(3));
        assert!(passes.of("u", &name).is_none());
    }

    #[test]
    fn what_cannot_be_read_is_handed_on() {
        let passes = Passes::parse("9:new:format,,");
        assert_eq!(passes.with(None).as_deref(), Some("9:new:format"));
    }

    #[test]
    fn the_list_is_bounded() {
        let mut list = String::new();
        for token in 0..40 {
            list = Passes::parse(&list)
                .with(Some(&pass("s", "a", token)))
                .unwrap();
        }
        let last = pass("s", "a", 39).to_string();
        assert_eq!(list.split(',').count(), MOST);
        assert!(list.ends_with(&last));
    }
}
