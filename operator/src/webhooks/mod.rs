//! What the API server asks the operator: objects in another version, and whether an object may be stored.
//!
//! The webhooks look after themselves: they make their certificate, keep it in a Secret that several operators share, and tell
//! the API server where they are and whom to trust. Every operator answers, also one that does not lead.

mod certificate;
mod registration;
mod review;
mod server;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{BoxError, Router};
use kube::{Api, Client};
use moongate_render::RoleNames;
use moongate_runtime::Supervisor;
use moongate_runtime::net::TcpListener;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::OperatorMetrics;
use crate::validation::{self, ValidationError};
use review::AdmissionReviewRequest;

const CONVERT: &str = "/convert";
const VALIDATE: &str = "/validate";

/// Largest body: a list of objects is converted as a whole. etcd takes objects of up to 1.5 MB.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// Longest time for a body. API servers wait at most 30 s for the whole answer.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Where the API server reaches the webhooks.
#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// Namespace of the Service and of the Secret.
    pub namespace: String,
    /// The Service.
    pub service: String,
    /// Its port.
    pub port: u16,
    /// The Secret that keeps the certificate.
    pub secret: String,
}

/// Answers until the supervisor stops.
///
/// # Errors
/// TLS cannot be had.
pub fn start(
    listener: TcpListener,
    client: Client,
    options: WebhookOptions,
    metrics: Arc<OperatorMetrics>,
    supervisor: &Supervisor,
) -> Result<(), rustls::Error> {
    let shown = Arc::new(server::ServingCertificate::default());
    metrics.set_webhooks_pending(true);
    let answers = Router::new()
        .route(CONVERT, post(convert))
        .route(VALIDATE, post(validate))
        .with_state(WebhookContext { client: client.clone(), metrics: Arc::clone(&metrics) });
    server::serve(listener, Arc::clone(&shown), answers, supervisor)?;
    let registration = registration::WebhookRegistration::new(client, options, shown, metrics);
    let stop = supervisor.token();
    supervisor.spawn_essential("webhook registration", async move {
        stop.run_until_cancelled(registration.run()).await;
    });
    Ok(())
}

/// What answers need.
#[derive(Clone)]
struct WebhookContext {
    client: Client,
    metrics: Arc<OperatorMetrics>,
}

impl WebhookContext {
    fn reject_invalid(&self, webhook: &'static str, what: &dyn Display) -> Response {
        self.metrics.count_webhook_request(webhook, "rubbish");
        (StatusCode::BAD_REQUEST, what.to_string()).into_response()
    }
}

async fn convert(State(asked): State<WebhookContext>, body: Body) -> Response {
    match read(body).await.map(|body| review::convert_review(&body)) {
        Ok(Ok((answer, review))) => {
            asked.metrics.count_webhook_request("convert", answer);
            axum::Json(review).into_response()
        }
        Ok(Err(rubbish)) => asked.reject_invalid("convert", &rubbish),
        Err(unread) => asked.reject_invalid("convert", &unread),
    }
}

async fn validate(State(asked): State<WebhookContext>, body: Body) -> Response {
    let question = match read(body).await.map(|body| AdmissionReviewRequest::parse(&body)) {
        Ok(Ok(question)) => question,
        Ok(Err(rubbish)) => return asked.reject_invalid("validate", &rubbish),
        Err(unread) => return asked.reject_invalid("validate", &unread),
    };
    let objections = match question.kind.kind.as_str() {
        "RoleBasedGroup" => group_errors(&asked.client, &question).await,
        "RoleBasedGroupSet" => validate_object(&question, |new: &RoleBasedGroupSet, old| {
            validation::validate_group_set(new, old)
        }),
        // Only these two are registered.
        _ => Vec::new(),
    };
    let answer = if objections.is_empty() { "allowed" } else { "refused" };
    asked.metrics.count_webhook_request("validate", answer);
    axum::Json(question.to_response(&objections)).into_response()
}

async fn read(body: Body) -> Result<Bytes, BoxError> {
    Ok(tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY)).await??)
}

fn validate_object<T: DeserializeOwned>(
    question: &AdmissionReviewRequest,
    judge: impl FnOnce(&T, Option<&T>) -> Vec<ValidationError>,
) -> Vec<ValidationError> {
    match parse_objects(question) {
        Ok((new, old)) => judge(&new, old.as_ref()),
        Err(objection) => vec![objection],
    }
}

/// The object as it shall be. That a stored one cannot be read is no reason against a new one.
fn parse_objects<T: DeserializeOwned>(
    question: &AdmissionReviewRequest,
) -> Result<(T, Option<T>), ValidationError> {
    let read = |object: &Value| T::deserialize(object);
    let new = read(&question.object).map_err(|error| ValidationError::Unreadable(error.to_string()))?;
    Ok((new, read(&question.old_object).ok()))
}

async fn group_errors(client: &Client, question: &AdmissionReviewRequest) -> Vec<ValidationError> {
    let (new, old) = match parse_objects::<RoleBasedGroup>(question) {
        Ok(objects) => objects,
        Err(objection) => return vec![objection],
    };
    let mut objections = validation::validate_group(&new, old.as_ref());
    let adapters: Api<RoleBasedGroupScalingAdapter> = Api::namespaced(client.clone(), &question.namespace);
    for role in old.iter().flat_map(|old| validation::scaled_roles(&new, old)) {
        let group = new.metadata.name.as_deref().unwrap_or_default();
        let name = RoleNames::new(group, &role.name).workload;
        match adapters.get_opt(&name).await {
            Ok(adapter) => {
                objections
                    .extend(adapter.and_then(|adapter| validation::validate_scaled_replicas(role, &adapter)));
            }
            Err(error) => {
                objections.push(ValidationError::Unknown { adapter: name, error: error.to_string() });
            }
        }
    }
    objections
}
