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

use redis::PushInfo;
use redis::aio::MultiplexedConnection;
use tokio::sync::watch;
use url::Url;

use super::access::{Access, Form};
use super::changed::Changed;
use super::dial::{Part, Server, settings};
use super::durability::{self, Durability};
use super::owed::Owed;
use super::views::{Address, SWITCH, View, Views, is_majority, switched_to};
use crate::backend::meant::nearest;
use crate::backend::{Fault, StoreError, hosts};
use crate::error::Error;
use crate::tls::Tls;

/// The options of a URL that are for the sentinels.
const USER: &str = "sentinel_user";
const PASSWORD: &str = "sentinel_password";

const FORM: Form = Form {
    text: "redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/service[/database number]\
        [?sentinel_user=…&sentinel_password=…&durability=…] (rediss+sentinel:// with TLS)",
    port: 26379,
    options: &[USER, PASSWORD, durability::OPTION],
};

/// The sentinels of a URL, and how to log in at the master that they name.
pub(super) struct Sentinels {
    pub(super) servers: Vec<Server>,
    /// The name that the sentinels use for the master.
    service: String,
    /// How to log in at the master.
    access: Access,
    pub(super) owed: Arc<Owed>,
    pub(super) changed: Arc<Changed>,
    /// The masters whose settings were looked at.
    looked_at: Mutex<BTreeSet<Arc<str>>>,
    /// The master that a connection of this client was the last to find.
    latest: watch::Sender<Option<Address>>,
}

impl Sentinels {
    /// Reads `redis+sentinel://…` and `rediss+sentinel://…`.
    pub(super) fn read(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let (mut access, options) = FORM.access(url, tls)?;
        let path = url.path();
        let mut path = path.strip_prefix('/').unwrap_or(path).splitn(2, '/');
        let service = hosts::decoded(path.next().unwrap_or_default());
        let service = service.map_err(|what| FORM.wrong(what))?;
        if service.is_empty() {
            return Err(FORM.wrong(
                "the service is missing; write the name that the sentinels have for the master, as in /mymaster",
            ));
        }
        if let Some(number) = path.next().filter(|number| !number.is_empty()) {
            access.login = access.login.set_db(FORM.database(number, "the database")?);
        }
        let own = FORM.login(&options, [USER, PASSWORD])?;
        // A sentinel that is named twice would count twice for the majority.
        let addresses = FORM.different_hosts(url, "; name each sentinel once")?;
        let servers = addresses.iter();
        let servers = servers.map(|address| access.server(address, &own, Part::Sentinel));
        Ok(Self {
            servers: servers.collect::<Result<_, Error>>()?,
            service,
            access,
            owed: Arc::default(),
            changed: Arc::default(),
            looked_at: Mutex::default(),
            latest: watch::Sender::new(None),
        })
    }

    pub(super) fn durability(&self) -> Option<Durability> {
        self.access.durability
    }

    pub(super) fn silence(&self) -> &'static str {
        match self.access.is_encrypted() {
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
        let is_another = |latest: &mut Option<Address>| {
            let before = latest.replace(master.clone());
            before.as_ref() != Some(master)
        };
        self.latest.send_if_modified(is_another);
    }

    /// Changes when a connection of this client has found another master.
    pub(super) fn masters(&self) -> watch::Receiver<Option<Address>> {
        self.latest.subscribe()
    }

    pub(super) fn server_at(&self, master: &Address) -> Result<Arc<Server>, StoreError> {
        self.access.named(master, Part::Master)
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
            .field("database", &self.access.login.db())
            .finish_non_exhaustive()
    }
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
        Sentinels::read(&Url::parse(url).unwrap(), &Tls::default())
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
