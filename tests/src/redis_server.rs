//! A real Redis server that the test owns. It starts on a free loopback port in a temporary folder.
//! The test can stop, kill, freeze and restart it, and change its clock. [`proxy`](crate::proxy)
//! cuts its network.
//!
//! The harness talks to the server over a Unix socket, as a user of its own. So the server answers
//! the harness even if a test has changed ports or passwords.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use redis::{
    ConnectionAddr, FromRedisValue, IntoConnectionInfo as _, RedisConnectionInfo, RedisResult,
};

use crate::certificates::{Authority, Identity};
use crate::daemon::{self, Daemon, NotStarted};
use crate::eventually::wait_until;
use crate::faketime::{Clock, FakeClock};

const PROGRAM: &str = "redis-server";

/// The harness's own user at the server.
pub const USER: &str = "harness";

/// The time for a start. A start takes 10 ms, or some seconds on two saturated cores.
const START: Duration = Duration::from_secs(20);

/// How long an answer may take, which is longer than any answer needs. It is short, so that a test
/// that waits for a server that it has frozen itself fails soon.
const ANSWER: Duration = Duration::from_secs(5);

/// The calls of each command since the server started or since `CONFIG RESETSTAT`. Commands that
/// scripts call are included.
pub type CommandStats = BTreeMap<String, u64>;

/// A running server. It ends when this value is dropped.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    extra: Vec<String>,
    /// Whether the port accepts TLS only.
    tls: bool,
    /// The settings of a sentinel, as lines of its file. `None` for a server that is not a
    /// sentinel.
    sentinel: Option<String>,
    clock: Option<FakeClock>,
    daemon: Daemon,
}

impl RedisServer {
    /// A server without persistence.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more arguments, for example `&["--maxmemory", "1mb"]`. They override the
    /// harness's own.
    pub fn with(extra: &[&str]) -> Self {
        Self::launch(extra, false, None, |_| None)
    }

    /// A sentinel. `settings` are lines of its file, and `extra` are more arguments.
    pub fn sentinel(settings: &str, extra: &[&str]) -> Self {
        Self::launch(extra, false, Some(settings.into()), |_| None)
    }

    /// A server whose port accepts TLS only, with this certificate. With `clients`, it requires a
    /// client certificate of this authority.
    pub fn with_tls(identity: &Identity, clients: Option<&Authority>, extra: &[&str]) -> Self {
        let arguments = tls_arguments(identity, clients);
        let mut arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        arguments.extend(extra);
        Self::launch(&arguments, true, None, |_| None)
    }

    /// A sentinel whose port accepts TLS only. It also uses TLS with its servers, whose
    /// certificates must be from the same authority.
    pub fn sentinel_with_tls(identity: &Identity, authority: &Authority, settings: &str) -> Self {
        let mut arguments = tls_arguments(identity, Some(authority));
        arguments
            .extend(["--tls-auth-clients", "no", "--tls-replication", "yes"].map(String::from));
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        Self::launch(&arguments, true, Some(settings.into()), |_| None)
    }

    /// A server whose wall clock [`set_clock`](Self::set_clock) can change.
    pub fn with_clock(extra: &[&str]) -> Self {
        Self::launch(extra, false, None, |folder| {
            Some(FakeClock::in_folder(folder).unwrap_or_else(|reason| panic!("{reason}")))
        })
    }

    /// A replica of another server. When this returns, it has the data of that server.
    pub fn replica_of(master: &Self) -> Self {
        master.replica_with(&[])
    }

    /// A replica of this server, with more arguments.
    pub fn replica_with(&self, extra: &[&str]) -> Self {
        let port = self.port.to_string();
        let mut arguments = vec!["--replicaof", "127.0.0.1", &port];
        arguments.extend(extra);
        let replica = Self::with(&arguments);
        self.is_followed_by(&replica);
        replica
    }

    /// Makes the replica the master, and this server its replica, by a coordinated failover. No
    /// data is lost, and no client connection is closed.
    pub fn fail_over_to(&self, replica: &Self) {
        let port = replica.port.to_string();
        self.command::<()>(&["FAILOVER", "TO", "127.0.0.1", &port]);
        replica.is_followed_by(self);
    }

