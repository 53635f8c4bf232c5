//! The TLS configuration of a client: three files. `connector` reads them. `backend::open` decides
//! which schemes use TLS.

#[cfg(any(
    feature = "etcd-tls",
    feature = "mysql-tls",
    feature = "postgres-tls",
    feature = "redis-tls",
    feature = "zookeeper-tls"
))]
mod connector;

use std::path::{Path, PathBuf};

use crate::error::Error;

#[cfg(any(
    feature = "etcd-tls",
    feature = "mysql-tls",
    feature = "postgres-tls",
    feature = "redis-tls",
    feature = "zookeeper-tls"
))]
pub(crate) use connector::Connector;

pub(crate) const CA_FILE: &str = "LOCK_CA_FILE (ca_file)";
pub(crate) const CERT_FILE: &str = "LOCK_CERT_FILE (cert_file)";
pub(crate) const KEY_FILE: &str = "LOCK_KEY_FILE (key_file)";

/// The files that a client was given, all in PEM form.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// Certificates that are trusted instead of the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// The client's own certificate, followed by the certificates that lead from it to the CA.
    pub(crate) cert_file: Option<PathBuf>,
    /// The private key of that certificate.
    pub(crate) key_file: Option<PathBuf>,
}

impl Tls {
    /// The files that were given, with the option names that messages use.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all = [
            (CA_FILE, &self.ca_file),
            (CERT_FILE, &self.cert_file),
            (KEY_FILE, &self.key_file),
        ];
        all.into_iter()
            .filter_map(|(option, file)| Some((option, file.as_deref()?)))
    }

    /// Finds mistakes that can be found without reading the files.
    pub(crate) fn check(&self) -> Result<(), Error> {
        // The value is not repeated in the message, because it may be a private key.
        for (option, file) in self.given() {
            if file.to_string_lossy().contains("-----BEGIN") {
                return Err(Error::config(format!(
                    "{option} is to be the path of a PEM file, not its text"
                )));
            }
        }
        let alone = match (&self.cert_file, &self.key_file) {
            (Some(_), None) => Some((CERT_FILE, KEY_FILE)),
            (None, Some(_)) => Some((KEY_FILE, CERT_FILE)),
            _ => None,
        };
        match alone {
            Some((given, missing)) => Err(Error::config(format!(
                "{given} is set without {missing}: a client certificate needs both"
            ))),
            None => Ok(()),
        }
    }
}

/// Does not show the values: see [`Tls::check`].
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let given = self.given().map(|(option, _)| option);
        f.debug_set().entries(given).finish()
    }
}
