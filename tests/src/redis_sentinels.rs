//! Redis servers with real sentinels. The sentinels promote another server when the master is gone,
//! or on request.

use std::collections::HashMap;
use std::time::Duration;

use crate::eventually::wait_until;
use crate::redis_server::RedisServer;

/// The name by which the sentinels know the master.
pub const SERVICE: &str = "mymaster";

/// The user that the sentinels log in as, at the servers and at each other.
const SENTINEL: &str = "sentinel";

/// The user that a replica logs in as at its master.
const REPLICA: &str = "replica";

/// Time for the servers and sentinels to find each other, which takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A time that is longer than any fact. With it, a dead master is replaced only on request.
pub const NEVER: Duration = Duration::from_secs(3600);

/// A master, its replicas and their sentinels. Each is a process of its own. All of them end when
/// this value is dropped.
#[derive(Debug)]
pub struct Sentinels {
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<RedisServer>,
}

impl Sentinels {
    /// A master with two replicas, and three sentinels. The sentinels replace a master that was
    /// silent for `down_after`. When this returns, all of them know each other, and a failover is
    /// possible.
    pub fn start(down_after: Duration) -> Self {
        Self::with(down_after, &[])
    }

    /// Like [`start`](Self::start), with more arguments for the servers.
    pub fn with(down_after: Duration, extra: &[&str]) -> Self {
        // Each server has these arguments, because each may become a replica.
        let mut arguments = vec!["--masteruser", REPLICA, "--masterauth", REPLICA];
        for user in [SENTINEL, REPLICA] {
            arguments.extend(["--user", user, "on", "nopass", "~*", "&*", "+@all"]);
        }
        arguments.extend(extra);
        let master = RedisServer::with(&arguments);
        let replicas = [(); 2].map(|()| master.replica_with(&arguments));
        let mut settings = settings(master.port(), 2, down_after);
        for login in [
            "auth-user SERVICE",
            "auth-pass SERVICE",
            "sentinel-user",
            "sentinel-pass",
        ] {
            let login = login.replace("SERVICE", SERVICE);
            settings += &format!("sentinel {login} {SENTINEL}\n");
        }
        let user = ["--user", SENTINEL, "on", "nopass", "~*", "&*", "+@all"];
        let set = Self {
            sentinels: (0..3)
                .map(|_| RedisServer::sentinel(&settings, &user))
                .collect(),
            servers: [master].into_iter().chain(replicas).collect(),
        };
        set.wait_until_complete();
        set
    }

    /// Waits until all replicas follow, all sentinels know them, and each sentinel knows the
    /// others.
    pub fn wait_until_complete(&self) {
        for sentinel in &self.sentinels {
            wait_until("the sentinels know all servers", PATIENCE, || {
                let (others, replicas) = (self.sentinels.len() - 1, self.servers.len() - 1);
                let told = |field, count: usize| says(sentinel, field) == count.to_string();
                told("num-slaves", replicas)
                    && told("num-other-sentinels", others)
                    && says(sentinel, "flags") == "master"
                    && self.replicas_are_sound(sentinel)
            });
        }
    }

    /// Whether the sentinel considers all replicas healthy. A failover skips other replicas.
    fn replicas_are_sound(&self, sentinel: &RedisServer) -> bool {
        let replicas: Vec<std::collections::HashMap<String, String>> =
            sentinel.command(&["SENTINEL", "REPLICAS", SERVICE]);
        replicas
            .iter()
            .all(|replica| replica["flags"] == "slave" && replica["master-link-status"] == "ok")
    }

    pub fn url(&self) -> String {
        url(&self.sentinels)
    }

    /// The server that the first sentinel names. That sentinel must be running.
    pub fn master(&self) -> &RedisServer {
        self.named_by(&self.sentinels[0])
    }

