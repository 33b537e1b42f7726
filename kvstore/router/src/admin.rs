//! The admin server of a router: what the masters' admin servers report, for all of them. Paths and members are Mooncake's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::future::join_all;
use futures_util::{StreamExt as _, TryStreamExt as _};
use mooncake_wire::admin::{HealthResponse, SegmentDetail, SegmentsDetail};
use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::MasterAddress;
use moongate_runtime::plain_http_client;
use moongate_store_shards::{ShardCount, ShardIndex};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::{Map, Value, json};

use crate::counters::RouterCounters;
use crate::metrics_text;
use crate::options::RouterOptions;
use crate::start::RouterStartError;

/// Mooncake's port for the admin server.
const DEFAULT_PORT: u16 = 9003;
const GIB: f64 = (1_u64 << 30) as f64;
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4");
/// Mooncake's name for a call that failed.
const UNREACHABLE: &str = "RPC_FAIL";

/// The admin servers of the masters.
#[derive(Clone, Debug)]
pub(crate) struct ShardAdmins {
    http: reqwest::Client,
    /// `http://HOST:PORT`, in the order of the shards.
    addresses: Vec<String>,
    timeout: Duration,
}

#[derive(Debug)]
pub(crate) struct AdminState {
    pub(crate) admins: ShardAdmins,
    pub(crate) counters: Arc<RouterCounters>,
    pub(crate) count: ShardCount,
}

type SharedAdmin = State<Arc<AdminState>>;

impl ShardAdmins {
    /// # Errors
    /// When the settings do not have the address of each admin server.
    pub(crate) fn new(options: &RouterOptions) -> Result<Self, RouterStartError> {
        let (admins, shards) = (options.shard_admins.len(), options.shards.len());
        let addresses: Vec<String> = match admins {
            0 => options.shards.iter().map(|master| derived_address(master)).collect::<Result<_, _>>()?,
            _ if admins != shards => return Err(RouterStartError::AdminCount { admins, shards }),
            _ => options.shard_admins.clone(),
        };
        for address in &addresses {
            let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            if !has_port || reqwest::Url::parse(&format!("http://{address}")).is_err() {
                return Err(RouterStartError::AdminAddress(address.clone()));
            }
        }
        let http = plain_http_client().connect_timeout(options.call_timeout).build();
        Ok(Self {
            http: http.map_err(RouterStartError::Http)?,
            addresses: addresses.into_iter().map(|address| format!("http://{address}")).collect(),
            timeout: options.call_timeout,
        })
    }

    /// Requests a path of one admin server. The time limit is for the response's head.
    async fn get(&self, shard: ShardIndex, path: &str) -> Option<reqwest::Response> {
        let address = self.addresses.get(shard)?;
        let sent = tokio::time::timeout(self.timeout, self.http.get(format!("{address}{path}")).send()).await;
        match sent {
            Ok(Ok(response)) => Some(response),
            Ok(Err(error)) => {
                tracing::debug!(shard, %error, "a master's admin server cannot be reached");
                None
            }
            Err(_) => None,
        }
    }

    /// A successful response of one admin server.
    async fn text(&self, shard: ShardIndex, path: &str) -> Option<String> {
        let response = self.get(shard, path).await.filter(|response| response.status().is_success())?;
        tokio::time::timeout(self.timeout, response.text()).await.ok()?.ok()
    }
}

/// Port 9003 of a master's host.
fn derived_address(master: &str) -> Result<String, RouterStartError> {
    match MasterAddress::parse(master, None)? {
        MasterAddress::Fixed(address) if address.contains(':') => {
            let host = address.rsplit_once(':').map_or(&*address, |(host, _)| host);
            Ok(format!("{host}:{DEFAULT_PORT}"))
        }
        _ => Err(RouterStartError::AdminUnknown(master.to_owned())),
    }
}

pub(crate) fn admin_routes(admin: AdminState) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/get_all_keys", get(all_keys))
        .route("/get_segments_detail", get(segments_detail))
        .route("/query_key", get(query_key))
        .route("/batch_query_keys", get(batch_query_keys))
        .with_state(Arc::new(admin))
}

/// Which masters serve. The status is 503 if none does; with one, a part of the objects can be read.
async fn health(State(admin): SharedAdmin) -> Response {
    let admins = &admin.admins;
    let serving = join_all(admin.count.iter().map(|shard| async move {
        let health = admins.text(shard, "/health").await;
        let health: Option<Value> = health.and_then(|text| serde_json::from_str(&text).ok());
        health.is_some_and(|health| health.get("service_ready") == Some(&Value::Bool(true)))
    }));
    let serving = serving.await;
    let missing = serving.iter().enumerate().filter(|(_, serves)| !**serves);
    let problems: Vec<String> =
        missing.map(|(shard, _)| format!("the master of shard {shard} does not serve")).collect();
    let service_ready = problems.len() < serving.len();
    let health = HealthResponse {
        status: if problems.is_empty() { "ok" } else { "degraded" }.to_owned(),
        role: "leader".to_owned(),
        ha_state: "serving".to_owned(),
        service_ready,
        leader_address: None,
        view_version: None,
        problems,
        shard: None,
    };
    let status = if service_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health)).into_response()
}

