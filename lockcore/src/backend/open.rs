//! From a URL to a store: the list of schemes.

use std::borrow::Cow;
use std::sync::Arc;

use url::{ParseError, Url};

use crate::backend::meant::nearest;
use crate::backend::{Backend, memory};
use crate::error::Error;
use crate::tls::Tls;

type Open = fn(&Url, &Tls) -> Result<Arc<dyn Backend>, Error>;

/// A scheme that at least one build supports.
struct Scheme {
    name: &'static str,
    feature: &'static str,
    /// Whether the scheme uses the files of [`Tls`]. With other schemes these files are an error.
    tls: bool,
    /// `None` if this build lacks the feature.
    open: Option<Open>,
}

/// The scheme of a Redis server behind a socket of Unix. Its URL has a path and no host.
const SOCKET: &str = "redis+unix";

/// A row of [`SCHEMES`]. A build without the feature has the row too, but cannot open the scheme.
macro_rules! scheme {
    ($name:expr, $feature:literal, tls: $tls:literal, $open:path) => {
        Scheme {
            name: $name,
            feature: $feature,
            tls: $tls,
            #[cfg(feature = $feature)]
            open: Some($open),
            #[cfg(not(feature = $feature))]
            open: None,
        }
    };
}

const SCHEMES: &[Scheme] = &[
    Scheme {
        name: "memory",
        feature: "",
        tls: false,
        open: Some(memory::open),
    },
    scheme!("redis", "redis", tls: false, super::redis::open),
    scheme!("etcd", "etcd", tls: false, super::etcd::open),
    scheme!("etcd+tls", "etcd-tls", tls: true, super::etcd::open_encrypted),
    scheme!("mysql", "mysql", tls: false, super::mysql::open),
    scheme!("mysql+tls", "mysql-tls", tls: true, super::mysql::open_encrypted),
    scheme!("postgres", "postgres", tls: false, super::postgres::open),
    scheme!("postgres+tls", "postgres-tls", tls: true, super::postgres::open_encrypted),
    scheme!("sqlite", "sqlite", tls: false, super::sqlite::open),
    scheme!("rediss", "redis-tls", tls: true, super::redis::open),
    scheme!(SOCKET, "redis", tls: false, super::redis::open),
    scheme!("redis+sentinel", "redis", tls: false, super::redis::open),
    scheme!("rediss+sentinel", "redis-tls", tls: true, super::redis::open),
    scheme!("redis+cluster", "redis", tls: false, super::redis::open),
    scheme!("rediss+cluster", "redis-tls", tls: true, super::redis::open),
    scheme!("redlock", "redis", tls: false, super::redis::quorum::open),
    scheme!("redlock+tls", "redis-tls", tls: true, super::redis::quorum::open),
    scheme!("zookeeper", "zookeeper", tls: false, super::zookeeper::open),
    scheme!("zookeeper+tls", "zookeeper-tls", tls: true, super::zookeeper::open_encrypted),
];

/// What users of other libraries write for our schemes, if it does not resemble them.
const OTHER_NAMES: [(&str, &str); 10] = [
    ("cluster", "redis+cluster"),
    ("mem", "memory"),
    ("redis+socket", "redis+unix"),
    ("redis-socket", "redis+unix"),
    ("redis+ssl", "rediss"),
    ("redis+tls", "rediss"),
    ("sentinel", "redis+sentinel"),
    ("valkey-cluster", "redis+cluster"),
    ("valkey-sentinel", "redis+sentinel"),
    ("zk", "zookeeper"),
];

/// The store that a URL names, so that you can wrap it in a store of your own: see
/// [`Locks::with_backend`](crate::Locks::with_backend). No connection is opened yet.
///
/// # Errors
///
/// The errors of [`Locks::connect`](crate::Locks::connect).
pub fn open(url: &str) -> Result<Arc<dyn Backend>, Error> {
    open_with(url, &Tls::default())
}

