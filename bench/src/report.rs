//! Tables for people and JSON for everything else.

use crate::measure::{Quiet, Spread};
use serde_json::{Value, json};
use std::fmt;

/// All figures of a run.
#[derive(Debug)]
pub(crate) struct Report {
    workers: usize,
    tables: Vec<Table>,
}

/// One figure.
#[derive(Debug)]
pub(crate) struct Table {
    name: &'static str,
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
    goals: Vec<Goal>,
    notes: Vec<String>,
    quiet: Option<Quiet>,
}

#[derive(Clone, Debug)]
pub(crate) enum Cell {
    Text(String),
    Count(u64),
    Number(f64),
    Spread(Spread),
    None,
}

/// The goal of a figure.
#[derive(Debug)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) limit: Limit,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Report {
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers,
            tables: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, table: Table) {
        self.tables.push(table);
    }

    pub(crate) fn json(&self) -> String {
        let figures: Vec<Value> = self.tables.iter().map(Table::json).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let report = json!({
            "release": !cfg!(debug_assertions),
            "cores": cores,
            "runtime_workers": self.workers,
            "figures": figures,
        });
        format!("{report:#}")
    }
}

impl Table {
    pub(crate) fn new(
        name: &'static str,
        title: impl Into<String>,
        columns: &[&'static str],
    ) -> Self {
        Self {
            name,
            title: title.into(),
            columns: columns.to_vec(),
            rows: Vec::new(),
            goals: Vec::new(),
            notes: Vec::new(),
            quiet: None,
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn goal(&mut self, what: impl Into<String>, value: f64, limit: Limit) {
        let what = what.into();
        self.goals.push(Goal { what, value, limit });
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The conditions of the repetitions.
    pub(crate) fn quiet(&mut self, quiet: &Quiet) {
        self.quiet = Some(quiet.clone());
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                let cells = self.columns.iter().zip(row);
                cells
                    .map(|(column, cell)| ((*column).to_owned(), cell.json()))
                    .collect()
            })
            .collect();
        let goals: Vec<Value> = self.goals.iter().map(Goal::json).collect();
        let quiet = self.quiet.as_ref().map(|quiet| {
            json!({
                "repetitions": quiet.all, "counted": quiet.used.len(), "noisy": quiet.noisy,
                "most_steal": quiet.steal, "most_foreign_cores": quiet.foreign,
            })
        });
        json!({
            "figure": self.name, "title": self.title, "rows": rows, "goals": goals, "notes": self.notes,
            "quiet": quiet,
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}: {}\n", self.name, self.title)?;
        let head = self.columns.iter().map(|column| (*column).to_owned());
        let mut lines = vec![head.collect::<Vec<_>>()];
        lines.extend(
            self.rows
                .iter()
                .map(|row| row.iter().map(ToString::to_string).collect()),
        );
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let cells = lines.iter().filter_map(|line| line.get(column));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        for (at, line) in lines.iter().enumerate() {
            for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
                let bar = if column == 0 { "|" } else { "" };
                if column == 0 {
                    write!(f, "{bar} {cell:<width$} |")?;
                } else {
                    write!(f, " {cell:>width$} |")?;
                }
            }
            writeln!(f)?;
            if at == 0 {
                let rules = widths.iter().enumerate().map(|(column, width)| {
                    let end = if column == 0 { '-' } else { ':' };
                    format!("{}{end}|", "-".repeat(width + 1))
                });
                writeln!(f, "|{}", rules.collect::<String>())?;
            }
        }
        writeln!(f)?;
        for goal in &self.goals {
            writeln!(f, "* {goal}")?;
        }
        for note in &self.notes {
            writeln!(f, "* {note}")?;
        }
        if let Some(quiet) = &self.quiet {
            writeln!(f, "* {quiet}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Quiet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (used, all) = (self.used.len(), self.all);
        write!(
            f,
            "repetitions: {used} of {all} counted, at most {:.0} % steal and {:.2} cores for others",
            self.steal * 100.0,
            self.foreign
        )?;
        if self.noisy {
            f.write_str("; **noisy**: too few were quiet, so all count")?;
        }
        Ok(())
    }
}

impl Cell {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Count(count) => json!(count),
            Self::Number(number) => json!(number),
            Self::Spread(spread) => {
                json!({"median": spread.median, "low": spread.low, "high": spread.high})
            }
            Self::None => Value::Null,
        }
    }
}

impl From<Spread> for Cell {
    fn from(spread: Spread) -> Self {
        Self::Spread(spread)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Count(count) => fmt::Display::fmt(count, f),
            Self::Number(number) => f.write_str(&short(*number)),
            Self::Spread(Spread { median, low, high }) => {
                write!(f, "{} ({}–{})", short(*median), short(*low), short(*high))
            }
            Self::None => f.write_str("-"),
        }
    }
}

/// Three significant digits.
fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 100.0 => format!("{number:.0}"),
        size if size >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

impl Goal {
    fn met(&self) -> bool {
        match self.limit {
            Limit::AtMost(limit) => self.value <= limit,
            Limit::AtLeast(limit) => self.value >= limit,
        }
    }

    fn json(&self) -> Value {
        let (bound, limit) = match self.limit {
            Limit::AtMost(limit) => ("at_most", limit),
            Limit::AtLeast(limit) => ("at_least", limit),
        };
        json!({"what": self.what, "value": self.value, bound: limit, "met": self.met()})
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, limit) = match self.limit {
            Limit::AtMost(limit) => ("≤", limit),
            Limit::AtLeast(limit) => ("≥", limit),
        };
        let met = if self.met() { "met" } else { "**missed**" };
        let value = short(self.value);
        write!(f, "goal: {} {value}, {sign} {limit}: {met}", self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cell, Limit, Table, short};
    use crate::measure::Spread;

    #[test]
    fn a_table_is_markdown_with_its_goals_below() {
        let mut table = Table::new("x", "y", &["who", "µs"]);
        table.row([Cell::text("floor"), Spread::of([1.0, 2.0, 4.0]).into()]);
        table.goal("ratio", 1.5, Limit::AtMost(1.25));
        let wanted = "### x: y\n\n\
            | who   |               µs |\n\
            |-------|-----------------:|\n\
            | floor | 2.00 (1.00–4.00) |\n\n\
            * goal: ratio 1.50, ≤ 1.25: **missed**\n";
        assert_eq!(table.to_string(), wanted);
        assert_eq!(table.json()["goals"][0]["met"], false);
        assert_eq!(table.json()["rows"][0]["µs"]["median"], 2.0);
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([1234.5, 56.78, 0.123].map(short), ["1234", "56.8", "0.12"]);
    }
}
