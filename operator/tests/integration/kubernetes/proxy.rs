//! A proxy between the operator and the API server that delays, fails or drops responses.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response, StatusCode};
use futures_util::{StreamExt as _, stream};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kube::Client;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Fault injected into a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ApiServerFault {
    /// Status 429 with a Retry-After header.
    TooMany,
    /// Status 500 from the proxy.
    Internal,
    /// The connection closes before the request reaches the API server.
    ConnectionClosed,
    /// The API server executes the request, but the response is lost.
    ResponseLost,
    Slow,
    /// No response.
    Hanging,
    /// A watch works for a moment, then its version has expired.
    Expired,
}

const FAULTS: [ApiServerFault; 5] = [
    ApiServerFault::TooMany,
    ApiServerFault::Internal,
    ApiServerFault::ConnectionClosed,
    ApiServerFault::ResponseLost,
    ApiServerFault::Slow,
];
const MAX_BODY: usize = 16 << 20;

#[derive(Default)]
struct ProxyCounts {
    requests: u64,
    faults: BTreeMap<ApiServerFault, u64>,
}

/// Percentages of requests that fail.
#[derive(Debug, Clone, Copy, Default)]
struct FaultRates {
    /// One of [`FAULTS`].
    any: u32,
    too_many: u32,
    hanging: u32,
}

/// Faults of the next requests. They are shuffled like a deck of cards, so that each fault occurs soon.
#[derive(Default)]
struct FaultSchedule(Vec<Option<ApiServerFault>>);

impl FaultSchedule {
    fn next_fault(&mut self, faults: &[ApiServerFault], of_a_hundred: u32) -> Option<ApiServerFault> {
        let one_in = usize::try_from(100_u32.checked_div(of_a_hundred)?).unwrap();
        if self.0.is_empty() {
            self.0.extend(faults.iter().copied().map(Some));
            self.0.resize(faults.len() * one_in, None);
            fastrand::shuffle(&mut self.0);
        }
        self.0.pop().flatten()
    }
}

/// Decks for watches and for other requests.
#[derive(Default)]
struct FaultSchedules {
    watches: FaultSchedule,
    others: FaultSchedule,
}

/// The proxy stops on drop.
pub(crate) struct FaultProxy {
    address: SocketAddr,
    counts: Arc<Mutex<ProxyCounts>>,
    rates: Arc<Mutex<FaultRates>>,
    silent: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

struct ProxyState {
    client: Client,
    counts: Arc<Mutex<ProxyCounts>>,
    rates: Arc<Mutex<FaultRates>>,
    decks: Mutex<FaultSchedules>,
    silent: Arc<AtomicBool>,
}

impl FaultProxy {
    /// Forwards requests with this client.
    pub(crate) async fn start(client: Client) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (counts, rates) = (Arc::<Mutex<ProxyCounts>>::default(), Arc::<Mutex<FaultRates>>::default());
        let silent = Arc::<AtomicBool>::default();
        let state = Arc::new(ProxyState {
            client,
            counts: Arc::clone(&counts),
            rates: Arc::clone(&rates),
            decks: Mutex::default(),
            silent: Arc::clone(&silent),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let state = Arc::clone(&state);
                let service = service_fn(move |request| forward(Arc::clone(&state), request));
                let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                connections.spawn(async move { drop(connection.await) });
            }
        });
        Self { address, counts, rates, silent, _tasks: tasks }
    }

    /// Sets the percentage of requests that fail.
    pub(crate) fn fail(&self, of_a_hundred: u32) {
        *self.rates.lock() = FaultRates { any: of_a_hundred, ..FaultRates::default() };
    }

    /// Sets the percentages of requests that get status 429, and no response, at random.
    pub(crate) fn overload(&self, too_many: u32, hanging: u32) {
        *self.rates.lock() = FaultRates { any: 0, too_many, hanging };
    }

    /// While silent, requests are executed, but no response starts and open watches send nothing. Requests that are waiting at
    /// the end of the silence never get a response.
    pub(crate) fn be_silent(&self, is_silent: bool) {
        self.silent.store(is_silent, Ordering::Relaxed);
    }

    /// Number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.counts.lock().requests
    }

    /// Number of faults so far, by kind.
    pub(crate) fn faults(&self) -> BTreeMap<ApiServerFault, u64> {
        self.counts.lock().faults.clone()
    }

    /// Writes a client configuration for the proxy.
    pub(crate) fn kubeconfig(&self, folder: &Path) -> PathBuf {
        let cluster = json!({ "name": "proxy", "cluster": { "server": format!("http://{}", self.address) } });
        let context = json!({ "name": "proxy", "context": { "cluster": "proxy", "user": "proxy" } });
        let file = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "clusters": [cluster], "contexts": [context], "users": [{ "name": "proxy", "user": {} }] });
        let path = folder.join(format!("kubeconfig-proxy-{}", self.address.port()));
        std::fs::write(&path, file.to_string()).unwrap();
        path
    }
}

