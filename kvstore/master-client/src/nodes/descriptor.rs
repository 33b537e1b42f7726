//! Looks up a node's transfer address in its segment descriptor.

use std::io;

use bytes::BufMut as _;
use moongate_runtime::PeerTls;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Largest descriptor in bytes, as in Mooncake.
const MAX_DESCRIPTOR: usize = 1 << 20;
/// Handshake kind in which both sides exchange descriptors.
const METADATA: u8 = 1;
/// The descriptor that this client sends. A node ignores it and responds with its own, so it is empty.
const OWN_DESCRIPTOR: &[u8] = b"{}";

/// Where nodes publish their transfer ports. It must match the nodes' own configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MetadataSource {
    /// Each node sends its descriptor in a handshake (`P2PHANDSHAKE`, SGLang's default).
    #[default]
    Handshake,
    /// An HTTP metadata server stores the descriptors.
    Http {
        /// URL of the server, as `http://host:8080/metadata`.
        url: String,
        /// The nodes' `MC_METADATA_CLUSTER_ID`, if they set it.
        cluster_id: Option<String>,
    },
}

/// Why the lookup of a node's transfer port failed.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorLookupError {
    /// The node has no TCP port: it serves transfers over another protocol.
    #[error("the node serves no transfers over TCP, only over {0:?}")]
    NoPort(String),
    /// The handshake with the node failed.
    #[error(transparent)]
    Handshake(#[from] io::Error),
    /// The request to the metadata server failed.
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("GET {url}: more than {MAX_DESCRIPTOR} bytes")]
    TooLarge { url: String },
    #[error(transparent)]
    NotJson(#[from] serde_json::Error),
}

/// The required part of a descriptor. RDMA nodes lack the port, and releases before 0.3.13 the host.
#[derive(Deserialize)]
struct TransferDescriptor {
    #[serde(default)]
    protocol: String,
    #[serde(default)]
    tcp_data_host: String,
    #[serde(default)]
    tcp_data_port: u16,
}

/// Fetches descriptors from nodes or the metadata server.
#[derive(Clone, Debug)]
pub(super) struct DescriptorLookup {
    metadata: MetadataSource,
    http: reqwest::Client,
    tls: Option<PeerTls>,
}

impl DescriptorLookup {
    pub(super) fn new(metadata: MetadataSource, http: reqwest::Client, tls: Option<PeerTls>) -> Self {
        Self { metadata, http, tls }
    }

    /// TLS with nodes, if it is used.
    pub(super) fn tls(&self) -> Option<&PeerTls> {
        self.tls.as_ref()
    }

    /// Host and port at which the node at `endpoint` serves transfers over TCP. The caller limits the time.
    pub(super) async fn transfer_address(
        &self,
        endpoint: &str,
    ) -> Result<(String, u16), DescriptorLookupError> {
        let bytes = match (&self.metadata, &self.tls) {
            (MetadataSource::Handshake, None) => handshake(TcpStream::connect(endpoint).await?).await?,
            (MetadataSource::Handshake, Some(tls)) => handshake_secured(endpoint, tls).await?,
            (MetadataSource::Http { url, cluster_id }, _) => {
                self.stored(descriptor_url(url, cluster_id.as_deref(), endpoint)).await?
            }
        };
        read_address(&bytes, endpoint)
    }

    async fn stored(&self, url: String) -> Result<Vec<u8>, DescriptorLookupError> {
        let mut response = self.http.get(&url).send().await?.error_for_status()?;
        let mut body = Vec::new();
        while let Some(part) = response.chunk().await? {
            if body.len() + part.len() > MAX_DESCRIPTOR {
                return Err(DescriptorLookupError::TooLarge { url });
            }
            body.extend_from_slice(&part);
        }
        Ok(body)
    }
}

fn descriptor_url(server: &str, cluster_id: Option<&str>, name: &str) -> String {
    let cluster = cluster_id.filter(|id| !id.is_empty()).map(|id| format!("{id}/")).unwrap_or_default();
    let key = format!("mooncake/{cluster}ram/{name}");
    // Nodes store the key percent-encoded, except for the unreserved characters of URLs.
    const ESCAPED: &percent_encoding::AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    format!("{server}?key={}", utf8_percent_encode(&key, ESCAPED))
}

