//! The normalised address of one engine.

use crate::error::{InstanceError, InstanceUrlError};

/// URL scheme of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HttpScheme {
    /// Plain HTTP.
    #[default]
    Http,
    /// HTTP over TLS.
    Https,
}

impl HttpScheme {
    /// The scheme's name in a URL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// A checked `http://host:port` or `https://host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineEndpoint {
    /// `http://host:port` or `https://host:port`, IPv6 in brackets.
    pub(crate) url: String,
    /// Host name or IP, without brackets.
    pub(crate) host: String,
}

impl EngineEndpoint {
    /// Accepts `http://host:port`, `https://host:port`, `host:port` and a trailing slash; the port defaults to the scheme's.
    pub(crate) fn parse(text: &str) -> Result<Self, InstanceError> {
        let invalid = |source| InstanceError::Url { url: text.to_owned(), source };
        let trimmed = text.trim();
        let with_scheme =
            if trimmed.contains("://") { trimmed.to_owned() } else { format!("http://{trimmed}") };
        let url = url::Url::parse(&with_scheme).map_err(|error| invalid(error.into()))?;
        let scheme: HttpScheme = url.scheme().parse().map_err(|_| invalid(InstanceUrlError::Scheme))?;
        if !matches!(url.path(), "" | "/") {
            return Err(invalid(InstanceUrlError::Path));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(invalid(InstanceUrlError::QueryOrFragment));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(invalid(InstanceUrlError::Credentials));
        }
        let host = url.host().ok_or_else(|| invalid(InstanceUrlError::NoHost))?;
        let port = url
            .port_or_known_default()
            .filter(|port| *port != 0)
            .ok_or_else(|| invalid(InstanceUrlError::PortZero))?;
        let bare_host = match &host {
            url::Host::Ipv6(ip) => ip.to_string(),
            other => other.to_string(),
        };
        Ok(Self { url: format!("{}://{host}:{port}", scheme.as_str()), host: bare_host })
    }

    /// Builds an endpoint from the parts that a source lists separately.
    pub(crate) fn from_parts(scheme: HttpScheme, host: &str, port: u16) -> Result<Self, InstanceError> {
        Self::parse(&format!("{}://{}:{port}", scheme.as_str(), bracketed(host)))
    }
}

/// Encloses an IPv6 address in brackets; other hosts are returned unchanged.
pub(crate) fn bracketed(host: &str) -> String {
    if host.parse::<std::net::Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn forms_are_normalised() {
        for (given, url, host) in [
            ("http://10.0.0.1:8000/", "http://10.0.0.1:8000", "10.0.0.1"),
            ("pod-0.svc:30000", "http://pod-0.svc:30000", "pod-0.svc"),
            ("HTTP://Pod", "http://pod:80", "pod"),
            ("http://[fd00::1]:8000", "http://[fd00::1]:8000", "fd00::1"),
            ("https://pod-0.svc:30000/", "https://pod-0.svc:30000", "pod-0.svc"),
            ("https://10.0.0.1", "https://10.0.0.1:443", "10.0.0.1"),
        ] {
            let endpoint = EngineEndpoint::parse(given).unwrap();
            assert_eq!((endpoint.url.as_str(), endpoint.host.as_str()), (url, host));
        }
        assert_eq!(
            EngineEndpoint::from_parts(HttpScheme::Http, "fd00::1", 80).unwrap().url,
            "http://[fd00::1]:80"
        );
        assert_eq!(EngineEndpoint::from_parts(HttpScheme::Https, "p", 80).unwrap().url, "https://p:80");
    }

    #[test]
    fn an_invalid_url_is_rejected_with_the_expected_form() {
        for bad in [
            "https://a:1/v1",
            "http://a:1/v1",
            "http://a:1?x",
            "http://u:p@a:1",
            "ftp://a",
            "",
            "http://a:0",
            "http://a:99999",
        ] {
            let message = EngineEndpoint::parse(bad).unwrap_err().to_string();
            assert!(message.contains("http://HOST:PORT"), "{bad}: {message}");
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_is_a_fixed_point(text in "\\PC{0,40}") {
            if let Ok(endpoint) = EngineEndpoint::parse(&text) {
                prop_assert_eq!(EngineEndpoint::parse(&endpoint.url).unwrap(), endpoint);
            }
        }
    }
}
