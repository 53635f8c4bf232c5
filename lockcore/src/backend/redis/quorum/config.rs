//! Reads the URL, and checks what an operator should know about the nodes.

use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionAddr, IntoConnectionInfo as _};
use url::Url;

use super::super::config::check as check_server;
use super::super::dial::{Part, Server, login, prepared};
use super::nodes::Links;
use super::tally::majority;
use crate::backend::{StoreError, hosts};
use crate::error::Error;
#[cfg(feature = "redis-tls")]
use crate::tls::{Connector, Tls};

const PORT: u16 = 6379;

const FORM: &str = "the URL is not of the form redlock://[[user]:password@]host[:port],host[:port],host[:port][,…] \
    (redlock+tls:// with TLS)";

/// The nodes of `redlock://…`.
pub(super) fn servers(url: &Url) -> Result<Vec<Server>, Error> {
    let wrong = |what: &str| Error::config(format!("{FORM}: {what}"));
    let is_empty = matches!(url.path(), "" | "/");
    if !is_empty || url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("nothing may follow the hosts"));
    }
    let login = login(url).map_err(wrong)?;
    let addresses = hosts::hosts(url, PORT).map_err(wrong)?;
    for (at, (host, port)) in addresses.iter().enumerate() {
        if addresses[..at].contains(&addresses[at]) {
            return Err(wrong(&format!(
                "{host}:{port} is named twice, and would vote twice; name each server once"
            )));
        }
    }
    match addresses.len() {
        1 => {
            return Err(wrong(
                "one server is no quorum: name three or five, or write redis:// for a single server",
            ));
        }
        count if count % 2 == 0 => {
            return Err(wrong(&format!(
                "{count} servers are no better than {}, because a majority of them is {}; name three or five",
                count - 1,
                majority(count),
            )));
        }
        count if count > 7 => {
            return Err(wrong(&format!(
                "{count} servers are too many, because each lock is asked for at all of them; name three or five"
            )));
        }
        _ => {}
    }
    let siblings = Arc::default();
    let servers = addresses.into_iter().map(|(host, port)| {
        // An IPv6 address has brackets only in a URL.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = ConnectionAddr::Tcp(host.to_owned(), port);
        let info = address.into_connection_info();
        let info = info.map_err(|_| Error::config(FORM))?;
        Ok(Server {
            info: prepared(info.set_redis_settings(login.clone())),
            #[cfg(feature = "redis-tls")]
            tls: None,
            part: Part::Voter,
            durability: None,
            siblings: Arc::clone(&siblings),
        })
    });
    servers.collect()
}

/// The nodes of `redlock+tls://…`.
#[cfg(feature = "redis-tls")]
pub(super) fn encrypted_servers(url: &Url, tls: &Tls) -> Result<Vec<Server>, Error> {
    let mut servers = servers(url)?;
    // The certificate files are read once, for all hosts.
    let connector = Connector::new(tls, "localhost")?;
    for server in &mut servers {
        if let ConnectionAddr::Tcp(host, _) = server.info.addr() {
            server.tls = Some(connector.for_host(host)?);
        }
    }
    Ok(servers)
}

/// How long a check waits for nodes that have not been reached yet.
const STRAGGLERS: Duration = Duration::from_millis(300);

/// Checks each node that is up. Returns warnings about the nodes that are down or do not vote.
pub(super) async fn check(links: Arc<Links>) -> Result<Vec<String>, StoreError> {
    let nodes = links.nodes();
    nodes.settled(STRAGGLERS).await;
    let mut warnings = nodes.warnings()?;
    let asked = nodes
        .up()
        .into_iter()
        .map(|(at, node)| async move { (at, check_server(node.connection).await) });
    for (at, found) in futures_util::future::join_all(asked).await {
        match found {
            Ok(found) => {
                let named = found
                    .into_iter()
                    .map(|warning| format!("{}: {warning}", nodes.address(at)));
                warnings.extend(named);
            }
            Err(error) => warnings.push(nodes.named(at, error).to_string()),
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hosts: &str) -> Result<Vec<Server>, Error> {
        servers(&Url::parse(&format!("redlock://{hosts}")).unwrap())
    }

    #[test]
    fn user_password_and_each_host_are_taken_from_the_url() {
        let servers = of("ann:p%40ss@h1%3A1,h2,%5B%3A%3A1%5D%3A3/").unwrap();

        let shown = |server: &Server| server.info.addr().to_string();
        let shown: Vec<_> = servers.iter().map(shown).collect();
        assert_eq!(shown, ["h1:1", "h2:6379", "::1:3"]);
        let login = servers[2].info.redis_settings();
        let login = (login.username(), login.password());
        assert_eq!(login, (Some("ann"), Some("p@ss")));
        assert!(!format!("{servers:?}").contains("p@ss"));
    }

    #[test]
    fn a_url_that_is_no_quorum_says_what_to_write() {
        for (hosts, reason) in [
            ("h1", "write redis:// for a single server"),
            ("h1,h2", "no better than 1"),
            ("h1,h2,h3,h4", "a majority of them is 3"),
            ("1,2,3,4,5,6,7,8,9", "too many"),
            ("h1,h2,h1%3A6379", "h1:6379 is named twice"),
            ("h1,,h2", "a host is missing"),
            ("h1,h2%3Aport,h3", "a port is not a number up to 65535"),
            ("h1,h2,h3/0", "nothing may follow"),
            ("h1,h2,h3?a=b", "nothing may follow"),
            ("h1,h2,h3#a", "nothing may follow"),
        ] {
            let error = of(hosts).expect_err(hosts).to_string();
            assert!(
                error.contains("redlock://[[user]") && error.contains(reason),
                "{error}"
            );
        }
    }
}
