//! Reads the settings of a session from the URL, and opens sessions.

use std::fmt;
#[cfg(feature = "zookeeper-tls")]
use std::sync::Arc;
use std::time::Duration;

use url::Url;
use zookeeper_client::{Acls, Client, Connector, Error as ZkError};

use super::attempts;
use super::driver;
use super::errors::not_connected;
#[cfg(feature = "zookeeper-tls")]
use super::tunnel::Servers;
#[cfg(feature = "zookeeper-tls")]
use crate::backend::Fault;
use crate::backend::{StoreError, hosts, query};
use crate::error::Error;
#[cfg(feature = "zookeeper-tls")]
use crate::tls::Tls;

const PORT: u16 = 2181;
/// The port that ZooKeeper's own documentation uses for `secureClientPort`.
#[cfg(feature = "zookeeper-tls")]
const ENCRYPTED_PORT: u16 = 2281;

/// How long a server may be silent before the library tries another server, as a part of the
/// session timeout. The library's own value is two fifths. With that value, no time of the lease is
/// left if the library tries the same server again, which can happen once. With a quarter, there is
/// enough time for this. (If the server gives less than five twelfths of the session timeout that
/// the client asked for, the library uses its own value.)
const SILENCE: u32 = 4;

const FORM: &str = "the URL is not of the form \
    zookeeper://[user:password@]host[:port][,host[:port]…][/chroot][?session_timeout=10s] \
    (zookeeper+tls:// with TLS)";

/// The settings that a session is opened with.
pub(super) struct Settings {
    /// `h1:2181,h2:2181`
    hosts: String,
    /// The servers over TLS. `None` for `zookeeper://`, which is never encrypted. If this is set,
    /// nothing is sent in plain text.
    #[cfg(feature = "zookeeper-tls")]
    encrypted: Option<Arc<Servers>>,
    pub(super) chroot: Option<String>,
    /// `user:password`.
    digest: Option<String>,
    /// The session timeout to ask for. If it is not set, this is the client's default ttl.
    session_timeout: Option<Duration>,
}

impl Settings {
    /// Reads `zookeeper://[user:password@]h1[:port],h2[:port]/chroot?session_timeout=10s`.
    pub(super) fn plain(url: &Url) -> Result<Self, Error> {
        Self::read(url, PORT)
    }

    /// Reads `zookeeper+tls://…`, which uses TLS to every server.
    #[cfg(feature = "zookeeper-tls")]
    pub(super) fn encrypted(url: &Url, tls: &Tls) -> Result<Self, Error> {
        let mut settings = Self::read(url, ENCRYPTED_PORT)?;
        let digest = settings.digest.as_deref();
        settings.encrypted = Some(Servers::new(&settings.hosts, digest, tls)?);
        Ok(settings)
    }

    fn read(url: &Url, port: u16) -> Result<Self, Error> {
        let wrong = |what: &str| Error::config(format!("{FORM}: {what}"));
        let decoded = |part: &str| hosts::decoded(part).map_err(wrong);
        if url.fragment().is_some() {
            return Err(wrong("nothing may follow a \"#\""));
        }
        let servers = hosts::hosts(url, port).map_err(wrong)?;
        let servers: Vec<_> =
            (servers.iter().map(|(host, port)| format!("{host}:{port}"))).collect();
        let hosts = servers.join(",");
        let chroot = decoded(url.path())?;
        let chroot = chroot.trim_end_matches('/');
        let digest = match (url.username(), url.password()) {
            ("", None) => None,
            ("", Some(_)) => return Err(wrong("a password needs a user")),
            (_, None) => return Err(wrong("a user needs a password")),
            (user, Some(password)) => Some(format!("{}:{}", decoded(user)?, decoded(password)?)),
        };
        let mut session_timeout = None;
        let options = query::options(url, &["session_timeout"]).map_err(|what| wrong(&what))?;
        for (_, value) in options {
            let timeout = humantime::parse_duration(&value)
                .ok()
                .filter(|timeout| (1..=i32::MAX as u128).contains(&timeout.as_millis()));
            let Some(timeout) = timeout else {
                return Err(wrong(
                    "session_timeout is not a duration as 500ms, 10s or 2m",
                ));
            };
            session_timeout = Some(timeout);
        }
        Ok(Self {
            hosts,
            #[cfg(feature = "zookeeper-tls")]
            encrypted: None,
            chroot: (!chroot.is_empty()).then(|| chroot.to_owned()),
            digest,
            session_timeout,
        })
    }

