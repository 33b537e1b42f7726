//! Webhooks: conversion of objects between versions, and validation.
//!
//! The webhooks register themselves: they generate their certificate, store it in a Secret that all replicas share, and set
//! the CA in the API server's configuration. Every replica serves them, also one that does not lead.

mod certificate;
mod ownership;
mod registration;
mod review;
mod server;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use kube::{Api, Client};
use moongate_render::{GangScheduler, RoleNames, SizeLimits};
use moongate_runtime::Supervisor;
use moongate_runtime::net::TcpListener;
use rbg_api::v1alpha2::{CoordinatedPolicy, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::error::Elapsed;

use crate::OperatorMetrics;
use crate::validation::{self, ValidationError};
use review::AdmissionReviewRequest;

pub use ownership::{OwnershipTiming, WebhookOwner};

const CONVERT: &str = "/convert";
const VALIDATE: &str = "/validate";

/// Maximum size of a body: a list of objects is converted as a whole. etcd accepts objects of up to 1.5 MB.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// Timeout for reading a body. API servers wait at most 30 s for the whole response.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Service and Secret of the webhooks.
#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// Namespace of the Service and of the Secret.
    pub namespace: String,
    pub service: String,
    pub port: u16,
    /// Name of the Secret that stores the certificate.
    pub secret: String,
    /// Maximum numbers of objects that one object may request.
    pub size_limits: SizeLimits,
    /// The scheduler that handles gangs.
    pub gang_scheduler: GangScheduler,
    pub ownership: OwnershipTiming,
}

/// Serves the webhooks until the supervisor stops. Returns the release that owns them, which may change.
///
/// # Errors
/// The TLS configuration is invalid.
pub fn start(
    listener: TcpListener,
    client: Client,
    options: WebhookOptions,
    metrics: Arc<OperatorMetrics>,
    supervisor: &Supervisor,
) -> Result<watch::Receiver<WebhookOwner>, rustls::Error> {
    let certificate = Arc::new(server::ServingCertificate::default());
    metrics.set_webhooks_pending(true);
    let routes = Router::new().route(CONVERT, post(convert)).route(VALIDATE, post(validate)).with_state(
        WebhookContext {
            client: client.clone(),
            metrics: Arc::clone(&metrics),
            size_limits: options.size_limits,
            gang_scheduler: options.gang_scheduler,
        },
    );
    server::serve(listener, Arc::clone(&certificate), routes, supervisor)?;
    let (sender, owner) = watch::channel(WebhookOwner::Unknown);
    let registration = registration::WebhookRegistration::new(client, options, certificate, metrics, sender);
    let stop = supervisor.token();
    supervisor.spawn_essential("webhook registration", async move {
        stop.run_until_cancelled(registration.run()).await;
    });
    Ok(owner)
}

/// State shared by the handlers.
#[derive(Clone)]
struct WebhookContext {
    client: Client,
    metrics: Arc<OperatorMetrics>,
    size_limits: SizeLimits,
    gang_scheduler: GangScheduler,
}

impl WebhookContext {
    fn reject_invalid(&self, webhook: &'static str, what: &dyn Display) -> Response {
        self.metrics.count_webhook_request(webhook, "invalid");
        (StatusCode::BAD_REQUEST, what.to_string()).into_response()
    }
}

async fn convert(State(context): State<WebhookContext>, body: Body) -> Response {
    match read(body).await.map(|body| review::convert_review(&body)) {
        Ok(Ok((result, review))) => {
            context.metrics.count_webhook_request("convert", result);
            axum::Json(review).into_response()
        }
        Ok(Err(error)) => context.reject_invalid("convert", &error),
        Err(error) => context.reject_invalid("convert", &error),
    }
}

async fn validate(State(context): State<WebhookContext>, body: Body) -> Response {
    let request = match read(body).await.map(|body| AdmissionReviewRequest::parse(&body)) {
        Ok(Ok(request)) => request,
        Ok(Err(error)) => return context.reject_invalid("validate", &error),
        Err(error) => return context.reject_invalid("validate", &error),
    };
    let errors = match request.kind.kind.as_str() {
        "RoleBasedGroup" => group_errors(&context, &request).await,
        "RoleBasedGroupSet" => {
            let limits = context.size_limits;
            validate_object(&request, |new: &RoleBasedGroupSet, old| {
                validation::validate_group_set(new, old, limits)
            })
        }
        "CoordinatedPolicy" => policy_errors(&context, &request).await,
        // The webhook is registered only for these kinds.
        _ => Vec::new(),
    };
    let result = if errors.is_empty() { "allowed" } else { "refused" };
    context.metrics.count_webhook_request("validate", result);
    axum::Json(request.to_response(&errors)).into_response()
}

