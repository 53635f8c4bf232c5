//! A real ZooKeeper that the test owns: one server, or an ensemble of three, on free loopback ports in temporary
//! folders. Each server can be stopped, killed, frozen and restarted.
//!
//! The harness uses ZooKeeper's four-letter words, each on its own connection.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tempfile::TempDir;

use crate::certificates::{Authority, Identity};
use crate::child::LeashedChild;
use crate::eventually::{poll, wait_until};
use crate::ports::free_port;
use crate::proxy::Proxy;

/// The paths of Debian's packages. The server's jar names its dependencies, except for logging and a part of TLS.
const JARS: [&str; 4] = [
    "/usr/share/java/zookeeper.jar",
    "/usr/share/java/slf4j-simple.jar",
    "/usr/share/java/netty-codec.jar",
    "/usr/share/java/netty-resolver.jar",
];

/// A start takes half a second, and an election another half, or many seconds on two saturated cores.
const START: Duration = Duration::from_secs(60);

/// Longer than any answer takes, and short enough for a test that hangs on a server that it froze itself.
const ANSWER: Duration = Duration::from_secs(5);

/// One server. It ends with its value.
#[derive(Debug)]
pub struct ZooKeeperServer {
    port: u16,
    /// The port that speaks TLS.
    encrypted: Option<u16>,
    /// How often the harness has asked for its packet counts.
    packet_questions: AtomicU64,
    /// Its number in its ensemble.
    number: Option<usize>,
    /// Properties for the JVM.
    properties: &'static [&'static str],
    /// Declared before the folder, so that the server is killed before its folder is removed.
    child: Mutex<Option<LeashedChild>>,
    folder: TempDir,
}

