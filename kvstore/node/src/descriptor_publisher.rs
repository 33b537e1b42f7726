//! How a node is found: its descriptor, and the metadata server that has it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use moongate_rdma::RdmaFabric;
use moongate_runtime::PeerTls;
use moongate_transfer::descriptor::RpcMeta;
use moongate_transfer::handshake::TcpHandshakeHandler as Answers;
use moongate_transfer::{DescriptorDirectory, DirectoryError, SegmentDescriptor};
use tokio::time::Instant;

use crate::config::NodeConfig;
use crate::error::NodeStartError;
use crate::heartbeat::HeartbeatState;
use crate::listeners::{NodeHost, NodeListeners};
use crate::membership::{NodeMembership, PROTOCOL};
use crate::rdma;
use crate::start_retry::StartRetry;

/// How often it is looked whether the metadata server still has the descriptor.
const CHECK_PERIOD: Duration = Duration::from_secs(10);
/// The extensions that this node's data plane has.
const EXTENSIONS: u32 = 1;

/// How a node is found.
#[derive(Clone)]
pub(crate) struct DescriptorPublisher {
    pub(crate) directory: DescriptorDirectory,
    pub(crate) handshakes: Arc<Answers>,
    rpc: RpcMeta,
}

impl DescriptorPublisher {
    /// Describes what the node lends now.
    pub(crate) fn update_descriptor(&self, membership: &NodeMembership) {
        self.handshakes.descriptor.rcu(|old| SegmentDescriptor {
            buffers: membership.pool.buffers(&membership.endpoint),
            timestamp: timestamp(),
            ..SegmentDescriptor::clone(old)
        });
    }

    pub(crate) async fn publish(&self) -> Result<(), DirectoryError> {
        let descriptor = self.handshakes.descriptor.load_full();
        self.directory.publish(&descriptor, &self.rpc).await
    }

    /// Tells the metadata server of the node, which may not be there yet.
    pub(crate) async fn publish_until(&self, deadline: Instant) -> Result<(), NodeStartError> {
        let mut retry = StartRetry::new(deadline);
        loop {
            match self.publish().await {
                Ok(()) => return Ok(()),
                Err(error @ DirectoryError::NameConflict { .. }) => return Err(error.into()),
                Err(error) if retry.is_expired() => return Err(error.into()),
                Err(error) => retry.pause("the metadata server", &error).await,
            }
        }
    }

    /// A metadata server that was restarted has lost what it knew.
    pub(crate) async fn run(&self, pulse: &HeartbeatState) {
        loop {
            tokio::select! {
                () = pulse.remounted.notified() => {}
                () = tokio::time::sleep(CHECK_PERIOD) => {
                    let name = self.handshakes.descriptor.load().name.clone();
                    if !matches!(self.directory.descriptor(&name).await, Err(DirectoryError::NotFound(_))) {
                        continue;
                    }
                }
            }
            if let Err(error) = self.publish().await {
                tracing::warn!(%error, "the metadata server does not know this node");
            }
        }
    }
}

/// Describes the node.
///
/// # Errors
/// When a socket has no address, or there can be no client for the metadata server.
pub(crate) fn describe_node(
    config: &NodeConfig,
    host: &NodeHost,
    place: &NodeListeners,
    membership: &NodeMembership,
    fabric: Option<&RdmaFabric>,
    tls: Option<&PeerTls>,
) -> Result<DescriptorPublisher, NodeStartError> {
    let data_host =
        if place.address.is_unspecified() { host.name.clone() } else { place.address.to_string() };
    let mut descriptor = SegmentDescriptor {
        name: membership.endpoint.to_string(),
        protocol: PROTOCOL.to_owned(),
        buffers: membership.pool.buffers(&membership.endpoint),
        tcp_data_host: data_host,
        tcp_data_port: place.data.local_addr()?.port(),
        tcp_proto_version: 2,
        timestamp: timestamp(),
        moongate: EXTENSIONS,
        ..SegmentDescriptor::default()
    };
    if let Some(fabric) = fabric {
        rdma::describe(fabric, &mut descriptor);
    }
    Ok(DescriptorPublisher {
        directory: DescriptorDirectory::authenticated(&config.metadata, tls)?,
        handshakes: Arc::new(Answers { descriptor: ArcSwap::from_pointee(descriptor) }),
        rpc: RpcMeta { ip_or_host_name: host.name.clone(), rpc_port: place.handshake.local_addr()?.port() },
    })
}

/// As Mooncake writes it, but for the time zone, which is always UTC.
fn timestamp() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string().replace('T', " ").replace('Z', "")
}
