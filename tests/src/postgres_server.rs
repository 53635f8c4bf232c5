//! A real PostgreSQL server that the test owns. It starts on a free loopback port in a temporary
//! folder. The schema of the library is there, and two users: the harness's own, which may do
//! everything, and [`USER`], which has only the rights that the guide lists.
//!
//! The harness talks to the server over a Unix socket. PostgreSQL does not run as root. If the
//! tests do, the server runs as the user `nobody`.

mod pooler;
mod standby;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::FutureExt as _;
use rustix::process::Signal;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage};

use crate::certificates::{Authority, Identity};
use crate::daemon::{self, Daemon, NotStarted};
use crate::elsewhere::elsewhere;
use crate::faketime::{Clock, FakeClock};
use crate::prepared::Prepared;
use crate::unprivileged::{as_unprivileged, give_away, place};
use crate::watch::SECRET;

pub use pooler::Pooler;
pub use standby::STANDBY;

/// The user with the rights of the guide. Its password is the [secret](SECRET).
pub const USER: &str = "locks";

/// The harness's own user at the server.
pub const HARNESS: &str = "harness";

const DATABASE: &str = "postgres";

/// The time for a start. A start takes 0.2 s, or some seconds on two saturated cores.
const START: Duration = Duration::from_secs(30);

/// Ends the server at once. This is SIGQUIT and not SIGKILL. After SIGKILL, the processes of the
/// clients would go on for a moment, and a part of the server's memory would be left to the
/// machine.
const CRASH: Signal = Signal::QUIT;

/// The users that may log in, and their kinds of login. With `md5`, the server asks for the kind of
/// password that it has of the user: see [`SETTINGS`]. No line of the system's own file is left.
const LOGINS: &str = "local all all trust\n\
    host all harness 127.0.0.1/32 trust\n\
    host replication harness 127.0.0.1/32 trust\n\
    host all all 127.0.0.1/32 md5\n";

/// Small settings. What a crash of the machine would lose does not matter here, and a crash of the
/// server alone loses nothing that was written.
const SETTINGS: [&str; 10] = [
    "listen_addresses=127.0.0.1",
    "shared_buffers=16MB",
    "max_connections=400",
    // The other kind costs an unoptimised client a tenth of a second at each connection.
    "password_encryption=md5",
    "fsync=off",
    "full_page_writes=off",
    "wal_level=minimal",
    "max_wal_senders=0",
    "log_checkpoints=off",
    "max_parallel_workers_per_gather=0",
];

/// A running server. It ends when this value is dropped.
#[derive(Debug)]
pub struct PostgresServer {
    port: u16,
    extra: Vec<String>,
    clock: Option<FakeClock>,
    daemon: Daemon,
}

impl PostgresServer {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more settings, for example `&["max_connections=20"]`.
    pub fn with(extra: &[&str]) -> Self {
        Self::launch(extra, |data| template().copy_to(data))
    }

    /// A server whose wall clock [`set_clock`](Self::set_clock) can change.
    pub fn with_clock() -> Self {
        let clock = |folder: &Path| {
            let clock = FakeClock::in_folder(folder).unwrap_or_else(|reason| panic!("{reason}"));
            Some(clock)
        };
        Self::launch_with(&[], clock, |data| template().copy_to(data))
    }

    /// A server on which nobody has made the schema yet.
    pub fn without_schema() -> Self {
        let server = Self::start();
        server.query("DROP SCHEMA lockcore1 CASCADE");
        server
    }

