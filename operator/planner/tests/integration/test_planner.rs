//! A namespace with engines, a gateway, and a planner that scales them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use kube::api::PostParams;
use moongate_planner::{PlanBoard, PlannerMetrics, PlannerOptions, admin};
use moongate_runtime::{ClientTls, ClientTlsFiles, Supervisor, bind};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::scripted_gateway::{GatewayLoad, ScriptedGateway};

/// Generous, because it only detects a test that hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const PREFILL: &str = "deployments.v1.apps/prefill";
pub(crate) const DECODE: &str = "deployments.v1.apps/decode";

/// The objects outside the planner.
pub(crate) struct TestCluster {
    plane: Arc<ControlPlane>,
    pub(crate) namespace: TestNamespace,
    pub(crate) gateway: ScriptedGateway,
    folder: TempDir,
    supervisor: Supervisor,
    _kubelet: FakeKubelet,
}

/// A running planner.
pub(crate) struct TestPlanner {
    supervisor: Supervisor,
    running: tokio::task::JoinHandle<()>,
    admin: String,
}

/// Loads are for one prefill engine that computes 1,000 tokens per second, and one decode engine that generates as many.
pub(crate) const QUIET: GatewayLoad = GatewayLoad {
    requests_per_s: 2.0,
    prompt_tokens: 100.0,
    generated_tokens: 50.0,
    prefill_engines: 1,
    busy_prefill_engines: 0,
    decode_engines: 1,
    is_failing: false,
};

impl TestCluster {
    pub(crate) async fn new(name: &str, load: GatewayLoad) -> Self {
        let plane = ControlPlane::shared().await.unwrap();
        let namespace = plane.namespace(name).await.unwrap();
        let client = namespace.client.clone();
        let kubelet = FakeKubelet::start(client, &namespace.name, KubeletTimings::default()).await.unwrap();
        let supervisor = Supervisor::new();
        let gateway = ScriptedGateway::start(load, &supervisor).await;
        let folder = tempfile::tempdir().unwrap();
        Self { plane, namespace, gateway, folder, supervisor, _kubelet: kubelet }
    }

    pub(crate) fn deployments(&self) -> Api<Deployment> {
        Api::default_namespaced(self.namespace.client.clone())
    }

    pub(crate) async fn create_engines(&self, name: &str, replicas: u32) {
        let labels = json!({ "engine": name });
        let deployment = json!({
            "metadata": { "name": name },
            "spec": {
                "replicas": replicas,
                "selector": { "matchLabels": labels },
                "template": {
                    "metadata": { "labels": labels },
                    "spec": {
                        "terminationGracePeriodSeconds": 1,
                        "containers": [{ "name": "engine", "image": "engine:1" }],
                    },
                },
            },
        });
        let deployment: Deployment = serde_json::from_value(deployment).unwrap();
        let deployments = self.deployments();
        deployments.create(&PostParams::default(), &deployment).await.unwrap();
        eventually("the engines are ready", async || {
            let status = deployments.get(name).await.unwrap().status.unwrap_or_default();
            (status.ready_replicas.unwrap_or(0) == i32::try_from(replicas).unwrap()).then_some(())
        })
        .await;
    }

    pub(crate) async fn replicas(&self, name: &str) -> u32 {
        let deployment = self.deployments().get(name).await.unwrap();
        u32::try_from(deployment.spec.unwrap().replicas.unwrap()).unwrap()
    }

    /// Writes the file of deployments. Engines start in a second, and capacities are those of the loads.
    pub(crate) fn write_file(&self, prefill: &str, decode: &str) {
        let role = json!({
            "min": 1,
            "max": 8,
            "first_tokens_per_s": 1000,
            "start": { "start_s": 1, "warmup_s": 0, "drain_s": 0 },
        });
        let deployment = json!({
            "name": "llama",
            "namespace": self.namespace.name,
            "gateways": [format!("http://{}/metrics", self.gateway.address)],
            "scale": { "prefill": prefill, "decode": decode },
            "settings": { "interval_s": 1, "prefill": role, "decode": role },
        });
        // JSON is YAML.
        std::fs::write(self.file(), json!({ "deployments": [deployment] }).to_string()).unwrap();
    }

    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("deployments.yaml")
    }

    pub(crate) fn start_planner(&self, dry_run: bool) -> TestPlanner {
        let supervisor = Supervisor::new();
        let options = PlannerOptions {
            kubeconfig: Some(self.plane.kubeconfig()),
            deployments: self.file(),
            own_namespace: self.namespace.name.clone(),
            dry_run,
            gateway_tls: ClientTls::load(ClientTlsFiles::default()).unwrap(),
            metrics: Arc::<PlannerMetrics>::default(),
            plans: Arc::<PlanBoard>::default(),
        };
        let (metrics, plans) = (Arc::clone(&options.metrics), Arc::clone(&options.plans));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        admin::start(bind(address).unwrap(), metrics, plans, &supervisor);
        let of_task = supervisor.clone();
        let running = self.supervisor.spawn("planner", async move {
            moongate_planner::run(options, &of_task).await.unwrap();
        });
        TestPlanner { supervisor, running, admin: format!("http://{address}") }
    }

    pub(crate) async fn end(self) {
        self.namespace.delete().await.unwrap();
        self.supervisor.token().cancel();
    }
}

impl TestPlanner {
    async fn get(&self, path: &str) -> (u16, String) {
        let response = reqwest::get(format!("{}{path}", self.admin)).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    pub(crate) async fn metrics(&self) -> String {
        self.get("/metrics").await.1
    }

    pub(crate) async fn is_ready(&self) -> bool {
        self.get("/readyz").await.0 == 200
    }

    /// The last step of the only deployment.
    pub(crate) async fn plan(&self) -> Value {
        let plans: Value = serde_json::from_str(&self.get("/plan").await.1).unwrap();
        plans["deployments"][0].clone()
    }

    /// The first step later than the present one for which this returns a value.
    pub(crate) async fn wait_for_plan<T>(&self, what: &str, mut check: impl FnMut(&Value) -> Option<T>) -> T {
        let before = self.plan().await["time_s"].as_f64();
        eventually(what, async || {
            let plan = self.plan().await;
            let is_later = plan["time_s"].as_f64() > before;
            is_later.then(|| check(&plan)).flatten()
        })
        .await
    }

    /// Waits for this many more steps.
    pub(crate) async fn wait_for_steps(&self, steps: usize) {
        for _ in 0..steps {
            self.wait_for_plan("a step", |_| Some(())).await;
        }
    }

    /// Ends the planner, which writes what it has learned.
    pub(crate) async fn stop(self) {
        self.supervisor.token().cancel();
        self.running.await.unwrap();
    }
}

/// Polls until `poll` returns a value.
pub(crate) async fn eventually<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = poll().await {
            return value;
        }
        assert!(started.elapsed() < TEST_TIMEOUT, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
