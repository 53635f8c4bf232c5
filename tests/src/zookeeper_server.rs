//! A real ZooKeeper server that the test owns. It runs on a free loopback port in a temporary
//! folder. The test can stop, kill, freeze and restart it.
//! [`zookeeper_ensemble`](crate::zookeeper_ensemble) starts three of them.
//!
//! The harness uses ZooKeeper's four-letter words. It sends each on a connection of its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::certificates::{Authority, Identity};
use crate::daemon::{self, Daemon};
use crate::eventually::{poll, wait_until};
use crate::ports::free_port;

/// The paths in Debian's packages. The server's jar names the jars that it depends on, except those
/// for logging and for a part of TLS.
const JARS: [&str; 4] = [
    "/usr/share/java/zookeeper.jar",
    "/usr/share/java/slf4j-simple.jar",
    "/usr/share/java/netty-codec.jar",
    "/usr/share/java/netty-resolver.jar",
];

/// The time for a start. A start takes half a second, and an election another half second. On two
/// saturated cores they take many seconds.
pub(crate) const START: Duration = Duration::from_secs(60);

/// How long an answer may take, which is longer than any answer needs. It is short, so that a test
/// that waits for a server that it has frozen itself fails soon.
const ANSWER: Duration = Duration::from_secs(5);

/// One server. It ends when this value is dropped.
#[derive(Debug)]
pub struct ZooKeeperServer {
    pub(crate) port: u16,
    /// The port that accepts TLS, if there is one.
    encrypted: Option<u16>,
    /// How often the harness has requested the packet counts of this server.
    packet_questions: AtomicU64,
    /// The number of this server in its ensemble.
    pub(crate) number: Option<usize>,
    /// Properties for the JVM.
    properties: &'static [&'static str],
    pub(crate) daemon: Daemon,
}

