//! The REST API of Mooncake's store service, with the same paths, status codes and bodies.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post, put};
use mooncake_wire::types::Uuid;
use moongate_runtime::{ClientCertificate, PeerAddr, SecretString};
use moongate_store_client::{KvError, PutOptions};
use moongate_transfer::AllowedPeers;
use serde_json::{Map, Value};
use subtle::ConstantTimeEq as _;

use crate::engine_segments;
use crate::node::NodeContext;

/// Maximum size of a request body in bytes.
const MAX_BODY: usize = 100 << 20;
const NO_CERTIFICATE: &str = "a client certificate of the store's CA (--store-tls-ca) is required";
const NOT_A_PEER: &str = "your address is not in --allow-peers";

/// Access control of the API, which can remove all objects and mount memory. Without a token, only programs on this machine may use
/// it; with one, callers from allowed networks that send it.
#[derive(Debug)]
pub(crate) struct ApiAccess {
    peers: AllowedPeers,
    /// The expected `Authorization` header; `None` without `--api-token`.
    authorization: Option<SecretString>,
    refused: Arc<AtomicU64>,
}

impl ApiAccess {
    /// Counts rejected requests in `refused`.
    pub(crate) fn new(peers: AllowedPeers, token: Option<&SecretString>, refused: Arc<AtomicU64>) -> Self {
        let authorization = token.and_then(|token| format!("Bearer {}", token.expose()).parse().ok());
        Self { peers, authorization, refused }
    }

    /// Returns status and message of a rejection.
    fn check(&self, from: Option<IpAddr>, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        let Some(from) = from.map(|from| from.to_canonical()) else {
            return Err((StatusCode::FORBIDDEN, "the address of the caller cannot be determined"));
        };
        let Some(expected) = &self.authorization else {
            // An Origin header means a browser page, which must not use the API although it runs on this machine.
            return if from.is_loopback() && !headers.contains_key(header::ORIGIN) {
                Ok(())
            } else {
                Err((
                    StatusCode::FORBIDDEN,
                    "this API accepts only programs on the node's own machine; start the node with --api-token to use it from elsewhere",
                ))
            };
        };
        if !from.is_loopback() && !self.peers.allow(from) {
            return Err((StatusCode::FORBIDDEN, NOT_A_PEER));
        }
        let sent = headers.get(header::AUTHORIZATION).map_or(&[][..], |sent| sent.as_bytes());
        if sent.ct_eq(expected.expose().as_bytes()).into() {
            Ok(())
        } else {
            Err((StatusCode::UNAUTHORIZED, "send the token of --api-token as Authorization: Bearer TOKEN"))
        }
    }
}

pub(crate) fn router(access: ApiAccess) -> Router<NodeContext> {
    Router::new()
        .route("/api/put", put(put_object))
        .route("/api/get/{key}", get(get_object))
        .route("/api/exist/{key}", get(exist))
        .route("/api/remove/{key}", delete(remove))
        .route("/api/remove_all", delete(remove_all))
        .route("/api/mount", post(mount))
        .route("/api/unmount", post(unmount))
        .route("/api/unmount_local_disk", post(unmount_local_disk))
        .route("/api/mount_shm", post(engine_segments::mount_shm))
        .route("/api/unmount_shm", post(engine_segments::unmount_shm))
        .route("/api/reconfigure", post(engine_segments::reconfigure))
        .fallback(async || plain(StatusCode::NOT_FOUND, "404: Not Found"))
        .method_not_allowed_fallback(async |_: Method| {
            plain(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(Arc::new(access), only_with_access))
}

async fn only_with_access(State(access): State<Arc<ApiAccess>>, request: Request, next: Next) -> Response {
    let from = request.extensions().get::<PeerAddr>().map(|from| from.0.ip());
    match access.check(from, request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, problem)) => {
            access.refused.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(?from, %status, "rejected a REST API request");
            error(status, problem)
        }
    }
}

