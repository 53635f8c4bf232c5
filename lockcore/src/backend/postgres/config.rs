//! Reads the URL, and warns an operator about the settings of the server.

use std::fmt;
use std::time::Duration;

use tokio_postgres::config::SslMode;
use tokio_postgres::{Config, Error as PgError};
use url::Url;

use crate::backend::{StoreError, hosts, query};
use crate::error::Error;

use super::calls::{self, Calls};
use super::errors::{GUIDE, failed};
#[cfg(feature = "postgres-tls")]
use crate::tls::{Connector, Tls};

const PORT: u16 = 5432;

const FORM: &str = "the URL is not of the form \
    postgres://user[:password]@host[:port][,host[:port]…]/database\
    [?durability=on|off|remote_apply&wakeups=listen|look] (postgres+tls:// with TLS)";

/// The address of the servers, and how to log in.
pub(super) struct Server {
    /// Of these, the one that is no standby has the locks.
    pub(super) hosts: Vec<(String, u16)>,
    pub(super) login: Config,
    pub(super) durability: Durability,
    pub(super) wakeups: Wakeups,
    /// For each of the hosts, with TLS.
    #[cfg(feature = "postgres-tls")]
    pub(super) tls: Option<Connector>,
}

/// What must have a request before it counts: `?durability=…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// The disk of the server, and the standbys in `synchronous_standby_names`.
    On,
    /// Nothing. A crash of the server may lose the last requests.
    Off,
    /// As `On`, and queries at these standbys see it.
    RemoteApply,
}

/// How a waiter learns that it is granted: `?wakeups=…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wakeups {
    /// By a notification.
    Listen,
    /// It looks every [`LOOK`]. For a pooler that gives connections of the server to others after
    /// each transaction. Nothing may be left on such a connection: no settings, no channels that are
    /// listened to, and no prepared statements.
    Look,
}

/// How often a waiter looks.
pub(super) const LOOK: Duration = Duration::from_millis(100);

impl Durability {
    fn parse(value: &str) -> Option<Self> {
        [Self::On, Self::Off, Self::RemoteApply]
            .into_iter()
            .find(|known| known.setting() == value)
    }

    /// The value of `synchronous_commit`.
    pub(super) fn setting(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::RemoteApply => "remote_apply",
        }
    }
}

impl Server {
    /// Reads `postgres://user[:password]@h1[:port],h2[:port]/database[?durability=…&wakeups=…]`.
    pub(super) fn plain(url: &Url) -> Result<Self, Error> {
        let wrong = |what: &str| Error::config(format!("{FORM}: {what}"));
        let decoded = |part: &str| hosts::decoded(part).map_err(wrong);
        if url.fragment().is_some() {
            return Err(wrong("nothing may follow a \"#\""));
        }
        let hosts = hosts::hosts(url, PORT).map_err(wrong)?;
        let mut login = Config::new();
        login
            .application_name("lockcore")
            .ssl_mode(SslMode::Disable);
        match decoded(url.username())? {
            user if user.is_empty() => return Err(wrong("the user is missing")),
            user => login.user(user),
        };
        if let Some(password) = url.password() {
            login.password(decoded(password)?);
        }
        match decoded(url.path().trim_start_matches('/'))? {
            database if database.is_empty() => return Err(wrong("the database is missing")),
            database if database.contains('/') => {
                return Err(wrong("nothing may follow the database"));
            }
            database => login.dbname(database),
        };
        let names_tls = |option: &str| option.starts_with("ssl");
        if url.query().unwrap_or_default().split('&').any(names_tls) {
            return Err(wrong(
                "no option chooses TLS here: postgres:// does not encrypt, and postgres+tls:// does, \
                 and verifies the server",
            ));
        }
        let (mut durability, mut wakeups) = (Durability::On, Wakeups::Listen);
        let options = query::options(url, &["durability", "wakeups"]);
        for (option, value) in options.map_err(|what| wrong(&what))? {
            match (option, &*value) {
                ("durability", value) => {
                    durability = Durability::parse(value).ok_or_else(|| {
                        wrong("the durability is none of on, off and remote_apply")
                    })?;
                }
                (_, "listen") => wakeups = Wakeups::Listen,
                (_, "look") => wakeups = Wakeups::Look,
                _ => return Err(wrong("the wakeups are none of listen and look")),
            }
        }
        Ok(Self {
            hosts,
            login,
            durability,
            wakeups,
            #[cfg(feature = "postgres-tls")]
            tls: None,
        })
    }

    /// Reads `postgres+tls://…`, which uses TLS to every host. Reads the certificate files once,
    /// here.
    #[cfg(feature = "postgres-tls")]
    pub(super) fn encrypted(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let mut server = Self::plain(url)?;
        for (host, _) in &server.hosts {
            server.tls = Some(match &server.tls {
                None => Connector::new(tls, host)?,
                // Finds a host that is neither a name nor an address.
                Some(first) => first.for_host(host)?,
            });
        }
        Ok(server)
    }
}

