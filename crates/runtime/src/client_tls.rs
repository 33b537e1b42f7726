//! TLS of connections that this process opens: whom it trusts, and as whom it shows itself, with files that are replaced while it runs.

mod options;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::{fmt, io};

use arc_swap::ArcSwap;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::{
    CryptoProvider, aws_lc_rs::default_provider, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, OtherError, RootCertStore,
    SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::FileChangeWatcher;
use crate::listener::{TlsConfigError, certificates};
use crate::peer_tls::{CertificateFingerprint, fingerprint};

pub use options::EngineTlsArgs;

/// What servers are known by, and what they are shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTlsFiles {
    /// PEM file of the authorities whose certificates servers must show; `None`: those that this machine trusts.
    pub ca: Option<PathBuf>,
    /// PEM files of the certificate that is shown to servers which ask for one, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that servers' certificates must have; `None`: the host that is connected to.
    pub name: Option<String>,
}

impl ClientTlsFiles {
    /// From options of a command line.
    ///
    /// # Errors
    /// [`TlsConfigError::IncompatibleSettings`] names the flag that is missing: `flags` are those of the certificate and the key.
    pub fn from_options(
        ca: Option<&PathBuf>,
        identity: [Option<&PathBuf>; 2],
        name: Option<&String>,
        flags: [&str; 2],
    ) -> Result<Self, TlsConfigError> {
        let needs = |given, missing| TlsConfigError::IncompatibleSettings(format!("{given} needs {missing}"));
        let identity = match identity {
            [Some(certificate), Some(key)] => Some((certificate.clone(), key.clone())),
            [None, None] => None,
            [Some(_), None] => return Err(needs(flags[0], flags[1])),
            [None, Some(_)] => return Err(needs(flags[1], flags[0])),
        };
        Ok(Self { ca: ca.cloned(), identity, name: name.cloned() })
    }

    fn paths(&self) -> Vec<PathBuf> {
        let identity = self.identity.iter().flat_map(|(certificate, key)| [certificate, key]);
        self.ca.iter().chain(identity).cloned().collect()
    }

    fn read_files(&self) -> Result<LoadedClientTls, TlsConfigError> {
        let identity = self.certified_key()?;
        let fingerprint = identity.as_ref().and_then(|identity| identity.cert.first()).map(fingerprint);
        Ok(LoadedClientTls { authorities: self.authorities()?, identity, fingerprint })
    }

    fn authorities(&self) -> Result<Option<Arc<WebPkiServerVerifier>>, TlsConfigError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(path) => {
                for certificate in certificates(path)? {
                    let unusable = |problem| TlsConfigError::Unusable { certificate: path.clone(), problem };
                    roots.add(certificate).map_err(unusable)?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let built =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
        match (built.build(), &self.ca) {
            (Ok(verifier), _) => Ok(Some(verifier)),
            (Err(VerifierBuilderError::NoRootAnchors), None) => Ok(None),
            (Err(problem), ca) => {
                Err(TlsConfigError::Authority { path: ca.clone().unwrap_or_default(), problem })
            }
        }
    }

    fn certified_key(&self) -> Result<Option<Arc<CertifiedKey>>, TlsConfigError> {
        let Some((certificate, key)) = &self.identity else { return Ok(None) };
        let chain = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|problem| TlsConfigError::File { path: key.clone(), problem })?;
        let unusable = |problem| TlsConfigError::Unusable { certificate: certificate.clone(), problem };
        Ok(Some(Arc::new(CertifiedKey::from_der(chain, key, &default_provider()).map_err(unusable)?)))
    }
}

/// What was last read.
#[derive(Debug)]
struct LoadedClientTls {
    /// `None` if nobody is trusted.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    identity: Option<Arc<CertifiedKey>>,
    /// Of the identity's own certificate.
    fingerprint: Option<CertificateFingerprint>,
}

/// Whom connections trust, and as whom they show this process. Clones are the same.
#[derive(Clone)]
pub struct ClientTls {
    files: ClientTlsFiles,
    /// Older than what was read.
    watcher: FileChangeWatcher,
    loaded: Arc<ArcSwap<LoadedClientTls>>,
    config: Arc<ClientConfig>,
}

