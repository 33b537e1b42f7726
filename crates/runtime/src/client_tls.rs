//! TLS for outgoing connections: trusted CAs and client certificate, reloaded from their files at run time.

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

/// CA, client certificate and server name of outgoing TLS connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTlsFiles {
    /// PEM file with the trusted CAs; `None`: the system store.
    pub ca: Option<PathBuf>,
    /// PEM files of the client certificate, sent to servers that request one, and of its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Expected name in server certificates; `None`: the host of the connection.
    pub name: Option<String>,
}

impl ClientTlsFiles {
    /// Builds the files from command-line options.
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

/// The last successfully loaded files.
#[derive(Debug)]
struct LoadedClientTls {
    /// `None` if there is no trusted CA.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    identity: Option<Arc<CertifiedKey>>,
    /// Fingerprint of the client certificate.
    fingerprint: Option<CertificateFingerprint>,
}

/// Client TLS settings with hot reload. Clones share the loaded files.
#[derive(Clone)]
pub struct ClientTls {
    files: ClientTlsFiles,
    /// Created before the files were read, so no change is missed.
    watcher: FileChangeWatcher,
    loaded: Arc<ArcSwap<LoadedClientTls>>,
    config: Arc<ClientConfig>,
}

impl ClientTls {
    /// Loads the files for the first time.
    ///
    /// # Errors
    /// [`TlsConfigError`], which names the file or the name.
    pub fn load(files: ClientTlsFiles) -> Result<Self, TlsConfigError> {
        let changes = FileChangeWatcher::new(files.paths());
        let current = Arc::new(ArcSwap::from_pointee(files.read_files()?));
        Self::from_loaded(files, changes, current)
    }

    /// The same settings for servers with certificate name `name`, unless the settings already fix a name.
    ///
    /// # Errors
    /// [`TlsConfigError`] if it is not a valid server name.
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

    /// Reloads the files whenever they change, until `stop`. If a reload fails, the previous files stay in use.
    pub async fn reload_on_change(self, stop: CancellationToken) {
        if self.files.paths().is_empty() {
            return;
        }
        let reload = || match self.files.read_files() {
            Ok(loaded) => {
                tracing::info!(files = ?self.files.paths(), "reloaded");
                self.loaded.store(Arc::new(loaded));
            }
            Err(error) => tracing::warn!(%error, "reload failed; keeping the previous files"),
        };
        self.watcher.watch(stop, reload).await;
    }

    /// Performs the TLS handshake with the server at `host` (without brackets).
    ///
    /// # Errors
    /// The handshake error; [`tls_error_hint`] returns a hint for the user.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<TlsStream<S>> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        TlsConnector::from(self.config.clone()).connect(name, stream).await
    }

    /// The same settings without session resumption: a resumed session would keep the certificate presented before a renewal.
    pub(crate) fn without_resumption(self) -> Self {
        let mut config = ClientConfig::clone(&self.config);
        config.resumption = Resumption::disabled();
        Self { config: Arc::new(config), ..self }
    }

    /// Fingerprint of the current client certificate.
    pub(crate) fn own_fingerprint(&self) -> Option<CertificateFingerprint> {
        self.loaded.load().fingerprint
    }

    /// A client for HTTP and, if a CA is trusted, HTTPS. It ignores proxies from the environment.
    pub fn http_client(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder().no_proxy().tls_backend_preconfigured(ClientConfig::clone(&self.config))
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls").field("files", &self.files).finish_non_exhaustive()
    }
}

/// A client for plain HTTP only, which needs no CA certificates on the machine. Otherwise like [`ClientTls::http_client`].
pub fn plain_http_client() -> reqwest::ClientBuilder {
    reqwest::Client::builder().no_proxy().tls_certs_only([])
}

/// Verifies servers and resolves the client certificate with the last loaded files.
#[derive(Debug)]
struct ReloadableCertVerifier {
    name: Option<ServerName<'static>>,
    loaded: Arc<ArcSwap<LoadedClientTls>>,
    provider: Arc<CryptoProvider>,
}

/// No trusted CA is available.
#[derive(Debug, thiserror::Error)]
#[error("no CA configured, and the system store is empty")]
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
        let no_trust_anchors = || rustls::Error::Other(OtherError(Arc::new(NoTrustAnchorsError)));
        let authorities = current.authorities.as_ref().ok_or_else(no_trust_anchors)?;
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

/// A hint for the user about an error caused by TLS; `None` for other errors.
#[must_use]
pub fn tls_error_hint(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(tls_error) = error.downcast_ref() {
            return rustls_error_hint(tls_error);
        }
        // The source of an I/O error is that of its inner error.
        cause = match error.downcast_ref::<io::Error>() {
            Some(error) => error.get_ref().map(|inside| inside as _),
            None => error.source(),
        };
    }
    None
}

fn rustls_error_hint(tls_error: &rustls::Error) -> Option<&'static str> {
    Some(match tls_error {
        // A CA with the same name but another key causes a bad signature.
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )
        | rustls::Error::Other(_) => "configure the CA that signed its certificate",
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "connect under a name in its certificate, or configure the expected name",
        rustls::Error::InvalidCertificate(_) => "renew or replace its certificate",
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied,
        ) => "configure the client certificate that it requires, from a CA that it trusts",
        rustls::Error::InvalidMessage(_) => "write http:// if it does not use TLS",
        _ => return None,
    })
}
