//! Admin server of the shared store's master: Mooncake's HTTP view of its objects, for engines that publish KV events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mooncake_wire::admin::{
    AdminBufferDescriptor, AdminSuccess, HealthResponse, KeyReplicas, KvEventsStatus, SegmentsDetail,
};
use mooncake_wire::key::ObjectKey;
use moongate_runtime::Supervisor;
use moongate_runtime::net::TcpListener;

use super::config::{SharedL3Store, SimEngineError};
use super::l3_store::LockedPageStore;
use super::response::{self, SimResponse};
use super::server;

/// Objects of a page: keys and values of one rank.
const TENSORS: [&str; 2] = ["k", "v"];
/// Reported segment of all objects; no reader connects to it.
const SEGMENT_NAME: &str = "simulated-store:1";
/// Reported size of an object; its content is never read.
const OBJECT_BYTES: u64 = 4_096;
/// Hexadecimal digits of a page hash, and how many of them are known.
const HASH_DIGITS: usize = 64;
const KNOWN_HASH_DIGITS: usize = 16;

/// A running admin server. It stops when dropped.
#[derive(Debug)]
pub struct SimMasterAdmin {
    address: SocketAddr,
    supervisor: Supervisor,
}

struct SimMasterAdminState {
    store: Arc<LockedPageStore>,
    /// Prefix of a page's key: the model name.
    prefix: String,
}

impl SimMasterAdmin {
    /// Starts the admin server of a fleet's store on a free loopback port. Its engines use the SGLang protocol and
    /// serve `model`.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn start(fleet: &SharedL3Store, model: &str) -> Result<Self, SimEngineError> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = server::bind(any).await?;
        let address = server::local_addr(&listener, any)?;
        let shared =
            Arc::new(SimMasterAdminState { store: fleet.page_store(), prefix: model.replace('/', "-") });
        let supervisor = Supervisor::new();
        let (tasks, stop) = (supervisor.clone(), supervisor.token());
        supervisor.spawn("sim-store-admin", async move {
            tokio::select! {
                () = listen(listener, shared, tasks) => {}
                () = stop.cancelled() => {}
            }
        });
        Ok(Self { address, supervisor })
    }

    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for SimMasterAdmin {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

async fn listen(listener: TcpListener, shared: Arc<SimMasterAdminState>, tasks: Supervisor) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        let service = service_fn(move |request| {
            let reply = respond(&shared, &request);
            async { Ok::<_, Infallible>(reply) }
        });
        let stop = tasks.token();
        tasks.spawn("sim-store-admin-connection", async move {
            tokio::select! {
                // A disconnecting client is not an error.
                _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service) => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

fn respond(shared: &SimMasterAdminState, request: &Request<Incoming>) -> SimResponse {
    if request.method() != Method::GET {
        return response::text(StatusCode::NOT_FOUND, "");
    }
    match request.uri().path() {
        "/health" => json(&HealthResponse {
            status: "ok".to_owned(),
            role: "leader".to_owned(),
            ha_state: "serving".to_owned(),
            service_ready: true,
            leader_address: None,
            view_version: None,
            problems: Vec::new(),
            shard: None,
        }),
        "/kv_events/status" => json(&KvEventsStatus::default()),
        // The simulation has no nodes that report metrics.
        "/get_all_segments" => response::text(StatusCode::OK, ""),
        "/get_segments_detail" => json(&SegmentsDetail::default()),
        "/get_all_keys" => response::text(StatusCode::OK, all_keys(shared)),
        "/batch_query_keys" => {
            let keys =
                request.uri().query().and_then(|query| query.strip_prefix("keys=")).unwrap_or_default();
            let data: BTreeMap<String, KeyReplicas<'_>> =
                keys.split(',').map(|key| (key.to_owned(), replicas(shared, key))).collect();
            json(&AdminSuccess { success: true, data })
        }
        _ => response::text(StatusCode::NOT_FOUND, ""),
    }
}

fn json(value: &impl serde::Serialize) -> SimResponse {
    response::json_ok(&serde_json::to_value(value).unwrap_or_default())
}

fn all_keys(shared: &SimMasterAdminState) -> String {
    let names: Vec<u64> = shared.store.lock().hashes().collect();
    let mut keys = String::new();
    for name in names {
        for tensor in TENSORS {
            keys.push_str(&format!(
                "{}_{name:0KNOWN_HASH_DIGITS$x}{:0<rest$}_0_{tensor}\n",
                shared.prefix,
                "",
                rest = HASH_DIGITS - KNOWN_HASH_DIGITS
            ));
        }
    }
    keys
}

/// Location of an object. Only the first 64 bits of the page hash are compared.
fn replicas(shared: &SimMasterAdminState, key: &str) -> KeyReplicas<'static> {
    let page = ObjectKey::parse(key).filter(|key| key.namespace == shared.prefix).map(|key| key.hash);
    let name = page.and_then(|page| page.as_bytes().first_chunk().copied()).map(u64::from_be_bytes);
    if !name.is_some_and(|name| shared.store.lock().contains_hash(name)) {
        return KeyReplicas { error: Some("OBJECT_NOT_FOUND".to_owned()), ..KeyReplicas::default() };
    }
    let buffer = AdminBufferDescriptor {
        size: OBJECT_BYTES,
        address: 0,
        protocol: "tcp".into(),
        endpoint: SEGMENT_NAME.into(),
    };
    KeyReplicas { ok: true, values: Some(vec![buffer]), ..KeyReplicas::default() }
}
