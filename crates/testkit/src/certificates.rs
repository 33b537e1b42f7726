//! A certificate authority, for programs that authenticate each other.

use std::io;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

/// A certificate cannot be generated or written.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The certificate or its key cannot be generated.
    #[error("certificate: {0}")]
    Generate(#[from] rcgen::Error),
    /// The folder or a file cannot be created.
    #[error("certificate: {0}")]
    Io(#[from] io::Error),
}

/// A certificate authority with a folder for files, which is deleted on drop.
pub struct TestAuthority {
    folder: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its private key, as PEM texts.
pub struct PemIdentity {
    pub certificate: String,
    pub key: String,
}

/// PEM files of a program: its certificate, its private key, and the authority that it trusts.
pub struct IdentityFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
}

impl TestAuthority {
    /// Generates an authority.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn new() -> Result<Self, CertificateError> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let authority = Self { folder: TempDir::with_prefix("moongate-authority-")?, issuer };
        std::fs::write(authority.ca_file(), authority.pem())?;
        Ok(authority)
    }

    /// The authority's certificate, as PEM text.
    #[must_use]
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// File of the authority's certificate.
    #[must_use]
    pub fn ca_file(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// Issues a certificate for host names and IP addresses.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn issue(&self, hosts: &[&str]) -> Result<PemIdentity, CertificateError> {
        let key = KeyPair::generate()?;
        let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
        let certificate = CertificateParams::new(hosts)?.signed_by(&key, &self.issuer)?;
        Ok(PemIdentity { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// As [`Self::issue`], written to files that are named after a program.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn issue_files(&self, program: &str, hosts: &[&str]) -> Result<IdentityFiles, CertificateError> {
        let identity = self.issue(hosts)?;
        let write = |extension: &str, text: String| -> io::Result<PathBuf> {
            let path = self.folder.path().join(format!("{program}.{extension}"));
            std::fs::write(&path, text)?;
            Ok(path)
        };
        Ok(IdentityFiles {
            certificate: write("pem", identity.certificate)?,
            key: write("key", identity.key)?,
            ca: self.ca_file(),
        })
    }
}
