//! The table of locks that `list` and `watch` show. Names come last, because they may have any length.

use crate::output::process;
use dlock::{Mode, Snapshot};
use std::time::Duration;

/// What stands above [`row`].
pub(crate) fn header() -> String {
    line(["HELD BY", "AGE", "ENDS IN", "WAITING", "NAME"])
}

/// A lock on one line.
pub(crate) fn row(lock: &Snapshot) -> String {
    let time = |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), short);
    let ends = match lock.holders.first() {
        Some(holder) => holder.rest,
        None => lock.unavailable_for,
    };
    let waiting = lock.waiters.map(|waiters| waiters.to_string());
    line([
        &holder(lock),
        &time(lock.age),
        &time(ends),
        waiting.as_deref().unwrap_or("-"),
        &lock.name.as_str().escape_debug().to_string(),
    ])
}

fn holder(lock: &Snapshot) -> String {
    if lock.damaged.is_some() {
        return "damaged".to_owned();
    }
    let Some(holder) = lock.holders.first() else {
        return "none: unavailable".to_owned();
    };
    match holder.owner.mode() {
        Mode::Shared => format!("shared by {}", lock.holds),
        Mode::Permit { of } => format!("{} of {of} permits", lock.holds),
        _ if holder.info.host.is_empty() => format!("#{}", holder.owner),
        _ => process(&holder.info),
    }
}

fn line([holder, age, ends, waiting, name]: [&str; 5]) -> String {
    let holder = cut(holder, 26); // the rest of a long note is in `inspect`
    format!("{holder:<26} {age:>7} {ends:>7} {waiting:>7}  {name}")
}

/// At most that many characters of a text; the last one says that some are missing.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept = text.chars().take(most.saturating_sub(1));
    kept.chain(['…']).collect()
}

/// A time in at most six characters: its two largest units.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{}ms", time.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::{cut, header, line, short};
    use std::time::Duration;

    #[test]
    fn times_have_their_two_largest_units() {
        for (millis, text) in [
            (0, "0ms"),
            (999, "999ms"),
            (59_999, "59s"),
            (61_000, "1m01s"),
            (3_661_000, "1h01m"),
            (90_061_000, "1d01h"),
        ] {
            assert_eq!(short(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_visibly_and_moves_no_column() {
        assert_eq!(cut("four", 4), "four");
        assert_eq!(cut("fünf!", 4), "fün…");
        let holder = "4711 on web1.example.org, \"nightly\"";
        let row = line([holder, "7s", "1s", "0", "x"]);
        assert_eq!(row.chars().count(), line(["", "7s", "1s", "0", "x"]).len());
    }

    #[test]
    fn a_name_of_24_characters_fits_into_80_columns() {
        assert!(header().len() <= 80);
        let name = "orders/2026-11-26/000042";
        let row = line(["4711 on web1.example.org", "59m59s", "364d23h", "64", name]);
        assert!(row.len() <= 80, "{row}");
    }
}
