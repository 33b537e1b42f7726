//! The webhooks, called by a real API server and by other clients.

mod caller;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams,
};
use kube::{Client, Error};
use moongate_operator::{GangScheduler, ResourceKind, SizeLimits, webhooks};
use moongate_runtime::{Supervisor, bind};
use moongate_testkit::{ControlPlane, TestNamespace};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{TEST_TIMEOUT, eventually, install};
use caller::post;

const SERVICE: &str = "webhooks";
const SECRET: &str = "certificate";

/// Starts the webhooks at an address; port 0 selects a free port.
fn start(namespace: &TestNamespace, address: SocketAddr) -> (Supervisor, SocketAddr) {
    let supervisor = Supervisor::new();
    let listener = bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    let options = webhooks::WebhookOptions {
        namespace: namespace.name.clone(),
        service: SERVICE.to_owned(),
        port: address.port(),
        secret: SECRET.to_owned(),
        size_limits: SizeLimits::default(),
        gang_scheduler: GangScheduler::default(),
        ownership: webhooks::OwnershipTiming::default(),
    };
    webhooks::start(listener, namespace.client.clone(), options, Arc::default(), &supervisor).unwrap();
    (supervisor, address)
}

/// Creates a Service that points to this machine.
async fn lead_here(client: &Client) {
    let service: Service = serde_json::from_value(json!({ "metadata": { "name": SERVICE },
        "spec": { "type": "ExternalName", "externalName": "localhost" } }))
    .unwrap();
    Api::default_namespaced(client.clone()).create(&PostParams::default(), &service).await.unwrap();
}

/// Waits until the webhooks with the Secret's certificate convert and validate objects.
async fn registered(client: &Client) -> Secret {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let configurations = Api::<ValidatingWebhookConfiguration>::all(client.clone());
    let secrets = Api::<Secret>::default_namespaced(client.clone());
    eventually("the webhooks are registered", async || {
        let secret = secrets.get_opt(SECRET).await.unwrap()?;
        let trusted = secret.data.clone()?.remove("ca.crt")?;
        for name in ["rolebasedgroups", "rolebasedgroupsets"] {
            let crd = definitions.get(&format!("{name}.workloads.x-k8s.io")).await.unwrap();
            let config = crd.spec.conversion?.webhook?.client_config?;
            (config.ca_bundle? == trusted).then_some(())?;
            let status = crd.status.unwrap_or_default();
            let mut conditions = status.conditions.into_iter().flatten();
            conditions.find(|one| one.type_ == "Established" && one.status == "True")?;
        }
        let configuration = configurations.get_opt("rbgs-validating-webhook-configuration").await.unwrap()?;
        let mut webhooks = configuration.webhooks?.into_iter();
        webhooks.all(|webhook| webhook.client_config.ca_bundle == Some(trusted.clone())).then_some(secret)
    })
    .await
}

fn api(client: &Client, version: ApiVersion, kind: &str) -> Api<DynamicObject> {
    let version = version.api_version().rsplit('/').next().unwrap();
    let gvk = GroupVersionKind::gvk("workloads.x-k8s.io", version, kind);
    let plural = format!("{}s", kind.to_lowercase());
    Api::default_namespaced_with(client.clone(), &ApiResource::from_gvk_with_plural(&gvk, &plural))
}

