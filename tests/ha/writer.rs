//! Mooncake's own client, which puts one key after the other.

use std::time::{Duration, Instant};

use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};

use crate::cluster::HaCluster;

/// Generous, because it only detects a test that hangs.
const LIMIT: Duration = Duration::from_secs(90);
/// Keys that are read at once.
const BATCH: usize = 100;

pub(crate) struct MooncakeWriter {
    node: RealNode,
    next: u64,
    /// The keys of all acknowledged puts.
    acknowledged: Vec<String>,
}

impl MooncakeWriter {
    pub(crate) async fn start(cluster: &HaCluster) -> Self {
        // Else a client waits 30 s for a master that sleeps.
        let variables = [("MC_RPC_TIMEOUT_MS", "1000")];
        let node =
            RealNode::start_with(NEWEST_WITHOUT_CUDA, &cluster.entry(), HANDSHAKE, 64, &variables).await;
        Self { node, next: 0, acknowledged: Vec::new() }
    }

    /// Puts until so many more have succeeded. Returns the longest time without a success.
    pub(crate) async fn write(&mut self, count: usize) -> Duration {
        let (begun, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
        let mut refused = Vec::new();
        let enough = self.acknowledged.len() + count;
        while self.acknowledged.len() < enough {
            let missing = enough - self.acknowledged.len();
            assert!(
                begun.elapsed() < LIMIT,
                "clients do not go on: {missing} of {count} puts are missing, the longest time without one \
                 was {:?}, refused were, after so long and with these codes: {refused:?}",
                longest.max(last.elapsed()),
            );
            self.next += 1;
            let key = format!("key-{}", self.next);
            let answer = self.node.send_command(&format!("put {key} 100")).await;
            if answer == "0" {
                longest = longest.max(last.elapsed());
                last = Instant::now();
                self.acknowledged.push(key);
            } else {
                refused.push((begun.elapsed(), answer));
            }
        }
        longest
    }

    /// Every key whose put succeeded can be read. On a busy machine a call may time out; then it is repeated.
    pub(crate) async fn check(&mut self) {
        for keys in self.acknowledged.chunks(BATCH) {
            let begun = Instant::now();
            loop {
                let read = self.node.send_command(&format!("read {}", keys.join(" "))).await;
                if read == keys.len().to_string() {
                    break;
                }
                let range = (&keys[0], &keys[keys.len() - 1]);
                assert!(begun.elapsed() < LIMIT, "{read} of {range:?} can be read");
            }
        }
    }
}