    /// Opens a new session, at the server that answers first.
    ///
    /// Fails when every server was asked and none answered. This function does not try again,
    /// because only the core reconnects in a loop. If the future is dropped, no task or connection
    /// stays in this process, and the servers end the sessions that they may have begun.
    pub(super) async fn connect(&self, asked: Duration) -> Result<Client, StoreError> {
        driver::ready()?;
        let servers = self.hosts.split(',').count();
        #[cfg(feature = "zookeeper-tls")]
        if let Some(encrypted) = &self.encrypted {
            let tunnel = Arc::new(encrypted.open().await.map_err(|error| {
                StoreError::new(
                    Fault::Retry,
                    format!("cannot connect to {}: {error}", self.hosts),
                )
            })?);
            let connected = attempts::first_to_answer(servers, || {
                let (connector, tunnel) = (self.connector(asked), Arc::clone(&tunnel));
                let cluster = self.cluster(tunnel.hosts());
                async move {
                    let client = connector.connect(&cluster).await?;
                    tunnel.stay_open_for(&client);
                    Ok(client)
                }
            });
            return connected
                .await
                .map_err(|error| match (error, tunnel.failure()) {
                    // One server was reached and refused the credentials. This counts more than the
                    // failures at other servers.
                    (ZkError::AuthFailed, _) => self.refused(),
                    (_, Some((fault, reason))) => StoreError::new(fault, reason),
                    (error, None) => not_connected(&self.hosts, error, ""),
                });
        }
        let connected = attempts::first_to_answer(servers, || {
            let (connector, cluster) = (self.connector(asked), self.cluster(&self.hosts));
            async move { connector.connect(&cluster).await }
        });
        connected.await.map_err(|error| match error {
            ZkError::AuthFailed => self.refused(),
            // If all servers have failed, the library gives this error for every kind of failure.
            ZkError::NoHosts => {
                let hint = " (if these ports speak TLS, write zookeeper+tls://)";
                not_connected(&self.hosts, error, hint)
            }
            error => not_connected(&self.hosts, error, ""),
        })
    }

    fn refused(&self) -> StoreError {
        let hint = ": the server refuses the credentials; check user and password in the URL";
        not_connected(&self.hosts, ZkError::AuthFailed, hint)
    }

    /// The library's connector, with the settings that the library may know. With TLS, the library
    /// sends its bytes to the tunnel in plain text, and other processes on this machine can read
    /// them. So with TLS the library does not get the credentials, and the tunnel adds them.
    fn connector(&self, asked: Duration) -> Connector {
        let connector = Client::connector()
            .with_session_timeout(asked)
            .with_connection_timeout(asked / SILENCE)
            .with_fail_eagerly();
        #[cfg(feature = "zookeeper-tls")]
        if self.encrypted.is_some() {
            return connector;
        }
        match &self.digest {
            Some(digest) => connector.with_auth("digest", digest.as_bytes()),
            None => connector,
        }
    }

    /// `h1:2181,h2:2181/chroot`, as the client library expects it.
    fn cluster(&self, hosts: &str) -> String {
        format!("{hosts}{}", self.chroot.as_deref().unwrap_or_default())
    }

    /// The session timeout to ask for.
    pub(super) fn asked(&self, default_ttl: Duration) -> Duration {
        // The protocol writes this time in milliseconds, with 31 bits.
        let longest = Duration::from_millis(i32::MAX as u64);
        self.session_timeout.unwrap_or(default_ttl).min(longest)
    }

