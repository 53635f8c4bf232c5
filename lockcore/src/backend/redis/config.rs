//! Reads the URL, and checks the settings of the server that an operator should know about.

use std::collections::HashMap;

use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, RedisResult, Value};
use url::Url;

use super::access::{Form, value};
use super::connection::RedisConnection;
use super::dial::{Part, Server};
use super::durability::{self, Durability};
use super::errors::failed;
use super::siblings::field;
use crate::backend::{Fault, StoreError, hosts};
use crate::error::Error;
use crate::tls::Tls;

const FORM: Form = Form {
    text: "redis://[[user]:password@]host[:port][/database number][?durability=…] (rediss:// with TLS)",
    port: 6379,
    options: &[durability::OPTION],
};

const SOCKET: Form = Form {
    text: "redis+unix:///path[?user=…&password=…&db=…&durability=…]",
    port: 0,
    options: &["user", "password", "db", durability::OPTION],
};

/// The server of `redis://…` and `rediss://…`.
pub(super) fn server(url: &Url, tls: &Tls) -> Result<Server, Error> {
    let (access, _) = FORM.access(url, tls)?;
    let hosts = FORM.hosts(url)?;
    let [address] = &hosts[..] else {
        return Err(Error::config(
            "redis:// and rediss:// take one host, because all locks lie on one server; if these are sentinels, write \
             redis+sentinel://h1,h2,h3/SERVICE; else see \"Failover\" in the guide of the Redis store: name an address \
             that leads to the master",
        ));
    };
    let database = match url.path().trim_matches('/') {
        "" => 0,
        number => FORM.database(number, "the database")?,
    };
    let login = access.login.clone().set_db(database);
    access.server(address, &login, Part::Alone)
}

/// The server of `redis+unix:///…`.
pub(super) fn server_at_socket(url: &Url, tls: &Tls) -> Result<Server, Error> {
    if cfg!(not(unix)) {
        return Err(SOCKET.wrong("this system has no such sockets"));
    }
    let (access, options) = SOCKET.access(url, tls)?;
    if url.has_host() || !url.path().starts_with('/') || url.path().ends_with('/') {
        return Err(SOCKET.wrong(
            "three slashes precede the path of the socket, as in redis+unix:///run/redis.sock",
        ));
    }
    let path = hosts::decoded(url.path()).map_err(|what| SOCKET.wrong(what))?;
    let mut login = SOCKET.login(&options, ["user", "password"])?;
    if let Some(number) = value(&options, "db") {
        login = login.set_db(SOCKET.database(number, "db")?);
    }
    access.server_at(ConnectionAddr::Unix(path.into()), &login, Part::Alone)
}

/// The oldest version with RESP3.
const OLDEST: u32 = 6;

/// The oldest version with channels in a slot.
const OLDEST_OF_A_CLUSTER: u32 = 7;

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

const REPLICA: &str = "this Redis server is a replica and takes no locks; connect to its master";

/// Checks that the server accepts locks. Each connection checks this again, because the address of
/// a master may lead to a replica after a failover, and later to a master again. `HELLO` needs no
/// right. If its answer does not say what the server is, this function accepts the server.
pub(super) async fn keeps_locks(
    mut connection: MultiplexedConnection,
    server: &Server,
) -> Result<(), StoreError> {
    // Redis 6.0 needs the version of the protocol as an argument. The connection already uses this
    // version.
    let question = redis::cmd("HELLO").arg(3).take();
    let answer: HashMap<String, Value> = question
        .query_async(&mut connection)
        .await
        .map_err(|error| server.failed(error))?;
    let is = |field: &str, value: &str| match answer.get(field) {
        Some(Value::SimpleString(text)) => text == value,
        Some(Value::BulkString(text)) => text == value.as_bytes(),
        _ => false,
    };
    let of_a_cluster = matches!(server.part, Part::Seed | Part::Node);
    if is("mode", "cluster") && !of_a_cluster {
        return Err(server.mistake(
            "this server is part of a Redis Cluster, where the locks of one client lie on several \
             servers; write redis+cluster://host:port, with as many of its nodes as you know",
        ));
    }
    if is("mode", "sentinel") {
        return Err(server.mistake(
            "this is a Redis Sentinel, which keeps no locks; write redis+sentinel://host:port/SERVICE, and the name of the \
             master that it watches for SERVICE",
        ));
    }
    if of_a_cluster && !is("mode", "cluster") {
        return Err(server.mistake(
            "this server is not part of a Redis Cluster; for a single server write redis:// or rediss://",
        ));
    }
    if of_a_cluster
        && let Some(Value::BulkString(version)) = answer.get("version")
        && let Some(version) = std::str::from_utf8(version).ok()
        && major(version).is_some_and(|major| major < OLDEST_OF_A_CLUSTER)
    {
        return Err(server.mistake(format_args!(
            "Redis {version} is too old for a cluster; update it to {OLDEST_OF_A_CLUSTER} or later, or to Valkey"
        )));
    }
    // A seed may be a replica, because any node can say where the slots are.
    if is("role", "replica") && server.part != Part::Seed {
        // This is not a `Config` error. At the next try the address may lead to a master, or the
        // sentinels may name another server.
        let reason = match server.part {
            Part::Master => "it is a replica, and the sentinels still name it",
            Part::Node => "it is a replica by now",
            Part::Alone | Part::Sentinel | Part::Seed | Part::Voter => REPLICA,
        };
        return Err(server.because(Fault::Retry, reason));
    }
    Ok(())
}

