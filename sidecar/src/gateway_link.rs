//! The link to one gateway: tells it what the engine is, again and again, and keeps what it answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moongate_discovery::{EngineRegistration, HttpScheme};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::gateways::GatewayIdentity;
use crate::http_client::{read_bounded_body, root_cause};
use crate::sidecar::{self, SidecarContext};

/// For one exchange.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Until a gateway that did not take a registration is asked again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Between two exchanges while something is waited for: a drain, or the gateway's own look at the engine.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The same if it takes long.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How a gateway sees the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct RegistrationResponse {
    pub(crate) id: String,
    /// Whether it sends requests there.
    pub(crate) usable: bool,
    /// Why not.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// Requests that it has there.
    pub(crate) load: u32,
}

/// What is known of one gateway.
#[derive(Debug, Default)]
pub(crate) struct GatewayLink {
    /// When the latest registration that it took was sent, and its answer.
    pub(crate) last_registration: Option<(Instant, RegistrationResponse)>,
    /// Why the latest was not taken; `None` if it was.
    pub(crate) error: Option<String>,
    /// Since when every answer says that it sends nothing there and has nothing there.
    pub(crate) quiet_since: Option<Instant>,
    pub(crate) cancel: CancellationToken,
}

/// One gateway, and how it is asked.
#[derive(Clone)]
struct GatewayClient {
    address: SocketAddr,
    scheme: HttpScheme,
    client: reqwest::Client,
}

impl GatewayClient {
    fn new(sidecar: &SidecarContext, address: SocketAddr, known: &GatewayIdentity) -> reqwest::Result<Self> {
        // A host that can be no name in a certificate is known by its address.
        let trust = &sidecar.gateway_trust;
        let trust = trust.for_name(&known.host).unwrap_or_else(|_| trust.clone());
        Ok(Self { address, scheme: known.scheme, client: sidecar::client(&trust)? })
    }

    fn workers_url(&self) -> String {
        format!("{}://{}/workers", self.scheme.as_str(), self.address)
    }
}

/// Starts links to gateways that have none. If the list is `complete`, those that are not in it end.
pub(crate) fn sync_links(
    sidecar: &Arc<SidecarContext>,
    gateways: &BTreeMap<SocketAddr, GatewayIdentity>,
    complete: bool,
) {
    let mut links = sidecar.links.lock();
    if complete {
        links.retain(|gateway, link| {
            let stays = gateways.contains_key(gateway);
            if !stays {
                link.cancel.cancel();
            }
            stays
        });
    }
    for (&address, known) in gateways {
        if links.contains_key(&address) {
            continue;
        }
        let gateway = match GatewayClient::new(sidecar, address, known) {
            Ok(gateway) => gateway,
            Err(error) => {
                tracing::warn!(gateway = %address, error = root_cause(&error), "the gateway cannot be asked");
                continue;
            }
        };
        links.entry(address).or_insert_with(|| {
            tracing::info!(gateway = %address, "gateway found");
            let end = sidecar.supervisor.token().child_token();
            let (of, until) = (Arc::clone(sidecar), end.clone());
            sidecar.supervisor.spawn_restarted("link to a gateway", move || {
                run(Arc::clone(&of), gateway.clone(), until.clone())
            });
            GatewayLink { cancel: end, ..GatewayLink::default() }
        });
    }
}

