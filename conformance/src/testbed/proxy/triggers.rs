//! Armed faults and running watches of a proxy, and the search for their needles.

use super::{
    fault::{ArmedFault, Fault, LONGEST_NEEDLE, Trigger, checked},
    link::Direction,
    tally::Watch,
};
use tokio::sync::watch;

/// All armed faults and running watches of a proxy.
#[derive(Debug, Default)]
pub(super) struct Triggers {
    armed: Vec<(Trigger, ArmedFault)>,
    watches: Vec<(Direction, Vec<u8>, watch::Sender<u64>)>,
}

impl Triggers {
    pub(super) fn arm(&mut self, trigger: Trigger, fault: Fault) -> ArmedFault {
        let armed = ArmedFault::new(fault, trigger.http2);
        self.armed.push((trigger, armed.clone()));
        armed
    }

    pub(super) fn disarm_all(&mut self) {
        self.armed.clear();
    }

    pub(super) fn watch(&mut self, direction: Direction, needle: Vec<u8>) -> Watch {
        let (count, seen) = watch::channel(0);
        self.watches.push((direction, checked(needle), count));
        Watch { seen, mark: 0 }
    }

    /// Counts, and takes out the faults that this piece of a stream triggers: their positions, in
    /// ascending order, and the faults.
    pub(super) fn scan(
        &mut self,
        direction: Direction,
        stream: &mut Tail,
        piece: &[u8],
    ) -> Vec<(usize, ArmedFault)> {
        let old = stream.extend(piece);
        self.count(direction, stream, old);
        let mut hits = match direction {
            Direction::ClientToServer => self.take_struck(stream, old),
            Direction::ServerToClient => Vec::new(),
        };
        hits.sort_by_key(|(at, _)| *at);
        stream.trim();
        hits
    }

    fn count(&mut self, direction: Direction, stream: &Tail, old: usize) {
        self.watches.retain(|(_, _, count)| !count.is_closed());
        let watches = self.watches.iter();
        for (_, needle, count) in watches.filter(|(watched, ..)| *watched == direction) {
            let found = stream.find(needle, old).count() as u64;
            if found > 0 {
                count.send_modify(|count| *count += found);
            }
        }
    }

    fn take_struck(&mut self, stream: &Tail, old: usize) -> Vec<(usize, ArmedFault)> {
        self.armed.retain(|(_, armed)| !armed.is_disarmed());
        let mut taken: Vec<(Vec<u8>, usize)> = Vec::new();
        let mut hits = Vec::new();
        self.armed.retain_mut(|(trigger, armed)| {
            let free = |at: &usize| !taken.contains(&(trigger.needle.clone(), *at));
            let places: Vec<usize> = stream.find(&trigger.needle, old).filter(free).collect();
            let Some(&at) = places.get(trigger.skip) else {
                trigger.skip -= places.len();
                return true;
            };
            taken.push((trigger.needle.clone(), at));
            // A needle that began in an earlier piece can only be stopped from here on.
            hits.push((at.saturating_sub(old), armed.clone()));
            false
        });
        hits
    }
}

/// The last bytes of a stream, kept so that a needle is found across the pieces TCP makes of it.
#[derive(Debug, Default)]
pub(super) struct Tail(Vec<u8>);

impl Tail {
    fn extend(&mut self, piece: &[u8]) -> usize {
        let old = self.0.len();
        self.0.extend_from_slice(piece);
        old
    }

    /// The position where the needle begins. Only occurrences that reach into the new bytes count;
    /// others were found before.
    fn find<'a>(&'a self, needle: &'a [u8], old: usize) -> impl Iterator<Item = usize> + 'a {
        let first = (old + 1).saturating_sub(needle.len());
        self.0[first..]
            .windows(needle.len())
            .enumerate()
            .filter_map(move |(at, window)| (window == needle).then_some(first + at))
    }

    fn trim(&mut self) {
        let excess = self.0.len().saturating_sub(LONGEST_NEEDLE - 1);
        self.0.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(triggers: &mut Triggers, pieces: &[&[u8]]) -> Vec<Vec<usize>> {
        let mut stream = Tail::default();
        let mut scan = |piece: &&[u8]| {
            let hits = triggers.scan(Direction::ClientToServer, &mut stream, piece);
            hits.into_iter().map(|(at, _)| at).collect()
        };
        pieces.iter().map(&mut scan).collect()
    }

    #[test]
    fn a_needle_is_found_once_however_it_is_split() {
        for split in 0..=9 {
            let mut triggers = Triggers::default();
            let watch = triggers.watch(Direction::ClientToServer, b"EVAL".to_vec());
            let (one, two) = b"xxxEVALyy".split_at(split);
            scan(&mut triggers, &[one, two, b"zzz"]);
            assert_eq!(watch.seen(), 1, "split at {split}");
        }
    }

    #[test]
    fn a_strike_is_where_the_needle_begins_or_where_the_new_bytes_do() {
        let mut triggers = Triggers::default();
        let _strike = triggers.arm(Trigger::on("GET"), Fault::HoldRequest);
        let _strike = triggers.arm(Trigger::on("GET"), Fault::HoldRequest);
        let hits = scan(&mut triggers, &[b"abcGETxxG", b"ETGET"]);
        assert_eq!(hits, vec![vec![3], vec![0]]);
    }

    #[test]
    fn each_occurrence_goes_to_the_first_fault_that_does_not_skip_it() {
        let mut triggers = Triggers::default();
        let second = triggers.arm(Trigger::on("G").skip(1), Fault::LoseReply);
        let first = triggers.arm(Trigger::on("G"), Fault::CutBeforeRequest);
        let mut stream = Tail::default();
        let mut next = |piece: &[u8]| triggers.scan(Direction::ClientToServer, &mut stream, piece);
        let faults = |hits: Vec<(usize, ArmedFault)>| {
            hits.iter().map(|(_, s)| s.fault()).collect::<Vec<_>>()
        };
        assert_eq!(faults(next(b"G")), vec![first.fault()]);
        assert_eq!(faults(next(b"G")), vec![second.fault()]);
        assert_eq!(faults(next(b"G")), vec![]);
    }
}
