//! A caller that checks whether a master responds.

use std::time::Duration;

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::rpc::{ExistKey, KeyArguments, encode_request};
use mooncake_wire::types::DEFAULT_TENANT;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::cluster::HaCluster;

/// A master without a response within this time counts as unresponsive.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A caller on a connection that stays.
pub(crate) struct MasterProbe(TcpStream);

impl MasterProbe {
    pub(crate) async fn connect(cluster: &HaCluster, master: usize) -> Self {
        Self(TcpStream::connect(cluster.address(master)).await.unwrap())
    }

    /// Sends a query that only a leader may answer.
    pub(crate) async fn send(&mut self) {
        let mut request = BytesMut::new();
        let key = KeyArguments { key: "key-1", tenant: DEFAULT_TENANT };
        encode_request::<ExistKey, &str>(1, Dialect::NEWEST, &key, &mut request).unwrap();
        // A connection that is closed already is as good as one that is closed now.
        let _ = self.0.write_all(&request).await;
    }

    /// Whether a response arrives before the timeout and the end of the connection.
    pub(crate) async fn receives_response(&mut self) -> bool {
        // A response has a few bytes, in one packet.
        let mut bytes = [0; 4096];
        let read = tokio::time::timeout(RESPONSE_TIMEOUT, self.0.read(&mut bytes)).await;
        read.is_ok_and(|read| read.is_ok_and(|length| length > 0))
    }

    pub(crate) async fn responds(&mut self) -> bool {
        self.send().await;
        self.receives_response().await
    }
}
