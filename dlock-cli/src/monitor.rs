//! `dlock monitor`: frees locks whose holders a witness has proven to be dead.
//!
//! It breaks an incarnation by its token. So it needs no leader: of two monitors one is told that the lock has changed.
//! It has no metrics: it seldom frees a lock, and each that it frees is a line of its output, with the name, which no
//! label may have.

use crate::{
    args::Monitor,
    exit::Exit,
    output::{Output, process, span},
    store,
};
use dlock::{Broken, Client, Error, FencingToken, Holder, LockName, Mode, Snapshot};
use futures_util::TryStreamExt;
use std::{collections::HashMap, process::Stdio, time::Duration};
use tokio::{
    process::Command,
    time::{Instant, sleep, timeout},
};

pub(crate) async fn run(client: &Client, args: &Monitor, output: &Output) -> Exit {
    let mut dead = HashMap::new();
    loop {
        // A store that fails may answer the next time, and what was seen before it failed still counts.
        match look(client, args, &mut dead, output).await {
            Ok(()) => {}
            Err(error) if error.is_retryable() => {
                output.fail(&error, Exit::UNREACHABLE);
            }
            Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        }
        sleep(args.every).await;
    }
}

/// An incarnation.
type Key = (LockName, FencingToken);

/// Since when, and how often in a row, the witness has said that its holder is dead.
#[derive(Clone, Copy)]
struct Dead {
    since: Instant,
    times: u32,
}

/// Asks about each lock once.
async fn look(
    client: &Client,
    args: &Monitor,
    dead: &mut HashMap<Key, Dead>,
    output: &Output,
) -> Result<(), Error> {
    let locks: Vec<Snapshot> = client.admin().list(&args.prefix).try_collect().await?;
    let mut seen = HashMap::new();
    for lock in &locks {
        let Some((holder, token)) = only_holder(lock) else {
            continue;
        };
        if ask(&args.witness, lock, holder, token).await != Verdict::Dead {
            continue;
        }
        let key = (lock.name.clone(), token);
        let now = Instant::now();
        let before = dead.get(&key).copied();
        let mut found = before.unwrap_or(Dead {
            since: now,
            times: 0,
        });
        found.times = found.times.saturating_add(1);
        if found.times >= args.misses && now - found.since >= args.delay {
            free(client, lock, token, output).await?;
        } else {
            seen.insert(key, found);
        }
    }
    *dead = seen;
    Ok(())
}

/// The holder of a lock that has one, whose token names its incarnation. Other processes than the one shown may have
/// entered a lock with several holds.
fn only_holder(lock: &Snapshot) -> Option<(&Holder, FencingToken)> {
    let holder = lock.holders.first()?;
    let is_alone = holder.owner.mode() == Mode::Exclusive && lock.holds == 1;
    holder
        .token
        .filter(|_| is_alone)
        .map(|token| (holder, token))
}

async fn free(
    client: &Client,
    listed: &Snapshot,
    token: FencingToken,
    output: &Output,
) -> Result<(), Error> {
    // The list may be old, for each witness may take a while, and a process may have entered meanwhile: the token stays.
    let lock = &client.admin().inspect(&listed.name).await?;
    let Some((holder, now)) = only_holder(lock) else {
        return Ok(());
    };
    if now != token || only_holder(listed).is_none_or(|(before, _)| before.info != holder.info) {
        return Ok(());
    }
    let broken = client.admin().break_lock(&lock.name, Some(token)).await?;
    if let Broken::Freed { .. } = broken {
        let (name, process) = (&lock.name, process(&holder.info));
        let age = lock.age.map(|age| format!(", held for {}", span(age)));
        let age = age.unwrap_or_default();
        output.say(&format!(
            "freed {name:?}: process {process} is dead; token {token}{age}"
        ));
    }
    Ok(())
}

/// What a witness says of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Lives,
    Dead,
    Unknown,
}

async fn ask(witness: &str, lock: &Snapshot, holder: &Holder, token: FencingToken) -> Verdict {
    // The process that acquired it has left, and one that entered since is not named.
    if holder.info.host.is_empty() {
        return Verdict::Unknown;
    }
    let command = match witness {
        "same-host" => {
            return match holder.info.has_ended() {
                Some(true) => Verdict::Dead,
                Some(false) => Verdict::Lives,
                None => Verdict::Unknown,
            };
        }
        "kubernetes" => KUBERNETES,
        command => command,
    };
    let age = lock.age.unwrap_or_default().as_millis();
    let mut asked = Command::new("sh");
    asked
        .args(["-c", command])
        .env_remove(store::URL)
        .env("DLOCK_NAME", lock.name.as_str())
        .env("DLOCK_HOST", &holder.info.host)
        .env("DLOCK_PID", holder.info.pid.to_string())
        .env("DLOCK_NOTE", &holder.info.note)
        .env("DLOCK_TOKEN", token.to_string())
        .env("DLOCK_AGE_MS", age.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    match timeout(ANSWER, asked.status()).await {
        Ok(Ok(status)) => match status.code() {
            Some(0) => Verdict::Lives,
            Some(1) => Verdict::Dead,
            _ => Verdict::Unknown,
        },
        // It could not be started, or does not answer.
        Ok(Err(_)) | Err(_) => Verdict::Unknown,
    }
}

/// How long a witness may take.
const ANSWER: Duration = Duration::from_secs(10);

/// A pod in one of these phases runs no process. One that is not ready, or cannot be found, may run one: its node may be
/// cut off.
const KUBERNETES: &str = r#"
phase=$(kubectl get pod "$DLOCK_HOST" --output 'jsonpath={.status.phase}') || exit 2
case $phase in
Succeeded | Failed) exit 1 ;;
*) exit 0 ;;
esac
"#;