/// The segments of all masters. Those of one that cannot be reached must not look unmounted, so then there is no response.
async fn segments_detail(State(admin): SharedAdmin) -> Response {
    let texts =
        join_all(admin.count.iter().map(|shard| admin.admins.text(shard, "/get_segments_detail"))).await;
    let parts: Option<Vec<SegmentsDetail>> =
        texts.into_iter().map(|text| serde_json::from_str(&text?).ok()).collect();
    parts.map_or_else(unavailable, |parts| Json(whole_segments(parts)).into_response())
}

/// Segments whose parts are in several shards.
fn whole_segments(parts: Vec<SegmentsDetail>) -> SegmentsDetail {
    let mut whole: BTreeMap<Uuid, SegmentDetail> = BTreeMap::new();
    for part in parts.into_iter().flat_map(|detail| detail.segments) {
        let Some(segment) = whole.get_mut(&part.segment_id) else {
            whole.insert(part.segment_id, part);
            continue;
        };
        // Addresses have the same number of digits, or the longer one is greater.
        if (part.base_address.len(), &part.base_address) < (segment.base_address.len(), &segment.base_address)
        {
            segment.base_address = part.base_address;
        }
        segment.size_bytes = segment.size_bytes.saturating_add(part.size_bytes);
        segment.size_human = format!("{} GiB", segment.size_bytes as f64 / GIB);
        segment.allocator_used_bytes = segment.allocator_used_bytes.saturating_add(part.allocator_used_bytes);
        segment.allocator_capacity_bytes =
            segment.allocator_capacity_bytes.saturating_add(part.allocator_capacity_bytes);
        let capacity = segment.allocator_capacity_bytes.max(1) as f64;
        segment.allocator_usage_percent = segment.allocator_used_bytes as f64 / capacity * 100.0;
    }
    SegmentsDetail { total_segments: whole.len() as u64, segments: whole.into_values().collect() }
}

/// The router's metrics, and the sums of those of the masters that can be reached.
async fn metrics(State(admin): SharedAdmin) -> Response {
    let texts = join_all(admin.count.iter().map(|shard| admin.admins.text(shard, "/metrics"))).await;
    // In one sum, as a family must not appear twice.
    let texts: Vec<String> =
        std::iter::once(admin.counters.text()).chain(texts.into_iter().flatten()).collect();
    ([(header::CONTENT_TYPE, TEXT)], metrics_text::sum(&texts)).into_response()
}

/// All keys, one per line. If a master fails meanwhile, the response is cut off, so that it is not taken for complete.
async fn all_keys(State(admin): SharedAdmin) -> Response {
    let lists = join_all(admin.count.iter().map(|shard| admin.admins.get(shard, "/get_all_keys"))).await;
    let lists: Option<Vec<_>> = lists.into_iter().map(|list| list?.error_for_status().ok()).collect();
    let Some(lists) = lists else { return unavailable() };
    let chunks =
        futures_util::stream::iter(lists).flat_map(|list| list.bytes_stream().map_err(axum::Error::new));
    ([(header::CONTENT_TYPE, TEXT)], Body::from_stream(chunks)).into_response()
}

/// Passes the query on to the shard of the key.
async fn query_key(State(admin): SharedAdmin, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let key = member(&query, "key").unwrap_or_default();
    let shard = admin.count.shard_of(key);
    let Some(response) = admin.admins.get(shard, &format!("/query_key?{query}")).await else {
        return unavailable();
    };
    let status = response.status();
    match tokio::time::timeout(admin.admins.timeout, response.bytes()).await {
        Ok(Ok(body)) => json_response(status, body),
        _ => unavailable(),
    }
}

/// Queries the shard of each key. Keys of shards that cannot be reached have an error.
async fn batch_query_keys(State(admin): SharedAdmin, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let keys = percent_decode_str(member(&query, "keys").unwrap_or_default()).decode_utf8_lossy();
    let mut by_shard: BTreeMap<ShardIndex, Vec<&str>> = BTreeMap::new();
    for key in keys.split(',') {
        by_shard.entry(admin.count.shard_of(key)).or_default().push(key);
    }
    let admins = &admin.admins;
    let queries = by_shard.iter().map(|(shard, keys)| async move {
        let encoded: Vec<_> =
            keys.iter().map(|key| utf8_percent_encode(key, NON_ALPHANUMERIC).to_string()).collect();
        let text = admins.text(*shard, &format!("/batch_query_keys?keys={}", encoded.join(","))).await;
        let reply: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
        match reply.as_ref().and_then(|reply| reply.get("data")) {
            Some(Value::Object(found)) => found.clone(),
            _ => keys
                .iter()
                .map(|key| ((*key).to_owned(), json!({ "ok": false, "error": UNREACHABLE })))
                .collect(),
        }
    });
    let data: Map<String, Value> = join_all(queries).await.into_iter().flatten().collect();
    Json(json!({ "success": true, "data": data })).into_response()
}

/// The value of the first member of this name in a query string, not decoded.
fn member<'q>(query: &'q str, name: &str) -> Option<&'q str> {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find(|(found, _)| *found == name)
        .map(|(_, value)| value)
}

fn json_response(status: StatusCode, body: Bytes) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}

fn unavailable() -> Response {
    let body = json!({ "success": false, "error_code": -900, "error_message": UNREACHABLE });
    (StatusCode::BAD_GATEWAY, Json(body)).into_response()
}
