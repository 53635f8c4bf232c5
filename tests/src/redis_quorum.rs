//! Independent Redis servers that vote on locks.

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use crate::faketime::Clock;
use crate::redis_server::RedisServer;

/// How far the clock of a server without files is ahead. By its clock, such a server has been up
/// for long enough to vote.
const LONG_UP: Duration = Duration::from_secs(3600);

/// The settings of a server that keeps every write.
pub const KEEPS_ALL: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

/// The servers. Each is a process of its own. All of them end when this value is dropped.
#[derive(Debug)]
pub struct Quorum {
    pub nodes: Vec<RedisServer>,
    /// The folders of the servers that keep their data.
    _folders: Vec<TempDir>,
}

impl Quorum {
    /// Servers that keep every write. So they vote as soon as they are up.
    pub fn start(count: usize) -> Self {
        let folders: Vec<_> = std::iter::repeat_with(folder).take(count).collect();
        let node = |folder: &TempDir| {
            let folder = folder.path().to_str().unwrap();
            RedisServer::with(&[&KEEPS_ALL[..], &["--dir", folder]].concat())
        };
        Self {
            nodes: folders.iter().map(node).collect(),
            _folders: folders,
        }
    }

    /// Servers that lose their data when they restart. They vote from the start, because their
    /// clocks say that they have been up for long. After a restart they do not vote.
    pub fn forgetful(count: usize) -> Self {
        let nodes = (0..count).map(|_| {
            let node = RedisServer::with_clock(&[]);
            node.set_clock(Clock::Ahead(LONG_UP));
            node
        });
        Self {
            nodes: nodes.collect(),
            _folders: Vec::new(),
        }
    }

    pub fn url(&self) -> String {
        url(self.nodes.iter().map(RedisServer::port))
    }
}

/// A folder in memory, if there is one: these servers wait for the disk at each write.
pub fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let builder = tempfile::Builder::new();
    if memory.is_dir()
        && let Ok(folder) = builder.tempdir_in(memory)
    {
        return folder;
    }
    builder.tempdir().unwrap()
}

/// The URL of nodes at these ports of this machine.
pub fn url(ports: impl IntoIterator<Item = u16>) -> String {
    let hosts = ports.into_iter().map(|port| format!("127.0.0.1:{port}"));
    format!("redlock://{}", hosts.collect::<Vec<_>>().join(","))
}