/// Checks that the address still leads to the same server. Reads `INFO`, and returns warnings about
/// the server's settings. If the user may not run `INFO`,
/// the settings stay unchecked.
pub(super) async fn check(connection: RedisConnection) -> Result<Vec<String>, StoreError> {
    if let Some(server) = &connection.driver.server {
        server.compare().await?;
    }
    let (watch, in_a_cluster) = (connection.watch, connection.hop.is_some());
    let durability = match &connection.group {
        Some(group) => {
            group.check().await?;
            Some(group.durability)
        }
        None => None,
    };
    let mut connection = connection.connection;
    let mut warnings = Vec::new();
    let info: Result<String, _> = redis::cmd("INFO").query_async(&mut connection).await;
    if let Some(watch) = &watch {
        warnings.extend(watch.warnings());
    }
    let info = match info.map_err(failed) {
        Ok(info) => info,
        Err(error) if error.fault() == Fault::Config => {
            tracing::info!(
                %error,
                "lock store: INFO is not permitted, so the settings of the server were not looked at"
            );
            return Ok(warnings);
        }
        Err(error) => return Err(error),
    };
    let field = |name| field(&info, name);
    if let Some(version) = field("redis_version")
        && major(version).is_some_and(|major| major < OLDEST)
    {
        return Err(StoreError::new(
            Fault::Config,
            format!("Redis {version} is too old; update it to {OLDEST} or later, or to Valkey"),
        ));
    }
    if field("role") == Some("slave") {
        return Err(StoreError::replace(Fault::Retry, REPLICA));
    }
    if let Some(replicas) = field("connected_slaves") {
        if let Some(durability) = durability {
            let replicas = replicas.parse().unwrap_or(0);
            warnings.extend(durability.leaves_out(replicas));
        }
        let fails_over = watch.is_some() || in_a_cluster;
        if fails_over && replicas == "0" {
            warnings.push(
                "no replica is connected to the Redis master, so no failover is possible; start one".to_owned(),
            );
        }
        if fails_over || replicas != "0" {
            warnings.extend(takes_unheard_writes(&info, durability));
        }
    }
    if let Some(policy) = field("maxmemory_policy")
        && policy != "noeviction"
    {
        warnings.push(format!(
            "Redis evicts keys when memory is short (maxmemory-policy {policy}), and locks with them; \
             holders notice at their next renewal. Set maxmemory-policy noeviction"
        ));
    }
    Ok(warnings)
}

/// The warning of [`check`] that a master of sentinels gets as soon as a client has connected to it:
/// without the setting, a failover may cost exclusion.
pub(super) async fn risk(connection: RedisConnection) -> RedisResult<Option<String>> {
    let durability = connection.group.as_ref().map(|group| group.durability);
    let mut connection = connection.connection;
    let info: RedisResult<String> = redis::cmd("INFO").query_async(&mut connection).await;
    Ok(takes_unheard_writes(&info?, durability))
}

/// A warning if this server takes writes that no replica hears.
fn takes_unheard_writes(info: &str, durability: Option<Durability>) -> Option<String> {
    // A server has this field only if min-replicas-to-write is set.
    let is_limited = field(info, "min_slaves_good_slaves").is_some();
    let awaits_replicas = durability.is_some_and(Durability::awaits_replicas);
    let version = field(info, "redis_version");
    let (why, what_to_do) = unheard_writes(version, is_limited, awaits_replicas)?;
    Some(format!(
        "Redis takes writes when no replica hears it ({why}): a master that is cut off goes on granting locks that \
         others hold at the one that has replaced it. {what_to_do}"
    ))
}

/// Why this server takes writes that no replica hears, and how an operator can change that.
fn unheard_writes(
    version: Option<&str>,
    is_limited: bool,
    awaits_replicas: bool,
) -> Option<(&'static str, &'static str)> {
    if !is_limited {
        return Some(("min-replicas-to-write 0", "Set min-replicas-to-write 1"));
    }
    // https://github.com/redis/redis/pull/10160
    let ignores = version.and_then(major).is_some_and(|major| major < 7);
    (ignores && !awaits_replicas).then_some((
        "before Redis 7, scripts ignore min-replicas-to-write",
        "Update to Redis 7 or Valkey, or set durability=replicas:N",
    ))
}

