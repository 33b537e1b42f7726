//! Where nodes serve transfers, and how.

use bytes::BufMut as _;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
pub use moongate_kvstore::nodes::Metadata;

/// Largest descriptor, in bytes.
const MAX_DESCRIPTOR: usize = 1 << 20;
/// The kind of handshake in which both sides tell their descriptors.
const METADATA: u8 = 1;
/// Mooncake's own clients escape all but these.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How a node's data port is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// A node's data port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: (String, u16),
    pub(crate) version: Version,
}

#[derive(Deserialize)]
struct Descriptor {
    #[serde(default)]
    protocol: String,
    #[serde(default)]
    tcp_data_host: String,
    #[serde(default)]
    tcp_data_port: u16,
    #[serde(default)]
    tcp_proto_version: u32,
}

/// Asks where nodes are.
#[derive(Debug)]
pub(crate) struct Directory {
    metadata: Metadata,
    http: reqwest::Client,
}

impl Directory {
    pub(crate) fn new(metadata: Metadata) -> Self {
        Self { metadata, http: reqwest::Client::new() }
    }

    /// Where the node at `endpoint` serves transfers. The caller limits the time.
    pub(crate) async fn place(&self, endpoint: &str) -> Result<Place, String> {
        let descriptor = match &self.metadata {
            Metadata::Handshake => handshake(endpoint).await.map_err(|error| error.to_string())?,
            Metadata::Http { url, cluster_id } => {
                let cluster = cluster_id.as_deref().filter(|id| !id.is_empty());
                let key = match cluster {
                    Some(id) => format!("mooncake/{id}/ram/{endpoint}"),
                    None => format!("mooncake/ram/{endpoint}"),
                };
                let url = format!("{url}?key={}", utf8_percent_encode(&key, ESCAPED));
                let asked = self.http.get(url).send().await.and_then(reqwest::Response::error_for_status);
                asked.map_err(|error| error.to_string())?.bytes().await.map_err(|error| error.to_string())?.to_vec()
            }
        };
        let descriptor: Descriptor = serde_json::from_slice(&descriptor).map_err(|error| error.to_string())?;
        if descriptor.tcp_data_port == 0 {
            return Err(format!("it serves no transfers over TCP, only over {:?}", descriptor.protocol));
        }
        let own = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
        let host = match descriptor.tcp_data_host.as_str() {
            "" | "0.0.0.0" | "::" | "[::]" => own,
            told => told,
        };
        let version = if descriptor.tcp_proto_version >= 2 { Version::V2 } else { Version::V1 };
        Ok(Place { address: (host.trim_matches(['[', ']']).to_owned(), descriptor.tcp_data_port), version })
    }
}

async fn handshake(endpoint: &str) -> std::io::Result<Vec<u8>> {
    let invalid = |reason: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_owned());
    let mut stream = TcpStream::connect(endpoint).await?;
    let mut request = Vec::new();
    request.put_u64_le(3);
    request.put_u8(METADATA);
    request.put_slice(b"{}");
    stream.write_all(&request).await?;
    let size = usize::try_from(stream.read_u64_le().await?).unwrap_or(usize::MAX);
    if size == 0 || size > MAX_DESCRIPTOR + 1 || stream.read_u8().await? != METADATA {
        return Err(invalid("the answer to the handshake is none"));
    }
    let mut descriptor = vec![0; size - 1];
    stream.read_exact(&mut descriptor).await?;
    Ok(descriptor)
}