impl ClientTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsConfigError`], which names the file or the name.
    pub fn load(files: ClientTlsFiles) -> Result<Self, TlsConfigError> {
        let changes = FileChangeWatcher::new(files.paths());
        let current = Arc::new(ArcSwap::from_pointee(files.read_files()?));
        Self::from_loaded(files, changes, current)
    }

    /// The same, for servers whose certificates have this name, unless the settings say another.
    ///
    /// # Errors
    /// [`TlsConfigError`] if it can be no name.
    pub fn for_name(&self, name: &str) -> Result<Self, TlsConfigError> {
        let name = self.files.name.clone().or_else(|| Some(name.to_owned()));
        Self::from_loaded(
            ClientTlsFiles { name, ..self.files.clone() },
            self.watcher.clone(),
            self.loaded.clone(),
        )
    }

    fn from_loaded(
        files: ClientTlsFiles,
        changes: FileChangeWatcher,
        current: Arc<ArcSwap<LoadedClientTls>>,
    ) -> Result<Self, TlsConfigError> {
        let wrong = |name: &String| TlsConfigError::InvalidServerName(name.clone());
        let name =
            files.name.as_ref().map(|name| ServerName::try_from(name.clone()).map_err(|_| wrong(name)));
        let provider = Arc::new(default_provider());
        let live = Arc::new(ReloadableCertVerifier {
            name: name.transpose()?,
            loaded: current.clone(),
            provider: provider.clone(),
        });
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(TlsConfigError::Versions)?
            .dangerous()
            .with_custom_certificate_verifier(live.clone())
            .with_client_cert_resolver(live);
        Ok(Self { files, watcher: changes, loaded: current, config: Arc::new(config) })
    }

    /// Reads the files again whenever they change, until `stop`. Files that cannot be used change nothing.
    pub async fn reload_on_change(self, stop: CancellationToken) {
        if self.files.paths().is_empty() {
            return;
        }
        let renew = || match self.files.read_files() {
            Ok(read) => {
                tracing::info!(files = ?self.files.paths(), "read again");
                self.loaded.store(Arc::new(read));
            }
            Err(error) => tracing::warn!(%error, "cannot be used; what was read before stays in force"),
        };
        self.watcher.watch(stop, renew).await;
    }

    /// The handshake with a server that is known as `host`, without brackets.
    ///
    /// # Errors
    /// What the handshake failed for; [`tls_error_hint`] tells what to do about it.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<TlsStream<S>> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        TlsConnector::from(self.config.clone()).connect(name, stream).await
    }

    /// The same with a whole handshake for each connection: a resumed session keeps the certificate that was shown before a renewal.
    pub(crate) fn without_resumption(self) -> Self {
        let mut config = ClientConfig::clone(&self.config);
        config.resumption = Resumption::disabled();
        Self { config: Arc::new(config), ..self }
    }

    /// The fingerprint of the certificate that servers are shown now.
    pub(crate) fn own_fingerprint(&self) -> Option<CertificateFingerprint> {
        self.loaded.load().fingerprint
    }

    /// A client for HTTP, and for HTTPS as far as somebody is trusted. It asks directly, whatever proxy the environment names.
    pub fn http_client(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder().no_proxy().tls_backend_preconfigured(ClientConfig::clone(&self.config))
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").field("files", &self.files).finish_non_exhaustive()
    }
}

/// A client for plain HTTP, which needs no authorities on this machine, as [`ClientTls::http_client`] otherwise.
pub fn plain_http_client() -> reqwest::ClientBuilder {
    reqwest::Client::builder().no_proxy().tls_certs_only([])
}

/// Answers a handshake's questions by what was last read.
#[derive(Debug)]
struct ReloadableCertVerifier {
    name: Option<ServerName<'static>>,
    loaded: Arc<ArcSwap<LoadedClientTls>>,
    provider: Arc<CryptoProvider>,
}

/// Nobody is trusted.
#[derive(Debug, thiserror::Error)]
#[error("no authority is trusted, for none was named and this machine knows none")]
struct NoTrustAnchorsError;

impl ServerCertVerifier for ReloadableCertVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let current = self.loaded.load();
        let nobody = || rustls::Error::Other(OtherError(Arc::new(NoTrustAnchorsError)));
        let authorities = current.authorities.as_ref().ok_or_else(nobody)?;
        let name = self.name.as_ref().unwrap_or(server_name);
        authorities.verify_server_cert(end_entity, intermediates, name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ResolvesClientCert for ReloadableCertVerifier {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.loaded.load().identity.clone()
    }

    fn has_certs(&self) -> bool {
        self.loaded.load().identity.is_some()
    }
}

/// What to do about an exchange that TLS has ended; `None` if it was something else.
#[must_use]
pub fn tls_error_hint(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(trouble) = error.downcast_ref() {
            return rustls_error_hint(trouble);
        }
        // An I/O error's own source is that of what is in it.
        cause = match error.downcast_ref::<io::Error>() {
            Some(error) => error.get_ref().map(|inside| inside as _),
            None => error.source(),
        };
    }
    None
}

fn rustls_error_hint(trouble: &rustls::Error) -> Option<&'static str> {
    Some(match trouble {
        // A wrong signature is how another authority of the same name shows.
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )
        | rustls::Error::Other(_) => "name the authority that signed its certificate",
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "reach it under a name that its certificate has, or say which name that is",
        rustls::Error::InvalidCertificate(_) => "renew its certificate, or mend it",
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied,
        ) => "give the certificate that it asks for, of an authority that it trusts",
        rustls::Error::InvalidMessage(_) => "write http:// if it does not speak TLS",
        _ => return None,
    })
}
