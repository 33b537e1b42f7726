//! Endpoint addresses in ZeroMQ's form: `tcp://host:port`.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// An address to connect to or to bind.
///
/// `tcp://*:5557` binds all interfaces; with `tcp://*:*` the kernel chooses the port too. IPv6 addresses are in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ZmtpEndpoint {
    /// Host name or address; `None` is `*`.
    host: Option<String>,
    /// TCP port; 0 is `*`.
    port: u16,
}

/// The text is not a supported endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not of the form tcp://HOST:PORT")]
pub struct ZmtpEndpointError(String);

impl ZmtpEndpoint {
    /// The host without brackets; `None` is `*`.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// The TCP port; 0 is `*`.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Resolves the endpoint. For all interfaces: first IPv6 with IPv4, then IPv4 only, for hosts without IPv6.
    pub(crate) async fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match &self.host {
            Some(host) => Ok(tokio::net::lookup_host((host.as_str(), self.port)).await?.collect()),
            None => {
                Ok(vec![(Ipv6Addr::UNSPECIFIED, self.port).into(), (Ipv4Addr::UNSPECIFIED, self.port).into()])
            }
        }
    }
}

impl FromStr for ZmtpEndpoint {
    type Err = ZmtpEndpointError;

    fn from_str(text: &str) -> Result<Self, ZmtpEndpointError> {
        let parsed = || {
            let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
            let port = if port == "*" { 0 } else { port.parse().ok()? };
            let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let host = match bracketed {
                Some(address) => Some(address.parse::<Ipv6Addr>().ok()?.to_string()),
                None if host == "*" => None,
                None if host.is_empty() || host.contains([':', '/', '[', ']']) => return None,
                None => Some(host.to_owned()),
            };
            Some(Self { host, port })
        };
        parsed().ok_or_else(|| ZmtpEndpointError(text.to_owned()))
    }
}

impl From<SocketAddr> for ZmtpEndpoint {
    fn from(address: SocketAddr) -> Self {
        Self { host: Some(address.ip().to_string()), port: address.port() }
    }
}

impl fmt::Display for ZmtpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) if host.contains(':') => write!(f, "tcp://[{host}]:{}", self.port),
            Some(host) => write!(f, "tcp://{host}:{}", self.port),
            None => write!(f, "tcp://*:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed_and_formatted() {
        for text in
            ["tcp://10.0.0.7:5557", "tcp://engine-0.pool:5557", "tcp://[fd00::7]:5557", "tcp://*:5557"]
        {
            assert_eq!(text.parse::<ZmtpEndpoint>().unwrap().to_string(), text);
        }
        let any: ZmtpEndpoint = "tcp://*:*".parse().unwrap();
        assert_eq!((any.host(), any.port()), (None, 0));
        let address: SocketAddr = "[::1]:7".parse().unwrap();
        assert_eq!(ZmtpEndpoint::from(address).to_string(), "tcp://[::1]:7");
    }

    #[test]
    fn other_texts_are_rejected() {
        for text in
            ["", "tcp://", "tcp://host", "tcp://host:70000", "tcp://:1", "ipc:///tmp/x", "tcp://fd00::7:1"]
        {
            assert_eq!(text.parse::<ZmtpEndpoint>(), Err(ZmtpEndpointError(text.to_owned())));
        }
    }
}
