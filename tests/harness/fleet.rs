//! Fleets of simulated engines, alone or with a gateway in front.

use moongate_loadtest::engine::{
    RecordedRequest, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};

use super::client;
use super::gateway::TestGateway;

/// A fleet that is about to be started.
pub(crate) struct TestFleetBuilder {
    face: SimProtocol,
    connector: VllmConnector,
    prefill: usize,
    decode: usize,
    plain: usize,
    tune: Box<dyn Fn(SimEngineOptions) -> SimEngineOptions + Send + Sync>,
    flags: Vec<String>,
}

impl TestFleetBuilder {
    /// A builder without engines. Engines will use SGLang's protocol, and are a thousand times faster than real ones.
    pub(crate) fn sglang() -> Self {
        Self {
            face: SimProtocol::Sglang,
            connector: VllmConnector::Nixl,
            prefill: 0,
            decode: 0,
            plain: 0,
            tune: Box::new(SimEngineOptions::fast),
            flags: Vec::new(),
        }
    }

    /// The same with vLLM's protocol and one of its connectors.
    pub(crate) fn vllm(connector: VllmConnector) -> Self {
        Self { face: SimProtocol::Vllm, connector, ..Self::sglang() }
    }

    /// Adds pairs of a prefill and a decode engine.
    pub(crate) fn pairs(mut self, count: usize) -> Self {
        self.prefill += count;
        self.decode += count;
        self
    }

    pub(crate) fn prefill(mut self, count: usize) -> Self {
        self.prefill += count;
        self
    }

    pub(crate) fn decode(mut self, count: usize) -> Self {
        self.decode += count;
        self
    }

    /// Adds engines that do both.
    pub(crate) fn plain(mut self, count: usize) -> Self {
        self.plain += count;
        self
    }

    /// Changes the engines' settings. Replaces the default, which is [`SimEngineOptions::fast`].
    pub(crate) fn tune(
        mut self,
        tune: impl Fn(SimEngineOptions) -> SimEngineOptions + Send + Sync + 'static,
    ) -> Self {
        self.tune = Box::new(tune);
        self
    }

    /// Adds a flag of the gateway.
    pub(crate) fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Starts the engines, without a gateway.
    pub(crate) async fn engines(&self) -> TestEngines {
        let fleet = SharedL3Store::new(1 << 20);
        let mut by_role = [Vec::new(), Vec::new(), Vec::new()];
        let wanted =
            [(SimRole::Prefill, self.prefill), (SimRole::Decode, self.decode), (SimRole::Plain, self.plain)];
        for ((role, count), list) in wanted.into_iter().zip(&mut by_role) {
            for _ in 0..count {
                let mut config = (self.tune)(SimEngineOptions::new(role, self.face));
                config.connector = self.connector;
                list.push(SimEngine::start_with_store(config, &fleet).await.unwrap());
            }
        }
        let [prefills, decodes, workers] = by_role;
        TestEngines { prefills, decodes, workers }
    }

    /// Starts the engines and a gateway, and waits until all are usable.
    pub(crate) async fn start(self) -> TestFleet {
        let engines = self.engines().await;
        let mut flags = engines.flags();
        flags.extend(self.flags);
        let gateway = TestGateway::start_ready(&flags).await;
        TestFleet { engines, gateway, client: client() }
    }
}

/// Running engines of all roles.
pub(crate) struct TestEngines {
    pub(crate) prefills: Vec<SimEngine>,
    pub(crate) decodes: Vec<SimEngine>,
    pub(crate) workers: Vec<SimEngine>,
}

impl TestEngines {
    pub(crate) fn all(&self) -> impl Iterator<Item = &SimEngine> {
        self.prefills.iter().chain(&self.decodes).chain(&self.workers)
    }

    /// The gateway's flags that name them.
    pub(crate) fn flags(&self) -> Vec<String> {
        let prefills = self.prefills.iter().map(|engine| {
            let port = engine.bootstrap_addr().map(|address| format!(",{}", address.port()));
            format!("--prefill={}{}", engine.url(), port.unwrap_or_default())
        });
        let decodes = self.decodes.iter().map(|engine| format!("--decode={}", engine.url()));
        let workers = self.workers.iter().map(|engine| format!("--worker={}", engine.url()));
        prefills.chain(decodes).chain(workers).collect()
    }

    /// Number of generation requests that have reached the engines.
    pub(crate) fn started(&self) -> u64 {
        self.all().map(|engine| engine.stats().started).sum()
    }
}

/// Engines with a gateway in front of them.
pub(crate) struct TestFleet {
    pub(crate) engines: TestEngines,
    pub(crate) gateway: TestGateway,
    pub(crate) client: reqwest::Client,
}

impl TestFleet {
    /// Name of the model that the first engine serves.
    pub(crate) fn model(&self) -> String {
        self.engines.all().next().unwrap().options().model.clone()
    }

    /// Posts a JSON text as it is.
    pub(crate) async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> reqwest::Response {
        let request = self.client.post(self.gateway.url(path)).header("content-type", "application/json");
        request.body(body).send().await.unwrap()
    }

    /// The latest request that an engine got.
    pub(crate) fn last_request(engine: &SimEngine) -> RecordedRequest {
        engine.recent_requests(1).pop().expect("the engine has got a request")
    }
}
