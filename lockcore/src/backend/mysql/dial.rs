//! Opens a connection to the server: a socket, the login, the session that the verbs need, and the
//! tables and procedures if they are missing.

use std::collections::HashMap;
use std::time::Duration;

use super::calls::{Call, PROCEDURES, only, statements};
use super::config::Server;
#[cfg(feature = "mysql-tls")]
use super::encrypted;
use super::errors::{GUIDE, failed, not_connected};
use super::wire::{Failure, Wire, greeted};
use crate::backend::socket::socket;
use crate::backend::table::Row as _;
use crate::backend::{Fault, StoreError};

/// The session of a connection. No verb needs it, so it may be lost at a proxy. It keeps the server
/// from ending a connection that is not used for a while, and a call in the middle. Only MariaDB
/// reads what stands between `/*M!` and `*/`.
fn session(op_timeout: Duration) -> String {
    let wait = lock_wait(op_timeout);
    format!(
        "SET SESSION autocommit = 1, wait_timeout = 2147483, innodb_lock_wait_timeout = {wait}, \
         lock_wait_timeout = {wait} /*M!, max_statement_time = 0 */"
    )
}

/// For how many seconds a call waits at the server for a row or a table that somebody has locked:
/// shorter than its client waits for the answer, if that is more than a second. The server counts in
/// whole seconds. It is never so long that a mark for a late call could have ended.
fn lock_wait(op_timeout: Duration) -> u128 {
    op_timeout
        .as_millis()
        .div_ceil(1_000)
        .saturating_sub(1)
        .clamp(1, 5)
}

/// The settings that count, and those by which two servers differ. Every user may read them.
const SETTINGS: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'read_only', \
    'innodb_read_only', 'wsrep_on', 'wsrep_provider', 'group_replication_single_primary_mode', \
    'max_allowed_packet', 'binlog_format', 'log_bin', 'sync_binlog', \
    'innodb_flush_log_at_trx_commit', 'hostname', 'port', 'server_id', 'server_uuid', 'server_uid')";

/// The settings of a server, with small letters.
pub(super) type Settings = HashMap<String, String>;

/// Opens a connection and logs in.
pub(super) async fn dial(server: &Server, op_timeout: Duration) -> Result<Wire, StoreError> {
    let refused = |failure| not_connected(server, failure);
    let mut wire = log_in(server).await.map_err(refused)?;
    let session = session(op_timeout);
    wire.ask(session.as_bytes()).await.map_err(refused)?;
    Ok(wire)
}

async fn log_in(server: &Server) -> Result<Wire, Failure> {
    let mut socket = socket(&server.host, server.port).await?;
    let greeting = greeted(&mut socket).await?;
    #[cfg(feature = "mysql-tls")]
    if let Some(tls) = &server.tls {
        let stream = encrypted::begin(tls, socket, &greeting).await?;
        let login = Wire::log_in(Box::new(stream), greeting, &server.login, true);
        // The server may refuse the certificate of the client only now.
        return login
            .await
            .map_err(|failure| encrypted::ended(tls, failure));
    }
    Wire::log_in(Box::new(socket), greeting, &server.login, false).await
}

pub(super) async fn settings(wire: &mut Wire) -> Result<Settings, StoreError> {
    let rows = wire.ask(SETTINGS.as_bytes()).await.map_err(failed)?;
    let row = |row: super::wire::Row| {
        let mut values = row.values.into_iter().flatten();
        let mut next = || Some(String::from_utf8_lossy(&values.next()?).to_lowercase());
        Some((next()?, next()?))
    };
    Ok(rows.into_iter().filter_map(row).collect())
}

/// Whether a quarter of the connections that the server allows are free.
pub(super) async fn ask_for_room(wire: &mut Wire) -> Result<bool, StoreError> {
    let most = "SELECT @@GLOBAL.max_connections AS Value";
    let open = "SHOW GLOBAL STATUS LIKE 'Threads_connected'";
    let mut numbers = [0; 2];
    for (number, text) in numbers.iter_mut().zip([most, open]) {
        let row = only(wire.ask(text.as_bytes()).await.map_err(failed)?)?;
        *number = row.int("Value")?.unwrap_or_default();
    }
    let [most, open] = numbers;
    Ok(open * 4 <= most * 3)
}

