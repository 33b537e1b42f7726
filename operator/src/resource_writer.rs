//! Writes to Kubernetes. Except for the Lease, events and webhooks, all writes of the operator are here.

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error};
use moongate_render::Manifest;

use crate::ResourceKind;
use crate::plan::{FIELD_MANAGER, WriteAction};
use crate::resource_cache::{ObservedChange, ResourceKey};

/// The API server's message, if it refuses a write for a reason that another attempt does not change: quota, permission, validation,
/// admission, size. Conflicts and overload are transient.
#[must_use]
pub(crate) fn refusal(error: &Error) -> Option<&str> {
    let Error::Api(status) = error else { return None };
    let message = status.message.as_str();
    let is_denied = message.starts_with("admission webhook") && message.contains("denied the request");
    // etcd's limits; the API server responds with status 500.
    let is_too_large =
        message.contains("request is too large") || message.contains("message larger than max");
    // A field that this release of the kind does not have; the API server responds to server-side apply with status 500.
    let is_undeclared = message.contains("field not declared in schema");
    let is_refused =
        matches!(status.code, 400 | 403 | 413 | 422) || is_denied || is_too_large || is_undeclared;
    is_refused.then_some(message)
}

#[derive(Clone)]
pub struct ResourceWriter {
    client: Client,
}

impl ResourceWriter {
    /// A writer that uses this client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Carries out one write. Returns the change in its response; `None` if nothing was written, because the live object has to be
    /// observed first.
    ///
    /// # Errors
    /// The error of the API server. It may be a conflict: the plan was made from an outdated state.
    pub async fn write(
        &self,
        namespace: &str,
        action: &WriteAction,
    ) -> Result<Option<ObservedChange>, Error> {
        match action {
            WriteAction::Apply(manifest) => {
                let Some(kind) = ResourceKind::from_manifest(manifest) else { return Ok(None) };
                let params = PatchParams::apply(FIELD_MANAGER).force();
                let object = self
                    .api(kind, namespace)
                    .patch(manifest.name(), &params, &Patch::Apply(manifest))
                    .await?;
                Ok(present(kind, object))
            }
            WriteAction::Create(manifest) => self.create(namespace, manifest).await,
            WriteAction::Replace { kind, name, object } => {
                let object: DynamicObject =
                    serde_json::from_value(object.clone()).map_err(Error::SerdeError)?;
                let params =
                    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
                let object = self.api(*kind, namespace).replace(name, &params, &object).await?;
                Ok(present(*kind, object))
            }
            WriteAction::Patch { kind, name, status, body } => {
                let api = self.api(*kind, namespace);
                let params =
                    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
                let patch = if kind.is_custom() { Patch::Merge(body) } else { Patch::Strategic(body) };
                let object = match status {
                    true => api.patch_status(name, &params, &patch).await?,
                    false => api.patch(name, &params, &patch).await?,
                };
                Ok(present(*kind, object))
            }
            WriteAction::Delete { kind, name, uid } => {
                self.delete(namespace, *kind, (name, uid), DeleteParams::background()).await
            }
            WriteAction::ForceDelete { name, uid } => {
                let params = DeleteParams::background().grace_period(0);
                self.delete(namespace, ResourceKind::Pod, (name, uid), params).await
            }
        }
    }

    async fn create(&self, namespace: &str, manifest: &Manifest) -> Result<Option<ObservedChange>, Error> {
        let Some(kind) = ResourceKind::from_manifest(manifest) else { return Ok(None) };
        let object = serde_json::to_value(manifest).and_then(serde_json::from_value);
        let object: DynamicObject = object.map_err(Error::SerdeError)?;
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let api = self.api(kind, namespace);
        match api.create(&params, &object).await {
            Ok(object) => Ok(present(kind, object)),
            Err(Error::Api(status)) if status.reason == "AlreadyExists" => {
                let owners = |object: &DynamicObject| object.metadata.owner_references.clone();
                match api.get_opt(manifest.name()).await? {
                    Some(live) if owners(&live) == owners(&object) => Ok(present(kind, live)),
                    // Also if the object has been deleted meanwhile: if it had another owner, no event would trigger another attempt.
                    _ => Err(Error::Api(status)),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn delete(
        &self,
        namespace: &str,
        kind: ResourceKind,
        (name, uid): (&str, &str),
        params: DeleteParams,
    ) -> Result<Option<ObservedChange>, Error> {
        let precondition = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let params = DeleteParams { preconditions: Some(precondition), ..params };
        let gone = || {
            let key = ResourceKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
            Some(ObservedChange::Gone(key, uid.to_owned()))
        };
        match self.api(kind, namespace).delete(name, &params).await {
            Ok(response) => Ok(response.left().map_or_else(gone, |object| {
                // With a grace period the object still exists and is marked; without one this is its last state.
                let is_terminating = object.metadata.deletion_timestamp.is_some();
                if is_terminating { present(kind, object) } else { gone() }
            })),
            Err(Error::Api(status)) if status.code == 404 => Ok(gone()),
            // Another object has the name now, or the object has just changed: a watch event follows.
            Err(Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn api(&self, kind: ResourceKind, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &kind.resource())
    }
}

fn present(kind: ResourceKind, object: DynamicObject) -> Option<ObservedChange> {
    Some(ObservedChange::Present(kind, Box::new(object)))
}

#[cfg(test)]
mod tests {
    use http::{Method, Request, Response, StatusCode};
    use serde_json::json;

    use super::*;

    #[test]
    fn permanent_rejections_are_refusals() {
        let error = |code, message: &str| {
            Error::Api(Box::new(kube::core::Status::failure(message, "Reason").with_code(code)))
        };
        for code in [400, 403, 413, 422] {
            assert_eq!(refusal(&error(code, "quota")), Some("quota"));
        }
        for (code, message) in [
            (500, "admission webhook \"w\" denied the request: no"),
            (500, "etcdserver: request is too large"),
            (
                500,
                "failed to create typed patch object (n/g; a/v1, Kind=K): .spec.x: field not declared in schema",
            ),
            (500, "rpc error: trying to send message larger than max (2 vs. 1)"),
        ] {
            assert_eq!(refusal(&error(code, message)), Some(message));
        }
        for (code, message) in [
            (404, "not found"),
            (409, "the object has been modified"),
            (429, "too many requests"),
            (500, "failed calling webhook \"w\": connection refused"),
        ] {
            assert_eq!(refusal(&error(code, message)), None);
        }
    }

    /// A pod of another owner has the name at the time of the create, and is deleted before it is read.
    #[tokio::test]
    async fn creating_an_object_with_a_taken_name_is_an_error() {
        let server = async |request: Request<kube::client::Body>| {
            let (code, reason) = match *request.method() {
                Method::POST => (StatusCode::CONFLICT, "AlreadyExists"),
                _ => (StatusCode::NOT_FOUND, "NotFound"),
            };
            let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure",
                "reason": reason, "message": "taken", "code": code.as_u16() });
            Response::builder().status(code).body(kube::client::Body::from(status.to_string().into_bytes()))
        };
        let writer = ResourceWriter::new(Client::new(tower::service_fn(server), "n"));
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" } });
        let pod = Manifest(serde_json::from_value(pod).unwrap());
        let refused = writer.write("n", &WriteAction::Create(pod)).await.unwrap_err();
        assert!(matches!(&refused, Error::Api(status) if status.reason == "AlreadyExists"), "{refused}");
    }
}
