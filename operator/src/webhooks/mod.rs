//! What the API server asks the operator: objects in another version, and whether an object may be stored.
//!
//! The webhooks look after themselves: they make their certificate, keep it in a Secret that several operators share, and tell
//! the API server where they are and whom to trust. Every operator answers, also one that does not lead.

mod answer;
mod certificate;
mod registration;
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

use crate::Metrics;
use crate::admission::{self, Objection};
use answer::Question;

const CONVERT: &str = "/convert";
const VALIDATE: &str = "/validate";

/// Largest body: a list of objects is converted as a whole. etcd takes objects of up to 1.5 MB.
const MAX_BODY: usize = 64 * 1024 * 1024;
/// Longest time for a body. API servers wait at most 30 s for the whole answer.
const BODY_TIME: Duration = Duration::from_secs(30);

/// Where the API server reaches the webhooks.
#[derive(Debug, Clone)]
pub struct Options {
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
    options: Options,
    metrics: Arc<Metrics>,
    supervisor: &Supervisor,
) -> Result<(), rustls::Error> {
    let shown = Arc::new(server::Shown::default());
    metrics.waits_for_webhooks(true);
    let answers = Router::new()
        .route(CONVERT, post(convert))
        .route(VALIDATE, post(validate))
        .with_state(Asked { client: client.clone(), metrics: Arc::clone(&metrics) });
    server::serve(listener, Arc::clone(&shown), answers, supervisor)?;
    let registration = registration::Registration::new(client, options, shown, metrics);
    let stop = supervisor.token();
    supervisor.spawn_essential("webhook registration", async move {
        stop.run_until_cancelled(registration.keep()).await;
    });
    Ok(())
}

/// What answers need.
#[derive(Clone)]
struct Asked {
    client: Client,
    metrics: Arc<Metrics>,
}

impl Asked {
    fn rubbish(&self, webhook: &'static str, what: &dyn Display) -> Response {
        self.metrics.webhook_answered(webhook, "rubbish");
        (StatusCode::BAD_REQUEST, what.to_string()).into_response()
    }
}

async fn convert(State(asked): State<Asked>, body: Body) -> Response {
    match read(body).await.map(|body| answer::converted(&body)) {
        Ok(Ok((answer, review))) => {
            asked.metrics.webhook_answered("convert", answer);
            axum::Json(review).into_response()
        }
        Ok(Err(rubbish)) => asked.rubbish("convert", &rubbish),
        Err(unread) => asked.rubbish("convert", &unread),
    }
}

async fn validate(State(asked): State<Asked>, body: Body) -> Response {
    let question = match read(body).await.map(|body| Question::of(&body)) {
        Ok(Ok(question)) => question,
        Ok(Err(rubbish)) => return asked.rubbish("validate", &rubbish),
        Err(unread) => return asked.rubbish("validate", &unread),
    };
    let objections = match question.kind.kind.as_str() {
        "RoleBasedGroup" => group_objections(&asked.client, &question).await,
        "RoleBasedGroupSet" => {
            objections_to(&question, |new: &RoleBasedGroupSet, old| admission::set(new, old))
        }
        // Only these two are registered.
        _ => Vec::new(),
    };
    let answer = if objections.is_empty() { "allowed" } else { "refused" };
    asked.metrics.webhook_answered("validate", answer);
    axum::Json(question.answered(&objections)).into_response()
}

async fn read(body: Body) -> Result<Bytes, BoxError> {
    Ok(tokio::time::timeout(BODY_TIME, to_bytes(body, MAX_BODY)).await??)
}

fn objections_to<T: DeserializeOwned>(
    question: &Question,
    judge: impl FnOnce(&T, Option<&T>) -> Vec<Objection>,
) -> Vec<Objection> {
    match objects(question) {
        Ok((new, old)) => judge(&new, old.as_ref()),
        Err(objection) => vec![objection],
    }
}

/// The object as it shall be. That a stored one cannot be read is no reason against a new one.
fn objects<T: DeserializeOwned>(question: &Question) -> Result<(T, Option<T>), Objection> {
    let read = |object: &Value| T::deserialize(object);
    let new = read(&question.object).map_err(|error| Objection::Unreadable(error.to_string()))?;
    Ok((new, read(&question.old_object).ok()))
}

async fn group_objections(client: &Client, question: &Question) -> Vec<Objection> {
    let (new, old) = match objects::<RoleBasedGroup>(question) {
        Ok(objects) => objects,
        Err(objection) => return vec![objection],
    };
    let mut objections = admission::group(&new, old.as_ref());
    let adapters: Api<RoleBasedGroupScalingAdapter> = Api::namespaced(client.clone(), &question.namespace);
    for role in old.iter().flat_map(|old| admission::scaled_roles(&new, old)) {
        let group = new.metadata.name.as_deref().unwrap_or_default();
        let name = RoleNames::new(group, &role.name).workload;
        match adapters.get_opt(&name).await {
            Ok(adapter) => {
                objections.extend(adapter.and_then(|adapter| admission::scaled(role, &adapter)));
            }
            Err(error) => objections.push(Objection::Unknown { adapter: name, error: error.to_string() }),
        }
    }
    objections
}
