//! Reads the URL.

use std::fmt;
#[cfg(feature = "etcd-tls")]
use std::sync::Arc;
use std::time::Duration;

use url::Url;

use super::layout::Layout;
use crate::backend::{hosts, query};
use crate::error::Error;
#[cfg(feature = "etcd-tls")]
use crate::tls::{Connector, Tls};

const PORT: u16 = 2379;

const FORM: &str = "the URL is not of the form \
    etcd://[user:password@]host[:port][,host[:port]…][?prefix=…&session_ttl=…] (etcd+tls:// with TLS)";

/// The shortest lease that is asked for. Leases have whole seconds.
const SHORTEST: Duration = Duration::from_secs(1);

/// The longest lease that a server takes.
const LONGEST: Duration = Duration::from_secs(9_000_000_000);

/// The members of an ensemble, and how to talk to them.
pub(super) struct Settings {
    pub(super) members: Vec<Member>,
    pub(super) is_encrypted: bool,
    pub(super) login: Option<(String, String)>,
    pub(super) layout: Layout,
    /// `?session_ttl=…`.
    session_ttl: Option<Duration>,
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) host: String,
    pub(super) port: u16,
    #[cfg(feature = "etcd-tls")]
    pub(super) tls: Option<Arc<Connector>>,
}

impl Settings {
    /// Reads `etcd+tls://…`, which uses TLS to every member. Reads the certificate files once, here.
    #[cfg(feature = "etcd-tls")]
    pub(super) fn encrypted(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let mut settings = Self {
            is_encrypted: true,
            ..Self::plain(url)?
        };
        let mut first: Option<Arc<Connector>> = None;
        for member in &mut settings.members {
            let connector = match &first {
                Some(first) => first.for_host(&member.host)?,
                // gRPC needs HTTP/2, and the server takes it only if this asks for it.
                None => Connector::new(tls, &member.host)?.with_protocol("h2"),
            };
            let connector = Arc::new(connector);
            first.get_or_insert_with(|| Arc::clone(&connector));
            member.tls = Some(connector);
        }
        Ok(settings)
    }

    /// Reads `etcd://…`.
    pub(super) fn plain(url: &Url) -> Result<Self, Error> {
        let wrong = |what: &str| Error::config(format!("{FORM}: {what}"));
        let decoded = |part: &str| hosts::decoded(part).map_err(wrong);
        if url.fragment().is_some() {
            return Err(wrong("nothing may follow a \"#\""));
        }
        if !matches!(url.path(), "" | "/") {
            return Err(wrong(
                "nothing may follow the hosts; did you mean ?prefix=…?",
            ));
        }
        let members = hosts::hosts(url, PORT).map_err(wrong)?.into_iter();
        let members = members.map(|(host, port)| Member {
            host,
            port,
            #[cfg(feature = "etcd-tls")]
            tls: None,
        });
        let user = decoded(url.username())?;
        let login = match (user.is_empty(), url.password()) {
            (true, None) => None,
            (false, Some(password)) => Some((user, decoded(password)?)),
            (true, Some(_)) => return Err(wrong("a password is given without a user")),
            (false, None) => return Err(wrong("a user is given without a password")),
        };
        let mut settings = Self {
            members: members.collect(),
            is_encrypted: false,
            login,
            layout: Layout::default(),
            session_ttl: None,
        };
        let options = query::options(url, &["prefix", "session_ttl"]);
        for (name, value) in options.map_err(|what| wrong(&what))? {
            match name {
                "prefix" => settings.layout.prefix = value,
                _ => {
                    let ttl = humantime::parse_duration(&value).ok();
                    let ttl = ttl.filter(|ttl| (SHORTEST..=LONGEST).contains(ttl));
                    settings.session_ttl = Some(ttl.ok_or_else(|| {
                        wrong("the session_ttl is no time of a second or more, such as 60s")
                    })?);
                }
            }
        }
        Ok(settings)
    }

    /// The ttl of the lease that is asked for, in seconds.
    pub(super) fn asked(&self, default_ttl: Duration) -> i64 {
        let ttl = self.session_ttl.unwrap_or(default_ttl);
        let ttl = ttl.clamp(SHORTEST, LONGEST);
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        i64::try_from(seconds).unwrap_or(i64::MAX)
    }
}

/// Shows neither the user nor the password.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.members, self.layout.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<Settings, Error> {
        Settings::plain(&Url::parse(url).unwrap())
    }

    fn members(settings: &Settings) -> Vec<(&str, u16)> {
        let members = settings.members.iter();
        members.map(|member| (&*member.host, member.port)).collect()
    }

    #[test]
    fn members_login_prefix_and_ttl_are_taken_from_the_url() {
        let settings = read("etcd://ann:p%40ss@h1%3A1,h2?prefix=/apps/&session_ttl=90s").unwrap();
        assert_eq!(members(&settings), [("h1", 1), ("h2", PORT)]);
        assert_eq!(settings.login, Some(("ann".into(), "p@ss".into())));
        assert_eq!(settings.layout.prefix, "/apps/");
        assert_eq!(settings.asked(Duration::from_secs(10)), 90);
        assert!(!format!("{settings:?}").contains("p@ss"));

        let settings = read("etcd://h/").unwrap();
        assert_eq!(members(&settings), [("h", PORT)]);
        assert_eq!(settings.login, None);
    }

    /// A lease that is shorter than the ttl of a lock could end before the lock.
    #[test]
    fn a_ttl_is_rounded_up_to_whole_seconds() {
        let settings = read("etcd://h").unwrap();
        for (ttl, seconds) in [(1, 1), (1_000, 1), (1_001, 2), (10_000, 10)] {
            assert_eq!(settings.asked(Duration::from_millis(ttl)), seconds);
        }
    }

    #[test]
    fn a_url_that_could_be_misread_is_refused_with_the_form() {
        for url in [
            "etcd://h/apps",
            "etcd://h#1",
            "etcd://ann@h",
            "etcd://:hunter2@h",
            "etcd://ann:hunter2@h?session_ttl=10",
            "etcd://ann:hunter2@h?session_ttl=10ms",
            "etcd://ann:hunter2@h?chroot=/x",
        ] {
            let error = read(url).expect_err(url).to_string();
            assert!(error.contains("etcd://[user"), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
