//! A real etcd server that the test owns: a single member on free loopback ports, with its data on a
//! RAM disk if there is one. The test can stop, kill, freeze and restart it.
//!
//! The harness looks on with etcd's own program, `etcdctl`.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use crate::certificates::{Authority, Identity};
use crate::daemon::{self, Daemon, NotStarted};
use crate::eventually::poll;
use crate::ports::free_port;
use crate::watch::SECRET;

/// The time for a start. A start takes half a second, or some seconds on two saturated cores.
pub(crate) const START: Duration = Duration::from_secs(30);

/// How long an answer may take, which is longer than any answer needs.
const ANSWER: Duration = Duration::from_secs(5);

/// One server. It ends when this value is dropped.
#[derive(Debug)]
pub struct EtcdServer {
    port: u16,
    peers: Peers,
    extra: Vec<String>,
    tls: Option<Encrypted>,
    /// The password of the user `root`, if clients must log in.
    root: Option<&'static str>,
    daemon: Daemon,
}

/// The certificates of a server with TLS.
#[derive(Debug)]
struct Encrypted {
    identity: Identity,
    /// The authority of the certificates that clients need.
    clients: Option<PathBuf>,
    /// A port without TLS, by which the harness looks on.
    plain: u16,
}

/// How the members of an ensemble reach this one.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pub(crate) name: String,
    pub(crate) listens: u16,
    pub(crate) advertised: u16,
    /// All members, each with its name and its address.
    pub(crate) cluster: String,
}

impl Peers {
    fn alone() -> Self {
        let port = free_port();
        Self {
            name: "alone".into(),
            listens: port,
            advertised: port,
            cluster: format!("alone=http://127.0.0.1:{port}"),
        }
    }
}

