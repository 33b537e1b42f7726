//! How a node is found: its descriptor, and the metadata server that has it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use moongate_rdma::Fabric;
use moongate_runtime::PeerTls;
use moongate_transfer::descriptor::RpcMeta;
use moongate_transfer::handshake::Node as Answers;
use moongate_transfer::{Directory, DirectoryError, SegmentDescriptor};
use tokio::time::Instant;

use crate::config::Config;
use crate::error::StartError;
use crate::heartbeat::Pulse;
use crate::membership::{Membership, PROTOCOL};
use crate::place::{Host, Place};
use crate::rdma;
use crate::start_retry::StartRetry;

/// How often it is looked whether the metadata server still has the descriptor.
const PUBLISH: Duration = Duration::from_secs(10);
/// The extensions that this node's data plane has.
const EXTENSIONS: u32 = 1;

/// How a node is found.
#[derive(Clone)]
pub(crate) struct Presence {
    pub(crate) directory: Directory,
    pub(crate) answers: Arc<Answers>,
    rpc: RpcMeta,
}

impl Presence {
    /// Describes what the node lends now.
    pub(crate) fn change(&self, membership: &Membership) {
        self.answers.descriptor.rcu(|old| SegmentDescriptor {
            buffers: membership.pool.buffers(&membership.endpoint),
            timestamp: timestamp(),
            ..SegmentDescriptor::clone(old)
        });
    }

    pub(crate) async fn publish(&self) -> Result<(), DirectoryError> {
        let descriptor = self.answers.descriptor.load_full();
        self.directory.publish(&descriptor, &self.rpc).await
    }

    /// Tells the metadata server of the node, which may not be there yet.
    pub(crate) async fn enter(&self, deadline: Instant) -> Result<(), StartError> {
        let mut retry = StartRetry::new(deadline);
        loop {
            match self.publish().await {
                Ok(()) => return Ok(()),
                Err(error @ DirectoryError::Taken { .. }) => return Err(error.into()),
                Err(error) if retry.is_over() => return Err(error.into()),
                Err(error) => retry.pause("the metadata server", &error).await,
            }
        }
    }

    /// A metadata server that was restarted has lost what it knew.
    pub(crate) async fn keep(&self, pulse: &Pulse) {
        loop {
            tokio::select! {
                () = pulse.remounted.notified() => {}
                () = tokio::time::sleep(PUBLISH) => {
                    let name = self.answers.descriptor.load().name.clone();
                    if !matches!(self.directory.descriptor(&name).await, Err(DirectoryError::Unknown(_))) {
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
pub(crate) fn present(
    config: &Config,
    host: &Host,
    place: &Place,
    membership: &Membership,
    fabric: Option<&Fabric>,
    tls: Option<&PeerTls>,
) -> Result<Presence, StartError> {
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
    Ok(Presence {
        directory: Directory::authenticated(&config.metadata, tls)?,
        answers: Arc::new(Answers { descriptor: ArcSwap::from_pointee(descriptor) }),
        rpc: RpcMeta { ip_or_host_name: host.name.clone(), rpc_port: place.handshake.local_addr()?.port() },
    })
}

/// As Mooncake writes it, but for the time zone, which is always UTC.
fn timestamp() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string().replace('T', " ").replace('Z', "")
}