impl ZooKeeperServer {
    /// A single server. Its ticks are 100 ms, so sessions of 200 ms and more are possible.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        let mut url = url::Url::parse(&self.url()).unwrap();
        url.set_username(user).unwrap();
        url.set_password(Some(password)).unwrap();
        url.into()
    }

    /// A server that removes a name's node a second after the last ticket, instead of a minute.
    pub fn that_forgets_soon() -> Self {
        Self::launch(&[], &["-Dznode.container.checkIntervalMs=1000"])
    }

    /// A server for measurements, whose JIT compiler is not limited. It needs a warm-up.
    pub fn for_load() -> Self {
        Self::launch(&[], &["-XX:TieredStopAtLevel=4"])
    }

    /// A server with more lines in its configuration, for example `&["maxSessionTimeout=1000"]`. They override the
    /// harness's own.
    pub fn with(lines: &[&str]) -> Self {
        Self::launch(lines, &[])
    }

    /// A server with a port that speaks TLS only, with this certificate. [`url`](Self::url) has that port. With
    /// `clients`, it requires a client certificate of that authority. The harness uses the other port.
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>, lines: &[&str]) -> Self {
        let folder = identity.key.parent().unwrap();
        let mut lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        let mut set = |line: String| lines.push(line);
        set("serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".into());
        set("ssl.protocol=TLSv1.3".into());
        // The server's default ciphers include none of TLS 1.3.
        set(
            "ssl.ciphersuites=TLS_AES_256_GCM_SHA384,TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
                .into(),
        );
        // One file has both, the key first.
        let pair =
            [&identity.key, &identity.certificate].map(|file| fs::read_to_string(file).unwrap());
        let store = tempfile::Builder::new()
            .suffix(".pem")
            .tempfile_in(folder)
            .unwrap();
        let store = store.into_temp_path().keep().unwrap();
        fs::write(&store, pair.concat()).unwrap();
        set(format!("ssl.keyStore.location={}", store.display()));
        // It requires some authority even if it asks clients for no certificate.
        let authority = clients.map_or(identity.certificate.as_path(), Authority::file);
        set(format!("ssl.trustStore.location={}", authority.display()));
        set(format!(
            "ssl.clientAuth={}",
            if clients.is_some() { "need" } else { "none" }
        ));
        Self::launch_with(&[], |server| {
            let port = free_port();
            server.encrypted = Some(port);
            server.configure(&lines);
            server.configure(&[
                format!("secureClientPort={port}"),
                "secureClientPortAddress=127.0.0.1".into(),
            ]);
        })
    }

    fn launch(lines: &[&str], properties: &'static [&'static str]) -> Self {
        Self::launch_with(lines, |server| server.properties = properties)
    }

    fn launch_with(lines: &[&str], adjust: impl Fn(&mut Self)) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        // Another process may take the port between our check and the server's bind. This does not happen five times in
        // a row.
        for _ in 0..5 {
            let mut server = Self::prepare(None, free_port(), 100, lines);
            adjust(&mut server);
            if server.try_spawn() {
                return server;
            }
        }
        panic!("five free ports were taken before ZooKeeper could bind them");
    }

    /// Whether ZooKeeper is installed. The error says how to get it.
    pub fn available() -> Result<(), String> {
        if let Some(missing) = JARS.iter().find(|jar| !Path::new(jar).exists()) {
            return Err(format!(
                "there is no {missing}: apt-get install zookeeper libslf4j-java libnetty-java"
            ));
        }
        // Checked once, because every fact needs the result and a JVM starts slowly.
        static JAVA: OnceLock<Result<(), String>> = OnceLock::new();
        JAVA.get_or_init(|| {
            let mut java = Command::new("java");
            java.arg("-version")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            match java.status() {
                Ok(status) if status.success() => Ok(()),
                Ok(status) => Err(format!("`java -version` failed: {status}")),
                Err(error) => Err(format!(
                    "cannot run java ({error}): apt-get install default-jre"
                )),
            }
        })
        .clone()
    }

    /// The process id. A restart changes it.
    pub fn pid(&self) -> u32 {
        self.running().as_ref().expect("the server runs").pid()
    }

    /// The port of the [`url`](Self::url).
    pub fn port(&self) -> u16 {
        self.encrypted.unwrap_or(self.port)
    }

    pub fn url(&self) -> String {
        let tls = if self.encrypted.is_some() { "+tls" } else { "" };
        format!("zookeeper{tls}://127.0.0.1:{}", self.port())
    }

    /// Sends SIGKILL. Does nothing if the server is down.
    pub fn kill(&self) {
        if let Some(child) = self.running().take() {
            child.kill();
        }
    }

    /// Sends SIGTERM. Does nothing if the server is down.
    pub fn stop(&self) {
        if let Some(child) = self.running().take() {
            child.stop(ANSWER);
        }
    }

    /// Starts it again on the same port with its data. Stops it first if it is running. Returns when it serves.
    pub fn restart(&self) {
        self.restart_alone();
        wait_until("the restarted server serves", START, || self.serves());
    }

    /// The same, without waiting until it is part of an ensemble.
    pub fn restart_alone(&self) {
        self.stop();
        self.spawn();
    }

    /// Kills it and starts it again without its data.
    pub fn restart_empty(&self) {
        self.kill();
        fs::remove_dir_all(self.folder.path().join("data/version-2")).unwrap();
        self.restart();
    }

    /// Sends SIGSTOP: connections stay open, and nothing is answered.
    pub fn freeze(&self) {
        self.running().as_mut().expect("runs").freeze();
    }

    /// Sends SIGCONT.
    pub fn thaw(&self) {
        self.running().as_mut().expect("runs").thaw();
    }

    /// The server's counters: `zk_packets_received` and so on. This question counts as a packet too.
    pub fn mntr(&self) -> BTreeMap<String, String> {
        let told = self.ask("mntr").unwrap_or_default();
        told.lines()
            .filter_map(|line| line.split_once('\t'))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// Packets that it received and sent, without those of this question. For [`Packets::since`].
    ///
    /// The server counts a reply after it has sent it, so right after an answer the count may be too low. This asks
    /// until two answers agree, and only a few times if other clients keep the server busy.
    pub fn packets(&self) -> Packets {
        let mut last = self.count_packets();
        for _ in 0..5 {
            let earlier = std::mem::replace(&mut last, self.count_packets());
            if last == earlier {
                break;
            }
        }
        last
    }

    /// Uses the four-letter word whose answer always fits into one packet.
    fn count_packets(&self) -> Packets {
        let told = self.ask("srvr").unwrap_or_default();
        let asked_before = self.packet_questions.fetch_add(1, Ordering::Relaxed);
        let count = |name: &str| {
            let mut lines = told.lines().filter_map(|line| line.split_once(": "));
            let (_, value) = lines
                .find(|(key, _)| *key == name)
                .expect("a server that answers");
            value.parse::<u64>().unwrap().wrapping_sub(asked_before)
        };
        Packets {
            received: count("Received"),
            sent: count("Sent"),
        }
    }

    /// The number of the last transaction that it knows.
    pub fn transactions(&self) -> u64 {
        let told = self.ask("srvr").expect("a server that answers");
        let number = told.lines().find_map(|line| line.strip_prefix("Zxid: 0x"));
        u64::from_str_radix(number.expect("what it tells"), 16).unwrap()
    }

    /// `leader`, `follower` or `standalone`. `None` while it does not serve.
    pub fn role(&self) -> Option<String> {
        self.mntr().remove("zk_server_state")
    }

    /// Whether it serves clients.
    pub fn serves(&self) -> bool {
        self.role().is_some()
    }

    /// Sessions that it serves.
    pub fn sessions(&self) -> usize {
        let told = self.ask("cons").unwrap_or_default();
        told.matches(",sid=0x").count()
    }

    /// The watches that its clients have set, by the server's own count.
    pub fn watches(&self) -> usize {
        let told = self.mntr().remove("zk_watch_count");
        told.map_or(0, |count| count.parse().unwrap())
    }

    /// The paths of the ephemeral nodes under a path, sorted. Only a leader or a single server knows them.
    pub fn ephemerals(&self, under: &str) -> Vec<String> {
        let told = self.ask("dump").unwrap_or_default();
        let mut paths: Vec<String> = told
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with(under))
            .map(ToOwned::to_owned)
            .collect();
        paths.sort();
        paths
    }

    /// The end of the server's log, over all its starts.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn prepare(number: Option<usize>, port: u16, tick_millis: u32, lines: &[&str]) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("zookeeper-")
            .tempdir()
            .unwrap();
        let data = folder.path().join("data");
        fs::create_dir(&data).unwrap();
        let config = format!(
            "tickTime={tick_millis}\nmaxSessionTimeout=300000\ndataDir={}\nclientPort={port}\n\
             clientPortAddress=127.0.0.1\nadmin.enableServer=false\n4lw.commands.whitelist=*\nmaxClientCnxns=0\n",
            data.display()
        );
        fs::write(folder.path().join("zoo.cfg"), config).unwrap();
        if let Some(number) = number {
            fs::write(data.join("myid"), number.to_string()).unwrap();
        }
        let server = Self {
            port,
            encrypted: None,
            packet_questions: AtomicU64::new(0),
            number,
            properties: &[],
            child: Mutex::new(None),
            folder,
        };
        server.configure(lines);
        server
    }

    /// Adds lines to its configuration.
    fn configure(&self, lines: &[impl AsRef<str>]) {
        let file = self.folder.path().join("zoo.cfg");
        let mut config = File::options().append(true).open(file).unwrap();
        for line in lines {
            writeln!(config, "{}", line.as_ref()).unwrap();
        }
    }

    /// Returns `false` if the port was taken.
    fn try_spawn(&self) -> bool {
        self.spawn();
        let started = poll(START, || match self.ended() {
            Some(status) => Some(Err(status)),
            None => self.serves().then_some(Ok(())),
        });
        match started {
            Some(Ok(())) => true,
            Some(Err(_)) if self.found_its_port_taken() => false,
            Some(Err(status)) => panic!("ZooKeeper ended at once: {status}\n{}", self.log_tail()),
            None => panic!(
                "ZooKeeper did not serve within {START:?}\n{}",
                self.log_tail()
            ),
        }
    }

    /// Whether a server that has ended found its port taken by another process.
    fn found_its_port_taken(&self) -> bool {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        log.contains("BindException")
    }

    fn spawn(&self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .unwrap();
        let mut command = Command::new("java");
        command
            // Small and quick to start, because tests need many servers for a few seconds each.
            .args([
                "-Xmx128m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-Xshare:auto",
            ])
            // The tests kill processes but never cut the power, so writes need not be forced to the disk.
            .arg("-Dzookeeper.forceSync=no")
            .arg("-Dorg.slf4j.simpleLogger.showDateTime=true")
            .args(self.properties)
            .args(["-cp", &JARS.join(":")])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(self.folder.path().join("zoo.cfg"))
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = LeashedChild::spawn(&mut command, Some(self.folder.path()));
        *self.running() = Some(child.unwrap_or_else(|error| panic!("cannot run java: {error}")));
    }

    /// Asks with a four-letter word. `None` when nobody answers.
    fn ask(&self, word: &str) -> Option<String> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        stream.write_all(word.as_bytes()).ok()?;
        let mut told = String::new();
        stream.read_to_string(&mut told).ok()?;
        Some(told)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn ended(&self) -> Option<std::process::ExitStatus> {
        self.running().as_mut().and_then(LeashedChild::ended)
    }

    fn running(&self) -> MutexGuard<'_, Option<LeashedChild>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The packets that a server received and sent. The start of the count is arbitrary, so use [`Packets::since`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packets {
    pub received: u64,
    pub sent: u64,
}

