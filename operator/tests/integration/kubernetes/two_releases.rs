//! Two releases of the operator in one cluster.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use moongate_operator::controllers::OperatorError;
use moongate_operator::{GangScheduler, OperatorMetrics, OperatorOptions, SizeLimits, admin, webhooks};
use moongate_runtime::{Supervisor, bind};
use moongate_testkit::{ControlPlane, TestNamespace};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::{TEST_TIMEOUT, eventually, install};

/// The owner has 7 s for a late renewal, which takes five requests, when other tests load the machine.
const TIMING: webhooks::OwnershipTiming =
    webhooks::OwnershipTiming { renewal: Duration::from_secs(2), expiry: Duration::from_secs(9) };

const SERVICE: &str = "operator";

/// An operator with webhooks in a namespace of its own.
struct Release {
    metrics: Arc<OperatorMetrics>,
    supervisor: Supervisor,
    operator: JoinHandle<Result<(), OperatorError>>,
}

impl Release {
    /// Starts a release that watches all namespaces, or only one.
    fn start(plane: &ControlPlane, own: &TestNamespace, watched: Option<&str>) -> Self {
        let (metrics, supervisor) = (Arc::<OperatorMetrics>::default(), Supervisor::new());
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let webhook_options = webhooks::WebhookOptions {
            namespace: own.name.clone(),
            service: SERVICE.to_owned(),
            port: listener.local_addr().unwrap().port(),
            secret: "webhooks".to_owned(),
            size_limits: SizeLimits::default(),
            gang_scheduler: GangScheduler::default(),
            ownership: TIMING,
        };
        let (client, counted) = (own.client.clone(), Arc::clone(&metrics));
        let owner = webhooks::start(listener, client, webhook_options, counted, &supervisor).unwrap();
        let options = OperatorOptions {
            kubeconfig: Some(plane.kubeconfig()),
            namespace: watched.map(str::to_owned),
            lease: Some((own.name.clone(), "rbg-controller".to_owned())),
            webhook_owner: Some(owner),
            metrics: Arc::clone(&metrics),
            ..OperatorOptions::default()
        };
        let operator = tokio::spawn({
            let supervisor = supervisor.clone();
            async move { moongate_operator::run(options, &supervisor).await }
        });
        Self { metrics, supervisor, operator }
    }

    fn has_metric(&self, line: &str) -> bool {
        self.metrics.text().lines().any(|other| other == line)
    }

    async fn wait_until_leading(&self, what: &str) {
        eventually(what, async || {
            (self.has_metric("moongate_operator_leading 1") && self.metrics.is_ready()).then_some(())
        })
        .await;
    }

    async fn stop(self) {
        self.supervisor.token().cancel();
        self.operator.await.unwrap().unwrap();
        self.supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    }

    /// The response of `/readyz`.
    async fn readiness(&self) -> String {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        admin::start(listener, Arc::clone(&self.metrics), &self.supervisor);
        let request = b"GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }
}

/// Versions of the cluster-scoped objects, and the namespaces of their webhooks' Services.
async fn registered(client: &Client) -> (Vec<String>, BTreeSet<String>) {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let definitions = definitions.list(&ListParams::default()).await.unwrap().items;
    let configurations = Api::<ValidatingWebhookConfiguration>::all(client.clone());
    let configurations = configurations.list(&ListParams::default()).await.unwrap().items;
    let mut services = BTreeSet::new();
    for definition in &definitions {
        let conversion = definition.spec.conversion.clone().and_then(|conversion| conversion.webhook);
        let service = conversion.and_then(|webhook| webhook.client_config?.service);
        services.extend(service.map(|service| service.namespace));
    }
    for webhook in configurations.iter().flat_map(|configuration| configuration.webhooks.iter().flatten()) {
        services.extend(webhook.client_config.service.clone().map(|service| service.namespace));
    }
    let metadata = definitions.into_iter().map(|object| object.metadata);
    let metadata = metadata.chain(configurations.into_iter().map(|object| object.metadata));
    (metadata.filter_map(|metadata| metadata.resource_version).collect(), services)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_release_owns_the_webhooks_until_it_ends() {
    let plane = ControlPlane::start().await.unwrap();
    let (a, b) = (plane.namespace("a").await.unwrap(), plane.namespace("b").await.unwrap());
    let client = &a.client;
    install(client).await;
    for namespace in [&a, &b] {
        let service: Service = serde_json::from_value(json!({ "metadata": { "name": SERVICE },
            "spec": { "type": "ExternalName", "externalName": "localhost" } }))
        .unwrap();
        let services = Api::<Service>::default_namespaced(namespace.client.clone());
        services.create(&PostParams::default(), &service).await.unwrap();
    }
    let first = Release::start(&plane, &a, None);
    first.wait_until_leading("the first release leads").await;
    let (mut versions, services) = registered(client).await;
    assert_eq!(services, [a.name.clone()].into());
    let second = Release::start(&plane, &b, None);
    let besides = Release::start(&plane, &b, Some(&b.name));
    besides.wait_until_leading("a release for one namespace reconciles it").await;

    let (started, mut writes) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(7) {
        let (now, services) = registered(client).await;
        assert_eq!(services, [a.name.clone()].into());
        writes += now.iter().filter(|version| !versions.contains(version)).count();
        versions = now;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Renewals by the owner.
    assert!((1..=5).contains(&writes), "{writes} writes in 7 s");
    assert!(first.has_metric("moongate_operator_webhooks_owned 1"));
    assert!(second.has_metric("moongate_operator_webhooks_owned 0"));
    assert!(second.has_metric("moongate_operator_leading 0"));
    let ready = second.readiness().await;
    let expected = format!("release {}/operator owns the webhooks", a.name);
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains(&expected), "{ready}");
    assert!(besides.readiness().await.starts_with("HTTP/1.1 200"));

    besides.stop().await;
    first.stop().await;
    let stopped = Instant::now();
    second.wait_until_leading("the second release takes over").await;
    assert!(stopped.elapsed() > TIMING.expiry - TIMING.renewal * 2, "{:?}", stopped.elapsed());
    assert_eq!(registered(client).await.1, [b.name.clone()].into());
    assert!(second.readiness().await.starts_with("HTTP/1.1 200"));

    // The first one comes back, and waits.
    let first = Release::start(&plane, &a, None);
    tokio::time::sleep(TIMING.renewal).await;
    assert!(first.has_metric("moongate_operator_leading 0") && !first.metrics.is_ready());
    assert_eq!(registered(client).await.1, [b.name.clone()].into());

    // The second one is uninstalled.
    let services = Api::<Service>::default_namespaced(b.client.clone());
    services.delete(SERVICE, &DeleteParams::default()).await.unwrap();
    eventually("the second release stops", async || second.operator.is_finished().then_some(())).await;
    assert!(matches!(second.operator.await.unwrap(), Err(OperatorError::Owner(_))));
    second.supervisor.token().cancel();
    first.wait_until_leading("the first release takes over").await;
    assert_eq!(registered(client).await.1, [a.name.clone()].into());
    first.stop().await;
}
