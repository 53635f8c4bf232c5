//! The map of a cluster: which node serves which slots, read from `CLUSTER SHARDS`.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use redis::Value;

use super::slots::SLOTS;
use crate::backend::redis::views::Address;

/// The masters, and their slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    /// Ranges of slots, with the first slot, the last slot and the master. They are in order.
    ranges: Vec<(u16, u16, Address)>,
    /// All masters that are not down, even those without slots.
    listed: BTreeSet<Address>,
    /// Whether the node that has sent this map can reach most of the masters.
    is_connected: bool,
    /// The epoch of the cluster. It grows with each change that the masters agree on.
    epoch: u64,
    /// Single slots for which a node has reported another master since this map was read.
    moved: HashMap<u16, Address>,
    /// The last known masters of the slots that have no master in this map.
    earlier: HashMap<u16, Address>,
    /// Whether a master has no port of the kind that this client needs: with TLS, or without.
    pub(super) lacks_ports: bool,
    /// Whether at most as many nodes had answered as were silent when this map was chosen as the
    /// newest.
    pub(super) is_of_few: bool,
}

impl Map {
    /// Reads the answers to `CLUSTER SHARDS` and `CLUSTER INFO` of the node `told_by`. `None` if
    /// one of them cannot be read.
    pub(super) fn parse(
        answer: Value,
        info: &str,
        told_by: &Address,
        encrypted: bool,
    ) -> Option<Self> {
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let mut map = Self {
            is_connected: field("cluster_state:")? == "ok",
            epoch: field("cluster_current_epoch:")?.parse().ok()?,
            ..Self::default()
        };
        for shard in items(answer)? {
            let mut shard = fields(shard)?;
            let slots: Vec<u16> = redis::from_redis_value(shard.remove("slots")?).ok()?;
            let nodes = items(shard.remove("nodes")?)?;
            let nodes = nodes.into_iter().map(fields).collect::<Option<Vec<_>>>()?;
            let is = |node: &HashMap<String, Value>, field: &str, value: &str| {
                node.get(field).and_then(text).as_deref() == Some(value)
            };
            let master = |node: &&HashMap<String, Value>| is(node, "role", "master");
            // For a moment after a failover, a shard may list two nodes as masters. The master that
            // has failed serves no slot.
            let masters = || nodes.iter().filter(master);
            let sound = || masters().filter(|node| is(node, "health", "online"));
            let listed = sound().filter_map(|node| address(node, told_by, encrypted));
            map.listed.extend(listed);
            let Some(master) = sound().next().or_else(|| masters().next()) else {
                continue;
            };
            let Some(address) = address(master, told_by, encrypted) else {
                map.lacks_ports |= !slots.is_empty();
                continue;
            };
            for range in slots.chunks_exact(2) {
                map.ranges.push((range[0], range[1], address.clone()));
            }
        }
        map.ranges.sort_unstable();
        Some(map)
    }

    /// The node that serves a slot.
    pub(super) fn master(&self, slot: u16) -> Option<&Address> {
        if let Some(moved) = self.moved.get(&slot) {
            return Some(moved);
        }
        let behind = self.ranges.partition_point(|(first, ..)| *first <= slot);
        let range = behind.checked_sub(1).and_then(|at| self.ranges.get(at));
        match range {
            Some((_, last, address)) if slot <= *last => Some(address),
            _ => self.earlier.get(&slot),
        }
    }

    /// Takes over the masters of slots that have no master in this map, from the map before.
    ///
    /// For a moment after a failover, a node may list a shard without its slots. Then the master
    /// before is the one to ask: it serves the slot, or it knows the new master.
    pub(super) fn after(mut self, before: &Self) -> Self {
        if self.uncovered() == 0 {
            return self;
        }
        let missing = (0..SLOTS).filter(|slot| self.master(*slot).is_none());
        let known = missing.filter_map(|slot| Some((slot, before.master(slot)?.clone())));
        self.earlier = known.collect();
        self
    }

    /// Notes the report of a node that another node serves this slot.
    pub(super) fn moved(&mut self, slot: u16, to: Address) {
        self.moved.insert(slot, to);
    }