    pub fn named_by(&self, sentinel: &RedisServer) -> &RedisServer {
        let (_, port): (String, u16) =
            sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE]);
        let named = self.servers.iter().find(|server| server.port() == port);
        named.unwrap_or_else(|| panic!("the sentinels name a stranger at port {port}"))
    }

    /// Waits until the replicas have everything that was written.
    pub fn wait_until_replicated(&self) {
        let master = self.master();
        let others = |server: &&RedisServer| server.port() != master.port();
        for replica in self.servers.iter().filter(others) {
            master.wait_until_received_by(replica);
        }
    }

    /// From now on, no write to the master reaches a replica.
    pub fn stop_replication(&self) {
        let master = self.master();
        master.command::<()>(&["ACL", "SETUSER", REPLICA, "off"]);
        master.command::<()>(&["CLIENT", "KILL", "USER", REPLICA]);
    }

    /// Makes the sentinels believe that the master is gone. They cannot make this server a replica,
    /// so its clients notice nothing.
    pub fn hide_the_master(&self) {
        let words = ["ACL", "SETUSER", SENTINEL, "-@all"];
        self.master().command::<()>(&words);
    }

    /// Ends [`hide_the_master`](Self::hide_the_master) for this server.
    pub fn show(&self, server: &RedisServer) {
        server.command::<()>(&["ACL", "SETUSER", SENTINEL, "+@all"]);
    }

    /// Requests a failover, and waits until all sentinels name another master. The writes of some
    /// milliseconds may be lost.
    pub fn fail_over(&self) {
        let (old, sentinel) = (self.master().port(), &self.sentinels[0]);
        wait_until("another master by request", PATIENCE, || {
            let told = tells(sentinel);
            let is_old = told["port"] == old.to_string();
            // The sentinel refuses while no replica is suitable. If a failover takes too long, the
            // sentinel gives it up and must be asked again.
            if is_old && !told["flags"].contains("failover_in_progress") {
                let _ = sentinel.try_command::<()>(&["SENTINEL", "FAILOVER", SERVICE]);
            }
            !is_old
        });
        self.wait_for_another_master_than(old);
    }

    /// Waits until all running sentinels name the same server, and this is not the server at
    /// `port`.
    pub fn wait_for_another_master_than(&self, port: u16) {
        wait_until("another master", PATIENCE, || {
            let running = self
                .sentinels
                .iter()
                .filter(|sentinel| sentinel.is_running());
            let mut named = running.map(|sentinel| self.named_by(sentinel).port());
            let first = named.next().expect("a sentinel that runs");
            first != port && named.all(|other| other == first)
        });
    }
}

/// The URL of a store that these sentinels watch.
pub fn url(sentinels: &[RedisServer]) -> String {
    let hosts: Vec<_> = (sentinels.iter())
        .map(|sentinel| format!("127.0.0.1:{}", sentinel.port()))
        .collect();
    format!("redis+sentinel://{}/{SERVICE}", hosts.join(","))
}

/// The settings of a sentinel that watches one master. It names this master until `quorum`
/// sentinels agree that it is gone.
pub fn settings(master: u16, quorum: u32, down_after: Duration) -> String {
    let down_after = down_after.as_millis();
    format!(
        "sentinel monitor {SERVICE} 127.0.0.1 {master} {quorum}\n\
         sentinel down-after-milliseconds {SERVICE} {down_after}\n\
         sentinel failover-timeout {SERVICE} 4000\n"
    )
}

/// A sentinel that always names this server.
pub fn one_that_names(master: u16) -> RedisServer {
    RedisServer::sentinel(&settings(master, 1, NEVER), &[])
}

fn says(sentinel: &RedisServer, field: &str) -> String {
    tells(sentinel).remove(field).unwrap_or_default()
}

/// What a sentinel tells of the master, by field.
fn tells(sentinel: &RedisServer) -> HashMap<String, String> {
    sentinel.command(&["SENTINEL", "MASTER", SERVICE])
}
