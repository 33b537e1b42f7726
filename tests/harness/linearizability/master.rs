//! A master's clients without memory of their own, and a node that has some.

use std::time::Duration;

use mooncake_wire::rpc::{ReMountSegment, RemountArguments};
use mooncake_wire::types::{Segment, Uuid};
use moongate_master_client::rpc::{MasterClient, MasterClientOptions};
use moongate_runtime::{BackoffPolicy, Supervisor};

/// Long, because it only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);
const NODE: Uuid = Uuid { first: 1, second: 1 };

fn segment() -> Segment<String> {
    Segment {
        id: Uuid { first: 5, second: 5 },
        name: "node".to_owned(),
        base: 1 << 40,
        size: 8 << 30,
        te_endpoint: "node".to_owned(),
        protocol: "tcp".to_owned(),
        host_id: String::new(),
        locality: None,
    }
}

/// One connection to a master.
pub(crate) fn connect(address: &str, supervisor: &Supervisor) -> MasterClient {
    let retry = BackoffPolicy { initial: Duration::from_millis(5), max: Duration::from_millis(20) };
    MasterClient::new(
        address,
        MasterClientOptions { connections: 1, timeout: LIMIT, retry, ..MasterClientOptions::default() },
        supervisor,
    )
}

/// Mounts the node's memory, as its client does when the master requires it. Waits until the master serves calls.
pub(crate) async fn mount(master: &MasterClient) {
    let arguments = RemountArguments { segments: vec![segment()], client_id: NODE };
    let mount = async {
        while !matches!(master.call::<ReMountSegment, String>(&arguments).await, Ok(Ok(()))) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, mount).await.unwrap();
}
