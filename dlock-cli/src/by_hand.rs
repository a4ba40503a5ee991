//! Holds without a process that renews them: acquire, renew, release.

use crate::{
    admin::quoted,
    args::{Acquire, Hold, Release, Renew},
    exit::Exit,
    output::{Output, busy, millis, result, span},
    secret,
    signals::{Ended as Signalled, Signals},
    withdraw::{until, withdraw},
};
use dlock::{
    Client, DEFAULT_LEASE, Error, Fingerprint, Guard, HoldId, HolderInfo, Holds, Lease, Lock,
    LockName, Owner, ReleaseOutcome,
};
use nix::unistd::getppid;
use serde_json::json;
use std::{slice, time::Duration};
use tokio::time::timeout;
use uuid::Uuid;

pub(crate) async fn acquire(
    client: &Client,
    args: Acquire,
    signals: &mut Signals,
    output: &Output,
) -> Exit {
    let lease = args.lease.unwrap_or_else(|| usual(client, &args.name));
    let lock = match client.lock(&args.name) {
        Ok(lock) => lock.lease(Lease::fixed(lease)),
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    if let Some(exit) = refused(client, output) {
        return exit;
    }
    let exit = match signals.unless(within(&lock, args.wait_args.limit())).await {
        Ok(Ok(Some(guard))) => match signals.ended() {
            // A user that pressed Ctrl-C does not want the lock.
            Some(Signalled(number)) => {
                drop(guard);
                Exit::signal(number)
            }
            None => print(client, guard, lease, output).await,
        },
        Ok(Ok(None)) => report_held(client, slice::from_ref(&lock), None, output, Exit::HELD).await,
        Ok(Err(error)) => match Exit::of(&error, Exit::HELD) {
            Exit::HELD => {
                report_held(
                    client,
                    slice::from_ref(&lock),
                    Some(&error),
                    output,
                    Exit::HELD,
                )
                .await
            }
            exit => output.fail(&error, exit),
        },
        Err(Signalled(number)) => Exit::signal(number),
    };
    withdraw(client, slice::from_ref(&lock), output).await;
    exit
}

/// This process is gone when the holder info is read. So it names the parent process, which releases the
/// hold.
pub(crate) fn holder_info() -> HolderInfo {
    let parent = getppid().as_raw();
    HolderInfo::new(HolderInfo::here().host, parent.unsigned_abs())
}

/// The lease when the options name none: the URL may have one.
fn usual(client: &Client, name: &str) -> Duration {
    let lock = client.lock(name);
    lock.and_then(|lock| lock.effective_lease())
        .map_or(DEFAULT_LEASE, Lease::length)
}

/// Refuses before anything is acquired: the hold would not outlive this process, or its name could not be
/// printed.
fn refused(client: &Client, output: &Output) -> Option<Exit> {
    let backend = client.capabilities().backend;
    if client.capabilities().session_bound {
        let message = "a lock of this store ends with its client's session, so acquire could leave none behind: use dlock exec";
        output.problem("Unsupported", message, backend, None);
        return Some(Exit::USAGE);
    }
    if !output.can_print() {
        output.say(
            "standard output is closed, and what is printed there is what gives the lock back: nothing was acquired",
        );
        return Some(Exit::OUTPUT);
    }
    None
}

/// Waits as long as the options say; `None`: held by another.
pub(crate) async fn within(lock: &Lock, limit: Option<Duration>) -> Result<Option<Guard>, Error> {
    match limit {
        None => lock.acquire().await.map(Some),
        Some(Duration::ZERO) => lock.try_acquire().await,
        Some(limit) => lock.acquire_timeout(limit).await.map(Some),
    }
}

/// Reports that one of the locks is held, and what is known of its holder.
pub(crate) async fn report_held(
    client: &Client,
    locks: &[Lock],
    error: Option<&Error>,
    output: &Output,
    exit: Exit,
) -> Exit {
    if !output.tells_busy() {
        return exit;
    }
    let names = || locks.iter().map(|lock| lock.name().as_str());
    let (name, message) = match error {
        Some(error) => (error.name().map(LockName::as_str), error.to_string()),
        None => {
            let found = timeout(ASK, first_busy(client, names())).await;
            let (name, busy) = match found.ok().flatten() {
                Some((name, busy)) => (Some(name), busy),
                // It may be free by now.
                None => (
                    names().next(),
                    "held by another owner, or unavailable".to_owned(),
                ),
            };
            let shown = name.unwrap_or_default();
            let message = format!("{shown:?} is {busy}; see dlock inspect {}", quoted(shown));
            (name, message)
        }
    };
    let name = name.or(names().next()).unwrap_or_default();
    output.busy(&message, client.capabilities().backend, name);
    exit
}

/// The first lock that is not free, and why.
async fn first_busy<'a>(
    client: &Client,
    names: impl Iterator<Item = &'a str>,
) -> Option<(&'a str, String)> {
    for name in names {
        if let Some(busy) = busy(&client.admin().inspect(name).await.ok()?) {
            return Some((name, busy));
        }
    }
    None
}