impl ProxyState {
    fn fault(&self, is_watch: bool) -> Option<ApiServerFault> {
        let FaultRates { any, too_many, hanging } = *self.rates.lock();
        let mut decks = self.decks.lock();
        let fault = match (is_watch, fastrand::u32(..100)) {
            (_, number) if number < too_many => Some(ApiServerFault::TooMany),
            (_, number) if number < too_many + hanging => Some(ApiServerFault::Hanging),
            (true, _) => decks.watches.next_fault(&[ApiServerFault::Expired], any),
            (false, _) => decks.others.next_fault(&FAULTS, any),
        };
        drop(decks);
        let mut counts = self.counts.lock();
        counts.requests += 1;
        if let Some(fault) = fault {
            *counts.faults.entry(fault).or_default() += 1;
        }
        fault
    }

    /// Never returns while the proxy is silent.
    async fn wait_while_silent(&self) {
        if self.silent.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }

    fn gate_body(self: &Arc<Self>, body: Body) -> Body {
        let state = Arc::clone(self);
        Body::from_stream(body.into_data_stream().then(move |part| {
            let state = Arc::clone(&state);
            async move {
                state.wait_while_silent().await;
                part
            }
        }))
    }
}

async fn forward(state: Arc<ProxyState>, request: Request<Incoming>) -> io::Result<Response<Body>> {
    let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
    let fault = state.fault(is_watch);
    let refused = |status: StatusCode, reason: &str| {
        let text = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
            "message": "by the test", "code": status.as_u16() });
        let answer = Response::builder().status(status).header("content-type", "application/json");
        answer.header("retry-after", "1").body(Body::from(text.to_string())).map_err(io::Error::other)
    };
    match fault {
        Some(ApiServerFault::TooMany) => return refused(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
        Some(ApiServerFault::Internal) => return refused(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
        Some(ApiServerFault::Hanging) => std::future::pending().await,
        Some(ApiServerFault::ConnectionClosed) => return Err(io::ErrorKind::ConnectionReset.into()),
        Some(ApiServerFault::Slow) => {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(500..2000))).await;
        }
        _ => {}
    }
    let (head, body) = request.into_parts();
    let body = to_bytes(Body::new(body), MAX_BODY).await.map_err(io::Error::other)?;
    let request = Request::from_parts(head, kube::client::Body::from(body.to_vec()));
    let answer = state.client.send(request).await.map_err(io::Error::other)?;
    state.wait_while_silent().await;
    let answer = answer.map(|body| state.gate_body(Body::new(body)));
    match fault {
        Some(ApiServerFault::ResponseLost) => Err(io::ErrorKind::ConnectionReset.into()),
        Some(ApiServerFault::Expired) => Ok(answer.map(expiring)),
        _ => Ok(answer),
    }
}

fn expiring(body: Body) -> Body {
    let status = json!({ "type": "ERROR", "object": { "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": "Expired", "message": "too old resource version", "code": 410 } });
    let end = stream::iter([Ok(Bytes::from(format!("{status}\n")))]);
    let moment = tokio::time::sleep(Duration::from_millis(fastrand::u64(300..1500)));
    Body::from_stream(body.into_data_stream().take_until(moment).chain(end))
}
