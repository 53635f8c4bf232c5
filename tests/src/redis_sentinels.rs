//! Redis servers under the watch of real sentinels, which make another server the master when the first is gone, or when
//! they are told to.

use std::time::Duration;

use crate::eventually::{poll, wait_until};
use crate::redis_server::{RedisServer, USER};

/// What the sentinels call the master.
pub const SERVICE: &str = "mymaster";

/// For what the servers and the sentinels have to find out about each other: seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// No fact takes as long: a master that is gone so long is not replaced unless somebody asks for that.
pub const NEVER: Duration = Duration::from_secs(3600);

/// A master, its replicas and their sentinels. Each is a process of its own, and gone with this value.
#[derive(Debug)]
pub struct Sentinels {
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<RedisServer>,
}

impl Sentinels {
    /// A master with two replicas, and three sentinels that replace a master after it was silent for so long. All know each
    /// other, and a failover is possible.
    pub fn start(down_after: Duration) -> Self {
        Self::with(down_after, &[])
    }

    /// The same, with more arguments for the servers.
    pub fn with(down_after: Duration, extra: &[&str]) -> Self {
        // Each may become the replica of another.
        let login = ["--masteruser", USER, "--masterauth", USER];
        let arguments: Vec<_> = login.iter().chain(extra).copied().collect();
        let master = RedisServer::with(&arguments);
        let replicas = [(); 2].map(|()| master.replica_with(&arguments));
        let settings = settings(SERVICE, master.port(), 2, down_after);
        let set = Self {
            sentinels: (0..3)
                .map(|_| RedisServer::sentinel(&settings, &[]))
                .collect(),
            servers: [master].into_iter().chain(replicas).collect(),
        };
        set.wait_until_complete();
        set
    }

    /// All replicas follow, all sentinels know them, and each sentinel knows the others.
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

    /// As a failover asks for it: a replica without these is passed over.
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

    /// The server that the first sentinel names, which runs.
    pub fn master(&self) -> &RedisServer {
        self.named_by(&self.sentinels[0])
    }

    pub fn named_by(&self, sentinel: &RedisServer) -> &RedisServer {
        let (_, port): (String, u16) =
            sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE]);
        let named = self.servers.iter().find(|server| server.port() == port);
        named.unwrap_or_else(|| panic!("the sentinels name a stranger at port {port}"))
    }

    /// Asks for a failover, and waits until all sentinels name another master. Some milliseconds of writes may be lost.
    pub fn fail_over(&self) {
        let old = self.master().port();
        let accepted = poll(PATIENCE, || {
            // Refused while no replica is fit, or another failover goes on.
            let asked = self.sentinels[0].try_command::<()>(&["SENTINEL", "FAILOVER", SERVICE]);
            asked.ok()
        });
        accepted.expect("no failover is accepted");
        self.wait_for_another_master_than(old);
    }

    /// All sentinels that run name the same server, and it is not this one.
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

/// The settings of a sentinel that watches one master, and names it until so many agree that it is gone.
pub fn settings(service: &str, master: u16, quorum: u32, down_after: Duration) -> String {
    let down_after = down_after.as_millis();
    format!(
        "sentinel monitor {service} 127.0.0.1 {master} {quorum}\n\
         sentinel down-after-milliseconds {service} {down_after}\n\
         sentinel failover-timeout {service} 4000\n\
         sentinel auth-user {service} {USER}\n\
         sentinel auth-pass {service} {USER}\n\
         sentinel sentinel-user {USER}\n\
         sentinel sentinel-pass {USER}\n"
    )
}

fn says(sentinel: &RedisServer, field: &str) -> String {
    let fields: std::collections::HashMap<String, String> =
        sentinel.command(&["SENTINEL", "MASTER", SERVICE]);
    fields.get(field).cloned().unwrap_or_default()
}
