//! Every figure runs to its end with next to no work, and says what it has to say. The numbers mean nothing here.

use serde_json::Value;
use std::{error::Error, process::Command};

type Outcome = Result<(), Box<dyn Error>>;

fn figures(arguments: &[&str]) -> Result<Vec<Value>, Box<dyn Error>> {
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
        .args(arguments)
        .args(["--repetitions", "1", "--json", "-"])
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout)?;
    Ok(report["figures"].as_array().cloned().unwrap_or_default())
}

/// The only figure, which has that many rows at least, all with a name.
fn figure(arguments: &[&str], rows: usize) -> Result<Value, Box<dyn Error>> {
    let mut figures = figures(arguments)?;
    let figure = figures.pop().ok_or("no figure")?;
    assert!(figures.is_empty(), "{figures:?}");
    assert_eq!(figure["figure"], arguments[0]);
    let shown = figure["rows"].as_array().map_or(0, Vec::len);
    assert!(shown >= rows, "{figure:#}");
    Ok(figure)
}

fn goal<'a>(figure: &'a Value, what: &str) -> Result<&'a Value, Box<dyn Error>> {
    let goals = figure["goals"].as_array().ok_or("no goals")?;
    let found = goals.iter().find(|goal| goal["what"] == what);
    Ok(found.ok_or_else(|| format!("no goal {what:?} in {goals:?}"))?)
}

#[test]
fn memory_cycle_counts_time_and_allocations() -> Outcome {
    let figure = figure(&["memory-cycle", "--seconds", "0.1"], 4)?;
    let whole = &figure["rows"][2];
    assert!(whole["p50 µs"]["median"].as_f64() > Some(0.0), "{whole}");
    assert!(whole["allocations"].as_f64() > Some(0.0), "{whole}");
    Ok(())
}

#[test]
fn memory_handoff_admits_one_holder_at_a_time() -> Outcome {
    let figure = figure(&["memory-handoff", "--seconds", "0.3"], 4)?;
    assert_eq!(goal(&figure, "two inside at once")?["met"], true);
    Ok(())
}

#[test]
fn memory_waiters_are_counted_as_they_give_up() -> Outcome {
    let figure = figure(
        &["memory-waiters", "--seconds", "2", "--waiters", "1000"],
        12,
    )?;
    goal(&figure, "locks lost beside the crowd").map(drop)
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use super::{Outcome, figure, goal};
    use std::{path::Path, process::Command};

    #[test]
    fn a_cycle_is_compared_with_its_two_statements() -> Outcome {
        let figure = figure(&["sqlite-cycle", "--seconds", "0.3"], 4)?;
        let ratio = goal(&figure, "through the client: p50 ÷ the two statements")?;
        assert!(ratio["value"].as_f64() > Some(0.0), "{figure:#}");
        Ok(())
    }

    #[test]
    fn processes_and_tasks_hand_over_to_one_holder_at_a_time() -> Outcome {
        let arguments = ["sqlite-handoff", "--seconds", "1.5", "--processes", "3"];
        // On a busy machine one run of so little time may have no hand-off.
        for _ in 0..3 {
            let figure = figure(&arguments, 5)?;
            assert_eq!(goal(&figure, "two inside at once")?["met"], true);
            if figure["rows"][3]["hand-offs"].as_u64() > Some(0) {
                return Ok(());
            }
        }
        Err("the two processes had no hand-off in any run".into())
    }

    #[test]
    fn the_command_is_compared_with_what_it_runs() -> Outcome {
        let dlock = Path::new(env!("CARGO_BIN_EXE_dlock-bench")).with_file_name("dlock");
        if !dlock.is_file() {
            // The workspace's build makes it; alone, this package's does not.
            let built = Command::new(env!("CARGO"))
                .args(["build", "-p", "dlock-cli"])
                .status()?;
            assert!(built.success());
        }
        let figure = figure(&["cli-exec", "--seconds", "0.1"], 3)?;
        // Beside other load a single run of `true` may take longer than that of the command.
        let more = goal(&figure, "more than true in ms")?["value"].as_f64();
        assert!(more.is_some_and(f64::is_finite), "{more:?}");
        Ok(())
    }

    #[test]
    fn a_command_that_is_not_there_is_said_how_to_build() -> Outcome {
        let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
            .args(["cli-exec", "--dlock", "/nowhere/dlock"])
            .output()?;
        let said = String::from_utf8(output.stderr)?;
        assert!(
            !output.status.success() && said.contains("cargo build -p dlock-cli"),
            "{said}"
        );
        Ok(())
    }
}