/// Why the body of a request cannot be read.
#[derive(Debug, thiserror::Error)]
enum BodyReadError {
    #[error(transparent)]
    TimedOut(#[from] Elapsed),
    #[error(transparent)]
    Body(#[from] axum::Error),
}

/// Why an object is not admitted.
#[derive(Debug, thiserror::Error)]
enum AdmissionError {
    #[error(transparent)]
    Invalid(#[from] ValidationError),
    /// The object does not deserialize.
    #[error("the object cannot be read: {0}")]
    Unreadable(#[source] serde_json::Error),
    /// Whether replicas may change depends on the adapter.
    #[error(
        "the RoleBasedGroupScalingAdapter `{adapter}` cannot be read, so a change of replicas cannot be validated: {source}"
    )]
    UnknownAdapter { adapter: String, source: kube::Error },
    /// Whether the roles of a policy exist depends on the group.
    #[error("the RoleBasedGroup `{group}` cannot be read, so its policy cannot be validated: {source}")]
    UnknownGroup { group: String, source: kube::Error },
}

async fn read(body: Body) -> Result<Bytes, BodyReadError> {
    Ok(tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY)).await??)
}

fn validate_object<T: DeserializeOwned>(
    request: &AdmissionReviewRequest,
    validate: impl FnOnce(&T, Option<&T>) -> Vec<ValidationError>,
) -> Vec<AdmissionError> {
    match parse_objects(request) {
        Ok((new, old)) => validate(&new, old.as_ref()).into_iter().map(Into::into).collect(),
        Err(error) => vec![error],
    }
}

/// The new object, and the stored one if it deserializes: an unreadable stored object is no reason to reject a new one.
fn parse_objects<T: DeserializeOwned>(
    request: &AdmissionReviewRequest,
) -> Result<(T, Option<T>), AdmissionError> {
    let read = |object: &Value| T::deserialize(object);
    let new = read(&request.object).map_err(AdmissionError::Unreadable)?;
    Ok((new, read(&request.old_object).ok()))
}

async fn policy_errors(context: &WebhookContext, request: &AdmissionReviewRequest) -> Vec<AdmissionError> {
    let (new, old) = match parse_objects::<CoordinatedPolicy>(request) {
        Ok(objects) => objects,
        Err(error) => return vec![error],
    };
    let gang = validation::validate_gang(&new, old.as_ref(), context.gang_scheduler);
    let mut errors: Vec<AdmissionError> = gang.into_iter().map(Into::into).collect();
    // Only fault recovery is validated against the group, and most policies have none.
    if new.spec.policies.iter().all(|rule| rule.strategy.fault_recovery.is_none()) {
        return errors;
    }
    let groups: Api<RoleBasedGroup> = Api::namespaced(context.client.clone(), &request.namespace);
    let name = new.metadata.name.clone().unwrap_or_default();
    match groups.get_opt(&name).await {
        Ok(group) => {
            let error = validation::validate_fault_recovery(&new, old.as_ref(), group.as_ref());
            errors.extend(error.map(Into::into));
        }
        Err(source) => errors.push(AdmissionError::UnknownGroup { group: name, source }),
    }
    errors
}

async fn group_errors(context: &WebhookContext, request: &AdmissionReviewRequest) -> Vec<AdmissionError> {
    let (new, old) = match parse_objects::<RoleBasedGroup>(request) {
        Ok(objects) => objects,
        Err(error) => return vec![error],
    };
    let invalid = validation::validate_group(&new, old.as_ref(), context.size_limits);
    let mut errors: Vec<AdmissionError> = invalid.into_iter().map(Into::into).collect();
    let adapters: Api<RoleBasedGroupScalingAdapter> =
        Api::namespaced(context.client.clone(), &request.namespace);
    for role in old.iter().flat_map(|old| validation::scaled_roles(&new, old)) {
        let group = new.metadata.name.as_deref().unwrap_or_default();
        let name = RoleNames::new(group, &role.name).workload;
        match adapters.get_opt(&name).await {
            Ok(adapter) => {
                let invalid =
                    adapter.and_then(|adapter| validation::validate_scaled_replicas(role, &adapter));
                errors.extend(invalid.map(Into::into));
            }
            Err(source) => errors.push(AdmissionError::UnknownAdapter { adapter: name, source }),
        }
    }
    errors
}
