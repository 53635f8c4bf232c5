//! Makes encrypted connections with the files of the configuration: which certificates are trusted,
//! which certificate this client shows, and what a failed handshake means.
//!
//! The server's certificate is always verified. No code here can turn that off.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as RustlsError, RootCertStore,
};

use super::{CA_FILE, CERT_FILE, KEY_FILE, Tls};
use crate::error::Error;

/// Opens encrypted connections to one host.
pub(crate) struct Connector {
    config: Arc<ClientConfig>,
    host: ServerName<'static>,
    /// The files of the configuration, for messages.
    tls: Tls,
}

impl Connector {
    /// Reads the files once. If a certificate is replaced on disk, only a client that is made later
    /// uses the new one.
    ///
    /// `host` is a name or an address as written in the URL. The server's certificate must be valid
    /// for it.
    pub(crate) fn new(tls: &Tls, host: &str) -> Result<Self, Error> {
        // The application may have chosen a provider (FIPS). If not, this does not install one for
        // the process, because a process can install only one, and the application decides which.
        let provider = match CryptoProvider::get_default() {
            Some(chosen) => Arc::clone(chosen),
            None => Arc::new(ring::default_provider()),
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::config(format!("TLS: {error}")))?
            .with_root_certificates(trusted(tls.ca_file.as_deref())?);
        let config = match (&tls.cert_file, &tls.key_file) {
            (Some(cert_file), Some(key_file)) => config
                .with_client_auth_cert(
                    certificates(CERT_FILE, cert_file)?,
                    private_key(key_file)?,
                )
                .map_err(|error| {
                    Error::config(format!(
                        "{CERT_FILE} {cert_file:?} and {KEY_FILE} {key_file:?} do not go together: {error}"
                    ))
                })?,
            // `Tls::check` has refused one file without the other.
            _ => config.with_no_client_auth(),
        };
        Ok(Self {
            config: Arc::new(config),
            host: server_name(host)?,
            tls: tls.clone(),
        })
    }

    /// A connector with the same files, for another host.
    #[cfg_attr(
        not(any(
            feature = "etcd-tls",
            feature = "postgres-tls",
            feature = "redis-tls",
            feature = "zookeeper-tls"
        )),
        allow(dead_code, reason = "a URL of MySQL names one host")
    )]
    pub(crate) fn for_host(&self, host: &str) -> Result<Self, Error> {
        Ok(Self {
            config: Arc::clone(&self.config),
            host: server_name(host)?,
            tls: self.tls.clone(),
        })
    }

    /// Asks the server for this protocol. A server may demand this (ALPN).
    #[cfg(feature = "etcd-tls")]
    pub(crate) fn with_protocol(mut self, name: &str) -> Self {
        let config = Arc::make_mut(&mut self.config);
        config.alpn_protocols = vec![name.as_bytes().to_vec()];
        self
    }

    pub(crate) async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        tokio_rustls::TlsConnector::from(Arc::clone(&self.config))
            .connect(self.host.clone(), stream)
            .await
    }

    /// If the failure is a mistake that a person must correct, returns what the mistake is and how
    /// to correct it. `None` if trying again may help.
    pub(crate) fn mistake(&self, error: &(dyn StdError + 'static)) -> Option<String> {
        let error = rustls_error(error)?;
        Some(match error {
            RustlsError::InvalidCertificate(why) => match (why, &self.tls.ca_file) {
                (CertificateError::UnknownIssuer, Some(file)) => format!(
                    "the server's certificate is not from the CA in {CA_FILE} {file:?}; name the one \
                     that it is from ({error})"
                ),
                (CertificateError::UnknownIssuer, None) => format!(
                    "the server's certificate is from no CA that this system trusts; set {CA_FILE} \
                     to the one that it is from ({error})"
                ),
                (CertificateError::Expired | CertificateError::ExpiredContext { .. }, _) => {
                    format!(
                        "the server's certificate has expired; renew it there, or set the clock here \
                     ({error})"
                    )
                }
                (
                    CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
                    _,
                ) => {
                    format!(
                        "the server's certificate is not valid yet; set the clock here ({error})"
                    )
                }
                (
                    CertificateError::NotValidForName
                    | CertificateError::NotValidForNameContext { .. },
                    _,
                ) => format!(
                    "the server's certificate is for another host; use one in the URL that it is \
                     for ({error})"
                ),
                _ => format!("the server's certificate is not usable; replace it there ({error})"),
            },
            RustlsError::InvalidMessage(_) => format!(
                "the server at this port does not speak TLS; use the port that does, or the \
                 scheme without TLS ({error})"
            ),
            RustlsError::PeerIncompatible(_) => {
                format!("the server speaks no TLS that is safe; it needs TLS 1.2 or 1.3 ({error})")
            }
            RustlsError::AlertReceived(alert) => refusal(*alert, self.tls.cert_file.as_deref())?,
            _ => return None,
        })
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

fn server_name(host: &str) -> Result<ServerName<'static>, Error> {
    // In a URL an IPv6 address is in brackets.
    let address = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = address.parse::<IpAddr>() {
        return Ok(ServerName::from(address));
    }
    ServerName::try_from(host.to_owned())
        .map_err(|_| Error::config("the host of the URL is neither a name nor an address"))
}

fn trusted(ca_file: Option<&Path>) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = ca_file {
        for certificate in certificates(CA_FILE, file)? {
            roots.add(certificate).map_err(|error| {
                Error::config(format!("{CA_FILE} {file:?}: not a usable CA: {error}"))
            })?;
        }
        return Ok(roots);
    }
    let system = rustls_native_certs::load_native_certs();
    for error in &system.errors {
        tracing::debug!(%error, "some of the system's root certificates cannot be read");
    }
    roots.add_parsable_certificates(system.certs);
    if roots.is_empty() {
        return Err(Error::config(format!(
            "this system has no root certificates to verify the server with: install them \
             (ca-certificates), or set {CA_FILE}"
        )));
    }
    Ok(roots)
}

