//! Certificates of one authority, for masters and for etcd.

use moongate_testkit::{IdentityFiles, TestAuthority};

pub(crate) struct HaCertificates {
    _authority: TestAuthority,
    files: IdentityFiles,
}

impl HaCertificates {
    /// For all who are at this address.
    pub(crate) fn make(host: &str) -> Self {
        let authority = TestAuthority::new().unwrap();
        let files = authority.issue_files("member", &[host]).unwrap();
        Self { _authority: authority, files }
    }

    /// The names that flags have for the files, and their paths.
    fn named_files(&self) -> [(&'static str, String); 3] {
        let files = &self.files;
        [("ca", &files.ca), ("cert", &files.certificate), ("key", &files.key)]
            .map(|(name, path)| (name, path.display().to_string()))
    }

    /// Of a master: towards etcd and towards others.
    pub(crate) fn flags(&self) -> String {
        let flags = |whom| self.named_files().map(|(name, path)| format!("--{whom}_{name}={path}"));
        [flags("etcd"), flags("ha_replication")].concat().join(" ")
    }

    /// Flags of etcd, which requires client certificates.
    pub(crate) fn flags_of_etcd(&self) -> Vec<String> {
        let [ca, cert, key] = self.named_files().map(|(_, path)| path);
        let flags =
            ["--trusted-ca-file", &ca, "--cert-file", &cert, "--key-file", &key, "--client-cert-auth"];
        flags.map(str::to_owned).to_vec()
    }
}