    /// The access rights of the nodes: only for clients with the same credentials, or for everybody
    /// if there are no credentials.
    pub(super) fn acls(&self) -> Acls<'static> {
        match self.digest {
            Some(_) => Acls::creator_all(),
            None => Acls::anyone_all(),
        }
    }
}

/// Does not show the password.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("hosts", &self.hosts)
            .field("chroot", &self.chroot)
            .field("authenticated", &self.digest.is_some())
            .field("session_timeout", &self.session_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<Settings, Error> {
        Settings::read(&Url::parse(url).unwrap(), PORT)
    }

    #[test]
    fn hosts_ports_and_chroot_are_taken_from_the_url() {
        let one = settings("zookeeper://zk1").unwrap();
        assert_eq!(one.cluster(&one.hosts), "zk1:2181");
        let one = settings("zookeeper://zk1:2182/").unwrap();
        assert_eq!((one.hosts.as_str(), one.chroot), ("zk1:2182", None));
        // This is the URL as `backend::open` passes it on.
        let three = settings("zookeeper://zk1%3A1,zk2,%5B%3A%3A1%5D%3A3/a/b").unwrap();
        assert_eq!(three.cluster(&three.hosts), "zk1:1,zk2:2181,[::1]:3/a/b");
        let address = settings("zookeeper://[::1]:7").unwrap();
        assert_eq!(address.hosts, "[::1]:7");
    }

    #[test]
    fn credentials_and_session_timeout_are_taken_from_the_url() {
        let settings = settings("zookeeper://ann:p%40ss@zk1/x?session_timeout=1500ms").unwrap();

        assert_eq!(settings.digest.as_deref(), Some("ann:p@ss"));
        assert_eq!(
            settings.asked(Duration::from_secs(9)),
            Duration::from_millis(1500)
        );
        assert!(!format!("{settings:?}").contains("p@ss"));
    }

    /// The bytes that the library sends to a server that never answers.
    #[cfg(feature = "zookeeper-tls")]
    async fn said(settings: &Settings) -> String {
        use tokio::io::AsyncReadExt as _;
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let hosts = server.local_addr().unwrap().to_string();
        let (gave_up, said) = tokio::join!(
            settings.connector(Duration::from_secs(1)).connect(&hosts),
            async {
                let mut said = Vec::new();
                let (mut library, _) = server.accept().await.unwrap();
                library.read_to_end(&mut said).await.unwrap();
                said
            }
        );
        assert!(gave_up.is_err() && !said.is_empty());
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Between the library and the tunnel, the bytes cross the loopback device, where other
    /// processes can read them.
    #[cfg(feature = "zookeeper-tls")]
    #[tokio::test]
    async fn with_tls_the_library_does_not_say_the_password() {
        let mut settings = settings("zookeeper://ann:secret@zk1").unwrap();
        assert!(said(&settings).await.contains("ann:secret"), "without TLS");

        let digest = settings.digest.as_deref();
        let servers = Servers::new(&settings.hosts, digest, &Tls::default());
        settings.encrypted = Some(servers.unwrap());
        assert!(!said(&settings).await.contains("secret"));
        assert!(!format!("{:?}", settings.encrypted).contains("secret"));
        assert_eq!(settings.acls(), Acls::creator_all());
    }

    #[test]
    fn a_form_that_would_be_misread_is_refused() {
        for url in [
            "zookeeper:///x",
            "zookeeper://a,,b",
            "zookeeper://a,%3A1",
            "zookeeper://ann@zk1",
            "zookeeper://:secret@zk1",
            "zookeeper://zk1#x",
            "zookeeper://zk1?sesion_timeout=1s",
            "zookeeper://zk1?session_timeout=ten",
            "zookeeper://zk1?session_timeout=0s",
        ] {
            let error = settings(url).expect_err(url);
            assert!(error.to_string().contains("zookeeper://[user"), "{error}");
            assert!(!error.to_string().contains("secret"));
        }
    }
}
