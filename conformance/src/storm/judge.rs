//! Checker: finds in the logs of all workers what no lock may ever do. It shares no code with dlock.
//!
//! A guard that is lost stays lost. So a holder whose check was Ok at some instant believed that it
//! held the lock from the grant to that instant. Every finding about two such spans is true however
//! late any process was scheduled.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, fs,
    path::Path,
    time::Duration,
};
use tempfile::TempDir;

/// The findings and the counts.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) findings: Vec<Finding>,
    pub(crate) grants: usize,
    /// Grants that entered an incarnation: by a pass, or as one of those who share it.
    pub(crate) joins: usize,
    /// How holds ended.
    pub(crate) ends: BTreeMap<String, usize>,
    /// The errors of acquires that gave no guard.
    pub(crate) failures: BTreeMap<String, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Two incarnations believed at the same instant that they hold one name.
    Overlap,
    /// More holders of permits believed at the same instant than there are permits.
    TooMany,
    /// A guard was still Ok after another incarnation had begun.
    NoticedLate,
    /// A later incarnation has no greater token, or one incarnation has two.
    Token,
    /// The name was granted before its minimum hold was over.
    Early,
    /// A call was refused as a misuse, though the caller made none.
    Refused,
    /// A name could not be acquired, or was held, when all leases were over.
    Leftover,
    /// A worker ended unexpectedly.
    Worker,
    /// Something took longer than it may.
    Slow,
}

#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    pub(crate) words: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.words)
    }
}

/// One hold, as its process logged it.
#[derive(Debug)]
struct Hold {
    family: String,
    token: u64,
    least: u64,
    asked: u64,
    got: u64,
    /// The last instant at which it certainly believed; before `got`: never after it had the guard.
    believed: Option<u64>,
    kept: bool,
}

/// Judges the logs in the folder [`LOGS`] of this folder.
///
/// # Errors
/// When one cannot be read, or a line is no record.
pub(crate) fn judge_all(folder: &Path) -> crate::Result<Verdict> {
    let mut logs = Vec::new();
    for entry in fs::read_dir(folder.join(LOGS))? {
        logs.push(fs::read_to_string(entry?.path())?);
    }
    Ok(judge(&logs)?)
}

fn judge(logs: &[String]) -> Result<Verdict, String> {
    let mut verdict = Verdict::default();
    let mut names: BTreeMap<String, Vec<Hold>> = BTreeMap::new();
    for log in logs {
        for (name, hold) in verdict.holds(log)? {
            names.entry(name).or_default().push(hold);
        }
    }
    for (name, mut holds) in names {
        holds.sort_by_key(|hold| hold.got);
        verdict.beliefs(&name, &holds);
        verdict.tokens(&name, &holds);
        verdict.minimum(&name, &holds);
    }
    Ok(verdict)
}

impl Verdict {
    pub(crate) fn find(&mut self, kind: Kind, words: impl fmt::Display) {
        let words = words.to_string();
        self.findings.push(Finding { kind, words });
    }

    /// Prints counts and findings, and returns whether there is none; on a finding the logs are kept.
    pub(crate) fn tell(&self, processes: &str, seed: u64, folder: TempDir) -> bool {
        println!(
            "{} grants, {} of them beside another hold of the incarnation, {processes}",
            self.grants, self.joins
        );
        println!("holds ended: {}", counts(&self.ends));
        println!("acquires without a lock: {}", counts(&self.failures));
        let findings = &self.findings;
        for finding in findings.iter().take(FINDINGS_SHOWN) {
            println!("FINDING {finding}");
        }
        if findings.is_empty() {
            println!("no finding");
            return true;
        }
        let (count, logs) = (findings.len(), folder.keep().join(LOGS));
        println!(
            "{count} findings, seed {seed}; the logs are in {}",
            logs.display()
        );
        false
    }

