//! The nodes of a Redis Cluster: masters that share the slots, and a replica of each master.

use std::collections::HashMap;
use std::time::Duration;

use redis::Value;

use crate::eventually::{poll, wait_until};
use crate::ports::free_port;
use crate::redis_server::RedisServer;

/// The user that a replica logs in as at its master.
const REPLICA: &str = "replica";

const SLOTS: u16 = 16_384;

/// Time for the nodes to find each other, which takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A timeout that is longer than any fact. With it, a dead master is replaced only on request.
pub const NEVER: Duration = Duration::from_secs(3600);

/// A cluster. Each node is a process of its own. All of them end when this value is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// First the nodes that were started as masters. Then their replicas in the same order, if
    /// there are any.
    pub nodes: Vec<RedisServer>,
}

impl Cluster {
    /// Three masters and three replicas. If a master was silent for `timeout`, its replica replaces
    /// it. When this returns, all nodes know each other, and a failover is possible.
    pub fn start(timeout: Duration) -> Self {
        Self::with(3, true, timeout, &[])
    }

    /// One master with all slots. It is ready two seconds after its start.
    pub fn of_one() -> Self {
        Self::with(1, false, NEVER, &[])
    }

    /// A cluster with this number of masters, with or without replicas. `extra` has more arguments
    /// for all nodes.
    pub fn with(masters: u16, replicas: bool, timeout: Duration, extra: &[&str]) -> Self {
        let timeout = timeout.as_millis().to_string();
        let count = if replicas { 2 * masters } else { masters };
        let nodes = (0..count).map(|_| {
            let bus = free_port().to_string();
            let mut arguments = vec!["--cluster-enabled", "yes", "--cluster-port", &bus];
            arguments.extend(["--cluster-node-timeout", &timeout]);
            // A replica may take over even if it has heard nothing of its master for long. It never
            // changes to another master.
            arguments.extend(["--cluster-replica-validity-factor", "0"]);
            arguments.extend(["--cluster-allow-replica-migration", "no"]);
            arguments.extend(["--masteruser", REPLICA, "--masterauth", REPLICA]);
            arguments.extend(["--user", REPLICA, "on", "nopass", "~*", "&*", "+@all"]);
            arguments.extend(extra);
            RedisServer::with(&arguments)
        });
        let cluster = Self {
            nodes: nodes.collect(),
        };
        cluster.meet(masters);
        cluster
    }

