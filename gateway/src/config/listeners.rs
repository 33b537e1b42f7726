//! Settings of both listeners: TLS, and limits of connections and requests.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moongate_runtime::{ConnectionRejection, ListenerLimits, ServerTlsFiles, TlsConfigError};

use crate::ingress::BodyLimits;
use crate::memory::MemoryBudget;

/// Most client connections by default; the limit of open files may allow fewer.
pub(crate) const DEFAULT_CONNECTIONS: u32 = 16_384;

/// TLS and limits of the listeners.
#[derive(Debug, Clone, Args)]
pub struct ListenerOptions {
    /// Server certificate chain for clients (PEM); reloaded on change. Without it, the listener has no TLS.
    #[arg(long, value_name = "FILE", env = "MOONGATE_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --tls-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_TLS_KEY")]
    pub tls_key: Option<PathBuf>,

    /// CA whose certificates clients must present (mTLS). Default: no client certificate is required.
    #[arg(long, value_name = "FILE", env = "MOONGATE_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,

    /// As --tls-cert, for the admin listener.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_TLS_CERT")]
    pub admin_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --admin-tls-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_TLS_KEY")]
    pub admin_tls_key: Option<PathBuf>,

    /// CA whose client certificates grant access to the admin listener, as --admin-token does; paths in --admin-open need none.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_TLS_CLIENT_CA")]
    pub admin_tls_client_ca: Option<PathBuf>,

    /// Largest request body. Default 32 MiB: a million tokens of text, or a few images.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_MAX_BODY_BYTES", default_value_t = 32 << 20)]
    pub max_body_bytes: usize,

    /// Longest pause between two parts of a request body.
    #[arg(long, value_name = "TIME", env = "MOONGATE_BODY_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    pub body_timeout: Duration,

    /// Time limit for a whole request body. Default 5 min: 32 MiB at 1 Mbit/s.
    #[arg(long, value_name = "TIME", env = "MOONGATE_BODY_DEADLINE", default_value = "5m", value_parser = humantime::parse_duration)]
    pub body_deadline: Duration,

    /// Time limit for a TLS handshake, for a request's headers, and between two requests of a connection.
    #[arg(long, value_name = "TIME", env = "MOONGATE_HEADER_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    pub header_timeout: Duration,

    /// Largest size of a request's headers. At least 8192.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_MAX_HEADER_BYTES", default_value_t = 64 << 10, value_parser = clap::value_parser!(u32).range(8192..))]
    pub max_header_bytes: u32,

    /// Concurrent requests on one HTTP/2 connection.
    #[arg(long, value_name = "N", env = "MOONGATE_MAX_STREAMS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_streams: u32,

    /// Most client connections; more are rejected (503). The limit of open files may allow fewer.
    #[arg(long, value_name = "N", env = "MOONGATE_MAX_CONNECTIONS", default_value_t = DEFAULT_CONNECTIONS, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
}

impl ListenerOptions {
    /// TLS files of the public listener. The error names the missing flag.
    pub(crate) fn tls(&self) -> Result<Option<ServerTlsFiles>, TlsConfigError> {
        files("", [&self.tls_cert, &self.tls_key, &self.tls_client_ca], false)
    }

    /// TLS files of the admin listener, whose open paths need no certificate.
    pub(crate) fn admin_tls(&self) -> Result<Option<ServerTlsFiles>, TlsConfigError> {
        files("admin-", [&self.admin_tls_cert, &self.admin_tls_key, &self.admin_tls_client_ca], true)
    }

    /// Limits of one listener. Connections above the limit get the response of `refusal`.
    pub(crate) fn limits(&self, connections: usize, rejection: ConnectionRejection) -> ListenerLimits {
        ListenerLimits {
            connections,
            rejection: Some(rejection),
            header_read_timeout: self.header_timeout,
            header_bytes: self.max_header_bytes as usize,
            streams: self.max_streams,
            ..ListenerLimits::default()
        }
    }

    /// Limits of one body, where all bodies together share `memory`.
    pub(crate) fn body_limits(&self, memory: &MemoryBudget) -> BodyLimits {
        let largest = usize::try_from(memory.max_request()).unwrap_or(usize::MAX);
        let max_bytes = self.max_body_bytes.min(largest);
        if max_bytes < self.max_body_bytes {
            tracing::warn!(
                max_body_bytes = self.max_body_bytes,
                largest,
                "--body-memory limits request bodies below --max-body-bytes"
            );
        }
        BodyLimits { max_bytes, idle: self.body_timeout, total: self.body_deadline }
    }
}

fn files(
    listener: &str,
    [certificate, key, client_ca]: [&Option<PathBuf>; 3],
    client_optional: bool,
) -> Result<Option<ServerTlsFiles>, TlsConfigError> {
    let flag = |name: &str| format!("--{listener}tls-{name}");
    let missing_error = |given: &str, missing: &[&str]| {
        let missing: Vec<String> = missing.iter().map(|name| flag(name)).collect();
        Err(TlsConfigError::IncompatibleSettings(format!("{} needs {}", flag(given), missing.join(" and "))))
    };
    match (certificate, key, client_ca) {
        (Some(certificate), Some(key), ca) => Ok(Some(ServerTlsFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            client_ca: ca.clone(),
            client_optional,
        })),
        (None, None, None) => Ok(None),
        (None, None, Some(_)) => missing_error("client-ca", &["cert", "key"]),
        (Some(_), None, _) => missing_error("cert", &["key"]),
        (None, Some(_), _) => missing_error("key", &["cert"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tls_files_are_named() {
        let file = || Some(PathBuf::from("f.pem"));
        let tls_files = |cert, key, ca| files("admin-", [&cert, &key, &ca], true);
        assert!(matches!(tls_files(None, None, None), Ok(None)));
        assert!(tls_files(file(), file(), None).unwrap().is_some_and(|files| files.client_optional));
        for (given, missing) in [
            (tls_files(file(), None, file()), "needs --admin-tls-key"),
            (tls_files(None, file(), None), "needs --admin-tls-cert"),
            (tls_files(None, None, file()), "--admin-tls-client-ca needs"),
        ] {
            assert!(given.unwrap_err().to_string().contains(missing), "{missing}");
        }
    }
}