    /// The holds of one process, by name; counts the other records. A last line without its end was
    /// being written when its process was killed.
    fn holds(&mut self, log: &str) -> Result<Vec<(String, Hold)>, String> {
        let mut holds: HashMap<u64, (String, Hold)> = HashMap::new();
        let whole = log.rfind('\n').map_or("", |end| &log[..end]);
        for line in whole.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| {
                fields[at]
                    .parse()
                    .map_err(|_| format!("no record: {line:?}"))
            };
            match fields[..] {
                ["took", _, name, family, _, _, _, _] => {
                    self.grants += 1;
                    let began = Hold {
                        family: family.to_owned(),
                        token: number(4)?,
                        least: number(5)?,
                        asked: number(6)?,
                        got: number(7)?,
                        believed: None,
                        kept: false,
                    };
                    holds.insert(number(1)?, (name.to_owned(), began));
                }
                ["believes", _, _] => {
                    if let Some((_, hold)) = holds.get_mut(&number(1)?) {
                        hold.believed = Some(number(2)?);
                    }
                }
                ["ended", _, how] => {
                    if let Some((_, hold)) = holds.get_mut(&number(1)?) {
                        hold.kept = how == "kept";
                    }
                    *self.ends.entry(how.to_owned()).or_default() += 1;
                }
                ["failed", how] => {
                    if how == "Misuse" || how == "Unsupported" {
                        self.find(Kind::Refused, format!("an acquire failed with {how}"));
                    }
                    *self.failures.entry(how.to_owned()).or_default() += 1;
                }
                _ => return Err(format!("no record: {line:?}")),
            }
        }
        Ok(holds.into_values().collect())
    }

    fn beliefs(&mut self, name: &str, holds: &[Hold]) {
        let mut open: Vec<&Hold> = Vec::new();
        for hold in holds {
            open.retain(|earlier| earlier.believed >= Some(hold.got));
            for earlier in open.iter().filter(|open| open.family != hold.family) {
                let kind = match hold.believed {
                    Some(_) => Kind::Overlap,
                    // The grant happened at some instant after the request, possibly long before the
                    // answer.
                    None if hold.asked >= earlier.got => Kind::NoticedLate,
                    None => continue,
                };
                let by = earlier.believed.map_or(0, |last| last - hold.got);
                self.find(
                    kind,
                    format!(
                        "{name}: {earlier} was believed in {:?} after {hold} had begun",
                        span(by)
                    ),
                );
            }
            open.push(hold);
            let most = most(&hold.family).filter(|_| hold.believed.is_some());
            if most.is_some_and(|most| open.len() > most) {
                let count = open.len();
                self.find(Kind::TooMany, format!("{name}: {count} held {hold}"));
            }
        }
    }

    /// Where beliefs do not overlap, their order is the order of the grants.
    fn tokens(&mut self, name: &str, holds: &[Hold]) {
        let mut families: HashMap<&str, u64> = HashMap::new();
        let mut last: Option<&Hold> = None;
        for hold in holds {
            let known = families.insert(&hold.family, hold.token);
            if let Some(token) = known {
                self.joins += 1;
                if token != hold.token {
                    self.find(
                        Kind::Token,
                        format!("{name}: {hold} had token {token} before"),
                    );
                }
            }
            if hold.believed.is_some() {
                let other = last.filter(|last| last.family != hold.family);
                if let Some(last) = other.filter(|last| last.token >= hold.token) {
                    self.find(Kind::Token, format!("{name}: {hold} came after {last}"));
                }
                last = Some(hold);
            }
        }
    }

    fn minimum(&mut self, name: &str, holds: &[Hold]) {
        for (number, kept) in holds.iter().enumerate().filter(|(_, hold)| hold.kept) {
            let opens = kept.asked + kept.least;
            let mut later = holds[number + 1..].iter();
            let next = later.find(|next| next.family != kept.family && next.believed.is_some());
            if let Some(next) = next.filter(|next| next.got < opens) {
                let by = span(opens - next.got);
                self.find(
                    Kind::Early,
                    format!("{name}: {next} came {by:?} before the minimum of {kept} was over"),
                );
            }
        }
    }
}

/// How many may be in an incarnation at once, if that is limited: `of-N-…` is a family of holders of permits.
fn most(family: &str) -> Option<usize> {
    family.strip_prefix("of-")?.split_once('-')?.0.parse().ok()
}

pub(crate) fn counts<W: fmt::Display>(of: &BTreeMap<W, usize>) -> String {
    let words: Vec<_> = of
        .iter()
        .map(|(word, count)| format!("{count} {word}"))
        .collect();
    words.join(", ")
}

/// The folder of the logs.
pub(crate) const LOGS: &str = "logs";
const FINDINGS_SHOWN: usize = 20;

