//! Queue of a lock: the seats parsed from node names, in the order of their numbers.
//!
//! All decisions about who holds and who waits derive from this order.

use crate::seats::Node;
use dlock_core::HoldId;
use std::cmp::Ordering;

/// A seat: one child of a lock's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) file: String,
    pub(crate) number: i64,
}

impl Seat {
    /// Parses a child's name. `None`: the node is neither dlock's nor Curator's, and blocks no client.
    pub(crate) fn parse(file: &str) -> Option<Self> {
        let at = file.rfind(MARK)? + MARK.len();
        let number = file[at..].split('.').next()?;
        let number = number.parse().ok().filter(|_| number.len() >= 10)?;
        Some(Self {
            file: file.to_owned(),
            number,
        })
    }

    /// The sequential node's name, for every seat of its number.
    pub(crate) fn head(&self) -> &str {
        let at = self.file.rfind(MARK).unwrap_or_default();
        let end = self.file[at..].find('.');
        &self.file[..end.map_or(self.file.len(), |end| at + end)]
    }

    /// Whether this is the sequential seat of its number.
    pub(crate) fn is_first(&self) -> bool {
        self.head().len() == self.file.len()
    }
}

/// Compares two numbers. They are 32 bits and wrap to the negative end: of two numbers, the one that is less
/// than half the circle behind came first. Servers that count in 64 bits never wrap. Numbers that are half the
/// circle apart, of which no server gave both, compare as numbers.
pub(crate) fn order(one: i64, other: i64) -> Ordering {
    match (i32::try_from(one), i32::try_from(other)) {
        (Ok(one), Ok(other)) if one.wrapping_sub(other) != i32::MIN => {
            one.wrapping_sub(other).cmp(&0)
        }
        _ => one.cmp(&other),
    }
}

/// The seats of a lock, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line(Vec<Seat>);

impl Line {
    pub(crate) fn new(children: &[String]) -> Self {
        let parsed = children.iter().filter_map(|file| Seat::parse(file));
        let mut seats: Vec<_> = parsed.collect();
        // Across the wrap, the order is total only as seen from one of the seats. They span far less than
        // half the circle.
        if let Some(origin) = seats.first().map(|seat| seat.number) {
            let place = |seat: &Seat| match (i32::try_from(seat.number), i32::try_from(origin)) {
                (Ok(number), Ok(origin)) => i64::from(number.wrapping_sub(origin)),
                _ => seat.number.wrapping_sub(origin),
            };
            seats.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.file.cmp(&b.file)));
        }
        Self(seats)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn find(&self, file: &str) -> Option<&Seat> {
        self.0.iter().find(|seat| seat.file == file)
    }

    /// Whether that seat exists and none is before it.
    pub(crate) fn is_first(&self, node: &Node) -> bool {
        self.find(&node.file).is_some() && self.ahead_of(node.number).is_none()
    }

    /// The seats created with this stem: for a sequential seat, without the seats beside it.
    pub(crate) fn begin_with(&self, stem: &str) -> impl Iterator<Item = &Seat> {
        let is_of =
            move |seat: &&Seat| seat.file == stem || seat.is_first() && seat.file.starts_with(stem);
        self.0.iter().filter(is_of)
    }

    /// The seats that hold the lock, or whose turn it is: no seat is ahead of them. It is the first in a queue
    /// of numbers that servers gave. A foreign number may lie anywhere, and then the sorted order says nothing.
    pub(crate) fn inside(&self) -> &[Seat] {
        let first = |seat: &&Seat| self.ahead_of(seat.number).is_none();
        let first = self.0.iter().find(first).or(self.0.first());
        first.map_or(&[], |first| self.of(first.number))
    }

    /// The seats of one number.
    pub(crate) fn of(&self, number: i64) -> &[Seat] {
        let mut runs = self.0.chunk_by(|one, other| one.number == other.number);
        let run = runs.find(|run| run[0].number == number);
        run.unwrap_or_default()
    }

    /// The seat right before that number: the one to watch. `None`: no seat is before it.
    pub(crate) fn ahead_of(&self, number: i64) -> Option<&Seat> {
        self.0
            .iter()
            .rev()
            .find(|seat| order(seat.number, number) == Ordering::Less)
    }

    /// The seats right before that number that do not hold the lock: not more of them than tell whether a client
    /// waits.
    pub(crate) fn queue_before(&self, number: i64) -> &[Seat] {
        let inside = self.inside().first().map(|seat| seat.number);
        let is_before = |seat: &Seat| order(seat.number, number) == Ordering::Less;
        let end = self.0.iter().rposition(is_before).map_or(0, |at| at + 1);
        let is_inside = |seat: &Seat| Some(seat.number) == inside;
        let from = self.0[..end].iter().rposition(is_inside);
        let from = from.map_or(0, |at| at + 1);
        &self.0[from.max(end.saturating_sub(NEAR))..end]
    }

    /// Whether `ahead` is the only seat before that one, which exists.
    pub(crate) fn is_only_ahead(&self, ahead: &str, node: &Node) -> bool {
        let is_before = |seat: &&Seat| order(seat.number, node.number) == Ordering::Less;
        let mut before = self.0.iter().filter(is_before);
        before.next().is_some_and(|seat| seat.file == ahead)
            && before.next().is_none()
            && self.find(&node.file).is_some()
    }

    /// How many numbers are before that one.
    pub(crate) fn count_before(&self, number: i64) -> usize {
        let is_before = |one: &&i64| order(**one, number) == Ordering::Less;
        self.numbers().iter().filter(is_before).count()
    }

    /// How many numbers the queue has.
    pub(crate) fn len(&self) -> usize {
        self.numbers().len()
    }

    fn numbers(&self) -> Vec<i64> {
        let mut numbers: Vec<_> = self.0.iter().map(|seat| seat.number).collect();
        numbers.dedup();
        numbers
    }
}

