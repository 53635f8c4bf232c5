//! A real MariaDB server that the test owns. It starts on a free loopback port in a temporary
//! folder, which is on a RAM disk if there is one with enough room. There are two users: the
//! harness's own, which may do everything, and [`USER`].
//!
//! The harness talks to the server over a Unix socket, by the program `mariadb`. The server does
//! not run as root. If the tests do, the server runs as the user `nobody`.

mod replica;
mod session;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::certificates::{Authority, Identity};
use crate::daemon::{self, Daemon, NotStarted};
use crate::faketime::{Clock, FakeClock};
use crate::prepared::Prepared;
use crate::unprivileged::{as_unprivileged, give_away, place};
use crate::watch::SECRET;

pub use session::Session;

/// The user for clients that need no more than the rights of the guide. Its password is the
/// [secret](SECRET).
pub const USER: &str = "locks";

/// The harness's own user at the server. It has no password.
pub const HARNESS: &str = "harness";

/// The database of [`url`](MysqlServer::url).
pub const DATABASE: &str = "lockdb";

const SERVER: &str = "/usr/sbin/mariadbd";
const CLIENT: &str = "/usr/bin/mariadb";
const MAKER: &str = "/usr/bin/mariadb-install-db";

/// The time for a start. A start takes 0.15 s, or some seconds on two saturated cores.
const START: Duration = Duration::from_secs(30);

/// The sizes of the files of a server, which are also those of its prepared data.
const SIZES: [&str; 5] = [
    "--innodb-data-file-path=ibdata1:4M:autoextend",
    "--innodb-autoextend-increment=1",
    "--innodb-undo-tablespaces=0",
    "--innodb-log-file-size=8M",
    "--aria-log-file-size=8M",
];

/// Small settings. What a server does for durability is as by default.
const SETTINGS: [&str; 7] = [
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--innodb-buffer-pool-size=16M",
    "--innodb-buffer-pool-dump-at-shutdown=OFF",
    // All servers of a machine share a limit on such requests.
    "--innodb-use-native-aio=OFF",
    "--max-connections=400",
    "--character-set-server=utf8mb4",
];

/// A running server. It ends when this value is dropped.
#[derive(Debug)]
pub struct MysqlServer {
    port: u16,
    extra: Vec<String>,
    clock: Option<FakeClock>,
    daemon: Daemon,
}

impl MysqlServer {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more options, for example `&["--max-connections=20"]`.
    pub fn with(extra: &[&str]) -> Self {
        let extra = extra.iter().map(ToString::to_string).collect();
        Self::launch(extra, |_| None, |data| template().copy_to(data))
    }

    /// A server whose wall clock [`set_clock`](Self::set_clock) can change.
    pub fn with_clock() -> Self {
        let clock = |folder: &Path| {
            let clock = FakeClock::in_folder(folder).unwrap_or_else(|reason| panic!("{reason}"));
            Some(clock)
        };
        Self::launch(Vec::new(), clock, |data| template().copy_to(data))
    }

