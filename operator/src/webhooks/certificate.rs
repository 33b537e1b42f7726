//! The webhooks' serving certificate, and the CA that the API server trusts for it.
//!
//! Both are generated together with the same lifetime. The CA's key is discarded after it has signed the certificate:
//! nothing can be signed with it later, and renewal generates a new CA.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::RootCertStore;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;

const LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Renewal time before expiry. Meanwhile the previous CA is trusted, too.
const RENEW_BEFORE_EXPIRY: Duration = Duration::from_secs(90 * 24 * 3600);
/// Tolerance for clocks that are behind.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

const AUTHORITIES: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// A certificate that cannot be generated or used.
#[derive(Debug, thiserror::Error)]
pub(super) enum WebhookCertificateError {
    /// The certificate cannot be generated.
    #[error("cannot generate a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// A key of the Secret is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A value of the Secret is not valid PEM.
    #[error("`{0}` is not valid PEM: {1}")]
    Pem(&'static str, pem::Error),
    /// The certificate is expired, or does not match the host, the CA or the key.
    #[error("the certificate cannot be used: {0}")]
    Rustls(#[from] rustls::Error),
    /// The CA certificates cannot be used.
    #[error("`ca.crt` cannot be used: {0}")]
    Authorities(#[from] VerifierBuilderError),
    /// The Service's name and namespace do not form a host name.
    #[error("`{0}` is not a host name; check the names of the webhooks' Service and its namespace")]
    Host(String),
}

/// A certificate, its key, and the CA certificates to trust: the current and the previous one. All in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WebhookCertificate {
    pub(super) authorities: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl WebhookCertificate {
    /// Generates a certificate. The CA of `before` stays trusted, since other replicas may still serve its certificate.
    pub(super) fn generate(
        host: &str,
        previous: Option<&Self>,
        now: SystemTime,
    ) -> Result<Self, WebhookCertificateError> {
        let mut params = CertificateParams::default();
        params.not_before = (now - CLOCK_SKEW).into();
        params.not_after = (now + LIFETIME).into();
        params.distinguished_name.push(DnType::CommonName, "moongate operator webhooks");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let (not_before, not_after) = (params.not_before, params.not_after);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;

        let mut params = CertificateParams::new([host.to_owned()])?;
        params.not_before = not_before;
        params.not_after = not_after;
        params.distinguished_name.push(DnType::CommonName, host);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?;
        let mut authorities = issuer.pem();
        if let Some(previous) = previous.filter(|previous| previous.ca_certificates().is_ok()) {
            authorities.push_str(first_of(&previous.authorities).unwrap_or_default());
            authorities.push('\n');
        }
        Ok(Self {
            authorities: authorities.into_bytes(),
            certificate: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        })
    }

    /// Reads the certificate from the data of a Secret.
    pub(super) fn from_data(data: &BTreeMap<String, ByteString>) -> Result<Self, WebhookCertificateError> {
        let part = |name: &'static str| {
            let value = data.get(name).ok_or(WebhookCertificateError::Missing(name))?;
            Ok::<_, WebhookCertificateError>(value.0.clone())
        };
        Ok(Self { authorities: part(AUTHORITIES)?, certificate: part(CERTIFICATE)?, key: part(KEY)? })
    }

    /// Data for a Secret of type `kubernetes.io/tls`.
    pub(super) fn into_data(self) -> BTreeMap<String, ByteString> {
        let parts = [(AUTHORITIES, self.authorities), (CERTIFICATE, self.certificate), (KEY, self.key)];
        parts.map(|(name, value)| (name.to_owned(), ByteString(value))).into()
    }

    /// Checks that a client that trusts the CAs accepts the certificate for this host until the next renewal.
    pub(super) fn check(&self, host: &str, now: SystemTime) -> Result<(), WebhookCertificateError> {
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        for authority in self.ca_certificates()? {
            roots.add(authority)?;
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        let name = ServerName::try_from(host.to_owned());
        let name =
            name.map_err(|InvalidDnsNameError { .. }| WebhookCertificateError::Host(host.to_owned()))?;
        let later = now + RENEW_BEFORE_EXPIRY;
        let later = later.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let chain = self.certificate_chain()?;
        let (first, others) = chain.split_first().ok_or(WebhookCertificateError::Missing(CERTIFICATE))?;
        verifier.verify_server_cert(first, others, &name, &[], UnixTime::since_unix_epoch(later))?;
        self.signing().map(|_| ())
    }

    /// The certificate with its key, for a TLS server.
    pub(super) fn signing(&self) -> Result<CertifiedKey, WebhookCertificateError> {
        let key = PrivateKeyDer::from_pem_slice(&self.key);
        let key = key.map_err(|error| WebhookCertificateError::Pem(KEY, error))?;
        Ok(CertifiedKey::from_der(self.certificate_chain()?, key, &default_provider())?)
    }

    fn certificate_chain(&self) -> Result<Vec<CertificateDer<'static>>, WebhookCertificateError> {
        all_in(CERTIFICATE, &self.certificate)
    }

    fn ca_certificates(&self) -> Result<Vec<CertificateDer<'static>>, WebhookCertificateError> {
        all_in(AUTHORITIES, &self.authorities)
    }
}

fn all_in(part: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, WebhookCertificateError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.map_err(|error| WebhookCertificateError::Pem(part, error))
}

/// The first certificate of a bundle.
fn first_of(bundle: &[u8]) -> Option<&str> {
    const END: &str = "-----END CERTIFICATE-----";
    let bundle = str::from_utf8(bundle).ok()?;
    Some(&bundle[..bundle.find(END)? + END.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "webhooks.system.svc";
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn generate(previous: Option<&WebhookCertificate>) -> WebhookCertificate {
        WebhookCertificate::generate(HOST, previous, SystemTime::now()).unwrap()
    }

    #[test]
    fn a_certificate_is_valid_for_its_host_until_renewal() {
        let certificate = generate(None);
        let now = SystemTime::now();
        certificate.check(HOST, now).unwrap();
        certificate.check(HOST, now + LIFETIME - RENEW_BEFORE_EXPIRY - DAY).unwrap();
        assert!(certificate.check(HOST, now + LIFETIME - RENEW_BEFORE_EXPIRY + DAY).is_err());
        assert!(certificate.check("webhooks.other.svc", now).is_err());
        assert!(matches!(certificate.check("not a host", now), Err(WebhookCertificateError::Host(_))));
        assert_eq!(WebhookCertificate::from_data(&certificate.clone().into_data()).unwrap(), certificate);
    }

    #[test]
    fn only_the_previous_ca_stays_trusted() {
        let first = generate(None);
        let second = generate(Some(&first));
        let third = generate(Some(&second));
        let trusts = |issuer: &WebhookCertificate, chain: &WebhookCertificate| {
            let issuer = WebhookCertificate { authorities: issuer.authorities.clone(), ..chain.clone() };
            issuer.check(HOST, SystemTime::now()).is_ok()
        };
        assert!(trusts(&second, &first) && trusts(&second, &second));
        assert!(trusts(&third, &second) && trusts(&third, &third));
        assert!(!trusts(&first, &second) && !trusts(&third, &first));
    }

    #[test]
    fn invalid_data_is_not_a_certificate() {
        let good = generate(None);
        let other = generate(None);
        let invalid = |part: &str, value: &[u8]| {
            let mut data = good.clone().into_data();
            data.insert(part.to_owned(), ByteString(value.to_vec()));
            WebhookCertificate::from_data(&data).unwrap().check(HOST, SystemTime::now())
        };
        for part in [AUTHORITIES, CERTIFICATE, KEY] {
            for value in
                [&b""[..], b"\xff", b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"]
            {
                assert!(invalid(part, value).is_err(), "{part}");
            }
            let mut data = good.clone().into_data();
            data.remove(part);
            assert!(matches!(WebhookCertificate::from_data(&data), Err(WebhookCertificateError::Missing(_))));
        }
        assert!(invalid(KEY, &other.key).is_err(), "the key of another certificate");
        let after_invalid =
            generate(Some(&WebhookCertificate { authorities: b"\xff".to_vec(), ..good.clone() }));
        after_invalid.check(HOST, SystemTime::now()).unwrap();
    }
}
