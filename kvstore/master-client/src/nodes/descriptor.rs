//! Where a node serves transfers: its segment descriptor.

use bytes::BufMut as _;
use moongate_runtime::PeerTls;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Largest descriptor, in bytes: what Mooncake allows.
const MAX_DESCRIPTOR: usize = 1 << 20;
/// The kind of handshake in which both sides tell their descriptors.
const METADATA: u8 = 1;
/// Our descriptor. A node answers with its own and does nothing with this one, so it need not describe anything.
const MOONGATE_FIELD: &[u8] = b"{}";

/// Where nodes tell their transfer ports. It must be what the nodes themselves are configured with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MetadataSource {
    /// Each node tells it to whoever connects (`P2PHANDSHAKE`, SGLang's default).
    #[default]
    Handshake,
    /// An HTTP metadata server knows it.
    Http {
        /// Its URL, as `http://host:8080/metadata`.
        url: String,
        /// What nodes have as `MC_METADATA_CLUSTER_ID`.
        cluster_id: Option<String>,
    },
}

/// Why a node's transfer port is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DescriptorLookupError {
    /// The node has none: it serves transfers over another protocol than TCP.
    #[error("the node serves no transfers over TCP, only over {0:?}")]
    NoPort(String),
    /// It could not be asked.
    #[error("{0}")]
    Unknown(String),
}

/// What of a descriptor is needed. RDMA's lacks the port, and releases before 0.3.13 the host.
#[derive(Deserialize)]
struct TransferDescriptor {
    #[serde(default)]
    protocol: String,
    #[serde(default)]
    tcp_data_host: String,
    #[serde(default)]
    tcp_data_port: u16,
}

/// Asks for descriptors.
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

    /// Where the node at `endpoint` serves transfers over TCP. The caller limits the time.
    pub(super) async fn transfer_address(
        &self,
        endpoint: &str,
    ) -> Result<(String, u16), DescriptorLookupError> {
        let unknown = |error: &dyn std::error::Error| DescriptorLookupError::Unknown(error.to_string());
        let bytes = match &self.metadata {
            MetadataSource::Handshake => {
                let answered = match &self.tls {
                    None => {
                        handshake(TcpStream::connect(endpoint).await.map_err(|error| unknown(&error))?).await
                    }
                    Some(tls) => handshake_secured(endpoint, tls).await,
                };
                answered.map_err(|error| unknown(&error))?
            }
            MetadataSource::Http { url, cluster_id } => {
                let url = descriptor_url(url, cluster_id.as_deref(), endpoint);
                self.stored(&url).await.map_err(DescriptorLookupError::Unknown)?
            }
        };
        read_address(&bytes, endpoint)
    }

    async fn stored(&self, url: &str) -> Result<Vec<u8>, String> {
        let asked = self.http.get(url).send().await.and_then(reqwest::Response::error_for_status);
        let mut response = asked.map_err(|error| error.to_string())?;
        let mut body = Vec::new();
        while let Some(part) = response.chunk().await.map_err(|error| error.to_string())? {
            if body.len() + part.len() > MAX_DESCRIPTOR {
                return Err(format!("GET {url}: more than {MAX_DESCRIPTOR} bytes"));
            }
            body.extend_from_slice(&part);
        }
        Ok(body)
    }
}

fn descriptor_url(server: &str, cluster_id: Option<&str>, name: &str) -> String {
    let cluster = cluster_id.filter(|id| !id.is_empty()).map(|id| format!("{id}/")).unwrap_or_default();
    let key = format!("mooncake/{cluster}ram/{name}");
    // Stored under the key as the nodes escape it, which is all but what URLs leave alone.
    const ESCAPED: &percent_encoding::AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    format!("{server}?key={}", utf8_percent_encode(&key, ESCAPED))
}

fn read_address(json: &[u8], endpoint: &str) -> Result<(String, u16), DescriptorLookupError> {
    let descriptor =
        serde_json::from_slice(json).map_err(|error| DescriptorLookupError::Unknown(error.to_string()))?;
    address(descriptor, endpoint)
}

/// Host and port of the TCP data plane that a segment descriptor names, if it names one: for fuzzing against the reader of
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
        told => told,
    };
    Ok((host.trim_matches(['[', ']']).to_owned(), descriptor.tcp_data_port))
}

async fn handshake_secured(endpoint: &str, tls: &PeerTls) -> std::io::Result<Vec<u8>> {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host).trim_matches(['[', ']']);
    handshake(tls.connect(host, TcpStream::connect(endpoint).await?).await?).await
}

/// Exchanges descriptors with a node: a length that counts the kind, the kind, JSON.
async fn handshake(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<Vec<u8>> {
    let invalid = |reason: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_owned());
    let mut request = Vec::new();
    request.put_u64_le(MOONGATE_FIELD.len() as u64 + 1);
    request.put_u8(METADATA);
    request.put_slice(MOONGATE_FIELD);
    stream.write_all(&request).await?;
    stream.flush().await?;
    let size = usize::try_from(stream.read_u64_le().await?).unwrap_or(usize::MAX);
    if size == 0 || size > MAX_DESCRIPTOR + 1 {
        return Err(invalid("the answer to the handshake has an impossible size"));
    }
    if stream.read_u8().await? != METADATA {
        return Err(invalid("the answer to the handshake is of another kind"));
    }
    let mut descriptor = vec![0; size - 1];
    stream.read_exact(&mut descriptor).await?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(json: &str) -> Result<(String, u16), DescriptorLookupError> {
        address(serde_json::from_str(json).unwrap(), "10.0.0.7:12345")
    }

    #[test]
    fn descriptors_of_all_releases_are_understood() {
        let new = r#"{"buffers":[],"protocol":"tcp","tcp_data_host":"10.0.0.8","tcp_data_port":15415}"#;
        assert_eq!(told(new).unwrap(), ("10.0.0.8".to_owned(), 15415));
        let old = r#"{"buffers":[],"protocol":"tcp","tcp_data_port":15415}"#;
        assert_eq!(told(old).unwrap(), ("10.0.0.7".to_owned(), 15415));
        let rdma = r#"{"protocol":"rdma","devices":[],"priority_matrix":{}}"#;
        assert_eq!(told(rdma).unwrap_err(), DescriptorLookupError::NoPort("rdma".to_owned()));
        let six = TransferDescriptor {
            protocol: "tcp".to_owned(),
            tcp_data_host: "::".to_owned(),
            tcp_data_port: 1,
        };
        assert_eq!(address(six, "[fe80::1]:9").unwrap(), ("fe80::1".to_owned(), 1));
    }

    #[test]
    fn metadata_keys_are_as_nodes_store_them() {
        let url = descriptor_url("http://m:8080/metadata", None, "127.0.0.1:13102");
        assert_eq!(url, "http://m:8080/metadata?key=mooncake%2Fram%2F127.0.0.1%3A13102");
        let url = descriptor_url("http://m:8080/metadata", Some("blue"), "a:1");
        assert_eq!(url, "http://m:8080/metadata?key=mooncake%2Fblue%2Fram%2Fa%3A1");
    }
}
