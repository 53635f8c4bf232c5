//! Reads the URL, and checks what an operator should know about the nodes.

use std::sync::Arc;
use std::time::Duration;

use url::Url;

use super::super::access::Form;
use super::super::config::check as check_server;
use super::super::dial::{Part, Server};
use super::nodes::Links;
use super::tally::majority;
use crate::backend::StoreError;
use crate::error::Error;
use crate::tls::Tls;

const FORM: Form = Form {
    text: "redlock://[[user]:password@]host[:port],host[:port],host[:port][,…] (redlock+tls:// with TLS)",
    port: 6379,
    options: &[],
};

/// The nodes of `redlock://…` and `redlock+tls://…`.
pub(super) fn servers(url: &Url, tls: &Tls) -> Result<Vec<Server>, Error> {
    FORM.ends_with_hosts(url, "")?;
    let (access, _) = FORM.access(url, tls)?;
    let because = ", and would vote twice; name each server once";
    let addresses = FORM.different_hosts(url, because)?;
    match addresses.len() {
        1 => {
            return Err(FORM.wrong(
                "one server is no quorum: name three or five, or write redis:// for a single server",
            ));
        }
        count if count % 2 == 0 => {
            return Err(FORM.wrong(format_args!(
                "{count} servers are no better than {}, because a majority of them is {}; name three or five",
                count - 1,
                majority(count),
            )));
        }
        count if count > 7 => {
            return Err(FORM.wrong(format_args!(
                "{count} servers are too many, because each lock is asked for at all of them; name three or five"
            )));
        }
        _ => {}
    }
    let servers = addresses.iter();
    let servers = servers.map(|address| access.server(address, &access.login, Part::Voter));
    servers.collect()
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
        let url = Url::parse(&format!("redlock://{hosts}")).unwrap();
        servers(&url, &Tls::default())
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
