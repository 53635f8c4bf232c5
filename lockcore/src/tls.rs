//! TLS as the client is configured for it: three files. What is made of them is in `connector`;
//! which schemes use TLS is in `backend::open`.

#[cfg(any(feature = "redis-tls", feature = "zookeeper-tls"))]
mod connector;

use std::path::{Path, PathBuf};

use crate::error::Error;

#[cfg(any(feature = "redis-tls", feature = "zookeeper-tls"))]
pub(crate) use connector::Connector;

pub(crate) const CA_FILE: &str = "LOCK_CA_FILE (ca_file)";
pub(crate) const CERT_FILE: &str = "LOCK_CERT_FILE (cert_file)";
pub(crate) const KEY_FILE: &str = "LOCK_KEY_FILE (key_file)";

/// The files, all in PEM form, that a client was given.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// Certificates that are trusted instead of the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// The client's own certificate, with what leads from it to the CA.
    pub(crate) cert_file: Option<PathBuf>,
    /// The private key of that certificate.
    pub(crate) key_file: Option<PathBuf>,
}

impl Tls {
    /// What was given, by the names that messages use.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all = [
            (CA_FILE, &self.ca_file),
            (CERT_FILE, &self.cert_file),
            (KEY_FILE, &self.key_file),
        ];
        all.into_iter()
            .filter_map(|(option, file)| Some((option, file.as_deref()?)))
    }

    /// Finds what is wrong without a look at the files.
    pub(crate) fn check(&self) -> Result<(), Error> {
        // The value is not repeated: it is a private key in the worst case.
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

/// Without the values: see [`Tls::check`].
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let given = self.given().map(|(option, _)| option);
        f.debug_set().entries(given).finish()
    }
}