#[cfg(feature = "redis")]
mod redis {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_the_textbook_lock() -> Outcome {
        for name in ["redis-cycle", "redis-cycle-one-core"] {
            let figure = figure(&[name, "--seconds", "0.2"], 4)?;
            assert!(goal(&figure, "p50 ÷ textbook lock")?["value"].as_f64() > Some(0.0));
        }
        Ok(())
    }

    #[test]
    fn a_quorum_is_compared_with_one_server() -> Outcome {
        let figure = figure(&["quorum-cycle", "--seconds", "0.2"], 3)?;
        goal(&figure, "p50 ÷ dlock over one Redis").map(drop)
    }

    #[test]
    fn throughput_is_compared_with_the_textbook_lock() -> Outcome {
        let figure = figure(&["redis-throughput", "--seconds", "0.4"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ textbook lock")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn recovery_kills_holders_and_no_client_acquires_early() -> Outcome {
        let figure = figure(&["redis-recovery", "--kills", "3"], 3)?;
        assert_eq!(goal(&figure, "acquired before the end")?["met"], true);
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["redis-handoff", "--seconds", "0.6"], 8)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }

    #[test]
    fn renewals_lose_no_lock() -> Outcome {
        let figure = figure(&["redis-renewals", "--seconds", "0.5", "--locks", "300"], 3)?;
        assert_eq!(goal(&figure, "locks lost")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "redis")]
#[test]
fn redis_waiters_are_counted_while_nothing_happens() -> Outcome {
    let figure = figure(&["redis-waiters", "--seconds", "0.5"], 3)?;
    goal(&figure, "commands of a waiter in a poll interval").map(drop)
}

#[cfg(feature = "mysql")]
mod mysql {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_its_statements_and_has_two() -> Outcome {
        let figure = figure(&["mysql-cycle", "--seconds", "0.3"], 4)?;
        assert!(goal(&figure, "p50 ÷ the two statements")?["value"].as_f64() > Some(0.0));
        let statements = goal(&figure, "statements per cycle, at most")?;
        assert_eq!(statements["met"], true, "{statements}");
        Ok(())
    }

    #[test]
    fn throughput_is_compared_with_a_pool() -> Outcome {
        let figure = figure(&["mysql-throughput", "--seconds", "0.6"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ pool")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["mysql-handoff", "--seconds", "1.5"], 5)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }

    #[test]
    fn renewals_lose_no_lock() -> Outcome {
        let figure = figure(&["mysql-renewals", "--seconds", "0.5", "--locks", "300"], 3)?;
        assert_eq!(goal(&figure, "locks lost")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_its_statements() -> Outcome {
        let figure = figure(&["postgres-cycle", "--seconds", "0.4"], 4)?;
        assert!(goal(&figure, "p50 ÷ the two statements")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn throughput_is_compared_with_a_pool() -> Outcome {
        let figure = figure(&["postgres-throughput", "--seconds", "0.8"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ pool")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["postgres-handoff", "--seconds", "2.5"], 14)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }

    #[test]
    fn renewals_lose_no_lock() -> Outcome {
        let figure = figure(
            &["postgres-renewals", "--seconds", "0.5", "--locks", "300"],
            3,
        )?;
        assert_eq!(goal(&figure, "locks lost")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "mongo")]
mod mongo {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_its_commands() -> Outcome {
        let figure = figure(&["mongo-cycle", "--seconds", "0.4"], 4)?;
        assert!(goal(&figure, "p50 ÷ two bare commands")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn throughput_is_compared_with_its_commands() -> Outcome {
        let figure = figure(&["mongo-throughput", "--seconds", "0.8"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ two bare commands")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["mongo-handoff", "--seconds", "1.5"], 8)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }

    #[test]
    fn renewals_lose_no_lock() -> Outcome {
        let figure = figure(&["mongo-renewals", "--seconds", "0.5", "--locks", "300"], 3)?;
        assert_eq!(goal(&figure, "locks lost")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "zk")]
mod zk {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_create_list_and_delete() -> Outcome {
        let figure = figure(&["zk-cycle", "--seconds", "0.3"], 3)?;
        assert!(goal(&figure, "p50 ÷ create + list, delete")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn throughput_is_compared_with_the_recipe_of_the_crate() -> Outcome {
        let figure = figure(&["zk-throughput", "--seconds", "0.8"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ the crate's recipe")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["zk-handoff", "--seconds", "1"], 5)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use super::{Outcome, figure, goal};

    #[test]
    fn a_cycle_is_compared_with_its_transactions() -> Outcome {
        let figure = figure(&["etcd-cycle", "--seconds", "0.4"], 4)?;
        assert!(goal(&figure, "p50 ÷ the two transactions")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn throughput_is_compared_with_its_transactions() -> Outcome {
        let figure = figure(&["etcd-throughput", "--seconds", "0.8"], 4)?;
        assert!(goal(&figure, "cycles/s ÷ the two transactions")?["value"].as_f64() > Some(0.0));
        Ok(())
    }

    #[test]
    fn handoff_admits_one_holder_at_a_time() -> Outcome {
        let figure = figure(&["etcd-handoff", "--seconds", "1.5"], 8)?;
        assert_eq!(goal(&figure, "two inside at once")?["met"], true);
        Ok(())
    }

    #[test]
    fn renewals_lose_no_lock() -> Outcome {
        let figure = figure(&["etcd-renewals", "--seconds", "0.5", "--locks", "300"], 3)?;
        assert_eq!(goal(&figure, "locks lost")?["met"], true);
        Ok(())
    }
}

#[cfg(feature = "compare")]
#[test]
fn a_failover_without_the_lock_is_recorded_with_what_its_holder_is_told() -> Outcome {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("failovers.jsonl");
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
        .args(["failovers", "--times", "1", "--lease", "4"])
        .args(["--contestants", "dlock", "--over", "sentinel", "--json"])
        .arg(&file)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let row: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    assert_eq!(row["links_cut"], true, "{row}");
    assert_eq!(row["told"], "lost", "{row}");
    assert_eq!(row["token_rises"], true, "{row}");
    assert!(row["got_s"].as_f64() > Some(0.0), "{row}");
    Ok(())
}

#[cfg(feature = "compare")]
mod compare {
    use super::Outcome;
    use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
    use serde_json::Value;
    use std::{
        collections::{BTreeMap, BTreeSet},
        error::Error,
        fs,
        path::Path,
        process::Command,
    };

    /// Its rows by contestant, then by case.
    type Rows = BTreeMap<String, BTreeMap<String, Value>>;

    fn compare(arguments: &[&str], out: &Path) -> Result<Rows, Box<dyn Error>> {
        let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
            .args(["compare", "--smoke", "--out"])
            .arg(out)
            .args(arguments)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let lines = fs::read_to_string(out.join("results.jsonl"))?;
        let mut rows = Rows::new();
        for line in lines.lines().skip(1) {
            let row: Value = serde_json::from_str(line)?;
            let word = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            let of_one = rows.entry(word("contestant")).or_default();
            of_one.insert(word("case"), row);
        }
        Ok(rows)
    }

    fn measured(rows: &BTreeMap<String, Value>) -> BTreeSet<&str> {
        let has_numbers = |row: &Value| {
            row["metrics"]
                .as_object()
                .is_some_and(|all| !all.is_empty())
        };
        let measured = rows.iter().filter(|(_, row)| has_numbers(row));
        measured.map(|(case, _)| case.as_str()).collect()
    }

    /// Every case of `dlock`, and of each library beside it. One that cannot be built here says why, and so does
    /// each case that a library does not have.
    fn every_case_over(store: &str, peers: &[(&str, usize)]) -> Outcome {
        let out = tempfile::tempdir()?;
        let mut rows = compare(&["--backends", store], out.path())?;
        let ours = rows.remove("dlock").ok_or("nothing of dlock")?;
        assert_eq!(measured(&ours).len(), CASES, "{ours:#?}");
        for (peer, cases) in peers {
            let none = || format!("nothing of {peer}");
            let mut rows = rows.remove(*peer).ok_or_else(none)?;
            // On a busy machine a library may give up. Then all is measured again.
            for _ in 0..2 {
                if rows.len() == CASES && measured(&rows).len() < *cases {
                    let mut again = compare(&["--backends", store], out.path())?;
                    rows = again.remove(*peer).ok_or_else(none)?;
                }
            }
            if let Some(why) = rows.get("").and_then(|row| row["missing"].as_str()) {
                eprintln!("{peer} is not measured here: {why}");
                let is_of_the_machine =
                    |known: &&str| why.contains(*known) && !why.starts_with("`javac");
                assert!(ABSENT.iter().any(is_of_the_machine), "{why}");
                assert_eq!(rows.len(), 1, "{rows:#?}");
                continue;
            }
            assert_eq!(
                (rows.len(), measured(&rows).len()),
                (CASES, *cases),
                "{peer}: {rows:#?}"
            );
            let reasons = rows.values().filter_map(|row| row["missing"].as_str());
            let mut unknown =
                reasons.filter(|why| !REASONS.iter().any(|known| why.starts_with(known)));
            assert_eq!(unknown.next(), None, "{peer}");
        }
        assert!(rows.is_empty(), "not expected: {rows:#?}");
        let report = fs::read_to_string(out.path().join("report.html"))?;
        assert!(
            report.contains("<svg") && !report.contains("NaN"),
            "{report}"
        );
        let folder = out.path().to_string_lossy();
        let difference = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
            .args(["compare", "--diff", &folder, &folder])
            .output()?;
        let said = String::from_utf8(difference.stdout)?;
        assert!(said.contains("nothing exceeds the noise"), "{said}");
        let joined = tempfile::tempdir()?;
        let join = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
            .args(["compare", "--join", &folder, "--out"])
            .arg(joined.path())
            .status()?;
        assert!(join.success());
        // Of a number, the last digit may differ.
        let read = |folder: &Path| -> Result<(String, usize), Box<dyn Error>> {
            let text = fs::read_to_string(folder.join("results.jsonl"))?;
            let first = text.lines().next().unwrap_or_default().to_owned();
            Ok((first, text.lines().count()))
        };
        assert_eq!(read(joined.path())?, read(out.path())?);
        Ok(())
    }

    /// A tool is not there, or cannot fetch what it needs; or the library is not built at all.
    const ABSENT: [&str; 4] = [
        " cannot be run: ",
        "` failed: ",
        "build with `--features peers`",
        "its sqlx 0.8",
    ];
    /// Of one store.
    const CASES: usize = 15;
    const REASONS: [&str; 3] = [
        "it has no ",
        "a second task of the same client has the lock, too",
        "the session has the lock",
    ];

    #[test]
    fn every_case_runs_over_redis() -> Outcome {
        let peers = [
            ("rslock", 11),
            ("redislock", 11),
            ("redsync", 11),
            ("redsync (10 ms)", 11),
            ("Redisson RLock", CASES),
            ("Redisson RFairLock", CASES - 2), // readers and permits are RLock's
            ("Redisson RFencedLock", CASES - 2),
            ("redis-py", 11),
            ("node-redlock", 11),
            ("distributed-lock", 0),
        ];
        every_case_over("redis", &peers)
    }

    #[test]
    fn every_case_runs_over_zookeeper() -> Outcome {
        every_case_over("zk", &[("zookeeper-client", 12), ("Curator", CASES)])
    }

    #[test]
    fn every_case_runs_over_etcd() -> Outcome {
        every_case_over("etcd", &[("etcd lock API", 11)])
    }

    #[test]
    fn every_case_runs_over_postgres() -> Outcome {
        let peers = [
            ("ShedLock on PostgreSQL", 6),
            ("PgAdvisoryLock", 11),
            ("distributed-lock", 0),
        ];
        every_case_over("postgres", &peers)
    }

    #[test]
    fn every_case_runs_over_mysql() -> Outcome {
        let peers = [("ShedLock on MariaDB", 6), ("distributed-lock", 0)];
        every_case_over("mysql", &peers)
    }

    #[test]
    fn every_case_runs_over_mongodb() -> Outcome {
        every_case_over("mongodb", &[("ShedLock on MongoDB", 6)])
    }

    #[test]
    fn every_case_runs_over_sqlite() -> Outcome {
        every_case_over("sqlite", &[])
    }

    #[test]
    fn a_server_of_the_user_gets_a_bounded_load() -> Outcome {
        let server = RedisServer::start(RedisOptions::default())?;
        let out = tempfile::tempdir()?;
        let rows = compare(&["--url", &server.url(), "--peers", "none"], out.path())?;
        let ours = rows.get("dlock").ok_or("nothing of dlock")?;
        let cases = measured(ours);
        assert!(
            cases.contains("task-128") && cases.contains("contend-16"),
            "{cases:?}"
        );
        assert!(
            !cases.contains("task-1024") && !cases.contains("contend-64"),
            "{cases:?}"
        );
        assert_eq!((rows.len(), ours.len()), (1, CASES - 2));
        Ok(())
    }

    #[test]
    fn a_server_that_is_not_there_is_told_and_is_a_failure() -> Outcome {
        let out = tempfile::tempdir()?;
        let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
            .args(["compare", "--smoke", "--url", "redis://127.0.0.1:1/"])
            .args(["--peers", "rslock", "--out"])
            .arg(out.path())
            .output()?;
        let said = String::from_utf8(output.stderr)?;
        assert!(
            !output.status.success() && said.contains("dlock failed: redis"),
            "{said}"
        );
        let rows = fs::read_to_string(out.path().join("results.jsonl"))?;
        assert!(rows.contains("rslock"), "each has its row: {rows}");
        Ok(())
    }

    #[test]
    fn only_the_chosen_cases_run() -> Outcome {
        let out = tempfile::tempdir()?;
        let chosen = ["--backends", "sqlite", "--cases", "main-1,names-100"];
        let rows = compare(&chosen, out.path())?;
        let ours = rows.get("dlock").ok_or("nothing of dlock")?;
        assert_eq!(measured(ours), BTreeSet::from(["main-1", "names-100"]));
        let tables = fs::read_to_string(out.path().join("report.md"))?;
        assert!(
            tables.contains("main thread") && !tables.contains("waiting"),
            "{tables}"
        );
        Ok(())
    }

    #[test]
    fn a_peer_or_a_case_that_does_not_exist_is_refused_with_the_list() -> Outcome {
        for (flag, name, known) in [
            ("--peers", "zookeper", "zookeeper-client"),
            ("--cases", "names-7", "names-1000,"),
        ] {
            let output = Command::new(env!("CARGO_BIN_EXE_dlock-bench"))
                .args(["compare", flag, name, "--out", "unused"])
                .output()?;
            let said = String::from_utf8(output.stderr)?;
            assert!(
                !output.status.success() && said.contains(name) && said.contains(known),
                "{said}"
            );
        }
        Ok(())
    }
}
