//! Publishes the node's descriptor, by which peers find it, through the handshake port and the metadata server.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use moongate_rdma::RdmaFabric;
use moongate_runtime::PeerTls;
use moongate_transfer::descriptor::RpcMeta;
use moongate_transfer::handshake::TcpHandshakeHandler;
use moongate_transfer::shared::SharedMemoryServer;
use moongate_transfer::{DescriptorDirectory, DirectoryError, SegmentDescriptor};
use tokio::time::Instant;

use crate::config::{NodeConfig, TCP_PROTOCOL};
use crate::error::NodeStartError;
use crate::heartbeat::HeartbeatState;
use crate::listeners::{NodeHost, NodeListeners};
use crate::membership::NodeMembership;
use crate::rdma;
use crate::start_retry::StartRetry;

/// Interval of checks that the metadata server still has the descriptor.
const CHECK_PERIOD: Duration = Duration::from_secs(10);
/// Version of Moongate's data-plane extensions in the descriptor.
const EXTENSIONS: u32 = 1;

/// Builds and publishes the node's descriptor.
#[derive(Clone)]
pub(crate) struct DescriptorPublisher {
    pub(crate) directory: DescriptorDirectory,
    pub(crate) handshakes: Arc<TcpHandshakeHandler>,
    rpc: RpcMeta,
}

impl DescriptorPublisher {
    /// Updates the descriptor to the segments that are mounted now.
    pub(crate) fn update_descriptor(&self, membership: &NodeMembership) {
        self.handshakes.descriptor.rcu(|old| SegmentDescriptor {
            buffers: membership.pool.buffers(&membership.endpoint),
            timestamp: timestamp(),
            ..SegmentDescriptor::clone(old)
        });
    }

    /// Adds the socket from which clients on this host get the memory. Call before the descriptor is published.
    pub(crate) fn announce_shared_memory(&self, server: Option<&SharedMemoryServer>) {
        self.handshakes.descriptor.rcu(|old| SegmentDescriptor {
            moongate_shared_memory: server.map(|server| server.address().clone()),
            ..SegmentDescriptor::clone(old)
        });
    }

    pub(crate) async fn publish(&self) -> Result<(), DirectoryError> {
        let descriptor = self.handshakes.descriptor.load_full();
        self.directory.publish(&descriptor, &self.rpc).await
    }

    /// Publishes the descriptor, with retries until the deadline: the metadata server may not be up yet.
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

    /// Publishes again after remounts, and when a restarted metadata server has lost the descriptor.
    pub(crate) async fn run(&self, heartbeat: &HeartbeatState) {
        loop {
            tokio::select! {
                () = heartbeat.remounted.notified() => {}
                () = tokio::time::sleep(CHECK_PERIOD) => {
                    let name = self.handshakes.descriptor.load().name.clone();
                    if !matches!(self.directory.descriptor(&name).await, Err(DirectoryError::NotFound(_))) {
                        continue;
                    }
                }
            }
            if let Err(error) = self.publish().await {
                tracing::warn!(%error, "cannot publish this node's descriptor to the metadata server");
            }
        }
    }
}

/// Builds the node's first descriptor.
///
/// # Errors
/// When a socket has no address, or the client of the metadata server cannot be created.
pub(crate) fn describe_node(
    config: &NodeConfig,
    host: &NodeHost,
    listeners: &NodeListeners,
    membership: &NodeMembership,
    fabric: Option<&RdmaFabric>,
    tls: Option<&PeerTls>,
) -> Result<DescriptorPublisher, NodeStartError> {
    let data_host =
        if listeners.address.is_unspecified() { host.name.clone() } else { listeners.address.to_string() };
    let mut descriptor = SegmentDescriptor {
        name: membership.endpoint.to_string(),
        protocol: TCP_PROTOCOL.to_owned(),
        buffers: membership.pool.buffers(&membership.endpoint),
        tcp_data_host: data_host,
        tcp_data_port: listeners.data.local_addr()?.port(),
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
        handshakes: Arc::new(TcpHandshakeHandler { descriptor: ArcSwap::from_pointee(descriptor) }),
        rpc: RpcMeta {
            ip_or_host_name: host.name.clone(),
            rpc_port: listeners.handshake.local_addr()?.port(),
        },
    })
}

/// The time in Mooncake's format, but always in UTC.
fn timestamp() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string().replace('T', " ").replace('Z', "")
}
