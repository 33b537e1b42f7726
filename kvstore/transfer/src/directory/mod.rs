//! Where descriptors are found.

mod http;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{PeerTls, describe_tls_error, plain_http_client};

use crate::descriptor::{RpcMeta, SegmentDescriptor};
use crate::handshake::{self, HandshakeKind};

use http::HttpDirectory;

/// The word for [`MetadataSource::Handshake`].
const HANDSHAKE: &str = "P2PHANDSHAKE";
/// Time for one question.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Our descriptor in a question. A node answers with its own and does nothing with this one.
const EMPTY_DESCRIPTOR: &[u8] = b"{}";

/// Where nodes tell their descriptors. It must be the same for all nodes and clients of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MetadataSource {
    /// Each node tells its own to whoever connects (`P2PHANDSHAKE`, SGLang's default).
    #[default]
    Handshake,
    /// An HTTP metadata server has them.
    Http {
        /// Its URL, as `http://host:8080/metadata`.
        url: String,
        /// What nodes have as `MC_METADATA_CLUSTER_ID`.
        cluster_id: Option<String>,
    },
}

/// A metadata server that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no metadata server that can be used; write P2PHANDSHAKE or http://HOST:PORT/metadata")]
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

/// A descriptor cannot be had or told.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The metadata server would be reached without TLS.
    #[error("{0}: with --store-tls-cert the metadata server is reached over TLS: write https://")]
    Insecure(String),
    /// The node does not answer.
    #[error("{endpoint} does not answer handshakes: {reason}")]
    Handshake {
        /// The node.
        endpoint: String,
        /// Why not.
        reason: String,
    },
    /// The metadata server does not answer as it should.
    #[error("metadata server: {method} {url}: {reason}")]
    Server {
        /// What was asked.
        method: &'static str,
        /// Where.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The metadata server does not know the node.
    #[error("the metadata server knows no node {0}; is the node's metadata server the same?")]
    NotFound(String),
    /// What was told is no descriptor.
    #[error("what {endpoint} tells about itself cannot be understood: {reason}")]
    Malformed {
        /// The node.
        endpoint: String,
        /// What is wrong.
        reason: String,
    },
    /// Another node has the same name.
    #[error(
        "the metadata server has another node of the name {name}, which is reached at {at}; give each node its own name"
    )]
    NameConflict {
        /// The name.
        name: String,
        /// Where the other one is.
        at: String,
    },
}

/// Finds and tells descriptors. Cloning is cheap.
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
    /// A directory.
    ///
    /// # Errors
    /// When there can be no HTTP client.
    pub fn new(metadata: &MetadataSource) -> Result<Self, DirectoryError> {
        Self::authenticated(metadata, None)
    }

    /// A directory that is reached over TLS with certificates, if `tls` is given.
    ///
    /// # Errors
    /// As [`DescriptorDirectory::new`], and [`DirectoryError::Insecure`].
    pub fn authenticated(metadata: &MetadataSource, tls: Option<&PeerTls>) -> Result<Self, DirectoryError> {
        let place = match metadata {
            MetadataSource::Handshake => DirectorySource::Handshake(tls.cloned()),
            MetadataSource::Http { url, .. } if tls.is_some() && !url.starts_with("https://") => {
                return Err(DirectoryError::Insecure(url.clone()));
            }
            MetadataSource::Http { url, cluster_id } => {
                // Nodes of a cluster do not stand behind proxies.
                let http = tls.map_or_else(plain_http_client, PeerTls::http_client).timeout(TIME_LIMIT);
                DirectorySource::Http(Arc::new(HttpDirectory::new(url, cluster_id.as_deref(), http)?))
            }
        };
        Ok(Self { source: place })
    }

    /// The descriptor of the node at `endpoint`, a `host:port` as a master tells it. Asks each time.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn descriptor(&self, endpoint: &str) -> Result<SegmentDescriptor, DirectoryError> {
        let json = match &self.source {
            DirectorySource::Handshake(tls) => fetch_descriptor(endpoint, tls.as_ref()).await?,
            DirectorySource::Http(server) => server.descriptor(endpoint).await?,
        };
        serde_json::from_slice(&json).map_err(|error| DirectoryError::Malformed {
            endpoint: endpoint.to_owned(),
            reason: error.to_string(),
        })
    }

    /// Where the node of this name answers handshakes, as `host:port`. Asks each time.
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

    /// Tells a node's descriptor, and where its handshake port is. A node that answers handshakes for itself need not.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub async fn publish(&self, descriptor: &SegmentDescriptor, rpc: &RpcMeta) -> Result<(), DirectoryError> {
        match &self.source {
            DirectorySource::Handshake(_) => Ok(()),
            DirectorySource::Http(server) => server.publish(descriptor, rpc).await,
        }
    }

    /// Takes back what has been told about a node.
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
    let error = |reason: String| DirectoryError::Handshake { endpoint: endpoint.to_owned(), reason };
    let asked = async {
        match tls {
            None => handshake::request(endpoint, HandshakeKind::Metadata, EMPTY_DESCRIPTOR).await,
            Some(tls) => {
                handshake::request_tls(endpoint, HandshakeKind::Metadata, EMPTY_DESCRIPTOR, tls).await
            }
        }
    };
    match tokio::time::timeout(TIME_LIMIT, asked).await {
        Ok(answer) => answer.map_err(|problem| error(describe_tls_error(&problem))),
        Err(_) => Err(error(format!("nothing within {TIME_LIMIT:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_servers_are_understood_or_explained() {
        assert_eq!("P2PHANDSHAKE".parse(), Ok(MetadataSource::Handshake));
        let url = "http://m:8080/metadata";
        assert_eq!(url.parse(), Ok(MetadataSource::Http { url: url.to_owned(), cluster_id: None }));
        for wrong in ["", "m:8080", "etcd://m:2379", "http://", "p2phandshake"] {
            let error = wrong.parse::<MetadataSource>().unwrap_err().to_string();
            assert!(error.contains("P2PHANDSHAKE or http://"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_silent_endpoint_is_named() {
        let directory = DescriptorDirectory::new(&MetadataSource::Handshake).unwrap();
        let error = directory.descriptor("127.0.0.1:1").await.unwrap_err().to_string();
        assert!(error.starts_with("127.0.0.1:1 does not answer handshakes"), "{error}");
    }
}
