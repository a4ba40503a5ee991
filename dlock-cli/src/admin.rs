//! Administration of other clients' locks: inspect, list, break, schema.

use crate::{
    args::Break,
    exit::Exit,
    output::{Output, object, result, words},
    table,
};
use dlock::{Broken, Client, FencingToken};
use futures_util::StreamExt;
use serde_json::json;

pub(crate) async fn inspect(client: &Client, names: &[String], output: &Output) -> Exit {
    for name in names {
        let snapshot = match client.admin().inspect(name).await {
            Ok(snapshot) => snapshot,
            Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        };
        let object = object(&snapshot, client.capabilities().backend);
        if output.result(&object, &words(&snapshot)).is_err() {
            return Exit::OUTPUT;
        }
    }
    Exit::DONE
}

pub(crate) async fn list(client: &Client, prefix: &str, output: &Output) -> Exit {
    let mut listed = client.admin().list(prefix);
    let mut header = Some(table::header());
    while let Some(shown) = listed.next().await {
        let snapshot = match shown {
            Ok(snapshot) => snapshot,
            Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        };
        let object = object(&snapshot, client.capabilities().backend);
        let row = table::row(&snapshot);
        let lines = header
            .take()
            .map_or(row.clone(), |header| format!("{header}\n{row}"));
        if output.result(&object, &lines).is_err() {
            return Exit::OUTPUT;
        }
    }
    if header.is_some() && !output.is_json() {
        let which = match prefix {
            "" => "no lock is held".to_owned(),
            prefix => format!("no lock is held whose name begins with {prefix:?}"),
        };
        output.warn(&which);
    }
    Exit::DONE
}

pub(crate) async fn break_lock(client: &Client, args: Break, output: &Output) -> Exit {
    let only = args.only.token.map(FencingToken);
    let broken = match client.admin().break_lock(&args.name, only).await {
        Ok(broken) => broken,
        Err(error) => return output.fail(&error, Exit::of_change(&error)),
    };
    let (exit, words) = match &broken {
        Broken::Freed { token: Some(token) } => {
            (Exit::DONE, format!("freed; its token was {token}"))
        }
        Broken::Freed { token: None } => (Exit::DONE, "opened".to_owned()),
        Broken::Changed { token } => {
            let now = token.map_or_else(|| "without one".to_owned(), |token| token.to_string());
            let words = format!(
                "not freed: another incarnation has it by now, with the token {now}; see dlock inspect {}",
                quoted(&args.name)
            );
            (Exit::NOT_YOURS, words)
        }
        // The named incarnation is over, but this command did not end it.
        _ if only.is_some() => (Exit::NOT_YOURS, "it was no longer held".to_owned()),
        _ => (Exit::DONE, "it was not held".to_owned()),
    };
    let token = match broken {
        Broken::Freed { token } | Broken::Changed { token } => token,
        _ => None,
    };
    let known = json!({
        "held": matches!(broken, Broken::Changed { .. }),
        "token": token.map(|token| token.to_string()),
    });
    let object = result(&args.name, client.capabilities().backend, known);
    output.print(&object, &words, exit)
}

pub(crate) fn schema(url: &str, output: &Output) -> Exit {
    match dlock::schema(url) {
        Ok(schema) => output.print(&json!({"schema": schema}), schema.trim_end(), Exit::DONE),
        Err(error) => output.fail(&error, Exit::of(&error, Exit::HELD)),
    }
}

/// A name, quoted for a shell.
pub(crate) fn quoted(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,=".contains(c);
    if name.chars().all(plain) && !name.starts_with('-') {
        name.to_owned()
    } else {
        format!("'{}'", name.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn names_are_quoted_for_the_shell() {
        assert_eq!(quoted("orders:42"), "orders:42");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("--force"), "'--force'");
    }
}
