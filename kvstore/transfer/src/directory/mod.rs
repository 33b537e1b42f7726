//! Lookup and publication of segment descriptors.

mod http;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{PeerTls, describe_tls_error, plain_http_client};
use reqwest::StatusCode;

use crate::descriptor::{MAX_DESCRIPTOR, RpcMeta, SegmentDescriptor};
use crate::handshake::{self, HandshakeKind};

use http::HttpDirectory;

/// Keyword that selects [`MetadataSource::Handshake`].
const HANDSHAKE: &str = "P2PHANDSHAKE";
/// Timeout of one lookup or publication.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// The descriptor sent in a request. The node replies with its own and ignores this one.
const EMPTY_DESCRIPTOR: &[u8] = b"{}";

/// Where nodes publish their descriptors. All nodes and clients of a store must use the same source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MetadataSource {
    /// Each node serves its own on its handshake port (`P2PHANDSHAKE`, SGLang's default).
    #[default]
    Handshake,
    /// An HTTP metadata server stores them.
    Http {
        /// URL of the server, as `http://host:8080/metadata`.
        url: String,
        /// Value of `MC_METADATA_CLUSTER_ID` on the nodes.
        cluster_id: Option<String>,
    },
}

/// The text names no supported metadata server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a supported metadata server; write P2PHANDSHAKE or http://HOST:PORT/metadata")]
pub struct MetadataSourceError(String);

impl FromStr for MetadataSource {
    type Err = MetadataSourceError;

    fn from_str(text: &str) -> Result<Self, MetadataSourceError> {
        if text == HANDSHAKE {
            return Ok(Self::Handshake);
        }
        let is_url = text.starts_with("http://") || text.starts_with("https://");
        match reqwest::Url::parse(text) {
            Ok(_) if is_url => Ok(Self::Http { url: text.to_owned(), cluster_id: None }),
            _ => Err(MetadataSourceError(text.to_owned())),
        }
    }
}

impl fmt::Display for MetadataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handshake => f.write_str(HANDSHAKE),
            Self::Http { url, .. } => f.write_str(url),
        }
    }
}

/// A descriptor cannot be fetched or published.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The URL is not HTTPS although TLS is required.
    #[error("{0}: with --store-tls-cert the metadata server must use TLS: write https://")]
    Insecure(String),
    /// The node does not respond to handshakes.
    #[error("{endpoint} does not respond to handshakes: {source}")]
    Handshake { endpoint: String, source: HandshakeError },
    /// A request to the metadata server failed.
    #[error("metadata server: {method} {url}: {source}")]
    Server {
        /// HTTP method of the request.
        method: &'static str,
        /// URL of the failed request.
        url: String,
        source: MetadataServerError,
    },
    /// The metadata server has no entry for the node.
    #[error(
        "the metadata server has no entry for node {0}; check that the node uses the same metadata server"
    )]
    NotFound(String),
    /// The received JSON is not a descriptor.
    #[error("the descriptor of {endpoint} is invalid: {source}")]
    Malformed {
        /// The node's endpoint or name.
        endpoint: String,
        source: Arc<serde_json::Error>,
    },
    /// Another node has the same name.
    #[error("the metadata server has another node named {name} at {at}; give each node a unique name")]
    NameConflict {
        /// The name that both nodes use.
        name: String,
        /// Handshake address of the other node.
        at: String,
    },
}

impl DirectoryError {
    fn malformed(endpoint: &str, error: serde_json::Error) -> Self {
        Self::Malformed { endpoint: endpoint.to_owned(), source: Arc::new(error) }
    }
}

/// Why a handshake failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    /// The socket or TLS failed, or the peer violated the protocol.
    #[error("{}", describe_tls_error(.0))]
    Io(#[source] Arc<io::Error>),
}

/// Why a request to the metadata server failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetadataServerError {
    // Not a source: the message has as much of its chain as is useful.
    #[error("{}", with_cause(.0))]
    Http(Arc<reqwest::Error>),
    #[error("the response exceeds {MAX_DESCRIPTOR} bytes")]
    TooLarge,
    /// An unexpected status, with the start of the body.
    #[error("{0}: {1}")]
    Status(StatusCode, String),
}

/// An error and its cause, which has more detail.
fn with_cause(error: &reqwest::Error) -> String {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    format!("{error}{cause}")
}

/// Looks up and publishes descriptors. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct DescriptorDirectory {
    source: DirectorySource,
}

#[derive(Clone, Debug)]
enum DirectorySource {
    Handshake(Option<PeerTls>),
    Http(Arc<HttpDirectory>),
}