/// The store that a URL names, with the files of its TLS. No connection is opened.
pub(crate) fn open_with(url: &str, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    // Messages do not repeat the URL, because it may contain a password.
    refuse_what_a_shell_would_take(url)?;
    let parts = Parts::of(url);
    if parts.is_some_and(|parts| parts.hides_a_user()) {
        return Err(Error::config(
            "LOCK_URL has an \"@\" behind the host: in a password write %23 for \"#\", %2F for \"/\" and %3F for \"?\", \
             which end the host; in a path write %40 for \"@\"",
        ));
    }
    let url = match parsed(url) {
        Ok(url) => url,
        Err(ParseError::RelativeUrlWithoutBase) => return Err(no_scheme()),
        // A socket has no host, so nothing may precede one.
        Err(ParseError::EmptyHost) => {
            return Err(Error::config(
                "LOCK_URL has a user or a port, but no host; at a socket write redis+unix:///path?user=…&password=…",
            ));
        }
        Err(error) => {
            return Err(Error::config(format!(
                "LOCK_URL is not a URL ({error}); {}",
                what_this_build_knows()
            )));
        }
    };
    let Some(scheme) = SCHEMES.iter().find(|scheme| scheme.name == url.scheme()) else {
        return Err(unknown(url.scheme(), parts.is_some()));
    };
    if !scheme.tls
        && let Some((option, _)) = tls.given().next()
    {
        // This is an error, because a user who sets a CA expects an encrypted connection.
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

/// The error for a scheme that no build supports. `is_certain` is `false` if no `//` follows the
/// colon. Then the text in front of the colon may be a host or a user.
fn unknown(scheme: &str, is_certain: bool) -> Error {
    let other = OTHER_NAMES.iter().find(|(name, _)| *name == scheme);
    let meant = match other {
        Some((_, meant)) => Some(*meant),
        None => nearest(scheme, SCHEMES.iter().map(|scheme| scheme.name)),
    };
    let hint = match meant {
        Some(meant) => format!(", did you mean \"{meant}\"?"),
        None if !is_certain => return no_scheme(),
        None => ";".into(),
    };
    let known = what_this_build_knows();
    Error::config(format!("unknown scheme \"{scheme}\"{hint} {known}"))
}

/// Refuses a URL in quotation marks. A shell removes them, but a file of environment variables
/// keeps them.
fn refuse_what_a_shell_would_take(url: &str) -> Result<(), Error> {
    let url = url.trim();
    for quote in ['"', '\''] {
        if url.starts_with(quote) || url.ends_with(quote) {
            return Err(Error::config(format!(
                "LOCK_URL begins or ends with a quotation mark ({quote}), which is part of the value here; write it without"
            )));
        }
    }
    Ok(())
}

fn no_scheme() -> Error {
    Error::config(format!(
        "LOCK_URL does not begin with the scheme of a store: write which store it is in front, as in redis://localhost:6379 or \
         sqlite:locks.db; {}",
        what_this_build_knows()
    ))
}

/// The address of a store, from its URL: the same in every process that uses the store, and without
/// credentials and options. Empty if the URL may contain credentials in another place. No store is
/// opened with such a URL.
pub(crate) fn place(url: &str) -> String {
    if Parts::of(url).is_some_and(|parts| parts.hides_a_user()) {
        return String::new();
    }
    let Ok(mut url) = parsed(url) else {
        return String::new();
    };
    let of_a_server = !["memory", "sqlite", SOCKET].contains(&url.scheme());
    if of_a_server && url.host_str().is_none_or(str::is_empty) {
        return String::new();
    }
    // These calls fail only if the URL has no host, and then it has no user.
    let _ = (url.set_username(""), url.set_password(None));
    url.set_query(None);
    url.set_fragment(None);
    match Parts::of(url.as_str()) {
        Some(parts) => parts.replaced(ESCAPED.map(|(sign, escaped)| (escaped, sign))),
        None => url.into(),
    }
}

/// `scheme://user:password@hosts/rest`. `user` includes the `@`.
#[derive(Clone, Copy)]
struct Parts<'a> {
    scheme: &'a str,
    user: &'a str,
    hosts: &'a str,
    rest: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Some(Self {
            scheme,
            user,
            hosts,
            rest,
        })
    }

    /// The URL, with these texts in its hosts replaced.
    fn replaced(&self, texts: [(&str, &str); 3]) -> String {
        let hosts = (texts.iter()).fold(self.hosts.to_owned(), |hosts, (text, other)| {
            hosts.replace(text, other)
        });
        format!("{}://{}{hosts}{}", self.scheme, self.user, self.rest)
    }

    /// Whether the text behind the host may be the end of a password.
    fn hides_a_user(&self) -> bool {
        !self.hosts.is_empty() && self.rest.contains('@')
    }
}

/// The characters that the parser of URLs takes for a part of a port or an address, and their
/// escapes.
const ESCAPED: [(&str, &str); 3] = [(":", "%3A"), ("[", "%5B"), ("]", "%5D")];

