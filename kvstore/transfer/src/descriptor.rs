//! A node's segment descriptor (memory and ports) as JSON that every Mooncake release parses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plane::TransferProtocol;

/// Maximum size of a descriptor in bytes: Mooncake's default limit.
pub const MAX_DESCRIPTOR: usize = 1 << 20;

/// A memory range that peers may read and write.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentBuffer {
    /// The node's name, repeated. Mooncake rejects a buffer without it.
    pub name: String,
    /// Address of the first byte; transfers use this address.
    pub addr: u64,
    /// Length in bytes of the range.
    pub length: u64,
    /// RDMA remote keys (`rkey`), one per device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rkey: Vec<u32>,
    /// RDMA local keys (`lkey`), one per device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lkey: Vec<u32>,
}

/// An RDMA device of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceDescriptor {
    /// The system's device name, for example `mlx5_0`.
    pub name: String,
    /// Local identifier (LID); 0 on RoCE.
    pub lid: u16,
    /// Global identifier, as 16 hexadecimal bytes with colons between them.
    pub gid: String,
}

/// What a node publishes about its memory and its ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentDescriptor {
    /// The node's name, a `host:port`.
    pub name: String,
    /// Transport of the node, `tcp` or `rdma`.
    pub protocol: String,
    /// Memory ranges that peers may access.
    pub buffers: Vec<SegmentBuffer>,
    /// Host of the TCP data plane. Empty before 0.3.13: the host of the name applies.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tcp_data_host: String,
    /// Port of the TCP data plane; 0 if the node has none.
    pub tcp_data_port: u16,
    /// Version of the TCP data plane. Releases before 0.3.13 omit it and use version 1.
    #[serde(default = "first_version")]
    pub tcp_proto_version: u32,
    /// Name at which RDMA handshakes reach the node, if it differs.
    pub rdma_server_name: String,
    /// RDMA devices of the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceDescriptor>,
    /// For RDMA: per memory location, the preferred devices and the other usable ones.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub priority_matrix: BTreeMap<String, [Vec<String>; 2]>,
    /// Time of writing, for human readers only.
    pub timestamp: String,
    /// Version of Moongate's extensions that the node supports: 1 adds checksums. Mooncake ignores this member.
    #[serde(skip_serializing_if = "is_zero")]
    pub moongate: u32,
    /// Where clients on the node's host get its memory to map. A Moongate extension, which Mooncake ignores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moongate_shared_memory: Option<SharedMemoryAddress>,
}

/// The UNIX socket from which clients on a node's host get its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemoryAddress {
    /// Path of the socket, or `@` and its abstract name.
    pub socket: String,
    /// Random id of the node's process: other hosts have sockets of this name, too.
    pub process: String,
}

fn first_version() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The node serves no transfers over TCP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node serves no transfers over TCP, only over {protocol:?}")]
pub struct NoTcpError {
    /// The protocol that the node serves.
    pub protocol: String,
}

impl SegmentDescriptor {
    /// Host and port of the data plane of the node whose descriptor was found under `endpoint`.
    ///
    /// # Errors
    /// [`NoTcpError`].
    pub fn data_address(&self, endpoint: &str) -> Result<(String, u16), NoTcpError> {
        if self.tcp_data_port == 0 {
            return Err(NoTcpError { protocol: self.protocol.clone() });
        }
        let own = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
        let host = match self.tcp_data_host.as_str() {
            // A wildcard address: use the host from which the descriptor was fetched.
            "" | "0.0.0.0" | "::" | "[::]" => own,
            host => host,
        };
        Ok((host.trim_matches(['[', ']']).to_owned(), self.tcp_data_port))
    }

    /// The newest protocol that the node's TCP data plane supports.
    #[must_use]
    pub fn protocol(&self) -> TransferProtocol {
        match (self.moongate, self.tcp_proto_version) {
            (1.., 2..) => TransferProtocol::Checked,
            (0, 2..) => TransferProtocol::V2,
            _ => TransferProtocol::V1,
        }
    }
}

/// Address of a node's handshake port, as stored in Mooncake's HTTP metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpcMeta {
    /// Host name or IP address of the port.
    pub ip_or_host_name: String,
    /// Port number of the handshake listener.
    pub rpc_port: u16,
}

impl RpcMeta {
    /// Formats the address as `host:port`.
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
    fn descriptors_of_all_releases_are_parsed() {
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
    fn extensions_are_used_with_moongate_nodes_only() {
        let moongate = r#"{"protocol":"tcp","tcp_data_port":1,"tcp_proto_version":2,"moongate":1}"#;
        assert_eq!(read(moongate).protocol(), TransferProtocol::Checked);
        let text = serde_json::to_string(&read(NEW)).unwrap();
        assert!(!text.contains("moongate"), "{text}");
    }
}