    /// A server that takes only encrypted connections, of these versions of TLS. It knows the user
    /// `default`, which has the rights of [`USER`]. With `clients`, this user needs a client
    /// certificate of this authority.
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>, versions: &[&str]) -> Self {
        let daemon = Self::daemon();
        let file = |name: &str| daemon.folder().join(name);
        let (certificate, key, authority) = (file("cert.pem"), file("key.pem"), file("ca.pem"));
        place(&identity.certificate, &certificate);
        place(&identity.key, &key);
        let mut extra = vec![
            "--require-secure-transport=ON".to_owned(),
            format!("--ssl-cert={}", certificate.display()),
            format!("--ssl-key={}", key.display()),
            format!("--tls-version={}", versions.join(",")),
        ];
        if let Some(clients) = clients {
            place(clients.file(), &authority);
            extra.push(format!("--ssl-ca={}", authority.display()));
        }
        template().copy_to(&file("data"));
        let server = Self::run(daemon, extra, None);
        let demand = clients.map_or("SSL", |_| "X509");
        server.query(&format!(
            "CREATE USER 'default'@'%' IDENTIFIED BY '{SECRET}' REQUIRE {demand}; \
             GRANT EXECUTE ON {DATABASE}.* TO 'default'@'%'"
        ));
        server
    }

    /// Whether MariaDB is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        let missing = [SERVER, CLIENT, MAKER].map(Path::new);
        match missing.into_iter().find(|program| !program.exists()) {
            None => Ok(()),
            Some(program) => Err(format!(
                "there is no {}: apt-get install mariadb-server",
                program.display()
            )),
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL for a user who may do everything.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The same at another port of this machine.
    pub fn url_at(&self, port: u16) -> String {
        format!("mysql://{HARNESS}@127.0.0.1:{port}/{DATABASE}")
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        daemon::with_user(&self.url(), user, password)
    }

    /// Sends SIGKILL. At its next start, the server reads what it has written to its log. Does
    /// nothing if the server is down.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Ends the server, which first writes its data. Does nothing if the server is down.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Starts the server again on the same port in the same folder. Stops it first if it is
    /// running.
    pub fn restart(&self) {
        self.stop();
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

    /// Sets the wall clock. It takes effect when the server reads the clock next.
    pub fn set_clock(&self, clock: Clock) {
        let own = self.clock.as_ref().expect("a server `with_clock`");
        own.set(clock);
    }

    /// Runs statements as the harness's user, and returns the first column of every row as text.
    pub fn query(&self, statements: &str) -> Vec<String> {
        self.try_query(statements)
            .unwrap_or_else(|error| panic!("{statements}: {error}"))
    }

    /// Runs statements that may fail. The error is the server's.
    pub fn try_query(&self, statements: &str) -> Result<Vec<String>, String> {
        let mut client = self
            .client()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It reads all statements before it prints a row. If it cannot connect, it reads nothing,
        // and its error says so.
        let _ = (client.stdin.take().unwrap()).write_all(statements.as_bytes());
        let output = client.wait_with_output().unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let told = String::from_utf8_lossy(&output.stdout);
        let first = |row: &str| row.split('\t').next().unwrap_or_default().to_owned();
        Ok(told.lines().map(first).collect())
    }

    /// The statements of all clients that the server has answered, without those of procedures.
    pub fn requests(&self) -> u64 {
        let requests = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS \
            WHERE VARIABLE_NAME = 'QUESTIONS'";
        self.query(requests)[0].parse().unwrap()
    }

    /// The server's own program, as the harness's user.
    fn client(&self) -> Command {
        let mut command = as_unprivileged(CLIENT.as_ref());
        command
            .args(["--no-defaults", "--batch", "--skip-column-names"])
            .arg(format!("--socket={}", self.socket().display()))
            .args(["--user", HARNESS]);
        command
    }

    /// The process id. A restart changes it.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// The folder of the server, which is removed with it.
    pub fn folder(&self) -> &Path {
        self.daemon.folder()
    }

    /// The end of the server's log. It covers all starts of the server.
    pub fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    fn launch(
        extra: Vec<String>,
        clock: impl FnOnce(&Path) -> Option<FakeClock>,
        fill: impl FnOnce(&Path),
    ) -> Self {
        let daemon = Self::daemon();
        fill(&daemon.folder().join("data"));
        let clock = clock(daemon.folder());
        Self::run(daemon, extra, clock)
    }

    fn daemon() -> Daemon {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let daemon = Daemon::on_ram_disk("this MariaDB server", "my-");
        give_away(daemon.folder());
        daemon
    }

    fn run(daemon: Daemon, extra: Vec<String>, clock: Option<FakeClock>) -> Self {
        let mut server = Self {
            port: 0,
            extra,
            clock,
            daemon,
        };
        daemon::start("mariadbd", |port| {
            server.port = port;
            server.serve()
        });
        server
    }

    fn serve(&self) -> Result<(), NotStarted> {
        let mut command = as_unprivileged(SERVER.as_ref());
        command
            .arg("--no-defaults")
            .arg(format!("--datadir={}", self.data().display()))
            .arg(format!("--socket={}", self.socket().display()))
            .arg(format!("--port={}", self.port))
            // A server removes the temporary tables of others in this folder when it starts.
            .arg(format!("--tmpdir={}", self.folder().display()))
            .args(SIZES)
            .args(SETTINGS)
            .args(&self.extra);
        if let Some(clock) = &self.clock {
            clock.preload_into(&mut command);
        }
        let serves = || self.try_query("SELECT 1").is_ok();
        self.daemon.serve(&mut command, START, serves)
    }

    fn data(&self) -> PathBuf {
        self.daemon.folder().join("data")
    }

    /// The socket of Unix at which the server listens too.
    fn socket(&self) -> PathBuf {
        self.daemon.folder().join("socket")
    }
}

/// The data of a server that was just made. Making it takes a second, and copying it a fiftieth.
fn template() -> &'static Prepared {
    static TEMPLATE: OnceLock<Prepared> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let server = MysqlServer::launch(vec!["--skip-grant-tables".to_owned()], |_| None, make);
        server.query(&format!(
            "FLUSH PRIVILEGES; \
             CREATE DATABASE {DATABASE}; \
             CREATE USER {HARNESS}@'%'; GRANT ALL ON *.* TO {HARNESS}@'%' WITH GRANT OPTION; \
             CREATE USER {USER}@'%' IDENTIFIED BY '{SECRET}'; \
             GRANT EXECUTE ON {DATABASE}.* TO {USER}@'%'"
        ));
        server.stop();
        Prepared::from(&server.data())
    })
}

fn make(data: &Path) {
    let made = as_unprivileged(MAKER.as_ref())
        .arg("--no-defaults")
        .arg(format!("--datadir={}", data.display()))
        .arg(format!("--tmpdir={}", data.parent().unwrap().display()))
        .args(["--auth-root-authentication-method=normal", "--skip-test-db"])
        .args(SIZES)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}