    /// All nodes that serve a slot.
    pub(super) fn masters(&self) -> BTreeSet<Address> {
        let ranges = self.ranges.iter().map(|(.., address)| address);
        ranges.chain(self.moved.values()).cloned().collect()
    }

    /// Whether this node is a master that is not down. Such a master may have no slots, for two
    /// reasons: slots are being moved to it, or it was demoted and some nodes do not know this yet.
    pub(super) fn lists(&self, node: &Address) -> bool {
        self.listed.contains(node)
    }

    /// Whether `other` is more likely to be out of date than this map. A node that is cut off from
    /// the other nodes sends the last map that it knows. This map has a lower epoch. After a while
    /// the node notices that it is cut off, and reports this too.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        let rank = |map: &Self| (map.is_connected, map.epoch, Reverse(map.uncovered()));
        rank(self) > rank(other)
    }

    /// Whether this map is probably older than `known`. This is so if it has a lower epoch, and at
    /// least as many nodes are silent as have answered. The nodes that have sent it may be cut off
    /// from the nodes that have sent `known`.
    pub(super) fn is_doubtful_beside(&self, known: &Self) -> bool {
        self.is_of_few && self.epoch < known.epoch
    }

    /// How many slots are served by no node.
    pub(super) fn uncovered(&self) -> usize {
        let covered = self
            .ranges
            .iter()
            .map(|(first, last, _)| usize::from(last - first) + 1);
        usize::from(SLOTS).saturating_sub(covered.sum())
    }
}

/// The address at which clients reach a node. `None` if the node has no port with TLS, or without
/// TLS, as this client needs it.
fn address(node: &HashMap<String, Value>, told_by: &Address, encrypted: bool) -> Option<Address> {
    let port = node.get(if encrypted { "tls-port" } else { "port" })?;
    let port = redis::from_redis_value_ref(port).ok()?;
    let host = node.get("endpoint").and_then(text).unwrap_or_default();
    Some(Address {
        host: known_host(host, told_by),
        port,
    })
}

/// The host of a node. If a node does not know its own address, it gives an empty host, or `?`. In
/// this case the host is the host at which the node was asked.
pub(super) fn known_host(host: String, told_by: &Address) -> String {
    match host.as_str() {
        "" | "?" => told_by.host.clone(),
        _ => host,
    }
}

