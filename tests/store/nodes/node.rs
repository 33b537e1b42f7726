//! A node in this process.

use clap::Parser as _;
use moongate_runtime::Supervisor;
use moongate_store_node::{NodeArgs, NodeConfig, RunningNode};
use moongate_store_testkit::LIMIT;

use super::masters::StoreMasterFixture;

pub(crate) const MEBIBYTES: u64 = 256;

pub(crate) struct InProcessNode {
    pub(crate) running: RunningNode,
    supervisor: Supervisor,
}

impl InProcessNode {
    pub(crate) async fn start(store: &StoreMasterFixture) -> Self {
        Self::start_with(store, &[]).await
    }

    /// As [`InProcessNode::start`], with additional flags.
    pub(crate) async fn start_with(store: &StoreMasterFixture, flags: &[&str]) -> Self {
        let line = ["moongate store", "--port=0"].into_iter().chain(flags.iter().copied());
        let flags = NodeArgs::try_parse_from(line).unwrap();
        let variables = [
            ("MOONCAKE_MASTER", store.rpc.clone()),
            ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1".to_owned()),
            ("MOONCAKE_TE_META_DATA_SERVER", store.metadata.clone()),
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE", format!("{MEBIBYTES}mb")),
        ];
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let config = NodeConfig::read(None, &flags.define, variable).unwrap();
        let supervisor = Supervisor::new();
        let running = moongate_store_node::start(flags, config, &supervisor).await.unwrap();
        Self { running, supervisor }
    }

    /// Stops the node in the same way as SIGTERM.
    pub(crate) async fn stop(self) {
        self.running.stop().await;
        self.supervisor.shutdown(LIMIT).await.unwrap();
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.running.http().unwrap())
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let response = reqwest::get(self.url(path)).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// The value of a metric with its labels.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
    }
}
