//! Three ZooKeeper servers that elect a leader. A test can cut them off from each other.

use crate::daemon;
use crate::eventually::poll;
use crate::ports::free_port;
use crate::proxy::Proxy;
use crate::zookeeper_server::{START, ZooKeeperServer};

/// Three servers that elect a leader.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<ZooKeeperServer>,
    /// The proxies between the servers, if the servers can be cut off from each other.
    bridges: Vec<Bridge>,
}

/// The number of the server that leads an ensemble with bridges.
const FIRST_LEADER: usize = 2;

/// A proxy for the connections from one server to another.
#[derive(Debug)]
struct Bridge {
    between: [usize; 2],
    /// Whether a follower uses this proxy to connect to its leader. If not, votes go through it.
    follows: bool,
    proxy: Proxy,
}

impl Ensemble {
    /// Starts an ensemble. Returns when all three servers serve. Its ticks are 500 ms, so a session
    /// may be as short as a second.
    pub fn start() -> Self {
        Self::launch(false, 10)
    }

    /// An ensemble whose servers can be cut off from each other. The second server leads, and the
    /// others follow. A server that is cut off notices it only after ten seconds.
    pub fn with_bridges() -> Self {
        Self::launch(true, 20)
    }

    fn launch(bridged: bool, sync_limit: u32) -> Self {
        ZooKeeperServer::available().unwrap_or_else(|reason| panic!("{reason}"));
        // As for a single server, all ports may be taken. Here there are nine ports.
        daemon::started(|| Self::try_launch(bridged, sync_limit))
            .expect("free ports were taken five times before the servers could bind them")
    }

    /// Starts the servers once. `None` if another process has taken a port.
    fn try_launch(bridged: bool, sync_limit: u32) -> Option<Self> {
        let ports: Vec<[u16; 3]> = (0..3)
            .map(|_| [free_port(), free_port(), free_port()])
            .collect();
        let mut bridges = Vec::new();
        let servers: Vec<ZooKeeperServer> = (1..=3)
            .map(|number: usize| {
                // A bridge may lead to a leader that does not listen yet. It accepts the connection
                // and breaks it. This limit is the time until the server tries again.
                let init_limit = if bridged { 10 } else { 20 };
                let mut lines = vec![
                    format!("initLimit={init_limit}"),
                    format!("syncLimit={sync_limit}"),
                ];
                for (other, &[_, mut peer, mut election]) in (1..).zip(&ports) {
                    if bridged && number != other {
                        for (follows, port) in [(true, &mut peer), (false, &mut election)] {
                            if follows && other != FIRST_LEADER {
                                // No bridge leads to a later leader. A later leader begins to
                                // listen late, and the other servers try again only if their
                                // connection is refused.
                                continue;
                            }
                            let proxy = Proxy::to(*port);
                            *port = proxy.port();
                            if !follows && number < other {
                                // A server must not call a server with a larger number. That server
                                // would call back to the caller's own address, and so avoid the
                                // bridges.
                                proxy.cut();
                            }
                            bridges.push(Bridge {
                                between: [number, other],
                                follows,
                                proxy,
                            });
                        }
                    }
                    lines.push(format!("server.{other}=127.0.0.1:{peer}:{election}"));
                }
                let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
                ZooKeeperServer::prepare(Some(number), ports[number - 1][0], 500, &lines)
            })
            .collect();
        let ensemble = Self { servers, bridges };
        let (first, later) = ensemble.servers.split_at(if bridged { 2 } else { 3 });
        // The first two servers are a majority, and the second of them leads. The third starts
        // later and follows.
        for servers in [first, later] {
            for server in servers {
                server.spawn();
            }
            let done = poll(START, || {
                if servers.iter().any(|server| server.daemon.ended().is_some()) {
                    return Some(false);
                }
                servers.iter().all(ZooKeeperServer::serves).then_some(true)
            });
            match done {
                Some(true) => {}
                Some(false) if servers.iter().any(ZooKeeperServer::found_its_port_taken) => {
                    return None;
                }
                _ => ensemble.is_not_complete(),
            }
        }
        Some(ensemble)
    }

    /// Cuts the connections between a server and the others silently: no server gets an error.
    pub fn cut_off(&self, server: &ZooKeeperServer) {
        for bridge in self.bridges_of(server) {
            bridge.proxy.freeze();
        }
    }

    /// Cuts the leader off, and resets its followers' connections to it. So the followers notice at
    /// once, and the leader does not.
    pub fn cut_off_untold(&self, leader: &ZooKeeperServer) {
        for bridge in self.bridges_of(leader) {
            match bridge.follows {
                true => bridge.proxy.cut_clients(),
                false => bridge.proxy.freeze(),
            }
        }
    }

    fn bridges_of(&self, server: &ZooKeeperServer) -> impl Iterator<Item = &Bridge> {
        let number = server.number.expect("is one of the ensemble");
        let touches = move |bridge: &&Bridge| bridge.between.contains(&number);
        self.bridges.iter().filter(touches)
    }

    pub fn url(&self) -> String {
        let hosts: Vec<String> = self
            .servers
            .iter()
            .map(|server| format!("127.0.0.1:{}", server.port))
            .collect();
        format!("zookeeper://{}", hosts.join(","))
    }

    pub fn servers(&self) -> &[ZooKeeperServer] {
        &self.servers
    }

    /// The server that leads. Waits until an election is over.
    pub fn leader(&self) -> &ZooKeeperServer {
        let leads = |server: &&ZooKeeperServer| server.role().as_deref() == Some("leader");
        poll(START, || self.servers.iter().find(leads)).expect("no leader was elected")
    }

    pub fn followers(&self) -> Vec<&ZooKeeperServer> {
        let leader = self.leader().number;
        self.servers
            .iter()
            .filter(|server| server.number != leader)
            .collect()
    }

    /// Waits until all three servers serve.
    pub fn wait_until_complete(&self) {
        let complete = poll(START, || {
            self.servers
                .iter()
                .all(ZooKeeperServer::serves)
                .then_some(())
        });
        if complete.is_none() {
            self.is_not_complete();
        }
    }

    fn is_not_complete(&self) -> ! {
        let logs: Vec<String> = self.servers.iter().map(ZooKeeperServer::log_tail).collect();
        panic!("the ensemble is not complete\n{}", logs.join("\n---\n"));
    }
}