async fn run(sidecar: Arc<SidecarContext>, gateway: GatewayClient, end: CancellationToken) {
    let mut states = sidecar.state.subscribe();
    let mut said: Option<EngineRegistration> = None;
    let mut id = None;
    let mut soon = MIN_POLL_INTERVAL;
    loop {
        let registration = states.borrow_and_update().registration(&sidecar.options);
        if registration != said {
            soon = MIN_POLL_INTERVAL;
        }
        let pause = match &registration {
            None => sidecar.options.lease,
            Some(registration) => {
                let outcome = tokio::select! {
                    () = end.cancelled() => break,
                    outcome = register(&sidecar, &gateway, registration) => outcome,
                };
                match outcome {
                    RegistrationOutcome::Rejected => RETRY_INTERVAL,
                    RegistrationOutcome::InSync(under) => {
                        id = Some(under);
                        sidecar.options.lease / 3
                    }
                    RegistrationOutcome::Pending(under) => {
                        id = Some(under);
                        let next = (soon * 2).min(MAX_POLL_INTERVAL);
                        std::mem::replace(&mut soon, next)
                    }
                }
            }
        };
        said = registration;
        let changed = async {
            // Most changes of the state are of no interest to gateways.
            let news = states.wait_for(|state| state.registration(&sidecar.options) != said);
            if news.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = end.cancelled() => break,
            () = changed => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    if let Some(id) = id {
        deregister(&sidecar, &gateway, &id).await;
    }
}

/// What came of telling a gateway. With the id under which it knows the engine.
enum RegistrationOutcome {
    /// It sees the engine as it was told.
    InSync(String),
    /// It does not yet.
    Pending(String),
    Rejected,
}

async fn register(
    sidecar: &SidecarContext,
    to: &GatewayClient,
    registration: &EngineRegistration,
) -> RegistrationOutcome {
    let sent = Instant::now();
    let outcome = post(sidecar, to, registration).await;
    let gateway = to.address;
    let mut links = sidecar.links.lock();
    // A link that was given up a moment ago.
    let Some(link) = links.get_mut(&gateway) else { return RegistrationOutcome::Rejected };
    match outcome {
        Ok(answer) => {
            let quiet = !answer.usable && answer.load == 0;
            link.quiet_since = quiet.then(|| link.quiet_since.unwrap_or(sent));
            if link.last_registration.is_none() || link.error.is_some() {
                tracing::info!(%gateway, id = answer.id, "registered");
            }
            let settled = if registration.held.is_none() { answer.usable } else { quiet };
            let id = answer.id.clone();
            link.error = None;
            link.last_registration = Some((sent, answer));
            sidecar.registrations_accepted.fetch_add(1, Ordering::Relaxed);
            if settled { RegistrationOutcome::InSync(id) } else { RegistrationOutcome::Pending(id) }
        }
        Err(trouble) => {
            if link.error.as_ref() != Some(&trouble) {
                tracing::warn!(%gateway, trouble, "the gateway has not taken the registration");
            }
            link.error = Some(trouble);
            sidecar.registrations_rejected.fetch_add(1, Ordering::Relaxed);
            RegistrationOutcome::Rejected
        }
    }
}

async fn post(
    sidecar: &SidecarContext,
    gateway: &GatewayClient,
    registration: &EngineRegistration,
) -> Result<RegistrationResponse, String> {
    let request = gateway.client.post(gateway.workers_url()).json(registration).timeout(REQUEST_TIMEOUT);
    let response = authorized(sidecar, request).send().await.map_err(|error| root_cause(&error))?;
    let status = response.status();
    let body = read_bounded_body(response).await?;
    if !status.is_success() {
        return Err(format!("POST /workers: HTTP {status}: {}", String::from_utf8_lossy(&body)));
    }
    serde_json::from_slice(&body).map_err(|error| format!("POST /workers: no gateway's answer: {error}"))
}

/// A gateway that cannot be told forgets the engine with the end of its lease.
async fn deregister(sidecar: &SidecarContext, to: &GatewayClient, id: &str) {
    let mut url = url::Url::parse(&to.workers_url()).ok();
    let gateway = to.address;
    if let Some(mut segments) = url.as_mut().and_then(|url| url.path_segments_mut().ok()) {
        segments.push(id);
    }
    let Some(url) = url else { return };
    let request = authorized(sidecar, to.client.delete(url).timeout(REQUEST_TIMEOUT));
    match request.send().await.and_then(reqwest::Response::error_for_status) {
        Ok(_) => tracing::info!(%gateway, id, "deregistered"),
        Err(error) => {
            tracing::warn!(%gateway, error = root_cause(&error), "could not deregister; its lease will end");
        }
    }
}

fn authorized(sidecar: &SidecarContext, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    match &sidecar.options.registration_token {
        Some(token) => request.bearer_auth(token),
        None => request,
    }
}
