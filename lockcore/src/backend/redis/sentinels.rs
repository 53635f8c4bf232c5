//! Redis with Sentinel: finds the master, and ends a connection when its server stops being the
//! master. The requests to the master are the same as to a single server.
//!
//! The master is the server that a majority of the sentinels in the URL name. The client believes
//! nothing else. So a sentinel that is cut off, or belongs to other servers, cannot lead a client
//! to another server.
//!
//! The client asks the sentinels when it makes a connection to the master, and listens to them
//! while this connection is up. When a majority names another server, the connection ends, and the
//! core makes a new one, as after a break.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::aio::MultiplexedConnection;
use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, PushInfo, RedisConnectionInfo,
};
use tokio::sync::watch;
use url::Url;

use super::changed::Changed;
use super::dial::{Part, Server, login, prepared, settings};
use super::durability::{self, Durability};
use super::owed::Owed;
use super::siblings::Siblings;
use super::views::{Address, SWITCH, View, Views, is_majority, switched_to};
use crate::backend::meant::nearest;
use crate::backend::{Fault, StoreError, hosts, query};
use crate::error::Error;
#[cfg(feature = "redis-tls")]
use crate::tls::{Connector, Tls};

const PORT: u16 = 26379;

/// The options of a URL that are for the sentinels.
const USER: &str = "sentinel_user";
const PASSWORD: &str = "sentinel_password";

const FORM: &str = "the URL is not of the form \
    redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/service[/database number]\
    [?sentinel_user=…&sentinel_password=…&durability=…] (rediss+sentinel:// with TLS)";

/// The sentinels of a URL, and how to log in at the master that they name.
pub(super) struct Sentinels {
    pub(super) servers: Vec<Server>,
    /// The name that the sentinels use for the master.
    service: String,
    /// The user, password and database at the master.
    master: RedisConnectionInfo,
    durability: Option<Durability>,
    pub(super) owed: Arc<Owed>,
    pub(super) changed: Arc<Changed>,
    siblings: Arc<Siblings>,
    /// The masters whose settings were looked at.
    looked_at: Mutex<BTreeSet<Arc<str>>>,
    /// The master that a connection of this client was the last to find.
    latest: watch::Sender<Option<Address>>,
}

impl Sentinels {
    /// Reads `redis+sentinel://…`.
    pub(super) fn plain(url: &Url) -> Result<Self, Error> {
        let decoded = |part: &str| hosts::decoded(part).map_err(wrong);
        if url.fragment().is_some() {
            return Err(wrong("nothing may follow a \"#\""));
        }
        let path = url.path();
        let mut path = path.strip_prefix('/').unwrap_or(path).splitn(2, '/');
        let service = decoded(path.next().unwrap_or_default())?;
        if service.is_empty() {
            return Err(wrong(
                "the service is missing; write the name that the sentinels have for the master, as in /mymaster",
            ));
        }
        let database = match path.next() {
            None | Some("") => 0,
            Some(number) => number
                .parse::<u32>()
                .map_err(|_| wrong("the database is not a number"))?,
        };
        let master = login(url).map_err(wrong)?.set_db(database.into());
        let (own, durability) = options(url)?;
        let addresses = hosts::hosts(url, PORT).map_err(wrong)?;
        for (at, (host, port)) in addresses.iter().enumerate() {
            if addresses[..at].contains(&addresses[at]) {
                // A sentinel that is named twice would count twice for the majority.
                return Err(wrong(&format!(
                    "{host}:{port} is named twice; name each sentinel once"
                )));
            }
        }
        let servers = addresses.into_iter().map(|(host, port)| {
            let address = Address { host, port };
            Ok(Server {
                info: info(&address, &own)?,
                #[cfg(feature = "redis-tls")]
                tls: None,
                part: Part::Sentinel,
                durability: None,
                siblings: Arc::default(),
            })
        });
        Ok(Self {
            servers: servers.collect::<Result<_, Error>>()?,
            service,
            master,
            durability,
            owed: Arc::default(),
            changed: Arc::default(),
            siblings: Arc::default(),
            looked_at: Mutex::default(),
            latest: watch::Sender::new(None),
        })
    }

