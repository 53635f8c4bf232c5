//! Reads what all URLs of Redis servers have: the hosts, the user and the password, the options, and
//! whether the scheme is one with TLS. What the path means, each topology reads by itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, ProtocolVersion, RedisConnectionInfo,
};
use url::Url;

use super::dial::{Part, Server};
use super::durability::{self, Durability};
use super::siblings::Siblings;
use super::views::Address;
use crate::backend::{Fault, StoreError, hosts, query};
use crate::error::Error;
#[cfg(feature = "redis-tls")]
use crate::tls::Connector;
use crate::tls::Tls;

/// The form of the URLs of a topology.
pub(super) struct Form {
    /// The form, as messages show it.
    pub(super) text: &'static str,
    /// The port of a host that has none in the URL.
    pub(super) port: u16,
    /// The options that may be set.
    pub(super) options: &'static [&'static str],
}

/// An option of a URL, with its value.
pub(super) type Setting = (&'static str, String);

/// How to log in at the servers of a URL, and what all connections to them share.
pub(super) struct Access {
    /// The user, the password and the database.
    pub(super) login: RedisConnectionInfo,
    pub(super) durability: Option<Durability>,
    /// Makes the TLS of any host. `None` if the scheme is one without TLS.
    #[cfg(feature = "redis-tls")]
    tls: Option<Connector>,
    siblings: Arc<Siblings>,
}

impl Form {
    /// An error about the form of a URL. It does not repeat the URL, because that may contain a
    /// password.
    pub(super) fn wrong(&self, what: impl fmt::Display) -> Error {
        Error::config(format!("the URL is not of the form {}: {what}", self.text))
    }

    /// Reads the user, the password and the options, and the files of TLS if the scheme uses them.
    pub(super) fn access(&self, url: &Url, tls: &Tls) -> Result<(Access, Vec<Setting>), Error> {
        if url.fragment().is_some() {
            return Err(self.wrong("nothing may follow a \"#\""));
        }
        let options = query::options(url, self.options).map_err(|what| self.wrong(what))?;
        let durability = value(&options, durability::OPTION).map(durability::option);
        let access = Access {
            login: login(url).map_err(|what| self.wrong(what))?,
            durability: durability.transpose().map_err(Error::config)?,
            #[cfg(feature = "redis-tls")]
            tls: match is_encrypted(url) {
                // The certificate files are read once, for all hosts.
                true => Some(Connector::new(tls, "localhost")?),
                false => None,
            },
            siblings: Arc::default(),
        };
        #[cfg(not(feature = "redis-tls"))]
        let _ = tls;
        Ok((access, options))
    }

    /// Reads the hosts.
    pub(super) fn hosts(&self, url: &Url) -> Result<Vec<Address>, Error> {
        let hosts = hosts::hosts(url, self.port).map_err(|what| self.wrong(what))?;
        let address = |(host, port)| Address { host, port };
        Ok(hosts.into_iter().map(address).collect())
    }

    /// Reads the hosts, none of which may be named twice, because of this.
    pub(super) fn different_hosts(&self, url: &Url, because: &str) -> Result<Vec<Address>, Error> {
        let hosts = self.hosts(url)?;
        match (1..hosts.len()).find(|at| hosts[..*at].contains(&hosts[*at])) {
            Some(at) => Err(self.wrong(format_args!("{} is named twice{because}", hosts[at]))),
            None => Ok(hosts),
        }
    }

    /// Refuses a path and options.
    pub(super) fn ends_with_hosts(&self, url: &Url, because: &str) -> Result<(), Error> {
        if !matches!(url.path(), "" | "/") {
            return Err(self.wrong(format_args!("nothing may follow the hosts{because}")));
        }
        match (url.query(), url.fragment()) {
            (None, None) => Ok(()),
            _ => Err(self.wrong("nothing may follow the hosts")),
        }
    }

    /// Reads the number of a database.
    pub(super) fn database(&self, number: &str, what: &str) -> Result<i64, Error> {
        let number = number.parse::<u32>();
        let number = number.map_err(|_| self.wrong(format_args!("{what} is not a number")))?;
        Ok(number.into())
    }

    /// Reads a user and a password from the options with these names.
    pub(super) fn login(
        &self,
        options: &[Setting],
        [user, password]: [&str; 2],
    ) -> Result<RedisConnectionInfo, Error> {
        let mut login = RedisConnectionInfo::default();
        for option in [user, password] {
            if value(options, option) == Some("") {
                return Err(self.wrong(format_args!(
                    "{option} has no value; write one, or leave the option out"
                )));
            }
        }
        if let Some(given) = value(options, user) {
            login = login.set_username(given);
        }
        match value(options, password) {
            Some(given) => login = login.set_password(given),
            None if login.username().is_some() => {
                return Err(self.wrong(format_args!("{user} needs {password}; write both")));
            }
            None => {}
        }
        Ok(login)
    }
}

/// The value of an option.
pub(super) fn value<'a>(options: &'a [Setting], name: &str) -> Option<&'a str> {
    let option = options.iter().find(|(option, _)| *option == name);
    option.map(|(_, value)| value.as_str())
}