impl ZooKeeperServer {
    /// A single server. Its ticks are 100 ms, so a session may be as short as 200 ms.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        daemon::with_user(&self.url(), user, password)
    }

    /// A server that removes the node of a name one second after the last ticket. The default is a
    /// minute.
    pub fn that_forgets_soon() -> Self {
        Self::launch(&[], &["-Dznode.container.checkIntervalMs=1000"])
    }

    /// A server for measurements, with the whole JIT compiler. It needs a warm-up.
    pub fn for_load() -> Self {
        Self::launch(&[], &["-XX:TieredStopAtLevel=4"])
    }

    /// A server with more lines in its configuration, for example `&["maxSessionTimeout=1000"]`.
    /// They override the harness's own.
    pub fn with(lines: &[&str]) -> Self {
        Self::launch(lines, &[])
    }

    /// A server with a port that accepts TLS only, with this certificate. [`url`](Self::url) has
    /// this port. With `clients`, the server requires a client certificate of this authority. The
    /// harness uses the other port.
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>, lines: &[&str]) -> Self {
        let folder = identity.key.parent().unwrap();
        let mut lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        let mut set = |line: String| lines.push(line);
        set("serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".into());
        set("ssl.protocol=TLSv1.3".into());
        // By default, the server has no ciphers of TLS 1.3.
        set(
            "ssl.ciphersuites=TLS_AES_256_GCM_SHA384,TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
                .into(),
        );
        // One file has the key and, after it, the certificate.
        let pair =
            [&identity.key, &identity.certificate].map(|file| fs::read_to_string(file).unwrap());
        let store = tempfile::Builder::new()
            .suffix(".pem")
            .tempfile_in(folder)
            .unwrap();
        let store = store.into_temp_path().keep().unwrap();
        fs::write(&store, pair.concat()).unwrap();
        set(format!("ssl.keyStore.location={}", store.display()));
        // The server requires an authority even if it does not require client certificates.
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
        daemon::started(|| {
            let mut server = Self::prepare(None, free_port(), 100, lines);
            adjust(&mut server);
            server.try_spawn().then_some(server)
        })
        .expect("five free ports were taken before ZooKeeper could bind them")
    }

    /// Whether ZooKeeper is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        if let Some(missing) = JARS.iter().find(|jar| !Path::new(jar).exists()) {
            return Err(format!(
                "there is no {missing}: apt-get install zookeeper libslf4j-java libnetty-java"
            ));
        }
        // Checked only once, because every fact needs the result and a JVM starts slowly.
        static JAVA: OnceLock<Result<(), String>> = OnceLock::new();
        JAVA.get_or_init(|| daemon::can_run("java", "-version", "apt-get install default-jre"))
            .clone()
    }

    /// The process id. A restart changes it.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
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
        self.daemon.kill();
    }

    /// Sends SIGTERM. Does nothing if the server is down.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Starts the server again on the same port with its data. Stops it first if it is running.
    /// Returns when it serves.
    pub fn restart(&self) {
        self.restart_alone();
        wait_until("the restarted server serves", START, || self.serves());
    }

    /// Starts the server again, and does not wait until it serves. A server of an ensemble can
    /// serve only when others run.
    pub fn restart_alone(&self) {
        self.stop();
        self.spawn();
    }

    /// Kills the server and starts it again without its data.
    pub fn restart_empty(&self) {
        self.kill();
        fs::remove_dir_all(self.daemon.folder().join("data/version-2")).unwrap();
        self.restart();
    }

    /// Sends SIGSTOP: connections stay open, and no answers come.
    pub fn freeze(&self) {
        self.daemon.freeze();
    }

    /// Sends SIGCONT.
    pub fn thaw(&self) {
        self.daemon.thaw();
    }

    /// The server's own counters: `zk_packets_received` and so on. This request is counted as a
    /// packet too.
    pub fn mntr(&self) -> BTreeMap<String, String> {
        let told = self.ask("mntr").unwrap_or_default();
        told.lines()
            .filter_map(|line| line.split_once('\t'))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// The packets that the server received and sent, for [`Packets::since`]. The packets of this
    /// request are left out.
    ///
    /// The server counts a reply after it has sent it. So right after an answer the count may be
    /// too low. This reads the counts until two readings agree, or a few times if other clients
    /// keep the server busy.
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

    /// Reads the counts with the four-letter word whose answer always fits into one packet.
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

    /// The number of the last transaction that the server knows.
    pub fn transactions(&self) -> u64 {
        let told = self.ask("srvr").expect("a server that answers");
        let number = told.lines().find_map(|line| line.strip_prefix("Zxid: 0x"));
        u64::from_str_radix(number.expect("what it tells"), 16).unwrap()
    }

    /// `leader`, `follower` or `standalone`. `None` while the server does not serve.
    pub fn role(&self) -> Option<String> {
        self.mntr().remove("zk_server_state")
    }

    /// Whether the server serves clients.
    pub fn serves(&self) -> bool {
        self.role().is_some()
    }

    /// The number of sessions that this server serves.
    pub fn sessions(&self) -> usize {
        let told = self.ask("cons").unwrap_or_default();
        told.matches(",sid=0x").count()
    }

    /// The number of watches that its clients have set. The server counts them.
    pub fn watches(&self) -> usize {
        let told = self.mntr().remove("zk_watch_count");
        told.map_or(0, |count| count.parse().unwrap())
    }

    /// The paths of the ephemeral nodes below a path, sorted. Only a leader or a single server
    /// knows them.
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

    /// The end of the server's log. It covers all starts of the server.
    pub fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    pub(crate) fn prepare(
        number: Option<usize>,
        port: u16,
        tick_millis: u32,
        lines: &[&str],
    ) -> Self {
        let daemon = Daemon::new("this ZooKeeper server", "zookeeper-");
        let data = daemon.folder().join("data");
        fs::create_dir(&data).unwrap();
        let config = format!(
            "tickTime={tick_millis}\nmaxSessionTimeout=300000\ndataDir={}\nclientPort={port}\n\
             clientPortAddress=127.0.0.1\nadmin.enableServer=false\n4lw.commands.whitelist=*\nmaxClientCnxns=0\n",
            data.display()
        );
        fs::write(daemon.folder().join("zoo.cfg"), config).unwrap();
        if let Some(number) = number {
            fs::write(data.join("myid"), number.to_string()).unwrap();
        }
        let server = Self {
            port,
            encrypted: None,
            packet_questions: AtomicU64::new(0),
            number,
            properties: &[],
            daemon,
        };
        server.configure(lines);
        server
    }

    /// Adds lines to the configuration of the server.
    fn configure(&self, lines: &[impl AsRef<str>]) {
        let file = self.daemon.folder().join("zoo.cfg");
        let mut config = File::options().append(true).open(file).unwrap();
        for line in lines {
            writeln!(config, "{}", line.as_ref()).unwrap();
        }
    }

    /// Starts the server. Returns `false` if its port was taken.
    fn try_spawn(&self) -> bool {
        self.spawn();
        let started = poll(START, || match self.daemon.ended() {
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

    /// Whether the server has ended because another process had its port.
    pub(crate) fn found_its_port_taken(&self) -> bool {
        self.daemon.log_from(0).contains("BindException")
    }

    pub(crate) fn spawn(&self) {
        let mut command = Command::new("java");
        command
            // The settings make the server small and quick to start: tests need many servers for a
            // few seconds each.
            .args([
                "-Xmx128m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-Xshare:auto",
            ])
            // The tests kill processes and never cut the power. So writes need not reach the disk
            // at once.
            .arg("-Dzookeeper.forceSync=no")
            .arg("-Dorg.slf4j.simpleLogger.showDateTime=true")
            .args(self.properties)
            .args(["-cp", &JARS.join(":")])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(self.daemon.folder().join("zoo.cfg"))
            .current_dir(self.daemon.folder());
        self.daemon.spawn(&mut command);
    }

    /// Sends a four-letter word, and returns the answer. `None` if no answer comes.
    fn ask(&self, word: &str) -> Option<String> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut stream = TcpStream::connect_timeout(&address, ANSWER).ok()?;
        stream.set_read_timeout(Some(ANSWER)).unwrap();
        stream.write_all(word.as_bytes()).ok()?;
        let mut told = String::new();
        stream.read_to_string(&mut told).ok()?;
        Some(told)
    }
}

/// The packets that a server received and sent. Their start values are arbitrary, so use
/// [`Packets::since`].
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