impl DescriptorDirectory {
    /// Creates a directory without TLS.
    ///
    /// # Errors
    /// When the HTTP client cannot be built.
    pub fn new(metadata: &MetadataSource) -> Result<Self, DirectoryError> {
        Self::authenticated(metadata, None)
    }

    /// Creates a directory that uses mutual TLS if `tls` is given.
    ///
    /// # Errors
    /// As [`DescriptorDirectory::new`], and [`DirectoryError::Insecure`].
    pub fn authenticated(metadata: &MetadataSource, tls: Option<&PeerTls>) -> Result<Self, DirectoryError> {
        let source = match metadata {
            MetadataSource::Handshake => DirectorySource::Handshake(tls.cloned()),
            MetadataSource::Http { url, .. } if tls.is_some() && !url.starts_with("https://") => {
                return Err(DirectoryError::Insecure(url.clone()));
            }
            MetadataSource::Http { url, cluster_id } => {
                // Nodes of a cluster are reached directly, not through proxies.
                let http = tls.map_or_else(plain_http_client, PeerTls::http_client).timeout(TIME_LIMIT);
                DirectorySource::Http(Arc::new(HttpDirectory::new(url, cluster_id.as_deref(), http)?))
            }
        };
        Ok(Self { source })
    }

    /// Fetches the descriptor of the node at `endpoint`, a `host:port` as sent by a master. Not cached.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn descriptor(&self, endpoint: &str) -> Result<SegmentDescriptor, DirectoryError> {
        let json = match &self.source {
            DirectorySource::Handshake(tls) => fetch_descriptor(endpoint, tls.as_ref()).await?,
            DirectorySource::Http(server) => server.descriptor(endpoint).await?,
        };
        serde_json::from_slice(&json).map_err(|error| DirectoryError::malformed(endpoint, error))
    }

    /// Fetches the handshake address of a node, as `host:port`. Not cached.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn handshakes(&self, name: &str) -> Result<String, DirectoryError> {
        match &self.source {
            DirectorySource::Handshake(_) => Ok(name.to_owned()),
            DirectorySource::Http(server) => {
                let rpc = server.rpc(name).await?.ok_or_else(|| DirectoryError::NotFound(name.to_owned()))?;
                Ok(rpc.address())
            }
        }
    }

    /// Publishes a node's descriptor and its handshake address. A no-op with [`MetadataSource::Handshake`].
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn publish(&self, descriptor: &SegmentDescriptor, rpc: &RpcMeta) -> Result<(), DirectoryError> {
        match &self.source {
            DirectorySource::Handshake(_) => Ok(()),
            DirectorySource::Http(server) => server.publish(descriptor, rpc).await,
        }
    }

    /// Removes a node's entries from the metadata server.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn unpublish(&self, name: &str) -> Result<(), DirectoryError> {
        match &self.source {
            DirectorySource::Handshake(_) => Ok(()),
            DirectorySource::Http(server) => server.unpublish(name).await,
        }
    }
}

async fn fetch_descriptor(endpoint: &str, tls: Option<&PeerTls>) -> Result<Vec<u8>, DirectoryError> {
    let failed = |source| DirectoryError::Handshake { endpoint: endpoint.to_owned(), source };
    let request = async {
        match tls {
            None => handshake::request(endpoint, HandshakeKind::Metadata, EMPTY_DESCRIPTOR).await,
            Some(tls) => {
                handshake::request_tls(endpoint, HandshakeKind::Metadata, EMPTY_DESCRIPTOR, tls).await
            }
        }
    };
    match tokio::time::timeout(TIME_LIMIT, request).await {
        Ok(response) => response.map_err(|error| failed(HandshakeError::Io(Arc::new(error)))),
        Err(_) => Err(failed(HandshakeError::TimedOut(TIME_LIMIT))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_servers_are_parsed_or_rejected_with_a_hint() {
        assert_eq!("P2PHANDSHAKE".parse(), Ok(MetadataSource::Handshake));
        let url = "http://m:8080/metadata";
        assert_eq!(url.parse(), Ok(MetadataSource::Http { url: url.to_owned(), cluster_id: None }));
        for wrong in ["", "m:8080", "etcd://m:2379", "http://", "p2phandshake"] {
            let error = wrong.parse::<MetadataSource>().unwrap_err().to_string();
            assert!(error.contains("P2PHANDSHAKE or http://"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_unreachable_endpoint_is_named_in_the_error() {
        let directory = DescriptorDirectory::new(&MetadataSource::Handshake).unwrap();
        let error = directory.descriptor("127.0.0.1:1").await.unwrap_err().to_string();
        assert!(error.starts_with("127.0.0.1:1 does not respond to handshakes"), "{error}");
    }
}
