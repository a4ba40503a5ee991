//! `DLOCK_PASS`: the incarnations that the command, and every process it starts, may enter.
//!
//! A list separated by commas, the innermost last. The same user and root can read it. A reader can enter
//! or end these incarnations, and nothing else.

use dlock::{LockName, Pass};
use std::env;

pub(super) const VARIABLE: &str = "DLOCK_PASS";

/// The most entries: an environment is bounded, so nesting is bounded too.
const MOST: usize = 64;

pub(super) struct Passes(Vec<Entry>);

/// An entry as it came, and its meaning; entries of other versions are passed on unread.
struct Entry {
    text: String,
    pass: Option<Pass>,
}

impl Passes {
    pub(super) fn inherited() -> Self {
        Self::parse(&env::var(VARIABLE).unwrap_or_default())
    }

    fn parse(list: &str) -> Self {
        let texts = list.split(',').filter(|text| !text.is_empty());
        let entries = texts.map(|text| Entry {
            text: text.to_owned(),
            pass: text.parse().ok(),
        });
        Self(entries.collect())
    }

    /// The pass for a lock: the innermost one counts. Entries of another store or name are ignored.
    pub(super) fn of(&self, store: &str, name: &LockName) -> Option<&Pass> {
        let mut passes = self.0.iter().rev().filter_map(|entry| entry.pass.as_ref());
        passes.find(|pass| pass.store() == store && pass.name() == name)
    }

    /// The list for the command: the inherited entries, then its own. Entries that are over or repeated
    /// are dropped, then the outermost.
    pub(super) fn with(&self, own: &[Pass]) -> String {
        let is_own = |pass: &Pass| {
            let of_it = |own: &Pass| pass.store() == own.store() && pass.name() == own.name();
            own.iter().any(of_it)
        };
        let mut texts = self.others(is_own);
        texts.extend(own.iter().map(Pass::expose));
        let surplus = texts.len().saturating_sub(MOST);
        texts.split_off(surplus).join(",")
    }

    /// The list for a command that must not enter these locks.
    pub(super) fn without(&self, store: &str, names: &[&LockName]) -> Option<String> {
        let texts = self.others(|pass| pass.store() == store && names.contains(&pass.name()));
        (!texts.is_empty()).then(|| texts.join(","))
    }

    /// The entries of other locks than these.
    fn others(&self, these: impl Fn(&Pass) -> bool) -> Vec<String> {
        let is_other = |entry: &&Entry| !entry.pass.as_ref().is_some_and(&these);
        let others = self.0.iter().filter(is_other);
        others.map(|entry| entry.text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, Passes};
    use dlock::{FencingToken, LockName, Owner, Pass};
    use std::slice;

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
        let list = list.map(|pass| pass.expose()).join(",");
        let passes = Passes::parse(&list);
        let name = LockName::new("a").unwrap();
        assert_eq!(passes.of("s", &name).unwrap().token(), FencingToken(3));
        assert!(passes.of("u", &name).is_none());
    }

    #[test]
    fn what_cannot_be_read_is_handed_on() {
        let own = pass("s", "a", 1);
        let passes = Passes::parse("9:new:format,,");
        let without = |passes: Passes| passes.without(own.store(), &[own.name()]);
        assert_eq!(
            passes.with(slice::from_ref(&own)),
            format!("9:new:format,{}", own.expose())
        );
        assert_eq!(without(passes).as_deref(), Some("9:new:format"));
        assert_eq!(without(Passes::parse("")), None);
    }

    #[test]
    fn a_lock_has_one_entry_however_often_it_is_entered() {
        let (old, new) = (pass("s", "a", 1), pass("s", "a", 2));
        let other = pass("t", "a", 1).expose();
        let passes = Passes::parse(&format!("{},{other}", old.expose()));
        assert_eq!(
            passes.with(slice::from_ref(&new)),
            format!("{other},{}", new.expose())
        );
        assert_eq!(passes.without(new.store(), &[new.name()]), Some(other));
    }

    #[test]
    fn the_passes_of_several_locks_are_handed_on_together() {
        let [old, a, b, c] =
            [("b", 1), ("a", 2), ("b", 2), ("c", 2)].map(|(name, token)| pass("s", name, token));
        let passes = Passes::parse(&[&old, &c].map(Pass::expose).join(","));
        let all = [&c, &a, &b].map(Pass::expose).join(",");
        assert_eq!(passes.with(&[a, b]), all);
        let names = [old.name(), c.name()];
        assert_eq!(passes.without("s", &names), None);
    }

    #[test]
    fn the_list_is_bounded_and_loses_the_outermost() {
        let mut list = String::new();
        for name in 0..100 {
            list = Passes::parse(&list).with(&[pass("s", &name.to_string(), 1)]);
        }
        let (first, last) = (pass("s", "36", 1).expose(), pass("s", "99", 1).expose());
        assert_eq!(list.split(',').count(), MOST);
        assert!(list.starts_with(&first) && list.ends_with(&last));
    }
}