#[cfg(test)]
mod tests {
    use redis::ConnectionInfo;

    use super::*;

    fn info(url: &str) -> Result<ConnectionInfo, Error> {
        Ok(server(&Url::parse(url).unwrap(), &Tls::default())?.info)
    }

    #[test]
    fn user_password_and_database_are_taken_from_the_url() {
        let info = info("redis://ann:p%40ss@example.com:6400/3").unwrap();

        let settings = info.redis_settings();
        assert_eq!(settings.username(), Some("ann"));
        assert_eq!(settings.password(), Some("p@ss"));
        assert_eq!(settings.db(), 3);
        assert_eq!(info.addr().to_string(), "example.com:6400");
    }

    #[test]
    fn a_limit_that_the_server_ignores_is_no_limit() {
        for (version, is_limited, durability, takes) in [
            (Some("7.0.15"), true, None, false),
            (Some("7.0.15"), false, None, true),
            (Some("6.2.14"), true, None, true),
            (Some("6.2.14"), true, Some("replicas:1"), false),
            (Some("6.2.14"), true, Some("fsync"), true),
            (None, true, None, false),
        ] {
            let named = durability.map(|named| durability::option(named).unwrap());
            let awaits_replicas = named.is_some_and(Durability::awaits_replicas);
            let why = unheard_writes(version, is_limited, awaits_replicas);
            assert_eq!(
                why.is_some(),
                takes,
                "{version:?} {is_limited} {durability:?}"
            );
        }
    }

    /// The driver's default for nodelay is off.
    #[test]
    fn a_request_does_not_wait_in_the_socket_for_the_next() {
        assert!(info("redis://localhost").unwrap().tcp_settings().nodelay());
    }

    #[test]
    fn several_hosts_are_refused_before_they_are_looked_up() {
        for url in ["redis://h1,h2", "redis://:hunter2@h1:1,h2:2/0"] {
            let error = crate::backend::open(url).expect_err(url);
            assert!(error.to_string().contains("take one host"), "{error}");
        }
    }

    #[test]
    fn a_url_that_could_be_misread_is_refused() {
        for url in [
            "redis:///0",
            "redis://host/zero",
            "redis://host/0?protocol=resp2",
            "redis://host/0#insecure",
        ] {
            let error = info(url).expect_err(url);
            assert!(error.to_string().contains("redis://[[user]"), "{error}");
        }
    }

    #[test]
    fn path_user_password_and_database_are_taken_from_the_url_of_a_socket() {
        let url = "redis+unix:///run/my%20redis@1.sock?user=ann&password=p%26ss&db=3&durability=replicas:1";
        let server = server_at_socket(&Url::parse(url).unwrap(), &Tls::default()).unwrap();

        let settings = server.info.redis_settings();
        assert_eq!(settings.username(), Some("ann"));
        assert_eq!(settings.password(), Some("p&ss"));
        assert_eq!(settings.db(), 3);
        assert_eq!(server.info.addr().to_string(), "/run/my redis@1.sock");
        assert!(server.durability.is_some());
    }

    #[test]
    fn a_url_of_a_socket_that_could_be_misread_is_refused() {
        for url in [
            "redis+unix://run/redis.sock",
            "redis+unix:redis.sock",
            "redis+unix:///run/",
            "unix://",
            "unix:///run/redis.sock#x",
            "unix:///run/redis.sock?db=zero",
            "unix:///run/redis.sock?user=ann",
            "unix:///run/redis.sock?pass=hunter2",
            "unix://:hunter2@/run/redis.sock",
        ] {
            let error = crate::backend::open(url).expect_err(url).to_string();
            assert!(error.contains("redis+unix:///"), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    /// The driver would leave out this user, which is often a password.
    #[test]
    fn a_user_without_a_password_is_refused_and_not_repeated() {
        for url in [
            "redis://hunter2@h",
            "redis://hunter2:@h/3",
            #[cfg(feature = "redis-tls")]
            "rediss://hunter2@h",
            "redis+sentinel://hunter2@h1,h2/s",
            "redis+cluster://hunter2@h1,h2",
            "redlock://hunter2@h1,h2,h3",
        ] {
            let error = crate::backend::open(url).expect_err(url).to_string();
            assert!(
                error.contains("a user is given without a password"),
                "{error}"
            );
            assert!(
                error.contains("write user:password@, or :password@"),
                "{error}"
            );
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn the_password_does_not_show_in_debug() {
        let url = Url::parse("redis://:hunter2@localhost").unwrap();
        let backend = crate::backend::redis::open(&url, &Tls::default()).unwrap();
        assert!(!format!("{backend:?}").contains("hunter2"));
    }
}
