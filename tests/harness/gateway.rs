//! The gateway in this process.

use std::time::Duration;

use clap::Parser;
use moongate_gateway::{GatewayOptions, RunningGateway};
use moongate_runtime::Supervisor;
use moongate_telemetry::Tracer;
use serde_json::Value;

use super::{TEST_TIMEOUT, client};

#[derive(Debug, Parser)]
struct TestGatewayArgs {
    #[command(flatten)]
    gateway: GatewayOptions,
}

/// A gateway and the supervisor of its tasks.
pub(crate) struct TestGateway {
    pub(crate) running: RunningGateway,
    pub(crate) supervisor: Supervisor,
}

impl TestGateway {
    /// Starts one with these flags; without others, on free ports, without health checks, and with time for predictions on a busy machine.
    pub(crate) async fn start(flags: &[String]) -> Self {
        let mut args = vec!["moongate".to_owned()];
        for (name, value) in [
            ("--listen", "127.0.0.1:0"),
            ("--admin-listen", "127.0.0.1:0"),
            ("--health-interval", "0s"),
            ("--prompt-timeout", "30s"),
        ] {
            if !flags.iter().any(|flag| flag.starts_with(&format!("{name}="))) {
                args.push(format!("{name}={value}"));
            }
        }
        args.extend_from_slice(flags);
        let options = TestGatewayArgs::try_parse_from(args).unwrap_or_else(|error| panic!("{error}")).gateway;
        let supervisor = Supervisor::new();
        let running = moongate_gateway::start(&options, Tracer::disabled(), &supervisor).await.unwrap();
        Self { running, supervisor }
    }

    /// Starts one and waits until every engine that it was given takes part.
    pub(crate) async fn start_ready(flags: &[String]) -> Self {
        let gateway = Self::start(flags).await;
        let (client, url) = (client(), gateway.admin_url("/ready"));
        let mut last = Value::Null;
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let response = client.get(&url).send().await.unwrap();
                let ready = response.status() == 200;
                last = response.json().await.unwrap();
                if ready && last["waiting"].as_array().is_some_and(Vec::is_empty) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "the gateway is not ready: {last}");
        gateway
    }

    /// URL of a path at the clients' listener.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.running.address)
    }

    /// URL of a path at the admin listener.
    pub(crate) fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.running.admin_address)
    }
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}