fn certificates(option: &'static str, file: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(option, file)?).collect();
    match found {
        Ok(found) if found.is_empty() => Err(Error::config(format!(
            "{option} {file:?} has no certificate in it (-----BEGIN CERTIFICATE-----)"
        ))),
        Ok(found) => Ok(found),
        Err(error) => Err(not_pem(option, file, &error)),
    }
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_slice(&read(KEY_FILE, file)?).map_err(|error| match error {
        pem::Error::NoItemsFound => Error::config(format!(
            "{KEY_FILE} {file:?} has no private key in it (-----BEGIN PRIVATE KEY-----, without a password)"
        )),
        error => not_pem(KEY_FILE, file, &error),
    })
}

fn read(option: &'static str, file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file)
        .map_err(|error| Error::config(format!("{option} {file:?} cannot be read: {error}")))
}

/// Tells only the kind of damage: the parser's text may quote the file, which may be the key.
fn not_pem(option: &'static str, file: &Path, error: &pem::Error) -> Error {
    let what = match error {
        pem::Error::MissingSectionEnd { .. } => "a section has no end",
        pem::Error::IllegalSectionStart { .. } => "a section begins with a malformed line",
        pem::Error::Base64Decode(_) => "the base64 is damaged",
        _ => "it cannot be parsed",
    };
    Error::config(format!("{option} {file:?} is not sound PEM: {what}"))
}

/// The meaning of the server's alert, which ended the handshake, for the user.
fn refusal(alert: AlertDescription, cert_file: Option<&Path>) -> Option<String> {
    use AlertDescription as A;
    Some(match (alert, cert_file) {
        (A::CertificateRequired, None) => format!(
            "the server demands a client certificate; set {CERT_FILE} and {KEY_FILE} ({alert:?})"
        ),
        (
            A::BadCertificate
            | A::UnsupportedCertificate
            | A::CertificateRevoked
            | A::CertificateExpired
            | A::CertificateUnknown
            | A::CertificateRequired
            | A::UnknownCA
            | A::AccessDenied
            | A::DecryptError,
            Some(file),
        ) => format!(
            "the server refuses the client certificate {CERT_FILE} {file:?}; it must be valid, and \
             from a CA that the server trusts ({alert:?})"
        ),
        // With TLS 1.2 these are the alerts for a missing certificate.
        (A::BadCertificate | A::HandshakeFailure, None) => format!(
            "the server ended the handshake; if it demands a client certificate, set {CERT_FILE} \
             and {KEY_FILE} ({alert:?})"
        ),
        (A::HandshakeFailure | A::ProtocolVersion | A::InsufficientSecurity, _) => format!(
            "the server and this client have no version or cipher of TLS in common; it needs TLS \
             1.2 or 1.3 ({alert:?})"
        ),
        (A::UnrecognisedName, _) => format!(
            "the server does not know the host of the URL; use one that its certificate is for \
             ({alert:?})"
        ),
        _ => return None,
    })
}

/// Finds the error of rustls inside of the errors that wrap it.
fn rustls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a RustlsError> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // For these two types, `source` skips the error that they contain.
        cause = if let Some(io) = error.downcast_ref::<io::Error>() {
            io.get_ref().map(|inner| inner as &(dyn StdError + 'static))
        } else if let Some(shared) = error.downcast_ref::<Arc<dyn StdError + Send + Sync>>() {
            Some(&**shared)
        } else {
            error.source()
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_an_address_or_a_name() {
        for address in ["127.0.0.1", "[::1]", "[2001:db8::1]"] {
            let name = server_name(address).unwrap();
            assert!(matches!(name, ServerName::IpAddress(_)), "{name:?}");
        }
        let name = server_name("locks.example.com").unwrap();
        assert!(matches!(name, ServerName::DnsName(_)), "{name:?}");
        assert!(server_name("no name").is_err());
    }

    /// The driver wraps the error of the stream twice.
    #[cfg(feature = "redis-tls")]
    #[test]
    fn the_error_of_rustls_is_found_in_the_error_of_the_driver() {
        let said = RustlsError::AlertReceived(AlertDescription::CertificateRequired);
        let error = redis::RedisError::from(io::Error::other(said.clone()));
        assert_eq!(rustls_error(&error), Some(&said));

        let other = redis::RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert_eq!(rustls_error(&other), None);
    }
}
