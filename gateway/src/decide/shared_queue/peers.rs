//! Addresses of the gateways that share a queue, and requests to them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use moongate_discovery::HttpScheme;
use moongate_runtime::{ClientTls, SecretString};
use reqwest::RequestBuilder;

use super::election::QueueIdentity;

/// Time limit for resolving a name, and for a gateway's answer to who it is.
const QUERY_TIMEOUT: Duration = Duration::from_millis(500);

/// `host:port`, or `https://host:port` for TLS; the host an address or a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePeerAddress {
    scheme: HttpScheme,
    /// `host:port`, as the standard library resolves it.
    authority: String,
}

/// The text is no address of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not host:port or https://host:port, such as moongate-gateway:9000")]
pub struct QueuePeerAddressError(String);

impl QueuePeerAddress {
    /// The host, if connections to it use TLS.
    pub(crate) fn tls_host(&self) -> Option<String> {
        let (host, _) = self.authority.rsplit_once(':')?;
        (self.scheme == HttpScheme::Https).then(|| host.trim_matches(['[', ']']).to_owned())
    }
}

impl std::str::FromStr for QueuePeerAddress {
    type Err = QueuePeerAddressError;

    fn from_str(text: &str) -> Result<Self, QueuePeerAddressError> {
        let invalid = || QueuePeerAddressError(text.to_owned());
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let (scheme, rest) = (scheme.parse().map_err(|_| invalid())?, rest.trim_end_matches('/'));
        let (host, port) = rest.rsplit_once(':').ok_or_else(invalid)?;
        let port_is_valid = port.parse::<u16>().is_ok_and(|port| port != 0);
        if !port_is_valid || host.is_empty() || host.contains(['/', '@', ' ']) {
            return Err(invalid());
        }
        Ok(Self { scheme, authority: rest.to_owned() })
    }
}

/// The peers cannot be contacted.
#[derive(Debug, thiserror::Error)]
#[error("HTTP client for --queue-peer: {0}")]
pub struct QueuePeersError(#[from] reqwest::Error);

/// A gateway that has answered.
#[derive(Debug, Clone)]
pub(super) struct QueuePeer {
    pub(super) address: SocketAddr,
    pub(super) identity: QueueIdentity,
    pub(super) url: String,
}

/// The gateways that share a queue, this one among them.
#[derive(Debug, Clone)]
pub(crate) struct QueuePeers {
    addresses: Vec<QueuePeerAddress>,
    client: reqwest::Client,
    token: Option<SecretString>,
}

impl QueuePeers {
    /// # Errors
    /// [`QueuePeersError`] if the HTTP client cannot be built.
    pub(crate) fn new(
        addresses: Vec<QueuePeerAddress>,
        tls: &ClientTls,
        token: Option<SecretString>,
    ) -> Result<Self, QueuePeersError> {
        let client = tls.http_client().connect_timeout(QUERY_TIMEOUT).build()?;
        Ok(Self { addresses, client, token })
    }

    /// The gateways that answer, and why others do not, by address.
    pub(super) async fn query(&self) -> (Vec<QueuePeer>, BTreeMap<String, String>) {
        let mut problems = BTreeMap::new();
        let mut urls: Vec<(SocketAddr, String)> = Vec::new();
        for address in &self.addresses {
            let resolved = tokio::time::timeout(QUERY_TIMEOUT, tokio::net::lookup_host(&address.authority));
            let resolved = match resolved.await {
                Ok(Ok(resolved)) => resolved,
                Ok(Err(error)) => {
                    problems.insert(address.authority.clone(), error.to_string());
                    continue;
                }
                Err(_) => {
                    problems.insert(address.authority.clone(), "the name is not resolved in time".to_owned());
                    continue;
                }
            };
            urls.extend(resolved.map(|socket| (socket, format!("{}://{socket}", address.scheme.as_str()))));
        }
        let queries = urls.into_iter().map(|(address, url)| async move {
            let request = self.authorize(self.client.get(format!("{url}/queue/identity")));
            let identity = async {
                let response = request.timeout(QUERY_TIMEOUT).send().await?.error_for_status()?;
                response.json::<QueueIdentity>().await
            };
            match identity.await {
                Ok(identity) => Ok(QueuePeer { address, identity, url }),
                Err(error) => Err((address.to_string(), describe(&error))),
            }
        });
        let mut peers = Vec::new();
        for queried in futures_util::future::join_all(queries).await {
            match queried {
                Ok(peer) => peers.push(peer),
                Err((address, problem)) => drop(problems.insert(address, problem)),
            }
        }
        (peers, problems)
    }

    /// A request for decisions of `peer`.
    pub(super) fn connect(&self, peer: &QueuePeer) -> RequestBuilder {
        self.authorize(self.client.post(format!("{}/queue/tickets", peer.url)))
    }

    fn authorize(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.token {
            Some(token) => request.bearer_auth(token.expose()),
            None => request,
        }
    }
}

/// The error with its causes, of which the first one is only that the request failed.
fn describe(error: &reqwest::Error) -> String {
    if let Some(status) = error.status() {
        return format!("HTTP status {status}; check --queue-peer-token, and that it runs with --queue-peer");
    }
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for text in ["gw:9000", "http://10.0.0.1:9000/", "[::1]:1", "https://gw:1"] {
            assert!(text.parse::<QueuePeerAddress>().is_ok(), "{text}");
        }
        for invalid in ["gw", "gw:0", ":9000", "gw:x", "u@gw:1", "gw/path:1", "ftp://gw:1"] {
            assert!(invalid.parse::<QueuePeerAddress>().is_err(), "{invalid}");
        }
    }
}