/// How long a refused try may take to learn the holder.
const ASK: Duration = Duration::from_secs(1);

/// Prints the secret that releases the lock; releases the lock if that fails.
async fn print(client: &Client, guard: Guard, lease: Duration, output: &Output) -> Exit {
    let (remaining, token) = (guard.remaining(), guard.token());
    let detached = match guard.detach() {
        Ok(detached) => detached,
        Err(not) => {
            drop(not.guard.release().await); // the hold is of no use
            return output.fail(&not.error, Exit::of(&not.error, Exit::HELD));
        }
    };
    let pass = match detached.pass() {
        Ok(pass) => pass,
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    let (owner, hold) = (*pass.owner(), detached.hold());
    let known = json!({
        "held": true, "owner": owner.expose().to_string(), "hold": hold.to_string(), "token": token.to_string(),
        "lease_ms": millis(lease), "remaining_ms": millis(remaining),
    });
    let object = result(pass.name().as_str(), client.capabilities().backend, known);
    let words = format!("{}/{hold}", owner.expose());
    if let Err(error) = output.result(&object, &words) {
        output.say(&format!(
            "the result could not be written ({error}): the lock is given back"
        ));
        let name = pass.name().as_str();
        let released = client.admin().release(name, &owner, Holds::One(hold)).await;
        return match released {
            Ok(_) => Exit::OUTPUT,
            Err(error) => {
                output.say(&format!("it ends by itself at {}", until(remaining)));
                output.fail(&error, Exit::UNKNOWN)
            }
        };
    }
    output.note(&format!("acquired {:?}, token {token}", pass.name()));
    Exit::DONE
}

pub(crate) async fn renew(client: &Client, args: Renew, output: &Output) -> Exit {
    let lease = args.lease.unwrap_or_else(|| usual(client, &args.name));
    let (owner, hold) = match named(&args.hold, output) {
        Ok((owner, Some(hold))) => (owner, hold),
        Ok((_, None)) => {
            output.misuse("renew needs the hold too: OWNER/HOLD, as acquire printed it");
            return Exit::USAGE;
        }
        Err(wrong) => return wrong.refuse(client, &args.name, output).await,
    };
    match client.admin().renew(&args.name, &owner, hold, lease).await {
        Ok(remaining) => {
            let known = json!({
                "held": true, "owner": owner.fingerprint().to_string(),
                "hold": Fingerprint::of(hold.to_string().as_bytes()).to_string(),
                "lease_ms": millis(lease), "remaining_ms": millis(remaining),
            });
            let object = result(&args.name, client.capabilities().backend, known);
            output.print(
                &object,
                &format!("renewed for {}", span(remaining)),
                Exit::DONE,
            )
        }
        Err(error) => output.fail(&error, Exit::of_change(&error)),
    }
}

pub(crate) async fn release(client: &Client, args: Release, output: &Output) -> Exit {
    let (owner, holds) = match named(&args.hold, output) {
        Ok((owner, hold)) => (owner, hold.map_or(Holds::All, Holds::One)),
        Err(wrong) => return wrong.refuse(client, &args.name, output).await,
    };
    let (left, unavailable, words) = match client.admin().release(&args.name, &owner, holds).await {
        Ok(ReleaseOutcome::StillHeld { holds }) => {
            (holds, None, format!("released; other holds left: {holds}"))
        }
        Ok(ReleaseOutcome::MinHold { rest }) => (
            0,
            Some(millis(rest)),
            format!("released; unavailable until {}", until(rest)),
        ),
        Ok(_) => (0, None, "released".to_owned()),
        Err(error) => return output.fail(&error, Exit::of_change(&error)),
    };
    let known = json!({
        "held": left > 0, "holds": left, "unavailable_ms": unavailable, "owner": owner.fingerprint().to_string(),
    });
    let object = result(&args.name, client.capabilities().backend, known);
    output.print(&object, &words, Exit::DONE)
}

/// The argument in the place of OWNER[/HOLD].
enum Wrong {
    Unread(String),
    Fingerprint,
    Owner,
    Hold,
}

fn named(hold: &Hold, output: &Output) -> Result<(Owner, Option<HoldId>), Wrong> {
    match (&hold.hold, &hold.hold_file) {
        (Some(hold), _) => written(hold),
        (None, Some(path)) => written(&secret::read(path, output).map_err(Wrong::Unread)?),
        (None, None) => Err(Wrong::Owner),
    }
}

fn written(text: &str) -> Result<(Owner, Option<HoldId>), Wrong> {
    let (owner, hold) = match text.split_once('/') {
        Some((owner, hold)) => (owner, Some(hold)),
        None => (text, None),
    };
    let plain = owner.trim_start_matches('#');
    if plain.len() == 8 && plain.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(Wrong::Fingerprint);
    }
    let owner = Uuid::try_parse(owner).map_err(|_| Wrong::Owner)?;
    let hold = match hold {
        Some(hold) if hold.len() == 16 => {
            Some(u64::from_str_radix(hold, 16).map_err(|_| Wrong::Hold)?)
        }
        Some(_) => return Err(Wrong::Hold),
        None => None,
    };
    Ok((Owner::from_uuid(owner), hold.map(HoldId::from_bits)))
}

