//! Drivers that inspect, list, break, report errors or map names wrongly.

use super::{Edit, FAR, Inner, Listing, Mutation, Only, memory::PerName, table};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    Broken, Effect, LockName, Snapshot,
    driver::{Acquire, Acquired, DriverError, Page, Release, Released, Renew, Result},
};

table! {
    inspect_prolongs breaks(Clause::Admin) => InspectProlongs::default();
    inspect_shows_no_name_kept_shut breaks(Clause::Keep) => ShutUnseen;
    break_does_not_look_at_the_token breaks(Clause::Admin) => BreakAnything;
    list_skips_between_pages breaks(Clause::Admin) => ListSkips;
    list_takes_its_prefix_for_a_pattern breaks(Clause::Admin) => Like;
    // Takes a lost answer for a lost request.
    what_was_executed_is_said_to_have_had_no_effect breaks(Clause::Error) needs(Network) => Edit {
        acquired: |_, answer| answer.map_err(without_effect),
        released: |answer| answer.map_err(without_effect),
        ..Edit::NONE
    };
    names_are_folded_to_lower_case breaks(Clause::Name) => Renamed(|name| name.to_lowercase());
    names_lose_trailing_blanks breaks(Clause::Name)
        => Renamed(|name| name.trim_end_matches(' ').to_owned());
}

/// Prolongs the holds that it shows.
#[derive(Debug, Default)]
struct InspectProlongs {
    last: PerName<Acquire>,
}

#[async_trait]
impl Mutation for InspectProlongs {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.last.put(&req.name, req.clone());
        }
        Ok(answer)
    }

    async fn inspect(&self, inner: &Inner, name: &LockName) -> Result<Snapshot> {
        if let Some(last) = self.last.get(name) {
            let lease = Some(last.lease.length());
            let entry = Renew::new(name.clone(), last.owner, last.hold, lease);
            let give_up = last.give_up + FAR;
            inner.renew(inner.lane(name), &[entry], give_up).await?;
        }
        inner.inspect(name).await
    }
}

/// Shows a name without holders as free.
#[derive(Debug)]
struct ShutUnseen;

#[async_trait]
impl Mutation for ShutUnseen {
    async fn inspect(&self, inner: &Inner, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(name).await?;
        if seen.waiters.unwrap_or(0) == 0 {
            seen.unavailable_for = None;
        }
        Ok(seen)
    }
}

/// Breaks first, then reads the token from the broken record.
#[derive(Debug)]
struct BreakAnything;

#[async_trait]
impl Mutation for BreakAnything {
    async fn break_lock(&self, inner: &Inner, name: &LockName, _: Only) -> Result<Broken> {
        inner.break_lock(name, None).await
    }
}

/// Continues one entry behind the last one.
#[derive(Debug)]
struct ListSkips;

#[async_trait]
impl Mutation for ListSkips {
    async fn list(&self, inner: &Inner, (prefix, from, limit): Listing<'_>) -> Result<Page> {
        let mut page = inner.list(prefix, from, limit).await?;
        if from.is_some() && !page.found.is_empty() {
            page.found.remove(0);
        }
        Ok(page)
    }
}

/// `_` is any character, as in SQL.
#[derive(Debug)]
struct Like;

#[async_trait]
impl Mutation for Like {
    async fn list(&self, inner: &Inner, (prefix, from, limit): Listing<'_>) -> Result<Page> {
        let plain = prefix.split('_').next().unwrap_or_default();
        let mut page = inner.list(plain, from, limit).await?;
        page.found.retain(|seen| {
            let mut name = seen.name.as_str().chars();
            prefix
                .chars()
                .all(|wanted| name.next().is_some_and(|c| wanted == '_' || wanted == c))
        });
        Ok(page)
    }
}

fn without_effect(error: DriverError) -> DriverError {
    match error.effect() {
        Effect::None => error,
        Effect::Unknown => error.with_effect(Effect::None),
    }
}

/// Stores names in a column that folds case.
#[derive(Debug)]
struct Renamed(fn(&str) -> String);

impl Renamed {
    fn of(&self, name: &LockName) -> LockName {
        LockName::new((self.0)(name.as_str())).unwrap_or_else(|_| name.clone())
    }
}

#[async_trait]
impl Mutation for Renamed {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut req = req.clone();
        req.name = self.of(&req.name);
        inner.acquire(&req).await
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let mut req = req.clone();
        req.name = self.of(&req.name);
        inner.release(&req).await
    }

    async fn inspect(&self, inner: &Inner, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(&self.of(name)).await?;
        seen.name = name.clone();
        Ok(seen)
    }
}
