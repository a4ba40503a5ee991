//! Doctor: what may void a lock in this store.

use crate::{exit::Exit, output::Output};
use dlock::{Client, Finding, Severity};
use serde_json::json;

pub(crate) async fn run(client: &Client, output: &Output) -> Exit {
    let found = match client.admin().diagnose().await {
        Ok(found) => found,
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    for finding in &found {
        if show(finding, client.capabilities().backend, output).is_err() {
            return Exit::OUTPUT;
        }
    }
    let worst = found.iter().map(|finding| finding.severity).max();
    match worst {
        None | Some(Severity::Ok) => Exit::DONE,
        Some(Severity::Warning) => Exit::HELD,
        Some(_) => Exit::VOID,
    }
}

fn show(finding: &Finding, backend: &str, output: &Output) -> std::io::Result<()> {
    let Finding { what, remedy, .. } = finding;
    let severity = match finding.severity {
        Severity::Ok => "ok",
        Severity::Warning => "warning",
        _ => "void",
    };
    let object = json!({"severity": severity, "what": what, "remedy": remedy, "backend": backend});
    let words = match remedy.as_str() {
        "" => format!("{severity:<8} {what}"),
        _ => format!("{severity:<8} {what}\n{:<8} -> {remedy}", ""),
    };
    output.result(&object, &words)
}