fn read_address(json: &[u8], endpoint: &str) -> Result<(String, u16), DescriptorLookupError> {
    address(serde_json::from_slice(json)?, endpoint)
}

/// Host and port of the TCP data plane in a segment descriptor, if it has one. Public for fuzzing against the parser of
/// `moongate-transfer`.
#[must_use]
pub fn transfer_address(json: &[u8], endpoint: &str) -> Option<(String, u16)> {
    read_address(json, endpoint).ok()
}

fn address(descriptor: TransferDescriptor, endpoint: &str) -> Result<(String, u16), DescriptorLookupError> {
    if descriptor.tcp_data_port == 0 {
        return Err(DescriptorLookupError::NoPort(descriptor.protocol));
    }
    let own = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let host = match descriptor.tcp_data_host.as_str() {
        "" | "0.0.0.0" | "::" | "[::]" => own,
        host => host,
    };
    Ok((host.trim_matches(['[', ']']).to_owned(), descriptor.tcp_data_port))
}

async fn handshake_secured(endpoint: &str, tls: &PeerTls) -> io::Result<Vec<u8>> {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host).trim_matches(['[', ']']);
    handshake(tls.connect(host, TcpStream::connect(endpoint).await?).await?).await
}

/// Exchanges descriptors with a node: a length that counts the kind, the kind, JSON.
async fn handshake(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<Vec<u8>> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let mut request = Vec::new();
    request.put_u64_le(OWN_DESCRIPTOR.len() as u64 + 1);
    request.put_u8(METADATA);
    request.put_slice(OWN_DESCRIPTOR);
    stream.write_all(&request).await?;
    stream.flush().await?;
    let size = usize::try_from(stream.read_u64_le().await?).unwrap_or(usize::MAX);
    if size == 0 || size > MAX_DESCRIPTOR + 1 {
        return Err(invalid("the handshake response has an invalid size"));
    }
    if stream.read_u8().await? != METADATA {
        return Err(invalid("the handshake response has an unexpected kind"));
    }
    let mut descriptor = vec![0; size - 1];
    stream.read_exact(&mut descriptor).await?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<(String, u16), DescriptorLookupError> {
        address(serde_json::from_str(json).unwrap(), "10.0.0.7:12345")
    }

    #[test]
    fn descriptors_of_all_releases_are_parsed() {
        let new = r#"{"buffers":[],"protocol":"tcp","tcp_data_host":"10.0.0.8","tcp_data_port":15415}"#;
        assert_eq!(parse(new).unwrap(), ("10.0.0.8".to_owned(), 15415));
        let old = r#"{"buffers":[],"protocol":"tcp","tcp_data_port":15415}"#;
        assert_eq!(parse(old).unwrap(), ("10.0.0.7".to_owned(), 15415));
        let rdma = r#"{"protocol":"rdma","devices":[],"priority_matrix":{}}"#;
        let error = parse(rdma).unwrap_err();
        assert!(matches!(&error, DescriptorLookupError::NoPort(protocol) if protocol == "rdma"), "{error}");
        let six = TransferDescriptor {
            protocol: "tcp".to_owned(),
            tcp_data_host: "::".to_owned(),
            tcp_data_port: 1,
        };
        assert_eq!(address(six, "[fe80::1]:9").unwrap(), ("fe80::1".to_owned(), 1));
    }

    #[test]
    fn metadata_keys_equal_those_of_nodes() {
        let url = descriptor_url("http://m:8080/metadata", None, "127.0.0.1:13102");
        assert_eq!(url, "http://m:8080/metadata?key=mooncake%2Fram%2F127.0.0.1%3A13102");
        let url = descriptor_url("http://m:8080/metadata", Some("blue"), "a:1");
        assert_eq!(url, "http://m:8080/metadata?key=mooncake%2Fblue%2Fram%2Fa%3A1");
    }
}
