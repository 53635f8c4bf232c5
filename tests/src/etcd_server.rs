//! A real etcd server that the test owns: a single member on free loopback ports, with its data on a
//! RAM disk if there is one. The test can stop, kill, freeze and restart it.
//!
//! The harness looks on with etcd's own program, `etcdctl`.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::daemon::{self, Daemon, NotStarted};
use crate::ports::free_port;

/// The time for a start. A start takes half a second, or some seconds on two saturated cores.
const START: Duration = Duration::from_secs(30);

/// How long an answer may take, which is longer than any answer needs.
const ANSWER: Duration = Duration::from_secs(5);

/// One server. It ends when this value is dropped.
#[derive(Debug)]
pub struct EtcdServer {
    port: u16,
    peers: u16,
    extra: Vec<String>,
    daemon: Daemon,
}

impl EtcdServer {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more options, for example `&["--quota-backend-bytes=1000000"]`.
    pub fn with(extra: &[&str]) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let mut server = Self {
            port: 0,
            peers: 0,
            extra: extra.iter().map(ToString::to_string).collect(),
            // etcd waits for the disk with each write, and this version cannot be told not to.
            daemon: Daemon::on_ram_disk("this etcd server", "etcd-"),
        };
        daemon::start("etcd", |port| {
            (server.port, server.peers) = (port, free_port());
            server.serve()
        });
        server
    }

    /// Whether etcd is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
        let install = "apt-get install etcd-server etcd-client";
        let found = || {
            daemon::can_run("etcd", "--version", install)?;
            daemon::can_run("etcdctl", "version", install)
        };
        FOUND.get_or_init(found).clone()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The same at another port of this machine.
    pub fn url_at(&self, port: u16) -> String {
        format!("etcd://127.0.0.1:{port}")
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        daemon::with_user(&self.url(), user, password)
    }

    /// Sends SIGKILL. Does nothing if the server is down.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Starts the server again on the same ports with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.kill();
        daemon::start_again(START, || self.serve());
    }

    /// Sends SIGSTOP: connections stay open, and no answers come.
    pub fn freeze(&self) {
        self.daemon.freeze();
    }

    /// Sends SIGCONT.
    pub fn thaw(&self) {
        self.daemon.thaw();
    }

    /// The keys with this beginning.
    pub fn keys(&self, beginning: &str) -> Vec<String> {
        let told = self.ctl(&["get", beginning, "--prefix", "--keys-only"]);
        let keys = told.lines().filter(|line| !line.is_empty());
        keys.map(ToOwned::to_owned).collect()
    }

    /// Runs `etcdctl`, and returns what it prints. Panics if it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints=127.0.0.1:{}", self.port))
            .args(arguments)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn serve(&self) -> Result<(), NotStarted> {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let (clients, peers) = (url(self.port), url(self.peers));
        let mut command = Command::new("etcd");
        command
            .arg(format!(
                "--data-dir={}",
                self.daemon.folder().join("data").display()
            ))
            .arg(format!("--listen-client-urls={clients}"))
            .arg(format!("--advertise-client-urls={clients}"))
            .arg(format!("--listen-peer-urls={peers}"))
            .arg(format!("--initial-advertise-peer-urls={peers}"))
            .arg(format!("--initial-cluster=default={peers}"))
            .args(&self.extra)
            .current_dir(self.daemon.folder());
        self.daemon.serve(&mut command, START, || self.is_healthy())
    }

    /// Whether the server has a leader.
    fn is_healthy(&self) -> bool {
        let told = || {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
            let mut stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
            stream.set_read_timeout(Some(ANSWER)).ok()?;
            let question = b"GET /health HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n";
            stream.write_all(question).ok()?;
            let mut told = String::new();
            stream.read_to_string(&mut told).ok()?;
            Some(told)
        };
        told().is_some_and(|told| told.contains("\"health\":\"true\""))
    }
}
