//! From a URL to a store: the registry of schemes.

use std::borrow::Cow;
use std::sync::Arc;

use url::Url;

use crate::backend::{self, Backend};
use crate::error::Error;
use crate::tls::Tls;

type Open = fn(&Url, &Tls) -> Result<Arc<dyn Backend>, Error>;

/// A scheme that some build knows.
struct Scheme {
    name: &'static str,
    feature: &'static str,
    /// Whether the files of [`Tls`] mean something to it; who gives them to another is told.
    tls: bool,
    /// `None` when this build lacks the feature.
    open: Option<Open>,
}

const SCHEMES: &[Scheme] = &[
    Scheme {
        name: "memory",
        feature: "",
        tls: false,
        open: Some(backend::memory::open),
    },
    Scheme {
        name: "redis",
        feature: "redis",
        tls: false,
        #[cfg(feature = "redis")]
        open: Some(backend::redis::open),
        #[cfg(not(feature = "redis"))]
        open: None,
    },
    Scheme {
        name: "sqlite",
        feature: "sqlite",
        tls: false,
        #[cfg(feature = "sqlite")]
        open: Some(backend::sqlite::open),
        #[cfg(not(feature = "sqlite"))]
        open: None,
    },
    Scheme {
        name: "rediss",
        feature: "redis-tls",
        tls: true,
        #[cfg(feature = "redis-tls")]
        open: Some(backend::redis::open_encrypted),
        #[cfg(not(feature = "redis-tls"))]
        open: None,
    },
    Scheme {
        name: "zookeeper",
        feature: "zookeeper",
        tls: false,
        #[cfg(feature = "zookeeper")]
        open: Some(backend::zookeeper::open),
        #[cfg(not(feature = "zookeeper"))]
        open: None,
    },
    Scheme {
        name: "zookeeper+tls",
        feature: "zookeeper-tls",
        tls: true,
        #[cfg(feature = "zookeeper-tls")]
        open: Some(backend::zookeeper::open_encrypted),
        #[cfg(not(feature = "zookeeper-tls"))]
        open: None,
    },
];

/// The store that a URL names. Nothing is connected.
pub(crate) fn open(url: &str, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    // The URL itself is not repeated in messages: it may carry a password (P10).
    let url = Url::parse(&several_hosts(url)).map_err(|error| {
        Error::config(format!(
            "LOCK_URL is not a URL ({error}); {}",
            what_this_build_knows()
        ))
    })?;
    let Some(scheme) = SCHEMES.iter().find(|scheme| scheme.name == url.scheme()) else {
        return Err(Error::config(format!(
            "unknown scheme \"{}\"; {}",
            url.scheme(),
            what_this_build_knows()
        )));
    };
    if !scheme.tls
        && let Some((option, _)) = tls.given().next()
    {
        // Not passed over: who gives a CA believes that the connection is encrypted.
        return Err(Error::config(format!(
            "{option} is set, but \"{}\" does not use TLS; these do: {}",
            scheme.name,
            listed(|scheme| scheme.tls)
        )));
    }
    tls.check()?;
    match scheme.open {
        Some(open) => open(&url, tls),
        None => Err(Error::config(format!(
            "\"{}\" is not in this build; enable the feature \"{}\" of lockcore ({})",
            scheme.name,
            scheme.feature,
            what_this_build_knows()
        ))),
    }
}

/// What a URL says about where a store is, the same in every process that uses the store: without
/// credentials, options, and who connects how.
pub(crate) fn place(url: &str) -> String {
    match Url::parse(&several_hosts(url)) {
        Ok(url) => {
            let (host, port) = (url.host_str().unwrap_or_default(), url.port().unwrap_or(0));
            format!("{} {host} {port} {}", url.scheme(), url.path())
        }
        Err(_) => String::new(),
    }
}

/// A URL has one host; `h1:2181,h2:2181,[::1]:2181` becomes one by escaping what tells a port or an
/// address from a name. The store that takes several undoes that.
fn several_hosts(url: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.into();
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    if !hosts.contains(',') {
        return url.into();
    }
    let hosts = hosts
        .replace(':', "%3A")
        .replace('[', "%5B")
        .replace(']', "%5D");
    format!("{scheme}://{user}{hosts}{path}").into()
}

/// "this build knows memory, redis".
pub(crate) fn what_this_build_knows() -> String {
    format!(
        "this build knows {}",
        listed(|scheme| scheme.open.is_some())
    )
}

fn listed(which: fn(&Scheme) -> bool) -> String {
    let names: Vec<_> = SCHEMES
        .iter()
        .filter(|scheme| which(scheme))
        .map(|scheme| scheme.name)
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(url: &str) -> String {
        open(url, &Tls::default())
            .expect_err("should be refused")
            .to_string()
    }

    #[test]
    fn an_unknown_scheme_lists_the_known_ones() {
        let message = message("rediss+x://localhost");
        assert!(
            message.contains("unknown scheme \"rediss+x\"; this build knows memory"),
            "{message}"
        );
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn a_scheme_of_a_missing_feature_names_the_feature() {
        assert!(message("redis://localhost").contains("enable the feature \"redis\""));
    }

    #[test]
    fn an_encrypted_scheme_never_falls_back_to_plain_text() {
        for (url, feature, there) in [
            ("rediss://h", "redis-tls", cfg!(feature = "redis-tls")),
            (
                "zookeeper+tls://h",
                "zookeeper-tls",
                cfg!(feature = "zookeeper-tls"),
            ),
        ] {
            if !there {
                assert!(message(url).contains(&format!("enable the feature \"{feature}\"")));
            }
        }
    }

    #[test]
    fn files_for_tls_are_refused_where_nothing_is_encrypted() {
        for url in ["memory:", "redis://localhost", "zookeeper://localhost"] {
            let tls = Tls {
                ca_file: Some("ca.pem".into()),
                ..Tls::default()
            };
            let message = open(url, &tls).expect_err(url).to_string();
            assert!(
                message.contains("LOCK_CA_FILE")
                    && message.contains("these do: rediss, zookeeper+tls"),
                "{message}"
            );
        }
    }

    #[test]
    fn several_hosts_with_ports_are_one_opaque_host() {
        let url = Url::parse(&several_hosts("x://u:a,b@h1:1,h2,[::1]:3/p:q,r")).unwrap();

        assert_eq!(url.host_str(), Some("h1%3A1,h2,%5B%3A%3A1%5D%3A3"));
        assert_eq!(
            (url.username(), url.password(), url.port()),
            ("u", Some("a,b"), None)
        );
        assert_eq!(url.path(), "/p:q,r");
        assert_eq!(several_hosts("x://h:1/a,b"), "x://h:1/a,b");
    }

    #[test]
    fn no_message_repeats_a_password() {
        for url in [
            "redos://u:hunter2@host",
            "//u:hunter2@host",
            "redis://u:hunter2@host:notaport",
            #[cfg(feature = "redis")]
            "redis://u:hunter2@host/zero",
            #[cfg(feature = "redis")]
            "redis://u:hunter2@host/0?protocol=resp2",
            "rediss://u:hunter2@host/zero",
            "rediss://u:hunter2@host/0#insecure",
            "zookeeper+tls://u:hunter2@host:notaport",
            "zookeeper+tls://u:hunter2@host,other:notaport",
            "zookeeper+tls://u:hunter2@host?tls=no",
        ] {
            assert!(!message(url).contains("hunter2"), "{url}");
        }
    }
}