impl Server {
    /// If a person must correct something about TLS before the login can succeed, returns what.
    ///
    /// With 28000 the server refuses this kind of connection, or a connection without a certificate,
    /// or the user. Its message is in the language of the server.
    pub(super) fn mistake(&self, error: &PgError) -> Option<String> {
        let Some(told) = error.as_db_error() else {
            return self.mistake_of_tls(error);
        };
        let hint = match self.is_encrypted() {
            false => "if it wants TLS, write postgres+tls://",
            true => "if it demands a client certificate, set LOCK_CERT_FILE and LOCK_KEY_FILE",
        };
        (told.code().code() == "28000").then(|| {
            format!(
                "the server refuses this login: {} (28000); {hint}{GUIDE}",
                told.message()
            )
        })
    }

    #[cfg(feature = "postgres-tls")]
    fn mistake_of_tls(&self, error: &PgError) -> Option<String> {
        self.tls.as_ref()?.mistake(error)
    }

    #[cfg(not(feature = "postgres-tls"))]
    fn mistake_of_tls(&self, _: &PgError) -> Option<String> {
        None
    }

    fn is_encrypted(&self) -> bool {
        #[cfg(feature = "postgres-tls")]
        return self.tls.is_some();
        #[cfg(not(feature = "postgres-tls"))]
        false
    }
}

/// Shows neither the user nor the password.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.login.get_dbname().unwrap_or_default();
        write!(f, "{:?}/{database} {:?}", self.hosts, self.durability)
    }
}

/// Warnings for an operator.
pub(super) async fn check(
    calls: &Calls,
    durability: Durability,
) -> Result<Vec<String>, StoreError> {
    let rows = calls.ask(&calls::SETTINGS, &[]).await?;
    let Some(row) = rows.first() else {
        return Ok(Vec::new());
    };
    let column = |name: &str| row.try_get::<_, String>(name).map_err(failed);
    let mut warnings = Vec::new();
    if column("fsync")? == "off" {
        warnings.push(
            "PostgreSQL does not write to the disk (fsync off): a crash of the machine may damage \
             the database. Set fsync on"
                .to_owned(),
        );
    }
    if durability == Durability::Off {
        warnings.push(
            "requests count before they are on the disk of PostgreSQL (durability=off in the \
             URL): after a crash of the server, a lock that was granted in its last moments may be \
             granted to others"
                .to_owned(),
        );
    }
    if column("unlogged")? == "true" {
        warnings.push(
            "a table of the schema lockcore1 is UNLOGGED: a crash of the server removes all locks \
             in it, and a standby has none of them. ALTER TABLE … SET LOGGED"
                .to_owned(),
        );
    }
    if column("notifications_pile_up")? == "true" {
        warnings.push(
            "the queue of notifications of PostgreSQL is not read: when it is full, locks are no \
             longer handed over. A session listens and keeps a transaction open, or is stopped. \
             The log of the server names it when the queue is half full. End it"
                .to_owned(),
        );
    }
    if column("autovacuum")? == "off" {
        warnings.push(
            "autovacuum is off: the tables of lockcore grow with every lock. Set autovacuum on"
                .to_owned(),
        );
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<Server, Error> {
        Server::plain(&Url::parse(url).unwrap())
    }

    #[test]
    fn user_password_database_and_durability_are_taken_from_the_url() {
        let server =
            read("postgres://ann:p%40ss@example.com:6400/shop%2d1?durability=off").unwrap();

        assert_eq!(server.hosts, [("example.com".to_owned(), 6400)]);
        assert_eq!(server.login.get_user(), Some("ann"));
        assert_eq!(server.login.get_password(), Some(&b"p@ss"[..]));
        assert_eq!(server.login.get_dbname(), Some("shop-1"));
        assert_eq!(server.durability, Durability::Off);
        assert!(!format!("{server:?}").contains("p@ss"));

        let server = read("postgres://ann@h1%3A1,h2/shop").unwrap();
        assert_eq!(server.hosts, [("h1".into(), 1), ("h2".into(), PORT)]);
        assert_eq!(server.durability, Durability::On);
        assert_eq!(server.wakeups, Wakeups::Listen);

        let server = read("postgres://ann@h/shop?wakeups=look&durability=off").unwrap();
        assert_eq!(server.durability, Durability::Off);
        assert_eq!(server.wakeups, Wakeups::Look);
    }

    #[test]
    fn a_url_that_could_be_misread_is_refused_with_the_form() {
        for url in [
            "postgres://h/shop",
            "postgres://ann@h",
            "postgres://ann@h/",
            "postgres://ann@h/shop/1",
            "postgres://ann@h/shop#1",
            "postgres://ann@/shop",
            "postgres://ann:hunter2@h/shop?sslmode=require",
            "postgres://ann:hunter2@h/shop?durability=local",
            "postgres://ann:hunter2@h/shop?wakeups=never",
            "postgres://ann:hunter2@h/shop?connect_timeout=3",
        ] {
            let error = Url::parse(url).map_or_else(
                |error| error.to_string(),
                |url| Server::plain(&url).expect_err("refused").to_string(),
            );
            assert!(
                error.contains("postgres://user") || error.contains("empty host"),
                "{url}: {error}"
            );
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