    fn meet(&self, masters: u16) {
        let first = &self.nodes[0];
        for (epoch, node) in self.nodes.iter().enumerate() {
            let epoch = (epoch + 1).to_string();
            node.command::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
        }
        for node in &self.nodes[1..] {
            let (port, bus) = (node.port().to_string(), bus_port(node).to_string());
            first.command::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        let (masters, replicas) = self.nodes.split_at(masters.into());
        let share = SLOTS.div_ceil(u16::try_from(masters.len()).unwrap());
        for (at, master) in (0..).zip(masters) {
            let slots = at * share..SLOTS.min((at + 1) * share);
            let (from, to) = (slots.start.to_string(), (slots.end - 1).to_string());
            master.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", &from, &to]);
        }
        let count = format!("cluster_known_nodes:{}\r", self.nodes.len());
        wait_until("all nodes know each other", PATIENCE, || {
            let told = |node: &RedisServer| node.command::<String>(&["CLUSTER", "INFO"]);
            self.nodes.iter().all(|node| told(node).contains(&count))
        });
        for (replica, master) in replicas.iter().zip(masters) {
            let id = id(master);
            poll(PATIENCE, || {
                let follows = replica.try_command::<()>(&["CLUSTER", "REPLICATE", &id]);
                follows.ok()
            })
            .expect("the replica does not know its master");
        }
        self.wait_until_complete();
    }

    /// Waits until every running node sees a master for every slot, and every replica follows its
    /// master.
    pub fn wait_until_complete(&self) {
        let running = || self.nodes.iter().filter(|node| node.is_running());
        let told = |node: &RedisServer, what: [&str; 2]| node.command::<String>(&what);
        wait_until("the cluster is complete", PATIENCE, || {
            running().all(|node| {
                let replication = told(node, ["INFO", "replication"]);
                let follows = replication.contains("role:master")
                    || replication.contains("master_link_status:up");
                let shards = shards(node);
                let healthy = shards.iter().flat_map(|shard| &shard.nodes);
                let healthy = healthy.filter(|(_, role, health)| {
                    health == "online" && ["master", "replica"].contains(&role.as_str())
                });
                follows
                    && told(node, ["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && healthy.count() == running().count()
            })
        });
    }

    pub fn url(&self) -> String {
        let hosts = self.nodes.iter();
        let hosts: Vec<_> = hosts
            .map(|node| format!("127.0.0.1:{}", node.port()))
            .collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// Lets the map name this port for a node, in place of its own. When this returns, all nodes
    /// know it.
    pub fn announce(&self, node: &RedisServer, port: u16) {
        let port = port.to_string();
        node.command::<()>(&["CONFIG", "SET", "cluster-announce-port", &port]);
        wait_until("all nodes know the port", PATIENCE, || {
            let mut maps = self.nodes.iter();
            maps.all(|node| {
                let map: String = node.command(&["CLUSTER", "NODES"]);
                map.contains(&format!(":{port}@"))
            })
        });
    }

    /// The master that serves the slot of this key, as the first running node sees it.
    pub fn master_of(&self, key: &str) -> &RedisServer {
        let asked = self.nodes.iter().find(|node| node.is_running()).unwrap();
        self.master_by(asked, slot(asked, key))
            .unwrap_or_else(|| panic!("no node serves the slot of {key}"))
    }

    fn master_by(&self, asked: &RedisServer, slot: u16) -> Option<&RedisServer> {
        let shards = shards(asked);
        let mut shards = shards.iter();
        let shard = shards.find(|shard| shard.slots.iter().any(|range| range.contains(&slot)))?;
        let masters = shard.nodes.iter().filter(|(_, role, _)| role == "master");
        let master = masters.max_by_key(|(.., health)| health == "online")?;
        self.nodes.iter().find(|node| node.port() == master.0)
    }

    /// All running nodes that are masters.
    pub fn masters(&self) -> Vec<&RedisServer> {
        let is_master = |node: &&RedisServer| {
            node.is_running()
                && node
                    .command::<String>(&["INFO", "replication"])
                    .contains("role:master")
        };
        self.nodes.iter().filter(is_master).collect()
    }

    /// The running replica of a master. The master may be down.
    pub fn replica_of(&self, master: &RedisServer) -> &RedisServer {
        let port = format!("master_port:{}\r", master.port());
        let follows = |node: &&RedisServer| {
            node.is_running()
                && node
                    .command::<String>(&["INFO", "replication"])
                    .contains(&port)
        };
        self.nodes.iter().find(follows).expect("it has no replica")
    }

    /// Waits until all replicas have everything that was written.
    pub fn wait_until_replicated(&self) {
        for master in self.masters() {
            master.wait_until_received_by(self.replica_of(master));
        }
    }

    /// From now on, no write to this master reaches its replica.
    pub fn stop_replication(&self, master: &RedisServer) {
        master.command::<()>(&["ACL", "SETUSER", REPLICA, "off"]);
        master.command::<()>(&["CLIENT", "KILL", "USER", REPLICA]);
    }

    /// Waits until all running nodes see another master for the slot of this key.
    pub fn wait_for_another_master_than(&self, port: u16, key: &str) {
        wait_until("another master", PATIENCE, || {
            let others = self.nodes.iter();
            let mut others = others.filter(|node| node.port() != port && node.is_running());
            others.all(|node| {
                let master = self.master_by(node, slot(node, key));
                master.is_some_and(|master| master.port() != port)
            })
        });
    }

    /// Makes the replica of a master the master. When this returns, both nodes know it, and no data
    /// is lost.
    pub fn fail_over(&self, master: &RedisServer) {
        self.replace(master, &["CLUSTER", "FAILOVER"]);
    }

    /// Like [`fail_over`](Self::fail_over), even if the replica has not received everything. What
    /// it has not received is lost.
    pub fn fail_over_with_loss(&self, master: &RedisServer) {
        self.replace(master, &["CLUSTER", "FAILOVER", "FORCE"]);
    }

    fn replace(&self, master: &RedisServer, words: &[&str]) {
        self.promote(self.replica_of(master), master, words);
    }

    /// Makes a replica the master by this command, and waits until both nodes know it.
    pub fn promote(&self, replica: &RedisServer, master: &RedisServer, words: &[&str]) {
        // The replica refuses while it has no connection to the master on the bus of the cluster.
        // On a busy machine it loses this connection at times.
        wait_until("the replica begins", PATIENCE, || {
            replica.try_command::<()>(words).is_ok()
        });
        let port = format!("master_port:{}\r", replica.port());
        wait_until("it is a replica", PATIENCE, || {
            master
                .command::<String>(&["INFO", "replication"])
                .contains(&port)
        });
        self.wait_until_complete();
    }

    /// Gives all slots to one of two masters. The slots must have no keys.
    pub fn take_all_slots(&self, master: &RedisServer) {
        let id = id(master);
        for slot in 0..SLOTS {
            let words = ["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id];
            for node in &self.nodes {
                node.command::<()>(&words);
            }
        }
        self.wait_until_complete();
    }

    /// Begins to move the slot of a key to another master. The keys are not moved yet.
    pub fn begin_moving(&self, key: &str, to: &RedisServer) -> u16 {
        let from = self.master_of(key);
        let slot = slot(from, key);
        let number = slot.to_string();
        to.command::<()>(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &id(from)]);
        from.command::<()>(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &id(to)]);
        slot
    }

    /// Moves one key.
    pub fn move_key(&self, from: &RedisServer, to: &RedisServer, key: &str) {
        let port = to.port().to_string();
        let login = ["AUTH2", REPLICA, REPLICA];
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, key, "0", "5000"];
        words.extend(login);
        from.command::<Value>(&words);
    }

    /// Moves the remaining keys of a slot, and then the slot.
    pub fn finish_moving(&self, slot: u16, from: &RedisServer, to: &RedisServer) {
        let number = slot.to_string();
        loop {
            let keys: Vec<String> = from.command(&["CLUSTER", "GETKEYSINSLOT", &number, "100"]);
            if keys.is_empty() {
                break;
            }
            for key in keys {
                self.move_key(from, to, &key);
            }
        }
        for node in [to, from] {
            node.command::<()>(&["CLUSTER", "SETSLOT", &number, "NODE", &id(to)]);
        }
    }

    /// Moves the slot of a key with all its keys. Returns the master that has it now.
    pub fn move_slot_of(&self, key: &str) -> &RedisServer {
        let from = self.master_of(key);
        let masters = self.masters();
        let to = masters.into_iter().find(|node| node.port() != from.port());
        let to = to.expect("another master");
        let slot = self.begin_moving(key, to);
        self.finish_moving(slot, from, to);
        to
    }
}

/// One entry of `CLUSTER SHARDS`.
struct Shard {
    slots: Vec<std::ops::RangeInclusive<u16>>,
    /// The port, the role and the health of each node.
    nodes: Vec<(u16, String, String)>,
}

fn shards(asked: &RedisServer) -> Vec<Shard> {
    let told: Vec<HashMap<String, Value>> = asked.command(&["CLUSTER", "SHARDS"]);
    let shard = |mut shard: HashMap<String, Value>| {
        let slots: Vec<u16> = redis::from_redis_value(shard.remove("slots").unwrap()).unwrap();
        let nodes: Vec<HashMap<String, Value>> =
            redis::from_redis_value(shard.remove("nodes").unwrap()).unwrap();
        let node = |mut node: HashMap<String, Value>| {
            let mut text = |field| redis::from_redis_value(node.remove(field).unwrap()).unwrap();
            let (role, health) = (text("role"), text("health"));
            let port = redis::from_redis_value(node.remove("port").unwrap()).unwrap();
            (port, role, health)
        };
        Shard {
            slots: slots.chunks(2).map(|range| range[0]..=range[1]).collect(),
            nodes: nodes.into_iter().map(node).collect(),
        }
    };
    told.into_iter().map(shard).collect()
}

/// The slot of a key, as the server computes it.
pub fn slot(node: &RedisServer, key: &str) -> u16 {
    node.command(&["CLUSTER", "KEYSLOT", key])
}

fn id(node: &RedisServer) -> String {
    node.command(&["CLUSTER", "MYID"])
}

fn bus_port(node: &RedisServer) -> u16 {
    let (_, port): (String, u16) = node.command(&["CONFIG", "GET", "cluster-port"]);
    port
}