    /// A server that takes only encrypted connections, of these versions of TLS. With `clients`, it
    /// requires client certificates of this authority. It knows the user `default`, who has the
    /// rights of [`USER`].
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>, versions: &[&str]) -> Self {
        let oldest = versions.iter().min().unwrap();
        let newest = versions.iter().max().unwrap();
        let mut settings = vec![
            "ssl=on".to_owned(),
            "ssl_cert_file=server.crt".to_owned(),
            "ssl_key_file=server.key".to_owned(),
            format!("ssl_min_protocol_version={oldest}"),
            format!("ssl_max_protocol_version={newest}"),
        ];
        settings.extend(clients.map(|_| "ssl_ca_file=ca.crt".to_owned()));
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        let server = Self::launch(&settings, |data| {
            template().copy_to(data);
            let place = |file: &Path, name: &str| place(file, &data.join(name));
            place(&identity.certificate, "server.crt");
            place(&identity.key, "server.key");
            if let Some(authority) = clients {
                place(authority.file(), "ca.crt");
            }
            let demand = clients.map_or("", |_| " clientcert=verify-ca");
            let logins = format!("local all all trust\nhostssl all all 127.0.0.1/32 md5{demand}\n");
            fs::write(data.join("pg_hba.conf"), logins).unwrap();
        });
        server.query(&format!(
            "CREATE USER \"default\" PASSWORD '{SECRET}' IN ROLE {USER}"
        ));
        server
    }

    /// Whether PostgreSQL is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        folder_of_programs()
            .map(drop)
            .ok_or_else(|| "PostgreSQL is not installed: apt-get install postgresql".to_owned())?;
        Pooler::available()
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
        format!("postgres://{HARNESS}@127.0.0.1:{port}/{DATABASE}")
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        daemon::with_user(&self.url(), user, password)
    }

    /// Ends the server as a crash would: at its next start it reads what it has written to its log.
    /// Does nothing if the server is down.
    pub fn kill(&self) {
        self.daemon.stop_by(CRASH);
    }

    /// Ends the server, which first writes its data. Does nothing if the server is down.
    pub fn stop(&self) {
        self.daemon.stop_by(Signal::INT);
    }

    /// Starts the server again on the same port in the same folder. Stops it first if it is
    /// running.
    pub fn restart(&self) {
        self.stop();
        daemon::start_again(START, || self.serve());
    }

    /// Sets the wall clock. It takes effect when the server reads the clock next.
    pub fn set_clock(&self, clock: Clock) {
        let own = self.clock.as_ref().expect("a server `with_clock`");
        own.set(clock);
    }

    /// Lets the server write no file beyond this length, as on a full disk. With `None` there is
    /// room again.
    pub fn limit_files(&self, longest: Option<u64>) {
        let longest = longest.map_or("unlimited".to_owned(), |bytes| bytes.to_string());
        let limit = |pid: &str| {
            // Only the user of a process may change its limits, even if the tests run as root.
            let mut command = as_unprivileged("/usr/bin/prlimit".as_ref());
            command.args(["--pid", pid, &format!("--fsize={longest}:")]);
            command.output().unwrap()
        };
        // Processes that begin from now on have the limit of this one.
        let limited = limit(&self.daemon.pid().to_string());
        assert!(limited.status.success(), "{limited:?}");
        for pid in self.query("SELECT pid FROM pg_stat_activity") {
            // It may have ended: the process of the query has.
            limit(&pid);
        }
    }

    /// Runs statements as the harness's user, and returns the first column of every row as text.
    pub fn query(&self, statements: &str) -> Vec<String> {
        self.try_query(statements)
            .unwrap_or_else(|error| panic!("{statements}: {error} {error:?}"))
    }

    /// Runs statements that may fail.
    pub fn try_query(&self, statements: &str) -> Result<Vec<String>, Box<dyn Error + Send + Sync>> {
        elsewhere(async {
            let stream = tokio::net::UnixStream::connect(self.socket()).await?;
            rows(stream, statements).await
        })
    }

    /// The end of the server's log. It covers all starts of the server.
    pub fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    /// The number of bytes in the server's log.
    pub fn log_length(&self) -> usize {
        self.daemon.log_length()
    }

    /// The server's log from this byte on.
    pub fn log_from(&self, byte: usize) -> String {
        self.daemon.log_from(byte)
    }

    fn launch(extra: &[&str], fill: impl FnOnce(&Path)) -> Self {
        Self::launch_with(extra, |_| None, fill)
    }

    fn launch_with(
        extra: &[&str],
        clock: impl FnOnce(&Path) -> Option<FakeClock>,
        fill: impl FnOnce(&Path),
    ) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let daemon = Daemon::new("this PostgreSQL server", "pg-").ends_by(CRASH);
        let mut server = Self {
            port: 0,
            extra: extra.iter().map(ToString::to_string).collect(),
            clock: clock(daemon.folder()),
            daemon,
        };
        fill(&server.data());
        give_away(server.daemon.folder());
        daemon::start("postgres", |port| {
            server.port = port;
            server.serve()
        });
        server
    }

    fn serve(&self) -> Result<(), NotStarted> {
        let folder = self.daemon.folder().to_str().unwrap();
        let mut command = program("postgres");
        command.args(["-D", self.data().to_str().unwrap(), "-k", folder]);
        command.args(["-p", &self.port.to_string()]);
        let extra = self.extra.iter().map(String::as_str);
        for setting in SETTINGS.into_iter().chain(extra) {
            command.args(["-c", setting]);
        }
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
        (self.daemon.folder()).join(format!(".s.PGSQL.{}", self.port))
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // If it does not end at SIGQUIT, the daemon kills it. Nothing here may panic, because the
        // test may already be panicking.
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.kill()));
        drop(stopped);
    }
}

