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
    let figure = figure(&["memory-cycle", "--seconds", "0.1"], 3)?;
    let whole = &figure["rows"][2];
    assert!(whole["p50 µs"]["median"].as_f64() > Some(0.0), "{whole}");
    assert!(whole["allocations"].as_f64() > Some(0.0), "{whole}");
    Ok(())
}

#[test]
fn redis_cycle_is_compared_with_the_textbook_lock() -> Outcome {
    let figure = figure(&["redis-cycle", "--seconds", "0.2"], 4)?;
    assert!(goal(&figure, "p50 ÷ textbook lock")?["value"].as_f64() > Some(0.0));
    Ok(())
}

#[test]
fn redis_throughput_is_compared_with_the_textbook_lock() -> Outcome {
    let figure = figure(&["redis-throughput", "--seconds", "0.4"], 4)?;
    assert!(goal(&figure, "cycles/s ÷ textbook lock")?["value"].as_f64() > Some(0.0));
    Ok(())
}

#[test]
fn redis_recovery_kills_holders_and_nobody_is_early() -> Outcome {
    let figure = figure(&["redis-recovery", "--kills", "3"], 3)?;
    assert_eq!(goal(&figure, "acquired before the end")?["met"], true);
    Ok(())
}

#[test]
fn handoff_lets_nobody_in_twice() -> Outcome {
    let figure = figure(&["handoff", "--seconds", "0.6"], 12)?;
    assert_eq!(goal(&figure, "two inside at once")?["met"], true);
    Ok(())
}

#[test]
fn renewals_lose_no_lock() -> Outcome {
    let figure = figure(&["renewals", "--seconds", "0.5", "--locks", "300"], 3)?;
    assert_eq!(goal(&figure, "locks lost")?["met"], true);
    Ok(())
}
