//! Finds a master: at a fixed address, or at the address that the leader of several masters registered in etcd.

use std::sync::Arc;
use std::time::Duration;

use super::error::{MasterConnectError, RpcError};
use super::leader_lookup::EtcdLeaderLookup;
use super::master_address::MasterAddress;

/// Environment variable with the cluster's name, as in Mooncake's clients.
pub const CLUSTER_VARIABLE: &str = "MC_STORE_CLUSTER_ID";

/// Finds the master's `HOST:PORT` before each connection.
#[derive(Debug)]
pub struct MasterLocator {
    address: Arc<str>,
    source: Result<AddressSource, MasterConnectError>,
}

#[derive(Debug)]
enum AddressSource {
    Fixed,
    Etcd(EtcdLeaderLookup),
}

impl MasterLocator {
    /// A locator of the master at `address`. Each etcd endpoint has `time_limit` to respond.
    #[must_use]
    pub fn new(address: &str, time_limit: Duration) -> Self {
        let source = match MasterAddress::parse(address, None) {
            Ok(MasterAddress::Fixed(_)) => Ok(AddressSource::Fixed),
            Ok(MasterAddress::Etcd { endpoints, cluster }) => {
                let lookup = EtcdLeaderLookup::new(endpoints, &cluster, time_limit);
                lookup.map(AddressSource::Etcd).map_err(Into::into)
            }
            Err(error) => Err(MasterConnectError::Address(error)),
        };
        Self { address: address.into(), source }
    }

    /// The address as configured.
    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// The master's current `HOST:PORT`.
    ///
    /// # Errors
    /// [`RpcError::Unreachable`] when etcd cannot be reached or has no leader.
    pub async fn locate(&self) -> Result<Arc<str>, RpcError> {
        let located = match &self.source {
            Ok(AddressSource::Fixed) => Ok(Arc::clone(&self.address)),
            Ok(AddressSource::Etcd(lookup)) => lookup.leader().await.map(Arc::from).map_err(Into::into),
            Err(error) => Err(error.clone()),
        };
        located.map_err(|source| RpcError::Unreachable { address: Arc::clone(&self.address), source })
    }
}