    /// Waits until a replica has everything that this server has at the time of the call. (`WAIT`
    /// would wait for the writes of its own connection only.)
    pub fn wait_until_received_by(&self, replica: &Self) {
        let offset = |server: &Self, field: &str| -> Option<u64> {
            let told = server.replication();
            let offset = told.lines().find_map(|line| line.strip_prefix(field))?;
            offset.parse().ok()
        };
        let written = offset(self, "master_repl_offset:").expect("a server with replicas");
        wait_until("the replica has everything", START, || {
            offset(replica, "slave_repl_offset:").is_some_and(|received| received >= written)
        });
    }

    fn is_followed_by(&self, replica: &Self) {
        let follows = format!("port={},state=online", replica.port);
        wait_until("the replica follows", START, || {
            self.replication().contains(&follows)
                && replica.replication().contains("master_link_status:up")
        });
    }

    fn replication(&self) -> String {
        self.command(&["INFO", "replication"])
    }

    /// Whether `redis-server` is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        daemon::can_run(PROGRAM, "--version", "apt-get install redis-server")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        let scheme = if self.tls { "rediss" } else { "redis" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// The URL with credentials, percent-encoded where necessary.
    pub fn url_with_user(&self, user: &str, password: &str) -> String {
        daemon::with_user(&self.url(), user, password)
    }

    /// The process id. A restart changes it.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    pub fn is_running(&self) -> bool {
        self.daemon.is_running()
    }

    /// Sends SIGKILL: the server loses what it has not written. Does nothing if the server is down.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Sends SIGTERM: the server ends normally, and first writes the data that it persists. Does
    /// nothing if the server is down.
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

    /// Changes the wall clock of a server that [`with_clock`](Self::with_clock) has made.
    pub fn set_clock(&self, clock: Clock) {
        self.clock
            .as_ref()
            .expect("the server was not started by `with_clock`")
            .set(clock);
    }

    /// Runs a command as the harness's user, for example `command::<u64>(&["DBSIZE"])`. Panics on
    /// an error.
    pub fn command<T: FromRedisValue>(&self, arguments: &[&str]) -> T {
        self.try_command(arguments)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// Runs a command that may fail.
    pub fn try_command<T: FromRedisValue>(&self, arguments: &[&str]) -> RedisResult<T> {
        let mut command = redis::Cmd::new();
        for argument in arguments {
            command.arg(argument);
        }
        command.query(&mut self.connection()?)
    }

    /// The keys that match a glob pattern, sorted.
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.command(&["KEYS", pattern]);
        keys.sort();
        keys
    }

    /// The calls of each command. The harness's own commands are included. The command that reads
    /// them is included only in the next reading.
    pub fn command_stats(&self) -> CommandStats {
        parse_command_stats(&self.command::<String>(&["INFO", "commandstats"]))
    }

    /// Calls since an earlier reading, without the harness's own INFO and AUTH.
    pub fn command_stats_since(&self, earlier: &CommandStats) -> CommandStats {
        let mut since = self.command_stats();
        for (command, calls) in &mut since {
            *calls -= earlier.get(command).unwrap_or(&0);
        }
        since.retain(|command, calls| *calls > 0 && !matches!(command.as_str(), "info" | "auth"));
        since
    }

    /// Removes every key. Scripts stay loaded.
    pub fn flush(&self) {
        self.command::<()>(&["FLUSHALL", "SYNC"]);
    }

    /// The end of the server's log. It covers all starts of the server.
    pub fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    fn launch(
        extra: &[&str],
        tls: bool,
        sentinel: Option<String>,
        clock: impl FnOnce(&Path) -> Option<FakeClock>,
    ) -> Self {
        Self::available().unwrap_or_else(|reason| panic!("{reason}"));
        let daemon = Daemon::new("this Redis server", "redis-");
        let mut server = Self {
            port: 0,
            extra: extra.iter().map(ToString::to_string).collect(),
            tls,
            sentinel,
            clock: clock(daemon.folder()),
            daemon,
        };
        daemon::start(PROGRAM, |port| {
            server.port = port;
            server.serve()
        });
        server
    }

    fn serve(&self) -> Result<(), NotStarted> {
        // The server listens on the Unix socket after it has bound the port. It answers when it has
        // read its data.
        let serves = || self.try_command::<()>(&["PING"]).is_ok();
        (self.daemon).serve(&mut self.command_line(), START, serves)
    }

    fn command_line(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        match &self.sentinel {
            None => command.args(self.settings()),
            Some(settings) => command.arg(self.sentinel_file(settings)).arg("--sentinel"),
        };
        if let Some(clock) = &self.clock {
            clock.preload_into(&mut command);
        }
        command
    }

    /// The server's settings as arguments.
    fn settings(&self) -> Vec<String> {
        let (port, folder, socket) = (self.port.to_string(), self.daemon.folder(), self.socket());
        let (folder, socket) = (folder.to_str().unwrap(), socket.to_str().unwrap());
        let mut settings = vec![if self.tls { "--tls-port" } else { "--port" }, &port];
        settings.extend(self.tls.then_some(["--port", "0"]).into_iter().flatten());
        settings.extend(["--bind", "127.0.0.1", "--dir", folder]);
        settings.extend(["--unixsocket", socket]);
        settings.extend(["--user", USER, "on", "nopass", "~*", "&*", "+@all"]);
        settings.extend(["--save", "", "--appendonly", "no"]);
        // With this setting, a replica does not wait for further replicas.
        settings.extend(["--repl-diskless-sync-delay", "0"]);
        let settings = settings.into_iter().map(str::to_owned);
        settings.chain(self.extra.iter().cloned()).collect()
    }

    /// The settings file of a sentinel. The sentinel stores in this file what it has learnt. So the
    /// harness writes the file only at the first start.
    fn sentinel_file(&self, own: &str) -> PathBuf {
        let file = self.daemon.folder().join(format!("{}.conf", self.port));
        if !file.exists() {
            let mut lines = String::new();
            for word in self.settings() {
                match word.strip_prefix("--") {
                    Some(setting) => lines += &format!("\n{setting}"),
                    None if word.is_empty() => lines += " \"\"",
                    None => lines += &format!(" {word}"),
                }
            }
            fs::write(&file, format!("{lines}\n{own}")).unwrap();
        }
        file
    }

    fn connection(&self) -> RedisResult<redis::Connection> {
        let user = RedisConnectionInfo::default()
            .set_username(USER)
            .set_password(USER)
            .set_skip_set_lib_name();
        let info = ConnectionAddr::Unix(self.socket())
            .into_connection_info()?
            .set_redis_settings(user);
        let connection = redis::Client::open(info)?.get_connection_with_timeout(ANSWER)?;
        connection.set_read_timeout(Some(ANSWER))?;
        Ok(connection)
    }

    /// The socket of Unix at which the server listens too.
    pub fn socket(&self) -> PathBuf {
        self.daemon.folder().join("socket")
    }
}