/// Fails if the server cannot keep locks.
pub(super) fn check_server(place: &str, settings: &Settings) -> Result<(), StoreError> {
    let is = |name: &str, value: &str| settings.get(name).is_some_and(|found| found == value);
    let because = |fault, text: &str| {
        Err(StoreError::new(
            fault,
            format!("cannot use {place}: {text}"),
        ))
    };
    if settings
        .get("version")
        .is_some_and(|version| is_too_old(version))
    {
        return because(
            Fault::Config,
            "this server is too old; update it to MariaDB 10.6, or to MySQL 8.0, or later",
        );
    }
    if is("read_only", "on") || is("innodb_read_only", "on") {
        // Not a mistake: after a failover, the address may lead to the other server, or this one
        // may be promoted.
        let text = "it is read-only, and takes no locks; name the server that it follows";
        return because(Fault::Retry, text);
    }
    // A row that is locked at one of these servers is not locked at the others.
    if is("wsrep_on", "on") && !is("wsrep_provider", "none") {
        let text = "it is a part of a Galera cluster, whose servers take writes at the same time \
            and do not see each other's locks; use a server that is a primary with replicas";
        return because(Fault::Config, &format!("{text}{GUIDE}"));
    }
    if is("group_replication_single_primary_mode", "off") {
        let text = "it is a part of a group whose servers all take writes, and do not see each \
            other's locks; set group_replication_single_primary_mode on";
        return because(Fault::Config, &format!("{text}{GUIDE}"));
    }
    // In READ COMMITTED the server refuses to write a log of statements.
    if is("log_bin", "on") && is("binlog_format", "statement") {
        let text = "its binlog_format is STATEMENT; set it to ROW or MIXED";
        return because(Fault::Config, &format!("{text}{GUIDE}"));
    }
    // The longest call writes a counter that remembers the most changes: half a megabyte, as it was
    // and as it is to be, in hexadecimal.
    let packet = settings.get("max_allowed_packet");
    if packet
        .and_then(|size| size.parse().ok())
        .is_some_and(|size: u64| size < 4 << 20)
    {
        let text = "its max_allowed_packet is too small; set it to at least 4M";
        return because(Fault::Config, &format!("{text}{GUIDE}"));
    }
    Ok(())
}

/// Warnings for an operator, from a connection of its own.
pub(super) async fn check(
    server: &Server,
    op_timeout: Duration,
) -> Result<Vec<String>, StoreError> {
    let settings = settings(&mut dial(server, op_timeout).await?).await?;
    let flush = settings.get("innodb_flush_log_at_trx_commit");
    let mut warnings = Vec::new();
    if flush.is_some_and(|flush| flush != "1") {
        warnings.push(
            "requests count before they are on the disk of MySQL (innodb_flush_log_at_trx_commit \
             is not 1): after a crash of the machine, a lock that was granted in its last second \
             may be granted to others. Set it to 1"
                .to_owned(),
        );
    }
    let is = |name: &str, value: &str| settings.get(name).is_some_and(|found| found == value);
    if is("log_bin", "on") && !is("sync_binlog", "1") {
        warnings.push(
            "the binary log of MySQL is not on the disk when a request counts (sync_binlog is not \
             1): after a crash of the machine, what it lacks is rolled back, and a lock may be \
             granted to others. Set it to 1"
                .to_owned(),
        );
    }
    Ok(warnings)
}

/// A version such as `8.0.36`, `10.11.6-MariaDB` or `5.5.5-10.11.6-MariaDB`.
fn is_too_old(version: &str) -> bool {
    let numbers = version.strip_prefix("5.5.5-").unwrap_or(version);
    let mut numbers = numbers
        .split(['.', '-'])
        .map_while(|part| part.parse::<u32>().ok());
    let found = [(); 2].map(|()| numbers.next().unwrap_or_default());
    found
        < if version.contains("mariadb") {
            [10, 6]
        } else {
            [8, 0]
        }
}

