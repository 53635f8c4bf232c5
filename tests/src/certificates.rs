//! Certificates for servers and clients, made on demand: valid ones, and one of each bad kind. The
//! files are removed when the authority that issued them is dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use tempfile::TempDir;

/// A certificate authority of the tests. Each has a name of its own, so that a chain to the wrong
/// authority is noticed.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
    folder: TempDir,
}

/// A certificate and its private key, as PEM files.
#[derive(Clone, Debug)]
pub struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        let mut ca = CertificateParams::default();
        ca.distinguished_name = named(&format!("authority {}", next()));
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::Builder::new().prefix("ca-").tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        fs::write(&file, issuer.pem()).unwrap();
        Self {
            issuer,
            file,
            folder,
        }
    }

    /// The authority's own certificate.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A certificate for a server with these names and addresses.
    pub fn server(&self, hosts: &[&str]) -> Identity {
        self.issue(params(hosts, ExtendedKeyUsagePurpose::ServerAuth))
    }

    /// A server's certificate that has expired.
    pub fn expired_server(&self, hosts: &[&str]) -> Identity {
        self.issue(expired(params(hosts, ExtendedKeyUsagePurpose::ServerAuth)))
    }

    /// A certificate for a client.
    pub fn client(&self) -> Identity {
        self.issue(params(&[], ExtendedKeyUsagePurpose::ClientAuth))
    }

    /// A client's certificate that has expired.
    pub fn expired_client(&self) -> Identity {
        self.issue(expired(params(&[], ExtendedKeyUsagePurpose::ClientAuth)))
    }

    fn issue(&self, params: CertificateParams) -> Identity {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let number = next();
        let write = |kind: &str, text: String| {
            let file = self.folder.path().join(format!("{number}.{kind}.pem"));
            fs::write(&file, text).unwrap();
            file
        };
        Identity {
            certificate: write("certificate", certificate.pem()),
            key: write("key", key.serialize_pem()),
        }
    }
}

fn params(hosts: &[&str], usage: ExtendedKeyUsagePurpose) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(hosts).unwrap();
    params.distinguished_name = named("somebody");
    params.extended_key_usages = vec![usage];
    params
}

fn expired(mut params: CertificateParams) -> CertificateParams {
    params.not_after = date_time_ymd(2001, 1, 1);
    params
}

fn named(name: &str) -> rcgen::DistinguishedName {
    let mut full = rcgen::DistinguishedName::new();
    full.push(DnType::CommonName, name);
    full
}

fn next() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}