/// The stem of a sequential node.
pub(crate) fn stem(id: u64) -> String {
    format!("_c_{id:016x}-{MARK}")
}

/// The name of one more seat beside a sequential one.
pub(crate) fn beside(head: &str, hold: HoldId) -> String {
    format!("{head}.{hold}")
}

/// The text before the number. Order depends on the text after its last occurrence.
pub(crate) const MARK: &str = "lock-";

/// How many seats before it a sharer reads: more than this are not all about to leave again.
pub(crate) const NEAR: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(files: &[&str]) -> Line {
        Line::new(
            &files
                .iter()
                .map(|file| (*file).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn seats_are_read_from_names_of_ours_and_of_curator() {
        let seat = Seat::parse("_c_00000000000000ff-lock-0000000007.0123456789abcdef").unwrap();
        assert_eq!((seat.number, seat.is_first()), (7, false));
        assert_eq!(seat.head(), "_c_00000000000000ff-lock-0000000007");
        let curator =
            Seat::parse("_c_3f2b1c9e-0d5a-4e53-9a52-0c1b2a3d4e5f-lock-0000000012").unwrap();
        assert_eq!((curator.number, curator.is_first()), (12, true));
        assert_eq!(
            Seat::parse("x-lock--2147483648").unwrap().number,
            -2_147_483_648
        );
        for stranger in [
            "meta",
            "lock-",
            "lock-12",
            "lock-00000000x1",
            "_c_x-__WRIT__0000000001",
        ] {
            assert_eq!(Seat::parse(stranger), None, "{stranger}");
        }
    }

    #[test]
    fn the_line_goes_on_across_the_wrap_of_numbers() {
        let seats = line(&[
            "b-lock--2147483648",
            "c-lock--2147483647",
            "a-lock-2147483647",
            "a-lock-2147483647.ff",
            "z-lock-2147483646",
        ]);
        assert_eq!(seats.inside(), [Seat::parse("z-lock-2147483646").unwrap()]);
        assert_eq!(
            seats
                .ahead_of(-2_147_483_648)
                .map(|seat| seat.file.as_str()),
            Some("a-lock-2147483647.ff")
        );
        assert_eq!(seats.ahead_of(2_147_483_646), None);
        assert_eq!((seats.count_before(-2_147_483_647), seats.len()), (3, 4));
        assert_eq!(
            order(i64::from(i32::MAX), i64::from(i32::MIN)),
            Ordering::Less
        );
        assert_eq!(order(1 << 40, 1 << 41), Ordering::Less);
    }

    #[test]
    fn seats_that_share_a_number_are_inside_together() {
        let seats = line(&[
            "b-lock-0000000009",
            "a-lock-0000000008.02",
            "a-lock-0000000008.01",
            "noise",
        ]);
        assert_eq!(seats.inside().len(), 2);
        assert_eq!(seats.inside()[0].head(), "a-lock-0000000008");
        assert_eq!(
            seats.ahead_of(9).map(|seat| seat.file.as_str()),
            Some("a-lock-0000000008.02")
        );
        assert_eq!(seats.queue_before(9), []);
        assert_eq!(
            seats.queue_before(10),
            [Seat::parse("b-lock-0000000009").unwrap()]
        );
        assert!(line(&["noise"]).is_empty());
        let nine = Node {
            file: "b-lock-0000000009".into(),
            number: 9,
            version: None,
        };
        assert!(!seats.is_only_ahead("a-lock-0000000008.01", &nine));
        assert!(!seats.is_only_ahead("a-lock-0000000008.02", &nine));
        let alone = line(&["b-lock-0000000009", "a-lock-0000000008.01", "noise"]);
        assert!(alone.is_only_ahead("a-lock-0000000008.01", &nine));
        assert!(!alone.is_only_ahead("a-lock-0000000008.02", &nine));
        let gone = line(&["a-lock-0000000008.01"]);
        assert!(!gone.is_only_ahead("a-lock-0000000008.01", &nine));
        assert!(!line(&["b-lock-0000000009"]).is_only_ahead("a-lock-0000000008.01", &nine));
    }
}