pub(crate) async fn only_peers(
    State(peers): State<Arc<AllowedPeers>>,
    request: Request,
    next: Next,
) -> Response {
    let from = request.extensions().get::<PeerAddr>();
    if from.is_some_and(|from| peers.allow(from.0.ip())) {
        return next.run(request).await;
    }
    error(StatusCode::FORBIDDEN, NOT_A_PEER)
}

/// With TLS, clients without a certificate may call only `/health`, which probes use.
pub(crate) async fn require_certificate(request: Request, next: Next) -> Response {
    let is_open = request.uri().path() == "/health";
    if is_open || request.extensions().get::<ClientCertificate>().is_some() {
        return next.run(request).await;
    }
    error(StatusCode::FORBIDDEN, NO_CERTIFICATE)
}

fn plain(status: StatusCode, text: &'static str) -> Response {
    (status, text).into_response()
}

/// A JSON body as Python's `json.dumps` writes it, with a space after each colon and comma.
pub(crate) fn json(status: StatusCode, members: &[(&str, Value)]) -> Response {
    let members: Vec<String> =
        members.iter().map(|(name, value)| format!("\"{name}\": {}", spaced(value))).collect();
    let body = format!("{{{}}}", members.join(", "));
    (status, [(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}

fn spaced(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(spaced).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

pub(crate) fn error(status: StatusCode, text: impl Into<String>) -> Response {
    json(status, &[("error", Value::String(text.into()))])
}

pub(crate) fn failed(text: impl Into<String>) -> Response {
    error(StatusCode::INTERNAL_SERVER_ERROR, text)
}

pub(crate) fn success() -> Response {
    json(StatusCode::OK, &[("status", "success".into())])
}

/// Parses a JSON body. A parse error is answered with 500, as upstream does.
pub(crate) fn members(body: &[u8]) -> Result<Map<String, Value>, Box<Response>> {
    serde_json::from_slice(body).map_err(|problem| Box::new(failed(problem.to_string())))
}

async fn put_object(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let key = data.get("key").and_then(Value::as_str).filter(|key| !key.is_empty());
    let (Some(key), Some(value)) = (key, data.get("value").filter(|value| !value.is_null())) else {
        return error(StatusCode::BAD_REQUEST, "Missing key or value");
    };
    let Some(value) = value.as_str() else { return failed("value is not a string") };
    match shared.client.put(key, value.as_bytes(), &PutOptions::default()).await {
        Ok(_) => success(),
        Err(problem) => {
            tracing::warn!(error = %problem, "PUT /api/put");
            failed("PUT operation failed")
        }
    }
}

async fn get_object(State(shared): State<NodeContext>, Path(key): Path<String>) -> Response {
    match shared.client.get(&key).await {
        Ok(bytes) => {
            (StatusCode::OK, [(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
        }
        Err(KvError::NotFound { .. }) => error(StatusCode::NOT_FOUND, "Key not found"),
        Err(problem) => {
            tracing::warn!(error = %problem, "GET /api/get");
            failed("GET operation failed")
        }
    }
}

async fn exist(State(shared): State<NodeContext>, Path(key): Path<String>) -> Response {
    match shared.client.exist(&[&key]).await.as_deref() {
        Ok([exists, ..]) => json(StatusCode::OK, &[("exists", (*exists).into())]),
        _ => failed("Exist check failed"),
    }
}

async fn remove(State(shared): State<NodeContext>, Path(key): Path<String>) -> Response {
    match shared.client.remove(&key, false).await {
        Ok(()) => success(),
        Err(_) => failed("Remove operation failed"),
    }
}

async fn remove_all(State(shared): State<NodeContext>) -> Response {
    match shared.client.remove_all(false).await {
        Ok(number) => json(StatusCode::OK, &[("status", format!("success removed {number} keys").into())]),
        Err(_) => failed("RemoveAll operation failed"),
    }
}

async fn mount(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let Some(size) = data.get("size").and_then(Value::as_u64).filter(|size| *size > 0) else {
        return error(StatusCode::BAD_REQUEST, "Invalid size, must be a positive integer");
    };
    match shared.mount_process_memory(size).await {
        Ok(id) => json(
            StatusCode::OK,
            &[
                ("status", "success".into()),
                ("segment_ids", vec![id.to_string()].into()),
                ("allocated_size", size.into()),
            ],
        ),
        Err(problem) => failed(format!("Allocate and mount failed, {problem}")),
    }
}

async fn unmount(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let ids = segment_ids(&data);
    if ids.is_empty() {
        return error(StatusCode::BAD_REQUEST, "Missing segment_ids");
    }
    for id in ids {
        if let Err(problem) = unmount_named(&shared, id).await {
            return failed(format!("Unmount and free failed, {problem}"));
        }
    }
    success()
}

/// Ids in `segment_ids`, which is a string or a list.
pub(crate) fn segment_ids(data: &Map<String, Value>) -> Vec<&str> {
    match data.get("segment_ids") {
        Some(Value::String(id)) => vec![id],
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Parses the id and unmounts the segment.
pub(crate) async fn unmount_named(shared: &NodeContext, id: &str) -> Result<(), String> {
    shared.unmount(id.parse::<Uuid>().map_err(|problem| problem.to_string())?).await
}

/// Unmounts the disk tier from the store, if there is one. Reads in progress complete.
async fn unmount_local_disk(State(shared): State<NodeContext>, body: Bytes) -> Response {
    match serde_json::from_slice::<Value>(&body) {
        Ok(Value::Object(_)) => {}
        Ok(_) => return error(StatusCode::BAD_REQUEST, "Request body must be a JSON object"),
        Err(_) => return error(StatusCode::BAD_REQUEST, "Malformed JSON body"),
    }
    match &shared.disk_worker {
        None => success(),
        Some(worker) => match worker.unmount().await {
            Ok(()) => success(),
            Err(problem) => failed(format!("Unmount local disk failed, {problem}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn text(response: Response) -> String {
        let body = axum::body::to_bytes(response.into_body(), MAX_BODY).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[test]
    fn api_requires_loopback_or_the_token() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
        };
        let (none, token) = (headers(&[]), headers(&[(header::AUTHORIZATION, "Bearer moon")]));
        let other = headers(&[(header::AUTHORIZATION, "Bearer sun!")]);
        let page = headers(&[(header::ORIGIN, "http://evil.example")]);
        let open = ApiAccess::new(AllowedPeers::all(), None, Arc::default());
        let secret = "moon".parse().unwrap();
        let guarded = ApiAccess::new("10.0.0.0/8".parse().unwrap(), Some(&secret), Arc::default());
        for (access, from, headers, refused) in [
            (&open, "127.0.0.1", &none, None),
            (&open, "::ffff:127.0.0.1", &none, None),
            (&open, "127.0.0.1", &page, Some(403)),
            (&open, "10.0.0.1", &none, Some(403)),
            (&open, "10.0.0.1", &token, Some(403)),
            (&guarded, "10.0.0.1", &token, None),
            (&guarded, "127.0.0.1", &token, None),
            (&guarded, "127.0.0.1", &none, Some(401)),
            (&guarded, "10.0.0.1", &other, Some(401)),
            (&guarded, "11.0.0.1", &token, Some(403)),
        ] {
            let checked = access.check(Some(from.parse().unwrap()), headers);
            assert_eq!(checked.err().map(|(status, _)| status.as_u16()), refused, "{from} {headers:?}");
        }
        assert!(open.check(None, &none).is_err());
    }

    #[tokio::test]
    async fn json_bodies_have_the_spacing_of_upstream() {
        assert_eq!(text(success()).await, r#"{"status": "success"}"#);
        let many = [("ids", Value::from(vec!["a", "b"])), ("n", 1.into()), ("exists", true.into())];
        assert_eq!(text(json(StatusCode::OK, &many)).await, r#"{"ids": ["a", "b"], "n": 1, "exists": true}"#);
        assert_eq!(text(failed("it said \"no\"")).await, r#"{"error": "it said \"no\""}"#);
    }
}