/// A URL can have only one host. This escapes `h1:2181,h2:2181,[::1]:2181` so that it becomes one
/// host. A store that takes several hosts unescapes them.
fn several_hosts(url: &str) -> Cow<'_, str> {
    match Parts::of(url) {
        Some(parts) if parts.hosts.contains(',') => parts.replaced(ESCAPED).into(),
        _ => url.into(),
    }
}

/// The parts of a URL. Valkey is the same as Redis to us, and MariaDB the same as MySQL, so their
/// schemes become those. Other libraries write `postgresql` or `postgres` as they like.
fn parsed(url: &str) -> Result<Url, ParseError> {
    let mut url = Url::parse(&several_hosts(url))?;
    let scheme = match url.scheme() {
        "unix" => SOCKET.to_owned(),
        other => {
            let same = [
                ("valkey", "redis"),
                ("mariadb", "mysql"),
                ("postgresql", "postgres"),
            ];
            (same.iter()).fold(other.to_owned(), |scheme, (other, ours)| {
                scheme.replacen(other, ours, 1)
            })
        }
    };
    if SCHEMES.iter().any(|known| known.name == scheme) {
        // This fails only between schemes of the web and others.
        let _ = url.set_scheme(&scheme);
    }
    Ok(url)
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
        open_with(url, &Tls::default())
            .expect_err("should be refused")
            .to_string()
    }

    #[test]
    fn an_unknown_scheme_lists_the_known_ones() {
        let message = message("mongodb://localhost");
        assert!(
            message.contains("unknown scheme \"mongodb\"; this build knows memory"),
            "{message}"
        );
    }

    #[test]
    fn the_doc_of_url_and_the_readme_have_every_scheme() {
        let builder = include_str!("../builder.rs");
        let (above, _) = builder.split_once("pub fn url(").unwrap();
        let (_, doc) = above.rsplit_once("\n\n").unwrap();
        // The published crate comes without the README of the repository.
        let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
        let readme = std::fs::read_to_string(readme).ok();
        for text in [Some(doc), readme.as_deref()].into_iter().flatten() {
            for Scheme { name, .. } in SCHEMES {
                assert!(
                    text.contains(&format!("`{name}:")),
                    "{name} is not in {text}"
                );
            }
        }
    }

    #[test]
    fn a_misspelt_scheme_is_named_with_the_right_one() {
        for (url, meant) in [
            ("redsi://h", "redis"),
            ("redi://h", "redis"),
            ("redisss://h", "rediss"),
            ("redis-sentinel://h/s", "redis+sentinel"),
            ("redis-cluster://h", "redis+cluster"),
            ("rediss+sentinal://h/s", "rediss+sentinel"),
            ("redlok://h1,h2,h3", "redlock"),
            ("memroy:", "memory"),
            ("sqllite:a.db", "sqlite"),
            ("zookeper://h", "zookeeper"),
            ("zookeeper+tsl://h", "zookeeper+tls"),
            ("zk://h", "zookeeper"),
            ("sentinel://h/s", "redis+sentinel"),
            ("valkey-sentinel://h/s", "redis+sentinel"),
            ("redis+tls://h", "rediss"),
        ] {
            let message = message(url);
            assert!(
                message.contains(&format!("did you mean \"{meant}\"?")),
                "{message}"
            );
        }
    }

    /// Two servers with one protocol. So clients with either URL exclude each other.
    #[test]
    fn mariadb_is_another_name_for_mysql() {
        for (written, place_of) in [
            ("mariadb://ann:hunter2@h:1/shop", "mysql://h:1/shop"),
            ("mariadb+tls://ann@h/shop", "mysql+tls://h/shop"),
        ] {
            assert_eq!(place(written), place_of);
            if let Err(error) = open(written) {
                let error = error.to_string();
                assert!(error.contains("is not in this build"), "{error}");
            }
        }
    }

    /// The two differ in name only. So clients with either URL exclude each other.
    #[test]
    fn valkey_is_another_name_for_redis() {
        for (written, place_of) in [
            ("valkey://ann:hunter2@h:1/3", "redis://h:1/3"),
            ("valkeys://h", "rediss://h"),
            ("valkey+sentinel://h1:1,h2/s", "redis+sentinel://h1:1,h2/s"),
            ("valkeys+cluster://h", "rediss+cluster://h"),
            ("valkey+unix:///s", "redis+unix:///s"),
        ] {
            assert_eq!(place(written), place_of);
            if let Err(error) = open(written) {
                let error = error.to_string();
                assert!(error.contains("is not in this build"), "{error}");
            }
        }
    }

    #[test]
    fn a_url_without_a_scheme_says_what_to_write_in_front() {
        for url in [
            "localhost",
            "localhost:6379",
            "127.0.0.1:6379/0",
            "//localhost",
            "/var/lib/locks.db",
            "ann:hunter2@localhost",
            "consul:foo",
            "",
        ] {
            let message = message(url);
            assert!(
                message.contains("write which store it is in front, as in redis://"),
                "{url}: {message}"
            );
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn a_url_in_quotation_marks_is_told_apart_from_one_that_is_misspelt() {
        for url in ["\"redis://h\"", "'memory:'", "redis://h\"", " \"memory:\" "] {
            let message = message(url);
            assert!(
                message.contains("quotation mark") && message.contains("write it without"),
                "{url}: {message}"
            );
        }
    }

    #[test]
    fn a_password_that_ends_the_host_says_how_to_write_it() {
        for url in [
            "redis://ann:hunter2#x@h",
            "redis://ann:12#hunter2@h",
            "redis://:hunter2/x@h:6379/0",
            "redis://ann:hunter2?x@h",
            "zookeeper://ann:12/hunter2@h",
        ] {
            let message = message(url);
            assert!(
                message.contains("%23 for \"#\"") && message.contains("%2F for \"/\""),
                "{url}: {message}"
            );
            assert!(!message.contains("hunter2"), "{message}");
        }
        assert!(!message("sqlite:///folder/").contains("%40"));
    }

    #[test]
    fn a_place_is_the_url_without_the_parts_that_differ_between_clients() {
        for (url, place_of) in [
            ("memory:", "memory:"),
            ("sqlite:locks.db", "sqlite:locks.db"),
            ("redis://ann:hunter2@h:6400/3", "redis://h:6400/3"),
            ("rediss://:hunter2@[::1]", "rediss://[::1]"),
            (
                "zookeeper://a:hunter2@h1:1,h2,[::1]:3/shop?session_timeout=4s",
                "zookeeper://h1:1,h2,[::1]:3/shop",
            ),
            (
                "redis+sentinel://ann:hunter2@h1:1,h2/shop/3?sentinel_user=ann&sentinel_password=hunter2",
                "redis+sentinel://h1:1,h2/shop/3",
            ),
            (
                "unix:///run/redis.sock?user=ann&password=hunter2&db=3",
                "redis+unix:///run/redis.sock",
            ),
            ("no url", ""),
            ("redis:ann:hunter2@h", ""),
            ("redis:/ann:hunter2@h", ""),
            ("redis://ann:12/hunter2@h", ""),
            ("redis://ann:12#hunter2@h", ""),
            ("zookeeper:ann:hunter2@h1,h2", ""),
        ] {
            assert_eq!(place(url), place_of);
        }
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
                "rediss+sentinel://h/s",
                "redis-tls",
                cfg!(feature = "redis-tls"),
            ),
            (
                "rediss+cluster://h",
                "redis-tls",
                cfg!(feature = "redis-tls"),
            ),
            ("etcd+tls://h", "etcd-tls", cfg!(feature = "etcd-tls")),
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
            let message = open_with(url, &tls).expect_err(url).to_string();
            assert!(
                message.contains("LOCK_CA_FILE")
                    && message.contains(
                        "these do: etcd+tls, mysql+tls, postgres+tls, rediss, \
                         rediss+sentinel, rediss+cluster, redlock+tls, zookeeper+tls"
                    ),
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
            "redis+sentinel://u:hunter2@h1,h2",
            "redis+sentinel://u:hunter2@h1,h2:notaport/s",
            "rediss+sentinel://u:hunter2@h1/s?sentinel_pasword=hunter2",
            "rediss+sentinel://h1,h1/s?sentinel_password=hunter2",
            "redis+sentinel://h1/s/zero?sentinel_user=hunter2",
            "redis+sentinel://h1,h2/s?sentinel_password=hunter2@x",
            "zookeeper+tls://u:hunter2@host:notaport",
            "zookeeper+tls://u:hunter2@host,other:notaport",
            "zookeeper+tls://u:hunter2@host?tls=no",
        ] {
            assert!(!message(url).contains("hunter2"), "{url}");
        }
    }
}
