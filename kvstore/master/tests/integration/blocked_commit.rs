//! A commit that waits for a disk or for followers does not block other connections.

use std::io;
use std::sync::Arc;

use mooncake_wire::rpc::ExistKey;
use mooncake_wire::types::Uuid;
use moongate_master::journal::{Journal, MemoryJournal};
use moongate_master::{LeadershipStatus, MasterServer, MasterServerOptions, RpcLimits, rpc};
use moongate_runtime::Supervisor;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::test_master::{TestRpcConnection, key};
use parking_lot::{Condvar, Mutex};

/// A journal whose commits block while it is closed.
struct GatedJournal {
    facts: MemoryJournal,
    is_closed: Mutex<bool>,
    opened: Condvar,
}

impl GatedJournal {
    fn set_closed(&self, closed: bool) {
        *self.is_closed.lock() = closed;
        self.opened.notify_all();
    }
}

impl Journal for GatedJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        self.facts.append(fact)
    }

    fn commit(&self, _: u64) -> io::Result<()> {
        self.opened.wait_while(&mut self.is_closed.lock(), |closed| *closed);
        Ok(())
    }
}

#[tokio::test]
async fn a_blocked_commit_does_not_block_other_connections() {
    let gate = Arc::new(GatedJournal {
        facts: MemoryJournal::new(1 << 16),
        is_closed: Mutex::new(false),
        opened: Condvar::new(),
    });
    let limits = RpcLimits { commits_wait: true, ..RpcLimits::default() };
    let options = MasterServerOptions { limits, ..MasterServerOptions::default() };
    let server = Arc::new(MasterServer::new(options, Arc::clone(&gate) as Arc<_>));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let supervisor = Supervisor::new();
    let rpc = rpc::serve(&server, "127.0.0.1:0".parse().unwrap(), 1, &supervisor).unwrap();
    let address = rpc.address().to_string();

    let (mut writer, mut reader) =
        (TestRpcConnection::connect(&address).await, TestRpcConnection::connect(&address).await);
    let node = Uuid { first: 1, second: 2 };
    writer.mount(node, 1 << 24).await;
    writer.put(node, "k", 1000).await;
    gate.set_closed(true);
    let mut put = std::pin::pin!(writer.put(node, "late", 1000));
    let query = key("k");
    for _ in 0..100 {
        tokio::select! {
            biased;
            () = &mut put => panic!("reply before the commit"),
            found = reader.call::<ExistKey>(&query) => assert_eq!(found, Ok(true)),
        }
    }
    gate.set_closed(false);
    tokio::time::timeout(LIMIT, put).await.expect("reply after the commit");
    assert_eq!(reader.call::<ExistKey>(&key("late")).await, Ok(true));
    supervisor.shutdown(LIMIT).await.unwrap();
}