impl Packets {
    /// The packets since an earlier count.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            received: self.received.wrapping_sub(earlier.received),
            sent: self.sent.wrapping_sub(earlier.sent),
        }
    }
}

/// Three servers that elect a leader.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<ZooKeeperServer>,
    /// The proxies between the servers, if these can be cut off from each other.
    bridges: Vec<Bridge>,
}

/// The leader of an ensemble with bridges, by its number.
const FIRST_LEADER: usize = 2;

/// A proxy for the connections from one server to another.
#[derive(Debug)]
struct Bridge {
    between: [usize; 2],
    /// Whether it carries a follower's connection to its leader. Otherwise it carries votes.
    follows: bool,
    proxy: Proxy,
}

impl Ensemble {
    /// Starts an ensemble, and returns when all three serve. Its ticks are 500 ms, so sessions of a second and more are
    /// possible.
    pub fn start() -> Self {
        Self::launch(false, 10)
    }

    /// An ensemble whose servers can be cut off from each other. The second leads, and the others follow. A server that
    /// is cut off notices it only after ten seconds.
    pub fn with_bridges() -> Self {
        Self::launch(true, 20)
    }

    fn launch(bridged: bool, sync_limit: u32) -> Self {
        ZooKeeperServer::available().unwrap_or_else(|reason| panic!("{reason}"));
        // As for a single server, but here there are nine ports.
        for _ in 0..5 {
            if let Some(ensemble) = Self::try_launch(bridged, sync_limit) {
                return ensemble;
            }
        }
        panic!("free ports were taken five times before the servers could bind them");
    }

