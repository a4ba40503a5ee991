//! The commands that do one thing and end.

use crate::{
    args::{Acquire, Break, Release, Renew},
    exit::Exit,
    output::{Output, millis, object, span, words},
};
use dlock::{
    Broken, Client, DEFAULT_LEASE, Error, FencingToken, Guard, HoldId, Holds, Lock, Outcome, Owner,
};
use serde_json::json;
use std::time::Duration;
use uuid::Uuid;

pub(crate) async fn acquire(client: &Client, args: Acquire, output: &Output) -> Exit {
    let lease = args.lease.unwrap_or(DEFAULT_LEASE);
    let lock = match client.lock(&args.name).and_then(|lock| lock.lease(lease)) {
        Ok(lock) => lock,
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    match within(&lock, args.patience.limit()).await {
        Ok(Some(guard)) => print(client, guard, lease, output).await,
        Ok(None) => held(&args.name, output, Exit::HELD),
        Err(error) => output.fail(&error, Exit::of(&error, Exit::HELD)),
    }
}

/// Waits as long as was said; `None`: held by another.
pub(crate) async fn within(lock: &Lock, limit: Option<Duration>) -> Result<Option<Guard>, Error> {
    match limit {
        None => lock.acquire().await.map(Some),
        Some(Duration::ZERO) => lock.try_acquire().await,
        Some(limit) => lock.acquire_within(limit).await.map(Some),
    }
}

pub(crate) fn held(name: &str, output: &Output, exit: Exit) -> Exit {
    output.warn(&format!("{name:?} is held by another"));
    exit
}

/// Prints what gives the lock back, or gives it back.
async fn print(client: &Client, guard: Guard, lease: Duration, output: &Output) -> Exit {
    let (remaining, token) = (guard.remaining(), guard.token());
    let detached = match guard.detach() {
        Ok(detached) => detached,
        Err(not) => {
            drop(not.guard.release().await); // it was no use
            return output.fail(&not.error, Exit::of(&not.error, Exit::HELD));
        }
    };
    let pass = detached.pass();
    let (owner, hold) = (*pass.owner(), detached.hold());
    let object = json!({
        "name": pass.name().as_str(),
        "held": true,
        "owner": owner.expose().to_string(),
        "hold": hold.to_string(),
        "token": token.to_string(),
        "lease_ms": millis(lease),
        "remaining_ms": millis(remaining),
        "backend": client.capabilities().backend,
    });
    let words = format!("{}/{hold} {token}", owner.expose());
    if let Err(error) = output.result(&object, &words) {
        output.say(&format!(
            "the result could not be written ({error}): the lock is given back"
        ));
        let name = pass.name().as_str();
        let released = client.release(name, &owner, Holds::One(hold)).await;
        return released.map_or_else(|error| output.fail(&error, Exit::UNKNOWN), |_| Exit::OUTPUT);
    }
    Exit::DONE
}

pub(crate) async fn renew(client: &Client, args: Renew, output: &Output) -> Exit {
    let lease = args.lease.unwrap_or(DEFAULT_LEASE);
    let (owner, hold) = match written(&args.hold) {
        Ok((owner, Some(hold))) => (owner, hold),
        Ok((_, None)) => {
            output.misuse("renew needs the hold too: OWNER/HOLD, as acquire printed it");
            return Exit::USAGE;
        }
        Err(wrong) => return wrong.refuse(client, &args.name, output).await,
    };
    match client.renew(&args.name, &owner, hold, lease).await {
        Ok(remaining) => {
            let object = json!({
                "name": args.name, "held": true, "owner": owner.fingerprint().to_string(),
                "lease_ms": millis(lease), "remaining_ms": millis(remaining),
                "backend": client.capabilities().backend,
            });
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
    let (owner, holds) = match written(&args.hold) {
        Ok((owner, hold)) => (owner, hold.map_or(Holds::All, Holds::One)),
        Err(wrong) => return wrong.refuse(client, &args.name, output).await,
    };
    let (left, words) = match client.release(&args.name, &owner, holds).await {
        Ok(Outcome::StillHeld { holds }) => (holds, format!("{holds} other holds are left")),
        Ok(Outcome::Kept { rest }) => (0, format!("released; shut for {}", span(rest))),
        Ok(_) => (0, "released".to_owned()),
        Err(error) => return output.fail(&error, Exit::of_change(&error)),
    };
    let object = json!({
        "name": args.name, "held": left > 0, "holds": left,
        "owner": owner.fingerprint().to_string(), "backend": client.capabilities().backend,
    });
    output.print(&object, &words, Exit::DONE)
}

pub(crate) async fn inspect(client: &Client, name: &str, output: &Output) -> Exit {
    match client.inspect(name).await {
        Ok(snapshot) => {
            let object = object(&snapshot, client.capabilities().backend);
            output.print(&object, &words(&snapshot), Exit::DONE)
        }
        Err(error) => output.fail(&error, Exit::of(&error, Exit::HELD)),
    }
}

pub(crate) async fn list(client: &Client, prefix: &str, output: &Output) -> Exit {
    let mut from = None;
    loop {
        let page = match client.list(prefix, from.as_ref(), PAGE).await {
            Ok(page) => page,
            Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        };
        for snapshot in &page.found {
            let object = object(snapshot, client.capabilities().backend);
            if output.result(&object, &words(snapshot)).is_err() {
                return Exit::OUTPUT;
            }
        }
        from = page.next;
        if from.is_none() {
            return Exit::DONE;
        }
    }
}

/// How many names one step of a walk asks for.
const PAGE: usize = 100;

pub(crate) async fn break_lock(client: &Client, args: Break, output: &Output) -> Exit {
    let only = args.token.map(FencingToken);
    let (exit, words) = match client.break_lock(&args.name, only).await {
        Ok(Broken::Freed { token: Some(token) }) => {
            (Exit::DONE, format!("freed; its token was {token}"))
        }
        Ok(Broken::Freed { token: None }) => (Exit::DONE, "opened".to_owned()),
        Ok(Broken::Changed { token }) => {
            let now = token.map_or_else(|| "none".to_owned(), |token| token.to_string());
            let words =
                format!("not freed: another incarnation has it by now, with the token {now}");
            (Exit::NOT_YOURS, words)
        }
        // Asked for one incarnation, it is over, though not by us.
        Ok(_) if only.is_some() => (Exit::NOT_YOURS, "nobody held it any more".to_owned()),
        Ok(_) => (Exit::DONE, "nobody held it".to_owned()),
        Err(error) => return output.fail(&error, Exit::of_change(&error)),
    };
    let object = json!({
        "name": args.name, "held": exit == Exit::NOT_YOURS && words.starts_with("not"),
        "backend": client.capabilities().backend,
    });
    output.print(&object, &words, exit)
}

pub(crate) fn schema(url: &str, output: &Output) -> Exit {
    match dlock::schema(url) {
        Ok(schema) => output.print(&json!({"schema": schema}), schema.trim_end(), Exit::DONE),
        Err(error) => output.fail(&error, Exit::of(&error, Exit::HELD)),
    }
}

/// What stands where OWNER[/HOLD] should.
enum Wrong {
    Fingerprint,
    Owner,
    Hold,
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
    /// Says what to do instead.
    async fn refuse(self, client: &Client, name: &str, output: &Output) -> Exit {
        let message = match self {
            Self::Owner => "OWNER must be what acquire printed: a UUID".to_owned(),
            Self::Hold => "HOLD must be what acquire printed: 16 hex digits".to_owned(),
            Self::Fingerprint => {
                let token = client
                    .inspect(name)
                    .await
                    .ok()
                    .and_then(|snapshot| snapshot.holders.first()?.token);
                let token = token.map_or_else(|| "N".to_owned(), |token| token.to_string());
                format!(
                    "that is a fingerprint, which anybody may see and which opens nothing; to free the lock of a dead holder: \
                     dlock break {} --token {token}",
                    quoted(name)
                )
            }
        };
        output.misuse(&message);
        Exit::USAGE
    }
}

/// A name as a shell takes it.
fn quoted(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,=".contains(c);
    if name.chars().all(plain) && !name.starts_with('-') {
        name.to_owned()
    } else {
        format!("'{}'", name.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Wrong, quoted, written};

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

    #[test]
    fn names_are_quoted_for_the_shell() {
        assert_eq!(quoted("orders:42"), "orders:42");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("--force"), "'--force'");
    }
}
