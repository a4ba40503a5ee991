//! Drivers that inspect, list, break, report errors or map names wrongly.

use super::{FAR, Mutant, Twist, memory::PerName};
use crate::{clause::Clause, fixture::Need};
use async_trait::async_trait;
use dlock_core::{
    Broken, Effect, FencingToken, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Cursor, DistributedLock, DriverError, Page, Release, Released, Renew,
        Result,
    },
};
use std::sync::Arc;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "inspect_prolongs",
        breaks: &[Clause::Admin],
        needs: &[],
        twist: || Arc::new(InspectProlongs::default()),
    },
    Mutant {
        name: "inspect_shows_no_name_kept_shut",
        breaks: &[Clause::Keep],
        needs: &[],
        twist: || Arc::new(ShutUnseen),
    },
    Mutant {
        name: "break_does_not_look_at_the_token",
        breaks: &[Clause::Admin],
        needs: &[],
        twist: || Arc::new(BreakAnything),
    },
    Mutant {
        name: "list_skips_between_pages",
        breaks: &[Clause::Admin],
        needs: &[],
        twist: || Arc::new(ListSkips),
    },
    Mutant {
        name: "list_takes_its_prefix_for_a_pattern",
        breaks: &[Clause::Admin],
        needs: &[],
        twist: || Arc::new(Like),
    },
    Mutant {
        name: "what_was_executed_is_said_to_have_had_no_effect",
        breaks: &[Clause::Error],
        needs: &[Need::Network],
        twist: || Arc::new(NoEffect),
    },
    Mutant {
        name: "names_are_folded_to_lower_case",
        breaks: &[Clause::Name],
        needs: &[],
        twist: || Arc::new(Renamed(|name| name.to_lowercase())),
    },
    Mutant {
        name: "names_lose_trailing_blanks",
        breaks: &[Clause::Name],
        needs: &[],
        twist: || Arc::new(Renamed(|name| name.trim_end_matches(' ').to_owned())),
    },
];

/// Prolongs the holds that it shows.
#[derive(Debug, Default)]
struct InspectProlongs {
    last: PerName<Acquire>,
}

#[async_trait]
impl Twist for InspectProlongs {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.last.put(&req.name, req.clone());
        }
        Ok(answer)
    }

    async fn inspect(&self, inner: &dyn DistributedLock, name: &LockName) -> Result<Snapshot> {
        if let Some(last) = self.last.get(name) {
            let entry = Renew::new(
                name.clone(),
                last.owner,
                last.hold,
                Some(last.lease.length()),
            );
            inner
                .renew(inner.lane(name), &[entry], last.give_up + FAR)
                .await?;
        }
        inner.inspect(name).await
    }
}

/// Shows a name without holders as free.
#[derive(Debug)]
struct ShutUnseen;

#[async_trait]
impl Twist for ShutUnseen {
    async fn inspect(&self, inner: &dyn DistributedLock, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(name).await?;
        if seen.waiters.unwrap_or(0) == 0 {
            seen.shut = None;
        }
        Ok(seen)
    }
}

/// Breaks first, then reads the token from the broken record.
#[derive(Debug)]
struct BreakAnything;

#[async_trait]
impl Twist for BreakAnything {
    async fn break_lock(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        _: Option<FencingToken>,
    ) -> Result<Broken> {
        inner.break_lock(name, None).await
    }
}

/// Continues one entry behind the last one.
#[derive(Debug)]
struct ListSkips;

#[async_trait]
impl Twist for ListSkips {
    async fn list(
        &self,
        inner: &dyn DistributedLock,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page> {
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
impl Twist for Like {
    async fn list(
        &self,
        inner: &dyn DistributedLock,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page> {
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

/// Takes a lost answer for a lost request.
#[derive(Debug)]
struct NoEffect;

fn without_effect(error: DriverError) -> DriverError {
    match error.effect() {
        Effect::None => error,
        Effect::Unknown => error.with_effect(Effect::None),
    }
}

#[async_trait]
impl Twist for NoEffect {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        inner.acquire(req).await.map_err(without_effect)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        inner.release(req).await.map_err(without_effect)
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
impl Twist for Renamed {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut req = req.clone();
        req.name = self.of(&req.name);
        inner.acquire(&req).await
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let mut req = req.clone();
        req.name = self.of(&req.name);
        inner.release(&req).await
    }

    async fn inspect(&self, inner: &dyn DistributedLock, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(&self.of(name)).await?;
        seen.name = name.clone();
        Ok(seen)
    }
}
