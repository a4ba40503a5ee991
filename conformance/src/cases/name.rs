//! `name`: any UTF-8 of 1 to 512 bytes without NUL is a name, and names that differ in a byte are two locks.

use crate::{Ctx, Failure, Hold, Result, TestDriver, case::cases, ensure, same};
use dlock_core::{LockName, MAX_NAME_BYTES};
use futures_util::future::try_join_all;
use std::collections::BTreeSet;

cases! {
    [Clause::Name]
    names_come_back_byte_for_byte;
    [Clause::Name bullet("two names that differ in a byte are two locks")]
    names_that_differ_in_a_byte_are_two_locks;
    the_longest_names_count_to_their_last_byte;
    names_like_the_keys_beside_a_lock_are_locks_of_their_own;
    names_that_are_parts_of_keys_are_locks_like_others;
}

/// Names that folding, trimming, escaping, patterns and collations confuse.
const TAILS: &[&str] = &[
    "a", "A", "a ", " a", "a  ", "a\t", "a\n", "a\r\n", "a.", "a..", "/a", "a/", "a//", "a/.",
    "a/..", "{a}", "{a", "a}", "{}a", "a{}", "%61", "a%", "%25", "%2525", "a%20", "a+", "a_", "a*",
    "a?", "[a]", "a\\", "\\a", "a'", "a\"", "a`", "a;", "a--", "$a", "$$a", "a$b", "a.b", "a:b",
    "a|b", "a,b", "a\u{1}", "a\u{1f}", "a\u{7f}", "a\u{80}", "a\u{a0}", "\u{e9}", "e\u{301}",
    "\u{c9}", "\u{df}", "ss", "SS", "\u{131}", "i", "I", "\u{130}", "\u{3c3}", "\u{3c2}",
    "\u{3a3}", "\u{fb01}", "fi", "\u{ff41}", "\u{212b}", "\u{c5}", "A\u{30a}", "\u{fffd}", "0",
    "00", "0x0", "1e1", "nil", "null",
];

/// The same with characters of several bytes.
const WIDE_TAILS: &[&str] = &[
    "\u{1f600}",
    "\u{feff}a",
    "a\u{200b}",
    "a\u{200d}",
    "\u{202e}a",
];

fn tails() -> impl Iterator<Item = &'static &'static str> {
    TAILS.iter().chain(WIDE_TAILS)
}

/// Suffixes that drivers use beside a lock's own key or row.
const BESIDE: &[&str] = &[
    "",
    ":token",
    ":line",
    ":ends",
    ":keep",
    ":t",
    ":l",
    "}:token",
    "}:line",
    "}",
    "{",
    "~token",
    "~h:1",
    "/token",
    "-token",
    ".token",
    "/0000000000",
    "-0000000001",
    "%7D:token",
    "\u{1}token",
];

/// What drivers put behind a name in a key.
const PARTS: &[&str] = &["h", "w", "pending"];

async fn names_that_differ_in_a_byte_are_two_locks(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let before = tails().map(|tail| format!("{base}:{tail}"));
    // Prefixes, too: code that strips a prefix does not strip a suffix.
    let after = tails().map(|head| format!("{head}:{base}"));
    let names: Vec<String> = before.chain(after).collect();
    all_at_once(&ctx, &driver, &other, &names).await
}

async fn the_longest_names_count_to_their_last_byte(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let full = |tail: &str| {
        let rest = MAX_NAME_BYTES - base.len() - tail.len();
        format!("{base}{}{tail}", "x".repeat(rest))
    };
    let mut names: Vec<_> = ["a", "b", "A", " ", "\u{1}", "}", "\u{e9}", "\u{e8}"]
        .map(full)
        .into();
    names.push(format!("{}b", &full("aa")[..MAX_NAME_BYTES - 2]));
    // Escaping makes these names the longest of all.
    for wide in ["{", "%", "\u{1}", "\u{10348}"] {
        let room = (MAX_NAME_BYTES - base.len()) / wide.len();
        names.push(format!("{base}{}", wide.repeat(room)));
        names.push(format!("{base}{}", wide.repeat(room - 1)));
    }
    all_at_once(&ctx, &driver, &other, &names).await
}

async fn names_like_the_keys_beside_a_lock_are_locks_of_their_own(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let plain = LockName::new(&base)?;
    // A lock with everything in use: a counter, a queue, a minimum hold.
    let first = driver.take(&ctx.ask(&plain)).await?;
    other.queues(&plain).await?;
    driver.frees(&first).await?;
    other.breaks(&plain, None).await?;
    let names: Vec<_> = BESIDE.iter().map(|tail| format!("{base}{tail}")).collect();
    all_at_once(&ctx, &driver, &other, &names).await?;
    let hold = driver.take(&ctx.ask(&plain)).await?;
    let grows = hold.token >= first.token;
    ensure(grows, "the counter of the name was lost")?;
    other.queues(&plain).await?;
    all_at_once(&ctx, &driver, &other, &names[1..]).await?;
    driver.frees(&hold).await
}

/// Nothing makes these names unique, so a copy of the case may be under way.
async fn names_that_are_parts_of_keys_are_locks_like_others(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    for part in PARTS {
        let name = LockName::new(*part)?;
        let ask = ctx.ask(&name).lasting(ctx.short());
        let hold = driver
            .take_within(&ask, ctx.short() * 4 + ctx.slack())
            .await?;
        let waits = other.queues(&name).await?;
        other.sees_holder(&hold).await?;
        other.leave(&waits).await?;
        driver.frees(&hold).await?;
    }
    Ok(())
}

async fn names_come_back_byte_for_byte(ctx: Ctx) -> Result {
    let ([driver, other], _) = ctx.test_drivers().await?;
    let base = ctx.text();
    let mut names = BTreeSet::new();
    for tail in tails() {
        let name = LockName::new(format!("{base}:{tail}"))?;
        driver.take(&ctx.ask(&name)).await?;
        names.insert(name);
    }
    let listed = other.list(&base, 1_000).await?;
    let listed = listed.into_iter().map(|seen| seen.name).collect();
    same("the names listed", listed, names)
}

/// Acquires all of them for different owners, inspects each, and releases all.
async fn all_at_once(
    ctx: &Ctx,
    driver: &TestDriver,
    other: &TestDriver,
    names: &[String],
) -> Result {
    let mut holds: Vec<Hold> = Vec::new();
    for name in names {
        let name = LockName::new(name)?;
        let hold = driver.try_take(&ctx.ask(&name)).await?;
        let hold =
            hold.ok_or_else(|| Failure::new(format!("{name:?} is held under another name")))?;
        same(format!("the number of holds of {name:?}"), hold.holds, 1)?;
        holds.push(hold);
    }
    // Immediately: without writes, a store may take its time to be sure of its answer.
    try_join_all(holds.iter().map(|hold| other.sees_holder(hold))).await?;
    for hold in &holds {
        driver.frees(hold).await?;
    }
    try_join_all(holds.iter().map(|hold| other.sees_free(&hold.ask.name))).await?;
    Ok(())
}