    /// Reads `rediss+sentinel://…`: the same, with TLS to the sentinels and to the master.
    #[cfg(feature = "redis-tls")]
    pub(super) fn encrypted(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let mut sentinels = Self::plain(url)?;
        // The certificate files are read once, for all hosts.
        let connector = Connector::new(tls, "localhost")?;
        for server in &mut sentinels.servers {
            if let ConnectionAddr::Tcp(host, _) = server.info.addr() {
                server.tls = Some(connector.for_host(host)?);
            }
        }
        Ok(sentinels)
    }

    pub(super) fn durability(&self) -> Option<Durability> {
        self.durability
    }

    pub(super) fn silence(&self) -> &'static str {
        match self.servers.iter().any(Server::is_encrypted) {
            true => {
                "; a majority of the sentinels must answer, and the master that they name; servers without TLS are silent: \
                 redis+sentinel:// is for them"
            }
            false => "; a majority of the sentinels must answer, and the master that they name",
        }
    }

    /// How many sentinels the URL names.
    pub(super) fn count(&self) -> usize {
        self.servers.len()
    }

    /// The masters whose settings this client has looked at.
    pub(super) fn looked_at(&self) -> MutexGuard<'_, BTreeSet<Arc<str>>> {
        self.looked_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a connection has found this master.
    pub(super) fn note_master(&self, master: &Address) {
        self.latest.send_if_modified(|latest| {
            let is_another = latest.as_ref() != Some(master);
            if is_another {
                *latest = Some(master.clone());
            }
            is_another
        });
    }

    /// Changes when a connection of this client has found another master.
    pub(super) fn masters(&self) -> watch::Receiver<Option<Address>> {
        self.latest.subscribe()
    }

    pub(super) fn server_at(&self, master: &Address) -> Result<Server, StoreError> {
        let mistake = |error: Error| StoreError::new(Fault::Config, error.to_string());
        Ok(Server {
            info: info(master, &self.master).map_err(mistake)?,
            #[cfg(feature = "redis-tls")]
            tls: match &self.servers[0].tls {
                Some(tls) => Some(tls.for_host(&master.host).map_err(mistake)?),
                None => None,
            },
            part: Part::Master,
            durability: self.durability,
            siblings: Arc::clone(&self.siblings),
        })
    }

    /// Asks one sentinel for the master, and stores the answer in `views`. Then stores each change
    /// that the sentinel sends, until the connection ends. Returns why the sentinel cannot be
    /// listened to.
    pub(super) async fn hear(&self, at: usize, views: &watch::Sender<Views>) -> StoreError {
        let server = &self.servers[at];
        let (views_of_sink, service) = (views.clone(), self.service.clone());
        let sink = move |push: PushInfo| {
            if let Some(master) = switched_to(&push, &service) {
                views_of_sink.send_modify(|views| views.0[at] = View::Names(master));
            }
            Ok::<_, Infallible>(())
        };
        let config = settings().set_push_sender(sink);
        let asked = async {
            let (mut connection, driver) = server.connect(config).await?;
            // The subscription comes before the question. So no change in between is missed.
            let subscribed = connection.subscribe(SWITCH).await;
            subscribed.map_err(|error| self.not_asked(server, error))?;
            let master = self.ask(server, &mut connection).await?;
            Ok((master, connection, driver))
        };
        let (master, _connection, driver) = match asked.await {
            Ok(asked) => asked,
            Err(error) => return error,
        };
        views.send_modify(|views| {
            let view = &mut views.0[at];
            // If a message came before the answer, it is at least as new as the answer.
            if !matches!(view, View::Names(_)) {
                *view = View::Names(master);
            }
        });
        driver.ended().await;
        server.because(Fault::Retry, "the connection is lost")
    }

    async fn ask(
        &self,
        server: &Server,
        connection: &mut MultiplexedConnection,
    ) -> Result<Address, StoreError> {
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let answer: Option<(String, u16)> = (question.query_async(connection).await)
            .map_err(|error| self.not_asked(server, error))?;
        match answer {
            Some((host, port)) => Ok(Address { host, port }),
            None => Err(self.unknown_service(server, connection).await),
        }
    }

    fn not_asked(&self, server: &Server, error: redis::RedisError) -> StoreError {
        if error.to_string().contains("unknown command") {
            return server.mistake(
                "it is not a Redis Sentinel; if it is the server that keeps the locks, write redis:// or rediss://",
            );
        }
        server.failed(error)
    }

    async fn unknown_service(
        &self,
        server: &Server,
        connection: &mut MultiplexedConnection,
    ) -> StoreError {
        let question = redis::cmd("SENTINEL").arg("MASTERS").take();
        // This is only for the error message. The user may not have the right to ask.
        let known: Vec<HashMap<String, String>> =
            question.query_async(connection).await.unwrap_or_default();
        let names = || known.iter().filter_map(|master| master.get("name"));
        let hint = match nearest(&self.service, names().map(String::as_str)) {
            Some(meant) => format!(", did you mean \"{meant}\"?"),
            None if known.is_empty() => String::new(),
            None => format!("; it watches {}", quoted(names())),
        };
        server.mistake(format_args!(
            "it knows no master \"{}\"{hint}",
            self.service
        ))
    }

    pub(super) fn no_majority(&self, views: &Views) -> StoreError {
        let all = self.servers.len();
        let mistakes = views.0.iter().filter(|view| match view {
            View::Failed(error) => error.fault() == Fault::Config,
            View::Asked | View::Names(_) => false,
        });
        // Without the sentinels that report mistakes, can the others be a majority?
        let fault = match is_majority(all - mistakes.count(), all) {
            true => Fault::Retry,
            false => Fault::Config,
        };
        // The sentinels that decided come first.
        let mut said: Vec<_> = views.0.iter().zip(&self.servers).collect();
        said.sort_by_key(|(view, _)| matches!(view, View::Asked));
        let said = said.into_iter().map(|(view, server)| match view {
            View::Asked => format!("{} was not waited for", server.info.addr()),
            View::Names(master) => format!("{} names {master}", server.info.addr()),
            View::Failed(error) => error.to_string(),
        });
        let said = said.collect::<Vec<_>>().join("; ");
        StoreError::new(
            fault,
            format!(
                "no master \"{}\": of {all} sentinels, {} must name the same server ({said})",
                self.service,
                all / 2 + 1
            ),
        )
    }
}

