use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::client::Body;
use moongate_render::{GangScheduler, SizeLimits};
use parking_lot::Mutex;
use serde_json::Value;

use super::*;
use crate::webhooks::OwnershipTiming;

const CRD: &str = CONVERTED[0];

/// An API server with one CRD and the configuration of an owner.
struct ContestedCluster {
    owner: &'static str,
    /// Number of writes before which others write the CRD.
    conflicts: u64,
    version: u64,
    /// Versions of the CRD that the release has tried to change.
    patched: Vec<Value>,
}

impl ContestedCluster {
    fn respond(&mut self, method: &Method, path: &str, body: &Value) -> (StatusCode, Value) {
        if path.contains("validatingwebhookconfigurations") {
            let annotations = json!({ "moongate.io/webhooks-owner": self.owner });
            let metadata = json!({ "name": CONFIGURATION, "annotations": annotations });
            let api_version = "admissionregistration.k8s.io/v1";
            let kind = "ValidatingWebhookConfiguration";
            return (
                StatusCode::OK,
                json!({ "apiVersion": api_version, "kind": kind, "metadata": metadata }),
            );
        }
        if *method == Method::PATCH {
            if self.conflicts > 0 {
                (self.conflicts, self.version) = (self.conflicts - 1, self.version + 1);
            }
            let version = &body["metadata"]["resourceVersion"];
            self.patched.push(version.clone());
            if version.as_str() != Some(self.version.to_string().as_str()) {
                let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure",
                    "reason": "Conflict", "message": "changed", "code": 409 });
                return (StatusCode::CONFLICT, status);
            }
        }
        let definition = json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": { "name": CRD, "resourceVersion": self.version.to_string() },
            "spec": { "group": "workloads.x-k8s.io", "scope": "Namespaced", "versions": [],
                "names": { "kind": "RoleBasedGroup", "plural": "rolebasedgroups" } } });
        (StatusCode::OK, definition)
    }
}

/// Registers the conversion of the release `a/operator`. Returns the versions of the CRD that it has tried to change.
async fn register(owner: &'static str, conflicts: u64) -> (Result<(), WebhookRegistrationError>, Vec<Value>) {
    let cluster =
        Arc::new(Mutex::new(ContestedCluster { owner, conflicts, version: 1, patched: Vec::new() }));
    let served = Arc::clone(&cluster);
    let serve = move |request: Request<Body>| {
        let cluster = Arc::clone(&served);
        async move {
            let (method, path) = (request.method().clone(), request.uri().path().to_owned());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let (code, response) = cluster.lock().respond(&method, &path, &body);
            Response::builder().status(code).body(Body::from(response.to_string().into_bytes()))
        }
    };
    let options = WebhookOptions {
        namespace: "a".to_owned(),
        service: "operator".to_owned(),
        port: 443,
        secret: "s".to_owned(),
        size_limits: SizeLimits::default(),
        gang_scheduler: GangScheduler::default(),
        ownership: OwnershipTiming::default(),
    };
    let (owner, _) = watch::channel(WebhookOwner::Unknown);
    let client = Client::new(tower::service_fn(serve), "n");
    let registration = WebhookRegistration::new(client, options, Arc::default(), Arc::default(), owner);
    let result = registration.register_conversion(CRD, &ByteString(b"ca".to_vec())).await;
    let patched = cluster.lock().patched.clone();
    (result, patched)
}

/// A release that was slow to write the CRDs, after it had read that it owns the webhooks, must not undo the registration of the release
/// that has taken over meanwhile.
#[tokio::test]
async fn a_former_owner_writes_no_conversion() {
    let (result, patched) = register("b/operator", 0).await;
    assert!(result.is_ok() && patched.is_empty(), "{result:?} {patched:?}");
}

#[tokio::test]
async fn a_conversion_is_written_to_the_version_that_was_read() {
    let (result, patched) = register("a/operator", 0).await;
    assert!(result.is_ok() && patched == ["1"], "{result:?} {patched:?}");
    let (result, patched) = register("a/operator", 2).await;
    assert!(result.is_ok() && patched == ["1", "2", "3"], "{result:?} {patched:?}");
    let (result, patched) = register("a/operator", 99).await;
    assert!(result.is_err() && patched.len() == CONFLICT_ATTEMPTS, "{result:?} {patched:?}");
}