/// Makes the tables and procedures if they are missing, and replaces procedures of an earlier
/// version. Those of a later version serve this client too, and stay.
///
/// The server commits each statement of this by itself. The file drops the procedure with the version
/// first and makes it last. So if the server crashes in the middle, the next client begins again. A
/// call of another client that finds a procedure missing in between fails, and its client connects
/// again.
///
/// To make them takes some 60 round trips, and may take longer than the client waits for a connection.
/// So once begun, this goes on if the future is dropped, and the next attempt finds them.
pub(super) async fn find_schema(mut wire: Wire, op_timeout: Duration) -> Result<Wire, StoreError> {
    if ask_for_schema(&mut wire).await? {
        return Ok(wire);
    }
    // The file takes this lock too. Its name may have 64 characters at most. A session that waits for
    // it does not notice that its client has gone. So it waits for less time than the client does,
    // which has to connect in this time too.
    let wait = lock_wait(op_timeout) - 1;
    let lock = format!("SELECT GET_LOCK(CONCAT('lockcore1 ', MD5(DATABASE())), {wait}) AS ours");
    let ours = only(wire.ask(lock.as_bytes()).await.map_err(failed)?)?;
    if !ours.is("ours")? {
        let text = "MySQL: somebody makes the procedures of lockcore, and is not done yet";
        return Err(StoreError::new(Fault::Retry, text));
    }
    let making = tokio::spawn(async move {
        let made = make(&mut wire).await;
        let unlocked = wire.ask(b"DO RELEASE_ALL_LOCKS()").await;
        made.and(unlocked.map_err(failed)).map(|_| wire)
    });
    let ended = |_| StoreError::new(Fault::Retry, "MySQL: the runtime has ended");
    making.await.map_err(ended)?
}

async fn make(wire: &mut Wire) -> Result<(), StoreError> {
    if ask_for_schema(wire).await? {
        return Ok(());
    }
    for statement in statements() {
        match wire.ask(statement.as_bytes()).await {
            Ok(_) => {}
            Err(Failure::Refused {
                code: 1044 | 1142 | 1227 | 1370,
                text,
            }) => {
                return Err(no_schema(&format!(
                    "the tables and procedures of lockcore are missing or of an earlier version, \
                     and this user may not make them ({text}): let a user with the rights CREATE, \
                     CREATE ROUTINE and ALTER ROUTINE run the file lockcore1.sql in this database"
                )));
            }
            Err(failure) => return Err(failed(failure)),
        }
    }
    Ok(())
}

/// Whether the procedures are there, in this version or a later one.
async fn ask_for_schema(wire: &mut Wire) -> Result<bool, StoreError> {
    match wire.ask(&Call::of("version").text()).await {
        Ok(rows) => {
            let version = only(rows)?.int("version")?;
            Ok(version.is_some_and(|version| version >= PROCEDURES))
        }
        Err(Failure::Refused { code: 1305, .. }) => Ok(false),
        Err(Failure::Refused { code: 1370, text }) => Err(no_schema(&format!(
            "this user may not call the procedures of lockcore ({text}): GRANT EXECUTE ON the \
             database of the URL"
        ))),
        Err(failure) => Err(failed(failure)),
    }
}

fn no_schema(why: &str) -> StoreError {
    StoreError::new(Fault::Config, format!("MySQL: {why}{GUIDE}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_waits_for_a_row_for_less_time_than_its_client_waits_for_the_answer() {
        for (op_timeout, wait) in [(300, 1), (1_000, 1), (2_000, 1), (2_001, 2), (60_000, 5)] {
            let op_timeout = Duration::from_millis(op_timeout);
            assert_eq!(lock_wait(op_timeout), wait, "{op_timeout:?}");
        }
    }

    #[test]
    fn an_old_server_is_told_by_its_version() {
        for (version, is_old) in [
            ("10.6.1-mariadb", false),
            ("5.5.5-10.11.6-mariadb-0+deb12u1", false),
            ("10.5.9-mariadb-log", true),
            ("11.4.2-mariadb", false),
            ("8.0.36", false),
            ("9.1.0", false),
            ("5.7.44-log", true),
        ] {
            assert_eq!(is_too_old(version), is_old, "{version}");
        }
    }

    #[test]
    fn a_setting_that_would_lose_locks_is_refused_with_what_to_do() {
        let check = |settings: &[(&str, &str)]| {
            let settings = settings
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()));
            check_server("h:1", &settings.collect())
        };
        assert!(check(&[("wsrep_on", "on"), ("wsrep_provider", "none")]).is_ok());
        assert!(check(&[("log_bin", "off"), ("binlog_format", "statement")]).is_ok());
        for (settings, todo) in [
            (&[("version", "5.7.1")][..], "update it"),
            (&[("wsrep_on", "on")], "use a server that is a primary"),
            (
                &[("log_bin", "on"), ("binlog_format", "statement")],
                "set it to ROW",
            ),
            (&[("max_allowed_packet", "1048576")], "at least 4M"),
            (
                &[("group_replication_single_primary_mode", "off")],
                "mode on",
            ),
        ] {
            let error = check(settings).expect_err(todo);
            assert_eq!(error.fault(), Fault::Config);
            assert!(error.to_string().contains(todo), "{error}");
        }
        let replica = check(&[("read_only", "on")]).expect_err("a replica");
        assert_eq!(replica.fault(), Fault::Retry);
    }
}