#[cfg(feature = "redis-tls")]
fn is_encrypted(url: &Url) -> bool {
    url.scheme().starts_with("rediss") || url.scheme().ends_with("+tls")
}

/// Reads the user and the password. The error says only what is wrong.
fn login(url: &Url) -> Result<RedisConnectionInfo, &'static str> {
    let mut login = RedisConnectionInfo::default();
    if !url.username().is_empty() {
        login = login.set_username(hosts::decoded(url.username())?);
    }
    match url.password() {
        Some(password) => login = login.set_password(hosts::decoded(password)?),
        // Without this error, the client would log in as another user.
        None if login.username().is_some() => {
            return Err(
                "a user is given without a password; write user:password@, or :password@ if there is only a password",
            );
        }
        None => {}
    }
    Ok(login)
}

impl Access {
    pub(super) fn is_encrypted(&self) -> bool {
        #[cfg(feature = "redis-tls")]
        return self.tls.is_some();
        #[cfg(not(feature = "redis-tls"))]
        return false;
    }

    /// The server at this address.
    pub(super) fn server(
        &self,
        address: &Address,
        login: &RedisConnectionInfo,
        part: Part,
    ) -> Result<Server, Error> {
        // An IPv6 address has brackets only in a URL.
        let host = address.host.trim_start_matches('[').trim_end_matches(']');
        let at = ConnectionAddr::Tcp(host.to_owned(), address.port);
        self.server_at(at, login, part)
    }

    pub(super) fn server_at(
        &self,
        address: ConnectionAddr,
        login: &RedisConnectionInfo,
        part: Part,
    ) -> Result<Server, Error> {
        #[cfg(feature = "redis-tls")]
        let tls = match (&self.tls, &address) {
            (Some(tls), ConnectionAddr::Tcp(host, _)) => Some(tls.for_host(host)?),
            _ => None,
        };
        let info = address.into_connection_info();
        let info = info.map_err(|_| Error::config("the URL has no address of a server"))?;
        Ok(Server {
            info: prepared(info.set_redis_settings(login.clone())),
            #[cfg(feature = "redis-tls")]
            tls,
            part,
            durability: self.durability,
            siblings: Arc::clone(&self.siblings),
        })
    }

    /// As [`server`](Self::server), for a server that other servers have named.
    pub(super) fn named(&self, address: &Address, part: Part) -> Result<Arc<Server>, StoreError> {
        let server = self.server(address, &self.login, part);
        let server = server.map_err(|error| StoreError::new(Fault::Config, error.to_string()))?;
        Ok(Arc::new(server))
    }
}

/// Adds the settings that every connection needs, whatever the URL says.
fn prepared(info: ConnectionInfo) -> ConnectionInfo {
    let settings = info
        .redis_settings()
        .clone()
        // Wake-ups come on the same connection as the answers.
        .set_protocol(ProtocolVersion::RESP3)
        // The driver does not send `CLIENT SETINFO`, so the user does not need the right to this
        // command.
        .set_skip_set_lib_name();
    let tcp = info
        .tcp_settings()
        .clone()
        // The driver's default is off. A request is one small write that must not wait for more
        // data.
        .set_nodelay(true)
        // The peer may go without notice: a cable is pulled, or a NAT entry is dropped. The kernel
        // then finds out within about ten seconds. This costs the server's command loop nothing.
        .set_keepalive(
            TcpKeepalive::new()
                .with_time(Duration::from_secs(5))
                .with_interval(Duration::from_secs(2))
                .with_retries(3),
        );
    info.set_redis_settings(settings).set_tcp_settings(tcp)
}
