//! Calls to a Mooncake master.
//!
//! A [`MasterClient`] has a few connections, each driven by one supervised task. Any number of calls is under way on
//! each; replies find their calls by the sequence number. A connection is opened by the first call that needs it,
//! and again after it broke; while the master cannot be reached, calls fail at once instead of waiting. Where several masters publish
//! their leader in etcd, it is looked up before each connection ([`MasterAddress`]).
//!
//! Nothing tells the master's release beforehand. A call is made in the dialect that fitted last, at first in the
//! newest. A master that refuses the arguments is asked in older forms; one that answers in another form than
//! expected has told its release by that.
//!
//! [`ObjectClient`] has the calls about objects, [`MasterClient::call`] makes any call. A [`DiskNodeClient`] is
//! called in the same way.

mod connection;
mod dialect_guess;
mod disk;
mod error;
mod grants;
mod locate;
mod master;
mod objects;
mod session;
mod transport;

pub use disk::DiskNodeClient;
pub use error::RpcError;
pub use grants::{GrantTable, StoreCredentials};
pub use locate::{CLUSTER_VARIABLE, MasterAddress, MasterAddressError, MasterLocator, leader_key};
pub use master::{MasterClient, MasterClientOptions};
pub use objects::{ObjectClient, PutMode};