fn group(name: &str, role: Value) -> DynamicObject {
    serde_json::from_value(json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": name }, "spec": { "roles": [role] } }))
    .unwrap()
}

fn role() -> Value {
    json!({ "name": "a", "replicas": 1, "standalonePattern": { "template": { "spec": {
        "containers": [{ "name": "engine", "image": "engine:1" }] } } } })
}

/// Creates a group; this may fail for a while after the API server's configuration has changed.
async fn make(client: &Client, name: &str) {
    let groups = api(client, ApiVersion::V1alpha2, "RoleBasedGroup");
    eventually("a group can be created", async || {
        match groups.create(&PostParams::default(), &group(name, role())).await {
            Ok(_) => Some(()),
            Err(Error::Api(status)) if status.message.contains("webhook") => None,
            Err(other) => unreachable!("{other}"),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_versions_are_served_and_invalid_specs_refused() {
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("webhooks").await.unwrap();
    let client = &namespace.client;
    lead_here(client).await;
    let (supervisor, _) = start(&namespace, "127.0.0.1:0".parse().unwrap());
    // CRDs may be installed after the operator has started.
    install(client).await;
    registered(client).await;
    make(client, "first").await;

    older_examples_survive(client).await;
    newer_examples_survive(client).await;
    invalid_specs_are_refused(client).await;
    an_adapter_decides(client).await;
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}

/// Every group and set of that version among the examples.
fn examples(version: ApiVersion) -> Vec<Value> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/examples")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(path).unwrap();
            let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
            found.extend(objects.into_iter().flatten());
        }
    }
    found.retain(|object| {
        let kind = object["kind"].as_str().unwrap();
        object["apiVersion"] == version.api_version()
            && matches!(kind, "RoleBasedGroup" | "RoleBasedGroupSet")
    });
    for (index, object) in found.iter_mut().enumerate() {
        let version = version.api_version().rsplit('/').next().unwrap();
        object["metadata"]["name"] = format!("{version}-{index}").into();
        object["metadata"].as_object_mut().unwrap().remove("namespace");
    }
    found
}

/// Fields of `sent` that `got` lacks; additional fields are allowed.
fn missing(at: &str, sent: &Value, got: &Value) -> Vec<String> {
    match (sent, got) {
        (Value::Object(sent), Value::Object(got)) => {
            let members = sent.iter().filter(|(_, value)| !value.is_null());
            let members = members.map(|(name, value)| (name, value, got.get(name).unwrap_or(&Value::Null)));
            members.flat_map(|(name, sent, got)| missing(&format!("{at}.{name}"), sent, got)).collect()
        }
        (Value::Array(sent), Value::Array(got)) if sent.len() == got.len() => {
            let items = sent.iter().zip(got).enumerate();
            items.flat_map(|(index, (sent, got))| missing(&format!("{at}[{index}]"), sent, got)).collect()
        }
        (sent, got) if sent == got => Vec::new(),
        (sent, got) => vec![format!("{at}: {sent} has become {got}")],
    }
}

async fn create(client: &Client, version: ApiVersion, object: &Value) -> Value {
    let kind = object["kind"].as_str().unwrap();
    let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    let created = api(client, version, kind).create(&PostParams::default(), &object).await;
    created.unwrap_or_else(|error| unreachable!("{:?}: {error}", object.metadata.name)).data
}

async fn read(client: &Client, version: ApiVersion, object: &Value) -> DynamicObject {
    let api = api(client, version, object["kind"].as_str().unwrap());
    api.get(object["metadata"]["name"].as_str().unwrap()).await.unwrap()
}

async fn older_examples_survive(client: &Client) {
    let examples = examples(ApiVersion::V1alpha1);
    assert!(examples.len() > 15, "only {} examples", examples.len());
    for example in &examples {
        create(client, ApiVersion::V1alpha1, example).await;
        let newer = read(client, ApiVersion::V1alpha2, example).await;
        let wanted = convert(example, ApiVersion::V1alpha2).unwrap();
        assert_eq!(missing("newer", &wanted["spec"], &newer.data["spec"]), [""; 0]);
        let older = read(client, ApiVersion::V1alpha1, example).await;
        assert_eq!(missing("older", &example["spec"], &older.data["spec"]), [""; 0]);
    }
}

async fn newer_examples_survive(client: &Client) {
    let examples = examples(ApiVersion::V1alpha2);
    assert!(examples.len() > 15, "only {} examples", examples.len());
    for example in &examples {
        create(client, ApiVersion::V1alpha2, example).await;
        let before = read(client, ApiVersion::V1alpha2, example).await;
        // An edit through the older version, which cannot express all fields.
        let mut older = read(client, ApiVersion::V1alpha1, example).await;
        older.metadata.labels.get_or_insert_default().insert("edited".into(), "yes".into());
        let name = older.metadata.name.clone().unwrap();
        let kind = example["kind"].as_str().unwrap();
        let api = api(client, ApiVersion::V1alpha1, kind);
        api.replace(&name, &PostParams::default(), &older).await.unwrap();
        let after = read(client, ApiVersion::V1alpha2, example).await;
        assert_eq!(after.data["spec"], before.data["spec"], "{name}");
        assert_eq!(after.metadata.labels.unwrap()["edited"], "yes");
    }
}

async fn refusal(client: &Client, object: &DynamicObject) -> String {
    let kind = ResourceKind::parse(&object.types.as_ref().unwrap().kind).unwrap();
    let objects: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &kind.resource());
    match objects.create(&PostParams::default(), object).await {
        Err(Error::Api(status)) => {
            assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"), "{}", status.message);
            status.message
        }
        other => unreachable!("{other:?}"),
    }
}

async fn invalid_specs_are_refused(client: &Client) {
    let with = |member: &str, value: Value| {
        let mut role = role();
        role[member] = value;
        role
    };
    let rolling = |update: Value| with("rolloutStrategy", json!({ "rollingUpdate": update }));
    for (name, role, text) in [
        ("with.dots", role(), "metadata.name `with.dots` must be a DNS label"),
        ("g", rolling(json!({ "maxUnavailable": 0 })), "raise one of them"),
        ("g", rolling(json!({ "partition": "100%" })), "must be less than its 1 replicas"),
        ("g", with("dependencies", json!(["b"])), "depends on `b`, which is no role of this group"),
        ("g", json!({ "name": "a" }), "none of standalonePattern"),
    ] {
        let refused = refusal(client, &group(name, role)).await;
        assert!(refused.contains("denied the request") && refused.contains(text), "{refused}");
    }
    let link =
        json!({ "when": { "role": "a" }, "scope": "Group", "then": [{ "role": "a", "action": "Drain" }] });
    let minimums = |roles: Value| json!({ "scheduling": { "gang": { "minReplicas": roles } } });
    for (strategy, text) in [
        (json!({ "faultRecovery": { "links": [link] } }), "a fault of role `a` cannot act on the same role"),
        (minimums(json!({ "b": 1 })), "`b`, which is not in the rule's roles"),
        (minimums(json!({ "a": 0 })), "must be at least 1, not 0"),
        // These webhooks belong to an operator with the default scheduler.
        (minimums(json!({ "a": 1 })), "needs Volcano 1.14"),
    ] {
        let rule = json!({ "name": "p", "roles": ["a"], "strategy": strategy });
        let policy = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "CoordinatedPolicy",
            "metadata": { "name": "g" }, "spec": { "policies": [rule] } });
        let refused = refusal(client, &serde_json::from_value(policy).unwrap()).await;
        assert!(refused.contains(text), "{refused}");
    }
    // Also through the older version, and in a set.
    let mut older = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "older" }, "spec": { "roles": [{ "name": "a", "dependencies": ["a"],
            "template": { "spec": { "containers": [{ "name": "c" }] } } }] } });
    let parameters = PostParams::default();
    let groups = api(client, ApiVersion::V1alpha1, "RoleBasedGroup");
    let object = serde_json::from_value(older.clone()).unwrap();
    let refused = groups.create(&parameters, &object).await.unwrap_err().to_string();
    assert!(refused.contains("in a circle: a"), "{refused}");
    older["kind"] = "RoleBasedGroupSet".into();
    older["spec"] = json!({ "replicas": 1, "template": older["spec"] });
    let sets = api(client, ApiVersion::V1alpha1, "RoleBasedGroupSet");
    let refused = sets.create(&parameters, &serde_json::from_value(older).unwrap()).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("vrolebasedgroupset.kb.io") && refused.contains("in a circle: a"), "{refused}");
}