fn tls_arguments(identity: &Identity, clients: Option<&Authority>) -> Vec<String> {
    // The server requires an authority even if it does not require client certificates.
    let authority = clients.map_or(identity.certificate.as_path(), Authority::file);
    let arguments = [
        "--tls-cert-file",
        identity.certificate.to_str().unwrap(),
        "--tls-key-file",
        identity.key.to_str().unwrap(),
        "--tls-ca-cert-file",
        authority.to_str().unwrap(),
        "--tls-auth-clients",
        if clients.is_some() { "yes" } else { "no" },
    ];
    arguments.map(String::from).into()
}

/// Reads the answer to `INFO commandstats`. It has lines like
/// `cmdstat_config|set:calls=3,usec=17,…`.
pub fn parse_command_stats(info: &str) -> CommandStats {
    command_figures(info, "calls")
}

/// The microseconds that the server has spent in each command. The time of a script includes the
/// commands that the script calls.
pub fn parse_command_micros(info: &str) -> CommandStats {
    command_figures(info, "usec")
}

fn command_figures(info: &str, figure: &str) -> CommandStats {
    let value = |line: &str| {
        let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let mut figures = figures.split(',').filter_map(|pair| pair.split_once('='));
        let (_, value) = figures.find(|(name, _)| *name == figure)?;
        Some((command.to_owned(), value.parse().ok()?))
    };
    info.lines().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_stats_are_read_with_subcommands_and_without_headings() {
        let info = "# Commandstats\r\ncmdstat_evalsha:calls=12,usec=9,usec_per_call=0.7\r\ncmdstat_config|set:calls=1,usec=3\r\n";

        let stats = parse_command_stats(info);

        assert_eq!(
            stats,
            CommandStats::from([("config|set".into(), 1), ("evalsha".into(), 12)])
        );
    }
}