fn items(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

/// The fields of a map. RESP2 and RESP3 write them in different ways.
fn fields(value: Value) -> Option<HashMap<String, Value>> {
    redis::from_redis_value(value).ok()
}

fn text(value: &Value) -> Option<String> {
    redis::from_redis_value_ref(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address {
            host: host.into(),
            port,
        }
    }

    fn node(port: u16, endpoint: &str, role: &str, health: &str) -> String {
        format!(
            "*12\r\n+id\r\n+n{port}\r\n+port\r\n:{port}\r\n+endpoint\r\n${}\r\n{endpoint}\r\n+role\r\n+{role}\r\n\
             +health\r\n+{health}\r\n+tls-port\r\n:{}\r\n",
            endpoint.len(),
            port + 1000
        )
    }

    fn shard(slots: &[u16], nodes: &[String]) -> String {
        let numbers: String = slots.iter().map(|slot| format!(":{slot}\r\n")).collect();
        let (count, nodes) = (nodes.len(), nodes.concat());
        format!(
            "*4\r\n+slots\r\n*{}\r\n{numbers}+nodes\r\n*{count}\r\n{nodes}",
            slots.len()
        )
    }

    const INFO: &str = "cluster_state:ok\r\ncluster_current_epoch:6\r\n";

    fn told(shards: &str, info: &str, encrypted: bool) -> Map {
        let shards = redis::parse_redis_value(shards.as_bytes()).unwrap();
        Map::parse(shards, info, &at("asked", 1), encrypted).unwrap()
    }

    fn map(shards: &[String], encrypted: bool) -> Map {
        let answer = format!("*{}\r\n{}", shards.len(), shards.concat());
        told(&answer, INFO, encrypted)
    }

    #[test]
    fn each_slot_has_the_master_of_its_shard() {
        let first = [
            node(1, "h1", "replica", "online"),
            node(2, "h2", "master", "online"),
        ];
        let second = [
            node(3, "h3", "master", "fail"),
            node(4, "", "master", "online"),
        ];
        let map = map(
            &[
                shard(&[9000, 16383, 0, 10], &first),
                shard(&[11, 12], &second),
            ],
            false,
        );

        for (slot, master) in [
            (0, Some(at("h2", 2))),
            (10, Some(at("h2", 2))),
            (11, Some(at("asked", 4))),
            (13, None),
            (8999, None),
            (9000, Some(at("h2", 2))),
            (16383, Some(at("h2", 2))),
        ] {
            assert_eq!(map.master(slot), master.as_ref(), "{slot}");
        }
        assert_eq!(map.uncovered(), 16384 - 11 - 2 - 7384);
    }

    #[test]
    fn a_client_with_tls_uses_the_port_for_it() {
        let nodes = [node(1, "?", "master", "online")];
        let map = map(&[shard(&[0, 16383], &nodes)], true);

        assert_eq!(map.master(7), Some(&at("asked", 1001)));
        assert_eq!(map.uncovered(), 0);
    }

    #[test]
    fn what_a_node_has_said_about_a_slot_counts_for_this_slot() {
        let nodes = [node(1, "h1", "master", "online")];
        let mut map = map(&[shard(&[0, 16383], &nodes)], false);

        map.moved(7, at("h2", 2));

        assert_eq!(map.master(7), Some(&at("h2", 2)));
        assert_eq!(map.master(8), Some(&at("h1", 1)));
        assert_eq!(map.masters().len(), 2);
    }

    #[test]
    fn a_slot_without_a_master_is_asked_for_at_its_last_one() {
        let [h1, h2] =
            [1, 2].map(|number| [node(number, &format!("h{number}"), "master", "online")]);
        let before = map(&[shard(&[0, 9], &h1), shard(&[10, 19], &h2)], false);
        let gap = || map(&[shard(&[10, 19], &h1)], false);

        let after = gap().after(&gap().after(&before));

        assert_eq!(after.master(7), Some(&at("h1", 1)));
        assert_eq!(after.master(17), Some(&at("h1", 1)));
        assert_eq!(after.master(20), None);
        assert_eq!(after.uncovered(), gap().uncovered());
        assert_eq!(gap().master(7), None);
    }

    #[test]
    fn a_map_is_newer_if_its_node_is_connected_and_has_heard_of_more() {
        let nodes = [node(1, "h1", "master", "online")];
        let all = format!("*1\r\n{}", shard(&[0, 16383], &nodes));
        let some = format!("*1\r\n{}", shard(&[0, 16000], &nodes));
        let map = |state: &str, epoch: u64, shards: &str| {
            let info = format!("cluster_state:{state}\r\ncluster_current_epoch:{epoch}\r\n");
            told(shards, &info, false)
        };
        let from_newest = [
            map("ok", 9, &all),
            map("ok", 9, &some),
            map("ok", 8, &all),
            map("fail", 10, &all),
        ];

        for (at, map) in from_newest.iter().enumerate() {
            for (other_at, other) in from_newest.iter().enumerate() {
                assert_eq!(map.is_newer_than(other), at < other_at, "{at} {other_at}");
            }
        }
    }

    #[test]
    fn a_master_without_slots_is_listed_and_one_that_is_down_is_not() {
        let nodes = [
            node(1, "h1", "master", "online"),
            node(2, "h2", "replica", "online"),
        ];
        let empty = [node(3, "h3", "master", "online")];
        let failed = [node(4, "h4", "master", "fail")];
        let map = map(
            &[
                shard(&[0, 16383], &nodes),
                shard(&[], &empty),
                shard(&[], &failed),
            ],
            false,
        );

        let listed = (1..=4).map(|number| map.lists(&at(&format!("h{number}"), number)));
        assert_eq!(listed.collect::<Vec<_>>(), [true, false, true, false]);
    }
}