/// Shows neither users nor passwords.
impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels")
            .field("servers", &self.servers)
            .field("service", &self.service)
            .field("database", &self.master.db())
            .finish_non_exhaustive()
    }
}

/// An error about the form of a URL.
fn wrong(what: &str) -> Error {
    Error::config(format!("{FORM}: {what}"))
}

/// Reads the options of a URL: how to log in at the sentinels, and the durability.
fn options(url: &Url) -> Result<(RedisConnectionInfo, Option<Durability>), Error> {
    let mut own = RedisConnectionInfo::default();
    let mut durability = None;
    let options = [USER, PASSWORD, durability::OPTION];
    for (option, value) in query::options(url, &options).map_err(|what| wrong(&what))? {
        own = match option {
            USER | PASSWORD if value.is_empty() => {
                return Err(wrong(&format!(
                    "{option} has no value; write one, or leave the option out"
                )));
            }
            USER => own.set_username(value),
            PASSWORD => own.set_password(value),
            _ => {
                durability = Some(durability::option(&value).map_err(Error::config)?);
                own
            }
        };
    }
    if own.username().is_some() && own.password().is_none() {
        return Err(wrong("sentinel_user needs sentinel_password; write both"));
    }
    Ok((own, durability))
}

/// How to connect to this server and log in.
pub(super) fn info(
    address: &Address,
    settings: &RedisConnectionInfo,
) -> Result<ConnectionInfo, Error> {
    // An IPv6 address has brackets only in a URL.
    let host = address.host.trim_start_matches('[').trim_end_matches(']');
    let address = ConnectionAddr::Tcp(host.to_owned(), address.port);
    let info = address.into_connection_info();
    let info = info.map_err(|_| Error::config(FORM))?;
    Ok(prepared(info.set_redis_settings(settings.clone())))
}