/// Runs statements as the harness's user. Returns the first column of every row as text.
async fn rows(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    statements: &str,
) -> Result<Vec<String>, Box<dyn Error + Send + Sync>> {
    let (client, driver) = client(stream).await?;
    let told = client.simple_query(statements).await?;
    drop(client);
    let _ = driver.await;
    Ok(first_column(&told))
}

async fn client(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<(Client, JoinHandle<()>), tokio_postgres::Error> {
    let mut login = Config::new();
    let login = login.user(HARNESS).dbname(DATABASE);
    let (client, connection) = login.connect_raw(stream, NoTls).await?;
    Ok((client, tokio::spawn(connection.map(drop))))
}

fn first_column(told: &[SimpleQueryMessage]) -> Vec<String> {
    let rows = told.iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
        _ => None,
    });
    rows.collect()
}

/// The data of a server that was just made. Making it takes a second, and copying it a tenth.
fn template() -> &'static Prepared {
    static TEMPLATE: OnceLock<Prepared> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let server = PostgresServer::launch(&[], make);
        server.query(&format!(
            "{}; CREATE USER {USER} PASSWORD '{SECRET}'; {}",
            include_str!("../../lockcore/src/backend/postgres/schema/lockcore1.sql"),
            rights()
        ));
        server.stop();
        Prepared::from(&server.data())
    })
}

/// The statements of the guide that give a user the rights that it needs.
fn rights() -> String {
    let page = include_str!("../../lockcore/src/backend/postgres/guide.md");
    let rights = page.split("# Minimum rights").nth(1).unwrap();
    let rights = rights.split("```").nth(1).unwrap();
    let rights = rights.strip_prefix("sql\n").unwrap();
    assert!(rights.contains(&format!("TO {USER};")), "{rights}");
    rights.to_owned()
}

fn make(data: &Path) {
    let folder = data.parent().unwrap();
    give_away(folder);
    let mut command = program("initdb");
    command.args(["-D", data.to_str().unwrap(), "-U", HARNESS]);
    command.args(["--no-sync", "--encoding=UTF8", "--locale=C", "--auth=trust"]);
    let made = command.stdin(Stdio::null()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    fs::write(data.join("pg_hba.conf"), LOGINS).unwrap();
}

/// A program of PostgreSQL.
fn program(name: &str) -> Command {
    as_unprivileged(&folder_of_programs().unwrap().join(name))
}

/// Debian keeps the programs of each version in a folder that is not in the path.
fn folder_of_programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut folders: Vec<_> = versions
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .filter(|folder| folder.join("initdb").exists())
        .collect();
    folders.sort();
    folders.pop()
}
