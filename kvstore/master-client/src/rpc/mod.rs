//! RPC client of a Mooncake master.
//!
//! A [`MasterClient`] has a few connections, each driven by one supervised task. Calls are pipelined on each, and responses are
//! matched by sequence number. A connection is opened by the first call that needs it, and again after it broke. While the master
//! is unreachable, calls fail at once instead of waiting. If several masters publish their leader in etcd, it is looked up before
//! each connection ([`MasterAddress`]).
//!
//! The protocol has no version handshake. A call uses the dialect that worked last, at first the newest. If the master refuses
//! the arguments, older formats are tried. The format of a response also identifies the master's release.
//!
//! [`ObjectClient`] has the calls about objects, [`MasterClient::call`] makes any call. A [`DiskNodeClient`] uses the same
//! protocol.

mod connection;
mod dialect_guess;
mod disk;
mod error;
mod grants;
mod leader_lookup;
mod locate;
mod master;
mod master_address;
mod objects;
mod session;
mod shard_check;
mod store_masters;
mod transport;

pub use disk::{DiskNodeClient, StagedObject};
pub use error::{ConnectionLossError, MasterConnectError, RpcError, RpcProtocolError};
pub use grants::{GrantTable, StoreCredentials};
pub use leader_lookup::{EtcdEndpointError, LeaderLookupError, LeaderRecordError, leader_key};
pub use locate::{CLUSTER_VARIABLE, MasterLocator};
pub use master::{MasterClient, MasterClientOptions};
pub use master_address::{MasterAddress, MasterAddressError};
pub use objects::{ObjectClient, PutMode};
