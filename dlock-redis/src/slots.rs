//! Slots of a cluster: which master has which, by what the nodes say.
//!
//! All keys of a lock have one slot. Each node says which master has a slot and at which epoch; the claim with the
//! greatest epoch counts, as it does among the nodes.
//!
//! Epochs are compared among the answers of one round only, not with the map of an earlier round: a cluster that is
//! reset begins with small ones again. So where only a node that lags answers in time, its older map counts until the
//! next round. It gives no lock twice: a master that lost a slot refuses requests for it, and one that is cut off
//! serves for `cluster-node-timeout` at most.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

/// The address of a node, `host:port`.
pub(crate) type NodeAddr = Arc<str>;

/// The masters, and the slots that they have.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) masters: HashSet<NodeAddr>,
    nodes: Vec<NodeAddr>,
    /// For each slot the position of its owner among the nodes.
    owners: Vec<usize>,
    /// The addresses of masters by their other ones: a refusal may name the IP of a node that is known by its host name.
    aliases: HashMap<NodeAddr, NodeAddr>,
}

impl Map {
    /// Reads what nodes answered to `CLUSTER NODES`, each with the address at which it was asked.
    pub(crate) fn read(answers: &[(NodeAddr, String)], prefers_names: bool) -> Self {
        let mut claims = Vec::new();
        for (asked, text) in answers {
            let asked = asked.rsplit_once(':').map_or(&**asked, |(host, _)| host);
            let read = |line| Node::read(line, asked, prefers_names);
            claims.extend(text.lines().filter_map(read));
        }
        // The last one that is entered remains: the one with the greatest epoch, and the first of those.
        claims.reverse();
        claims.sort_by_key(|claim| claim.epoch);
        claims.dedup();
        let mut nodes: Vec<_> = claims.iter().map(|claim| claim.addr.clone()).collect();
        nodes.sort();
        nodes.dedup();
        let mut owners = vec![UNCLAIMED; COUNT];
        for claim in &claims {
            let node = nodes.binary_search(&claim.addr).unwrap_or(UNCLAIMED);
            for (from, to) in &claim.slots {
                if let Some(slots) = owners.get_mut(*from..=*to) {
                    slots.fill(node);
                }
            }
        }
        // A node without slots may be a replica by now.
        let mut used = owners.clone();
        used.dedup();
        let masters = used.iter().filter_map(|node| nodes.get(*node).cloned());
        let aliases = claims
            .iter()
            .filter_map(|claim| Some((claim.alias.clone()?, claim.addr.clone())));
        Self {
            masters: masters.collect(),
            aliases: aliases.collect(),
            nodes,
            owners,
        }
    }

    /// The address by which the map knows that node.
    pub(crate) fn known_as(&self, addr: NodeAddr) -> NodeAddr {
        self.aliases.get(&addr).cloned().unwrap_or(addr)
    }

    pub(crate) fn owner(&self, slot: u16) -> Option<NodeAddr> {
        let node = self.owners.get(usize::from(slot))?;
        self.nodes.get(*node).cloned()
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(&self.masters).finish()
    }
}

/// A master, as a line of `CLUSTER NODES` shows it.
#[derive(PartialEq, Eq)]
struct Node {
    addr: NodeAddr,
    alias: Option<NodeAddr>,
    epoch: u64,
    slots: Vec<(usize, usize)>,
}

impl Node {
    fn read(line: &str, asked: &str, prefers_names: bool) -> Option<Self> {
        let mut words = line.split(' ').skip(1);
        let (addr, rest) = words.next()?.split_once('@')?;
        let (ip, port) = addr.rsplit_once(':')?;
        let name = rest.split(',').nth(1).unwrap_or_default();
        let (host, other) = match ip {
            _ if prefers_names && !name.is_empty() => (name, ip),
            // It never met another node.
            "" => (asked, name),
            ip => (ip, name),
        };
        let flags: Vec<_> = words.next()?.split(',').collect();
        let unusable = ["handshake", "noaddr"];
        if !flags.contains(&"master") || flags.iter().any(|flag| unusable.contains(flag)) {
            return None;
        }
        let epoch = words.nth(3)?.parse().ok()?;
        // A slot in brackets is being moved: it is in a range, too, where the node still has it.
        let slots = words.skip(1).filter(|slot| !slot.starts_with('['));
        let range = |slot: &str| {
            let (from, to) = slot.split_once('-').unwrap_or((slot, slot));
            Some((from.parse().ok()?, to.parse().ok()?))
        };
        Some(Self {
            addr: format!("{host}:{port}").into(),
            alias: (!other.is_empty()).then(|| format!("{other}:{port}").into()),
            epoch,
            slots: slots.filter_map(range).collect(),
        })
    }
}

/// The slot of a lock's record: of what is between its braces.
pub(crate) fn slot_of(record: &str) -> u16 {
    let tag = record.split(['{', '}']).nth(1).unwrap_or(record);
    crc16(tag.as_bytes()) % 16_384
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 }
        })
    })
}

const COUNT: usize = 16_384;
/// The owner of a slot that no node claims.
const UNCLAIMED: usize = usize::MAX;

#[cfg(test)]
mod tests {
    use super::{Map, crc16, slot_of};

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("dlock:{foo}"), 12_182);
        assert_eq!(slot_of("dlock:{foo}:line"), 12_182);
    }

    #[test]
    fn the_claim_with_the_greatest_epoch_counts() {
        let lagging = "a :7000@17000 myself,master - 0 0 1 connected 0-16383";
        let others = "a 10.0.0.1:7000@17000,one master,fail - 0 0 1 connected 8-16383\n\
                      b 10.0.0.2:7000@17000,two myself,master - 0 0 3 connected 0-2 4 [9->-a]\n\
                      c 10.0.0.3:7000@17000,three slave b 0 0 3 connected\n\
                      d :0@0 master,noaddr - 0 0 9 disconnected 0-16383\n\nbad line";
        let answers = [lagging, others].map(|it| ("10.0.0.1:7000".into(), it.to_owned()));
        let map = Map::read(&answers, false);
        for slot in [0, 2, 4] {
            assert_eq!(map.owner(slot).as_deref(), Some("10.0.0.2:7000"));
        }
        for slot in [3, 9, 16_383] {
            assert_eq!(map.owner(slot).as_deref(), Some("10.0.0.1:7000"));
        }
        assert_eq!(map.masters.len(), 2);
        let named = Map::read(&answers[1..], true);
        assert_eq!(named.owner(0).as_deref(), Some("two:7000"));
        // As a refusal names it.
        assert_eq!(&*named.known_as("10.0.0.2:7000".into()), "two:7000");
        assert_eq!(&*map.known_as("two:7000".into()), "10.0.0.2:7000");
        assert_eq!(&*named.known_as("10.0.0.9:7000".into()), "10.0.0.9:7000");
        assert_eq!(named.owner(3), None);
        assert!(Map::read(&[], false).masters.is_empty());
    }
}
