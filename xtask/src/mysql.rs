//! What the MySQL driver's tests did over MariaDB, over MySQL.

use crate::{Result, step};
use serde_json::Value;
use std::env;
use std::path::Path;
use std::process::Command;

/// The package, and its folder.
pub(crate) const PACKAGE: &str = "dlock-mysql";

/// Clauses that are left out: mutants try the suite, and the others are about the client's time, which is the same over
/// any server. Containers have another server and do not begin with `mysql::`.
const NOT_OVER_MYSQL: [&str; 8] = [
    "::mutant::",
    "::cancel::",
    "::crash::",
    "::indeterminate::",
    "::loss::",
    "::renew::",
    "::shutdown::",
    "::wait::",
];
/// A MySQL as old as `MYSQLD` speaks TLS with no client of today.
const TLS: &str = "a_servers_identity_is_verified_as_the_url_says";

/// Runs the package's test programs as `selection` builds them.
pub(crate) fn run(selection: &[&str]) -> Result {
    let Some(mysqld) = env::var_os("MYSQLD").filter(|program| !program.is_empty()) else {
        println!("there is no MySQL (MYSQLD): left out");
        return Ok(());
    };
    let programs = programs(selection)?;
    if !programs.iter().any(Program::is_suite) {
        return Err(format!("{PACKAGE} has no suite among its tests").into());
    }
    for program in programs {
        let mut tests = Command::new(&program.path);
        if program.is_suite() {
            tests.arg("mysql::");
            tests.args(NOT_OVER_MYSQL.iter().flat_map(|clause| ["--skip", clause]));
        } else {
            tests.args(["--skip", TLS]);
        }
        let tests = tests.env("DLOCK_TEST_MYSQLD", &mysqld);
        step::run_tests(tests.current_dir(PACKAGE))?;
    }
    Ok(())
}

struct Program {
    target: String,
    path: String,
}

impl Program {
    fn is_suite(&self) -> bool {
        self.target == "conformance"
    }

    /// Of what cargo says while it builds: a program of the package.
    fn from_message(message: &Value) -> Option<Self> {
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let program = Self {
            target: message["target"]["name"].as_str()?.to_owned(),
            path: message["executable"].as_str()?.to_owned(),
        };
        manifest.parent()?.ends_with(PACKAGE).then_some(program)
    }
}

/// The package's test programs. With the selection of an earlier step they are built already.
fn programs(selection: &[&str]) -> Result<Vec<Program>> {
    let mut build = step::cargo(["test", "--quiet", "--no-run", "--message-format=json"]);
    let output = step::output(build.args(selection))?;
    let messages = serde_json::Deserializer::from_slice(&output).into_iter();
    let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
    Ok(messages.iter().filter_map(Program::from_message).collect())
}