fn span(nanoseconds: u64) -> Duration {
    Duration::from_nanos(nanoseconds)
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (token {}, from {})",
            self.family, self.token, self.got
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, judge};

    /// A process with one hold: token, minimum hold, instants of asking and having, the last instant of
    /// belief, and its end.
    fn told(family: &str, token: u64, times: [u64; 3], believed: Option<u64>, how: &str) -> String {
        let [least, asked, got] = times;
        let took = format!("took 0 a {family} {token} {least} {asked} {got}\n");
        let believes = believed
            .map(|at| format!("believes 0 {at}\n"))
            .unwrap_or_default();
        format!("{took}{believes}ended 0 {how}\nbelie")
    }

    fn found(logs: &[String]) -> Vec<Kind> {
        judge(logs)
            .unwrap()
            .findings
            .iter()
            .map(|finding| finding.kind)
            .collect()
    }

    #[test]
    fn holders_one_after_the_other_are_no_finding() {
        let one = told("x", 1, [0, 5, 10], Some(20), "released");
        let two = told("y", 2, [0, 5, 21], Some(30), "released");
        let never = told("z", 9, [0, 5, 25], None, "lost");
        let verdict = judge(&[two, one]).unwrap();
        assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
        assert_eq!(
            (verdict.grants, verdict.joins, verdict.ends["released"]),
            (2, 0, 2)
        );
        assert!(found(&[told("x", 1, [0, 5, 10], Some(20), "released"), never]).is_empty());
    }

    #[test]
    fn two_that_believe_at_once_overlap() {
        let one = told("x", 1, [0, 5, 10], Some(20), "released");
        let two = told("y", 2, [0, 5, 20], Some(30), "released");
        assert_eq!(found(&[two, one]), [Kind::Overlap]);
    }

    #[test]
    fn the_bearers_of_one_pass_do_not_overlap() {
        let one = told("x", 1, [0, 5, 10], Some(40), "released");
        let two = told("x", 1, [0, 5, 20], Some(30), "still");
        let verdict = judge(&[one, two]).unwrap();
        assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
        assert_eq!(verdict.joins, 1);
    }

    #[test]
    fn more_holders_than_permits_are_found() {
        let of = |got, until| told("of-2-7", 7, [0, 5, got], Some(until), "released");
        let [one, two] = [of(10, 20), of(15, 30)];
        assert!(found(&[one.clone(), two.clone(), of(21, 40)]).is_empty());
        assert_eq!(found(&[one, two, of(20, 40)]), [Kind::TooMany]);
    }

    #[test]
    fn an_overlap_is_found_behind_a_short_hold_of_the_same_family() {
        let one = told("x", 1, [0, 5, 10], Some(40), "released");
        let inner = told("x", 1, [0, 5, 12], Some(13), "still");
        let two = told("y", 2, [0, 5, 30], Some(35), "released");
        assert_eq!(found(&[one, inner, two]), [Kind::Overlap]);
    }

    #[test]
    fn a_guard_that_is_ok_after_another_began_is_told_late() {
        let one = told("x", 1, [0, 5, 10], Some(21), "released");
        let two = |asked| told("y", 2, [0, asked, 20], None, "lost");
        assert_eq!(found(&[one.clone(), two(10)]), [Kind::NoticedLate]);
        // It may have been granted before the first one, and learned so after a long stop.
        assert!(found(&[one, two(9)]).is_empty());
    }

    #[test]
    fn a_token_that_does_not_grow_is_found() {
        for token in [1, 2] {
            let one = told("x", 2, [0, 5, 10], Some(20), "released");
            let two = told("y", token, [0, 5, 21], Some(30), "released");
            assert_eq!(found(&[one, two]), [Kind::Token]);
        }
        let one = told("x", 2, [0, 5, 10], Some(20), "released");
        let again = told("x", 3, [0, 5, 15], Some(20), "released");
        assert_eq!(found(&[one, again]), [Kind::Token]);
    }

    #[test]
    fn a_name_granted_before_its_minimum_hold_is_over_is_found() {
        let kept = |how| told("x", 1, [100, 5, 10], Some(20), how);
        let next = |got| told("y", 2, [0, 5, got], Some(got + 1), "released");
        assert_eq!(found(&[kept("kept"), next(104)]), [Kind::Early]);
        assert!(found(&[kept("kept"), next(105)]).is_empty());
        assert!(found(&[kept("lost"), next(50)]).is_empty());
    }

    #[test]
    fn a_refusal_of_a_right_call_is_found() {
        let log = "failed Misuse\nfailed Unavailable\n".to_owned();
        let verdict = judge(&[log]).unwrap();
        assert_eq!(verdict.findings[0].kind, Kind::Refused);
        assert_eq!(
            (verdict.findings.len(), verdict.failures["Unavailable"]),
            (1, 1)
        );
    }

    #[test]
    fn a_line_that_is_no_record_is_an_error() {
        judge(&["ended x\n".to_owned()]).unwrap_err();
    }
}