fn quoted<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<_> = names.map(|name| format!("\"{name}\"")).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::views::tests::{failed, names};
    use super::*;

    fn sentinels(url: &str) -> Result<Sentinels, Error> {
        Sentinels::plain(&Url::parse(url).unwrap())
    }

    #[test]
    fn hosts_service_database_and_both_credentials_are_taken_from_the_url() {
        let url = "redis+sentinel://ann:p%40ss@h1%3A1,h2,%5B%3A%3A1%5D/my%20master/3?sentinel_user=bob&sentinel_password=p+w%26x";
        let sentinels = sentinels(url).unwrap();

        let shown = |server: &Server| server.info.addr().to_string();
        let shown: Vec<_> = sentinels.servers.iter().map(shown).collect();
        assert_eq!(shown, ["h1:1", "h2:26379", "::1:26379"]);
        let own = sentinels.servers[1].info.redis_settings();
        assert_eq!(
            (own.username(), own.password()),
            (Some("bob"), Some("p+w&x"))
        );
        assert_eq!(sentinels.service, "my master");
        let at = Address {
            host: "h9".into(),
            port: 9,
        };
        let master = sentinels.server_at(&at).unwrap();
        let settings = master.info.redis_settings();
        assert_eq!(
            (settings.username(), settings.password(), settings.db()),
            (Some("ann"), Some("p@ss"), 3)
        );
        assert_eq!(master.info.addr().to_string(), "h9:9");
        assert!(own.db() == 0 && master.info.tcp_settings().nodelay());
        let shown = format!("{sentinels:?}");
        assert!(!shown.contains("p@ss") && !shown.contains("p+w"), "{shown}");
    }

    #[test]
    fn sentinels_get_no_credentials_if_the_url_has_none_for_them() {
        let sentinels = sentinels("redis+sentinel://ann:secret@h1/s/").unwrap();
        let own = sentinels.servers[0].info.redis_settings();
        assert_eq!((own.username(), own.password()), (None, None));
    }

    #[test]
    fn a_url_that_could_be_misread_is_refused() {
        for (url, reason) in [
            ("redis+sentinel://h1,h2", "the service is missing"),
            ("redis+sentinel://h1,h2/", "the service is missing"),
            ("redis+sentinel://h1/s/zero", "the database is not a number"),
            ("redis+sentinel://h1/s/0/1", "the database is not a number"),
            ("redis+sentinel://h1,,h2/s", "a host is missing"),
            ("redis+sentinel:///s", "a host is missing"),
            (
                "redis+sentinel://h1,h2%3Ax/s",
                "a port is not a number up to 65535",
            ),
            (
                "redis+sentinel://h1,h2,h1%3A26379/s",
                "h1:26379 is named twice",
            ),
            ("redis+sentinel://h1/s#secret", "nothing may follow"),
            ("redis+sentinel://h1/s?db=1", "may be set"),
            (
                "redis+sentinel://h1/s?sentinel_pasword=secret",
                "did you mean sentinel_password?",
            ),
            (
                "redis+sentinel://h1/s?sentinel_user=secret",
                "needs sentinel_password",
            ),
            (
                "redis+sentinel://h1/s?sentinel_password",
                "sentinel_password has no value",
            ),
        ] {
            let error = sentinels(url).expect_err(url).to_string();
            assert!(
                error.contains("redis+sentinel://[[user]") && error.contains(reason),
                "{error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
    }

    /// A wrong password at one sentinel is no reason to give up, if the others can agree.
    #[test]
    fn without_a_majority_the_fault_is_config_only_if_the_rest_cannot_form_one() {
        let sentinels = sentinels("redis+sentinel://h1,h2,h3/s").unwrap();
        for (views, fault) in [
            ([names("a"), names("b"), names("c")], Fault::Retry),
            (
                [names("a"), failed(Fault::Retry), failed(Fault::Config)],
                Fault::Retry,
            ),
            (
                [names("a"), failed(Fault::Config), failed(Fault::Config)],
                Fault::Config,
            ),
        ] {
            let error = sentinels.no_majority(&Views(views.to_vec()));
            assert_eq!(error.fault(), fault, "{error}");
        }
    }
}