async fn an_adapter_decides(client: &Client) {
    let mut adapted = role();
    adapted["scalingAdapter"] = json!({ "enable": true });
    let groups = api(client, ApiVersion::V1alpha2, "RoleBasedGroup");
    groups.create(&PostParams::default(), &group("adapted", adapted.clone())).await.unwrap();
    let adapter = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupScalingAdapter",
        "metadata": { "name": "adapted-a" },
        "spec": { "replicas": 3, "scaleTargetRef": { "name": "adapted", "role": "a" } } });
    create(client, ApiVersion::V1alpha2, &adapter).await;
    let mut scale = async |replicas: i32| {
        adapted["replicas"] = replicas.into();
        let patch = Patch::Merge(json!({ "spec": { "roles": [adapted] } }));
        groups.patch("adapted", &PatchParams::default(), &patch).await
    };
    let refused = scale(2).await.unwrap_err().to_string();
    assert!(refused.contains("`adapted-a`, which requests 3"), "{refused}");
    scale(3).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_outages_and_lost_certificates_are_survived() {
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("webhooks").await.unwrap();
    let client = &namespace.client;
    lead_here(client).await;
    install(client).await;
    let (supervisor, address) = start(&namespace, "127.0.0.1:0".parse().unwrap());
    let operator = Supervisor::new();
    let options = moongate_operator::OperatorOptions {
        kubeconfig: Some(plane.kubeconfig()),
        namespace: Some(namespace.name.clone()),
        ..moongate_operator::OperatorOptions::default()
    };
    let works = operator.clone();
    operator.spawn("operator", async move { moongate_operator::run(options, &works).await.unwrap() });
    let secret = registered(client).await;
    make(client, "g").await;

    let host = format!("{SERVICE}.{}.svc", namespace.name);
    let trusted = secret.data.unwrap().remove("ca.crt").unwrap().0;
    for (path, body) in [
        ("/convert", &b"{"[..]),
        ("/convert", b"\xff\xff"),
        ("/convert", br#"{"kind":"ConversionReview","apiVersion":"v1"}"#),
        ("/validate", b"[]"),
        ("/validate", br#"{"request":{"uid":7}}"#),
    ] {
        let answer = post(address, &host, &trusted, path, body).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
    }
    let object = json!({ "request": { "uid": "u", "kind": { "group": "", "version": "", "kind": "RoleBasedGroup" },
        "object": { "spec": { "roles": 7 } } } });
    let answer = post(address, &host, &trusted, "/validate", object.to_string().as_bytes()).await;
    assert!(answer.contains("the object cannot be read"), "{answer}");
    let review = json!({ "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1",
        "request": { "uid": "u", "desiredAPIVersion": "workloads.x-k8s.io/v9", "objects": [7, null] } });
    let answer = post(address, &host, &trusted, "/convert", review.to_string().as_bytes()).await;
    assert!(answer.contains("Failure") && answer.contains("v9"), "{answer}");
    // A connection without TLS.
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _ = plain.read_to_end(&mut Vec::new()).await;

    // The certificate is deleted: another one is generated and trusted.
    let secrets = Api::<Secret>::default_namespaced(client.clone());
    secrets.delete(SECRET, &DeleteParams::default()).await.unwrap();
    registered(client).await;
    make(client, "after-deletion").await;
    // The conversion is removed from a CRD.
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let none = Patch::Merge(json!({ "spec": { "conversion": { "strategy": "None", "webhook": null } } }));
    let name = "rolebasedgroups.workloads.x-k8s.io";
    definitions.patch(name, &PatchParams::default(), &none).await.unwrap();
    registered(client).await;

    // While the webhooks are down, no object is stored without validation, and running groups are kept running.
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    let groups = Api::<RoleBasedGroup>::default_namespaced(client.clone());
    let unjudged: RoleBasedGroup = group("unjudged", role()).try_parse().unwrap();
    let refused = groups.create(&PostParams::default(), &unjudged).await.unwrap_err().to_string();
    assert!(refused.contains("failed calling webhook"), "{refused}");
    let pods = Api::<Pod>::default_namespaced(client.clone());
    let first = eventually("the group has its pod", async || pods.get_opt("g-a-0").await.unwrap()).await;
    pods.delete("g-a-0", &DeleteParams::default()).await.unwrap();
    eventually("the pod is recreated", async || {
        let pod = pods.get_opt("g-a-0").await.unwrap()?;
        (pod.metadata.uid != first.metadata.uid).then_some(())
    })
    .await;

    // A second operator uses the same certificate.
    let before = secrets.get(SECRET).await.unwrap();
    let (supervisor, _) = start(&namespace, address);
    make(client, "after-outage").await;
    assert_eq!(secrets.get(SECRET).await.unwrap().data, before.data);
    assert_eq!(operator.panics() + supervisor.panics(), 0);
    operator.shutdown(TEST_TIMEOUT).await.unwrap();
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}