impl EtcdServer {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more options, for example `&["--quota-backend-bytes=1000000"]`.
    pub fn with(extra: &[&str]) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let mut server = Self::prepare(0, Peers::default());
        server.extra = extra.iter().map(ToString::to_string).collect();
        daemon::start("etcd", |port| {
            (server.port, server.peers) = (port, Peers::alone());
            server.serve()
        });
        server
    }

    /// A server with TLS, which requires client certificates of `clients`, if that is given. The user
    /// `default` has the [secret](SECRET) as its password.
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let mut server = Self::prepare(0, Peers::default());
        daemon::start("etcd", |port| {
            (server.port, server.peers) = (port, Peers::alone());
            server.tls = Some(Encrypted {
                identity: identity.clone(),
                clients: clients.map(|authority| authority.file().to_owned()),
                plain: free_port(),
            });
            server.serve()
        });
        server.let_in("default", "");
        server
    }

    /// From now on, clients must log in. This user, with the [secret](SECRET), has the rights of the
    /// guide, for keys with this beginning.
    pub fn let_in(&mut self, user: &str, beginning: &str) {
        self.ctl(&["role", "add", "locks"]);
        let grants = [
            "role",
            "grant-permission",
            "locks",
            "readwrite",
            "--prefix=true",
        ];
        self.ctl(&[&grants[..], &[beginning]].concat());
        for name in ["root", user] {
            self.ctl(&["user", "add", &format!("{name}:{SECRET}")]);
        }
        self.ctl(&["user", "grant-role", user, "locks"]);
        self.ctl(&["user", "grant-role", "root", "root"]);
        self.ctl(&["auth", "enable"]);
        self.root = Some(SECRET);
    }

    /// A member that has not been started.
    pub(crate) fn prepare(port: u16, peers: Peers) -> Self {
        Self {
            port,
            peers,
            extra: Vec::new(),
            tls: None,
            root: None,
            // etcd waits for the disk with each write, and this version cannot be told not to.
            daemon: Daemon::on_ram_disk("this etcd server", "etcd-"),
        }
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

    /// The numbers of all leases.
    pub fn leases(&self) -> Vec<String> {
        let told = self.ctl(&["lease", "list"]);
        // The first line says how many there are.
        told.lines().skip(1).map(ToOwned::to_owned).collect()
    }

    /// The newest revision.
    pub fn revision(&self) -> u64 {
        let told = self.ctl(&["get", "none", "--write-out=json"]);
        let (_, revision) = told.split_once("\"revision\":").unwrap();
        let end = revision.find(|c: char| !c.is_ascii_digit());
        revision[..end.unwrap()].parse().unwrap()
    }

    /// How many requests about keys the server has received: reads, writes and transactions.
    pub fn requests(&self) -> u64 {
        let told = self.told("/metrics").unwrap();
        let of_keys = |line: &&str| {
            line.starts_with("grpc_server_started_total")
                && line.contains("grpc_service=\"etcdserverpb.KV\"")
        };
        let counts = told.lines().filter(of_keys);
        let counts = counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        counts.sum::<f64>() as u64
    }

    /// Writes until the disk quota is used up.
    pub fn fill(&self) {
        let much = "x".repeat(100_000);
        let is_full = || !self.run_ctl(&["put", "filler", &much]).status.success();
        poll(START, || is_full().then_some(())).expect("the server has a quota");
    }

    /// What an operator does when the disk quota is used up.
    pub fn make_room(&self) {
        self.ctl(&["compact", &self.revision().to_string()]);
        self.ctl(&["defrag"]);
        self.ctl(&["alarm", "disarm"]);
    }

    /// Runs `etcdctl`, and returns what it prints. Panics if it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.run_ctl(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn run_ctl(&self, arguments: &[&str]) -> Output {
        Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .arg(format!("--endpoints=127.0.0.1:{}", self.plain_port()))
            .args(self.root.map(|password| format!("--user=root:{password}")))
            .args(arguments)
            .output()
            .unwrap()
    }

    fn serve(&self) -> Result<(), NotStarted> {
        let mut command = self.command();
        self.daemon.serve(&mut command, START, || self.is_healthy())
    }

    /// Starts the process, and waits for nothing.
    pub(crate) fn spawn(&self) {
        self.daemon.spawn(&mut self.command());
    }

    fn command(&self) -> Command {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let clients = match &self.tls {
            None => url(self.port),
            Some(tls) => format!("https://127.0.0.1:{},{}", self.port, url(tls.plain)),
        };
        let Peers {
            name,
            listens,
            advertised,
            cluster,
        } = &self.peers;
        let (listens, advertised) = (url(*listens), url(*advertised));
        let mut command = Command::new("etcd");
        command
            .arg(format!(
                "--data-dir={}",
                self.daemon.folder().join("data").display()
            ))
            .arg(format!("--listen-client-urls={clients}"))
            .arg(format!("--advertise-client-urls={clients}"))
            .arg(format!("--name={name}"))
            .arg(format!("--listen-peer-urls={listens}"))
            .arg(format!("--initial-advertise-peer-urls={advertised}"))
            .arg(format!("--initial-cluster={cluster}"))
            .args(&self.extra)
            .current_dir(self.daemon.folder());
        if let Some(tls) = &self.tls {
            let Identity { certificate, key } = &tls.identity;
            command.arg(format!("--cert-file={}", certificate.display()));
            command.arg(format!("--key-file={}", key.display()));
            if let Some(clients) = &tls.clients {
                command.arg("--client-cert-auth=true");
                command.arg(format!("--trusted-ca-file={}", clients.display()));
            }
        }
        command
    }

    fn plain_port(&self) -> u16 {
        self.tls.as_ref().map_or(self.port, |tls| tls.plain)
    }

    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.daemon.ended().is_some()
    }

    pub(crate) fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    /// Whether the server leads, as it believes itself. `false` if it does not answer.
    pub fn leads(&self) -> bool {
        self.daemon.is_running()
            && (self.told("/metrics"))
                .is_some_and(|told| told.lines().any(|line| line == "etcd_server_is_leader 1"))
    }

    /// Whether the server has a leader.
    pub(crate) fn is_healthy(&self) -> bool {
        let told = self.told("/health");
        told.is_some_and(|told| told.contains("\"health\":\"true\""))
    }

    /// The page that the server has at this path.
    fn told(&self, path: &str) -> Option<String> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.plain_port()));
        let mut stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
        stream.set_read_timeout(Some(ANSWER)).ok()?;
        let question = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(question.as_bytes()).ok()?;
        let mut told = String::new();
        stream.read_to_string(&mut told).ok()?;
        Some(told)
    }
}