    /// `None` if another process has taken a port.
    fn try_launch(bridged: bool, sync_limit: u32) -> Option<Self> {
        let ports: Vec<[u16; 3]> = (0..3)
            .map(|_| [free_port(), free_port(), free_port()])
            .collect();
        let mut bridges = Vec::new();
        let servers: Vec<ZooKeeperServer> = (1..=3)
            .map(|number: usize| {
                // A bridge to a leader that does not listen yet accepts a connection and breaks it. Then this limits
                // the time until the server tries again.
                let init_limit = if bridged { 10 } else { 20 };
                let mut lines = vec![
                    format!("initLimit={init_limit}"),
                    format!("syncLimit={sync_limit}"),
                ];
                for (other, &[_, mut peer, mut election]) in (1..).zip(&ports) {
                    if bridged && number != other {
                        for (follows, port) in [(true, &mut peer), (false, &mut election)] {
                            if follows && other != FIRST_LEADER {
                                // A later leader listens late, and only a refused connection makes the others try
                                // again.
                                continue;
                            }
                            let proxy = Proxy::to(*port);
                            *port = proxy.port();
                            if !follows && number < other {
                                // A server with a larger number is never called: it would call back to the caller's own
                                // address, and so around the bridges.
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
        // Two servers are a majority, of which the second leads. The one that comes later follows.
        for servers in [first, later] {
            for server in servers {
                server.spawn();
            }
            let done = poll(START, || {
                if servers.iter().any(|server| server.ended().is_some()) {
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

    /// Cuts the connections between a server and the others silently: neither side is told.
    pub fn cut_off(&self, server: &ZooKeeperServer) {
        for bridge in self.bridges_of(server) {
            bridge.proxy.freeze();
        }
    }

    /// The same for the leader, but its followers are told: their connections to it are reset. The leader is not told.
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

    /// The server that leads. Waits for an election to end.
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

    /// Waits until all three serve.
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
