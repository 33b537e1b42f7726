//! Certificates of one authority, for masters and for etcd.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

pub(crate) struct HaCertificates(TempDir);

impl HaCertificates {
    /// For all who are at this address.
    pub(crate) fn make(host: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new([host.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        for (name, text) in [("ca", issuer.pem()), ("cert", cert.pem()), ("key", key.serialize_pem())] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Of a master: towards etcd and towards others.
    pub(crate) fn flags(&self) -> String {
        let flags = |whom| ["ca", "cert", "key"].map(|name| format!("--{whom}_{name}={}", self.file(name)));
        [flags("etcd"), flags("ha_replication")].concat().join(" ")
    }

    /// Flags of etcd, which requires client certificates.
    pub(crate) fn flags_of_etcd(&self) -> Vec<String> {
        let [ca, cert, key] = ["ca", "cert", "key"].map(|name| self.file(name));
        let flags =
            ["--trusted-ca-file", &ca, "--cert-file", &cert, "--key-file", &key, "--client-cert-auth"];
        flags.map(str::to_owned).to_vec()
    }
}
