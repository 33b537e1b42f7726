//! What a node tells about its memory and its ports, as JSON that every release of Mooncake reads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plane::TransferProtocol;

/// Largest descriptor in bytes: what Mooncake allows unless it is told otherwise.
pub const MAX_DESCRIPTOR: usize = 1 << 20;

/// Memory that others may read and write.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentBuffer {
    /// The node's name again. Mooncake refuses a buffer without one.
    pub name: String,
    /// The address of the first byte, by which transfers name it.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// For RDMA: the key that remote nodes use, one for each device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rkey: Vec<u32>,
    /// For RDMA: the key that the node itself uses, one for each device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lkey: Vec<u32>,
}

/// An RDMA device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceDescriptor {
    /// As the system calls it, for example `mlx5_0`.
    pub name: String,
    /// Local identifier; 0 on RoCE.
    pub lid: u16,
    /// Global identifier, as 16 hexadecimal bytes with colons between them.
    pub gid: String,
}

/// A node's segment descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentDescriptor {
    /// The node's `host:port`.
    pub name: String,
    /// `tcp` or `rdma`.
    pub protocol: String,
    /// What may be read and written.
    pub buffers: Vec<SegmentBuffer>,
    /// Where the TCP data plane is. Empty before 0.3.13: then it is the host of the name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tcp_data_host: String,
    /// Its port; 0 if the node has none.
    pub tcp_data_port: u16,
    /// Its version. Releases before 0.3.13 say nothing and speak the first.
    #[serde(default = "first_version")]
    pub tcp_proto_version: u32,
    /// Name under which RDMA handshakes reach the node, if it is another.
    pub rdma_server_name: String,
    /// RDMA devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceDescriptor>,
    /// For RDMA: for each place in memory the preferred and the other usable devices.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub priority_matrix: BTreeMap<String, [Vec<String>; 2]>,
    /// When it was written, for people.
    pub timestamp: String,
    /// The extensions of this project's own nodes that the node speaks: 1 has checksums. Mooncake's nodes ignore it.
    #[serde(skip_serializing_if = "is_zero")]
    pub moongate: u32,
}

fn first_version() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A node serves no transfers over TCP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node serves no transfers over TCP, only over {protocol:?}")]
pub struct NoTcpError {
    /// What it has instead.
    pub protocol: String,
}

impl SegmentDescriptor {
    /// Where the data plane of the node is, of which the descriptor was found under `endpoint`: host and port.
    ///
    /// # Errors
    /// [`NoTcpError`].
    pub fn data_address(&self, endpoint: &str) -> Result<(String, u16), NoTcpError> {
        if self.tcp_data_port == 0 {
            return Err(NoTcpError { protocol: self.protocol.clone() });
        }
        let own = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
        let host = match self.tcp_data_host.as_str() {
            // A node that listens everywhere is reached where its descriptor was.
            "" | "0.0.0.0" | "::" | "[::]" => own,
            told => told,
        };
        Ok((host.trim_matches(['[', ']']).to_owned(), self.tcp_data_port))
    }

    /// The best that the node's TCP data plane speaks.
    #[must_use]
    pub fn protocol(&self) -> TransferProtocol {
        match (self.moongate, self.tcp_proto_version) {
            (1.., 2..) => TransferProtocol::Checked,
            (0, 2..) => TransferProtocol::V2,
            _ => TransferProtocol::V1,
        }
    }
}

/// How Mooncake's nodes are reached for handshakes, as their HTTP metadata says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpcMeta {
    /// Host.
    pub ip_or_host_name: String,
    /// Port.
    pub rpc_port: u16,
}

impl RpcMeta {
    /// As `host:port`.
    pub(crate) fn address(&self) -> String {
        let host = self.ip_or_host_name.trim_matches(['[', ']']);
        if host.contains(':') {
            format!("[{host}]:{}", self.rpc_port)
        } else {
            format!("{host}:{}", self.rpc_port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &str = r#"{"buffers":[{"addr":140611978002432,"length":16777216,"name":"127.0.0.1:12695"}],
        "name":"127.0.0.1:12695","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1",
        "tcp_data_port":15415,"tcp_proto_version":2,"timestamp":"2026-11-21 09:14:50.324429"}"#;

    fn read(json: &str) -> SegmentDescriptor {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_nodes_descriptor_is_written_as_it_was_read() {
        let as_value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let text = serde_json::to_string(&read(NEW)).unwrap();
        assert_eq!(as_value(&text), as_value(NEW));
        assert_eq!(read(NEW).protocol(), TransferProtocol::V2);
        let rdma = r#"{"name":"a:1","protocol":"rdma","tcp_data_port":0,"tcp_proto_version":1,"timestamp":"",
            "devices":[{"name":"mlx5_0","lid":0,"gid":"00:01"}],"rdma_server_name":"",
            "buffers":[{"name":"a:1","addr":4096,"length":1,"rkey":[7],"lkey":[8]}],
            "priority_matrix":{"cpu:0":[["mlx5_0"],["mlx5_1"]]}}"#;
        let text = serde_json::to_string(&read(rdma)).unwrap();
        assert_eq!(as_value(&text), as_value(rdma));
    }

    #[test]
    fn descriptors_of_all_releases_are_understood() {
        let data = |json: &str| read(json).data_address("10.0.0.7:12345");
        assert_eq!(data(NEW).unwrap(), ("127.0.0.1".to_owned(), 15415));
        let old = r#"{"buffers":[],"protocol":"tcp","tcp_data_port":15415}"#;
        assert_eq!(data(old).unwrap(), ("10.0.0.7".to_owned(), 15415));
        assert_eq!(read(old).protocol(), TransferProtocol::V1);
        let rdma = r#"{"protocol":"rdma","devices":[],"priority_matrix":{}}"#;
        assert_eq!(data(rdma).unwrap_err(), NoTcpError { protocol: "rdma".to_owned() });
        let six =
            SegmentDescriptor { tcp_data_host: "::".to_owned(), tcp_data_port: 1, ..Default::default() };
        assert_eq!(six.data_address("[fe80::1]:9").unwrap(), ("fe80::1".to_owned(), 1));
    }

    #[test]
    fn extensions_are_spoken_with_our_own_nodes_only() {
        let ours = r#"{"protocol":"tcp","tcp_data_port":1,"tcp_proto_version":2,"moongate":1}"#;
        assert_eq!(read(ours).protocol(), TransferProtocol::Checked);
        let text = serde_json::to_string(&read(NEW)).unwrap();
        assert!(!text.contains("moongate"), "{text}");
    }
}