impl Wrong {
    /// An error that says what to do instead.
    async fn refuse(self, client: &Client, name: &str, output: &Output) -> Exit {
        let message = match self {
            Self::Unread(why) => why,
            Self::Owner => "OWNER must be what acquire printed: a UUID".to_owned(),
            Self::Hold => "HOLD must be what acquire printed: 16 hex digits".to_owned(),
            Self::Fingerprint => {
                let token = client
                    .admin()
                    .inspect(name)
                    .await
                    .ok()
                    .and_then(|snapshot| snapshot.holders.first()?.token);
                let token = token.map_or_else(|| "N".to_owned(), |token| token.to_string());
                format!(
                    "that is a fingerprint, which is public and opens nothing; to free the lock of a holder that is \
                     known to be dead: dlock break {} --token {token}",
                    quoted(name)
                )
            }
        };
        output.misuse(&message);
        Exit::USAGE
    }
}

#[cfg(test)]
mod tests {
    use super::{Wrong, written};

    #[test]
    fn what_acquire_printed_is_read_back() {
        let uuid = "7d444840-9dc0-11d1-b245-5ffdce74fad2";
        let (owner, hold) = written(&format!("{uuid}/00000000000000ff")).ok().unwrap();
        assert_eq!(
            (owner.expose().to_string().as_str(), hold.unwrap().to_bits()),
            (uuid, 255)
        );
        assert!(matches!(written(uuid), Ok((_, None))));
        assert!(matches!(written("#1a2b3c4d"), Err(Wrong::Fingerprint)));
        assert!(matches!(written("me"), Err(Wrong::Owner)));
        assert!(matches!(written(&format!("{uuid}/1")), Err(Wrong::Hold)));
    }
}
