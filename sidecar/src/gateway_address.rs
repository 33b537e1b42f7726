//! Addresses of gateways' admin listeners.

use std::fmt;
use std::str::FromStr;

use moongate_discovery::HttpScheme;

/// `host:port`, or `https://host:port` for TLS; the host an address or a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayAddress {
    pub(crate) scheme: HttpScheme,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// The text is not the address of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not host:port or https://host:port, such as moongate-gateway:9000")]
pub struct GatewayAddressError(String);

impl FromStr for GatewayAddress {
    type Err = GatewayAddressError;

    fn from_str(text: &str) -> Result<Self, GatewayAddressError> {
        let invalid = || GatewayAddressError(text.to_owned());
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let (scheme, rest) = (scheme.parse().map_err(|_| invalid())?, rest.trim_end_matches('/'));
        let (host, port) = rest.rsplit_once(':').ok_or_else(invalid)?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(invalid)?;
        if host.is_empty() || host.contains(['/', '@', ' ']) {
            return Err(invalid());
        }
        Ok(Self { scheme, host, port })
    }
}

impl fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// How to connect to a gateway, in addition to its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GatewayIdentity {
    pub(crate) scheme: HttpScheme,
    /// Expected name in its certificate.
    pub(crate) host: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for (text, shown) in
            [("gw:9000", "gw:9000"), ("http://10.0.0.1:9000/", "10.0.0.1:9000"), ("[::1]:1", "::1:1")]
        {
            assert_eq!(text.parse::<GatewayAddress>().unwrap().to_string(), shown);
        }
        assert_eq!("gw:1".parse::<GatewayAddress>().unwrap().scheme, HttpScheme::Http);
        assert_eq!("https://gw:1".parse::<GatewayAddress>().unwrap().scheme, HttpScheme::Https);
        for invalid in ["gw", "gw:0", ":9000", "gw:x", "u@gw:1", "gw/path:1", "ftp://gw:1"] {
            assert!(invalid.parse::<GatewayAddress>().is_err(), "{invalid}");
        }
    }
}
