//! The link to one gateway: registers the engine, renews the registration, and stores the gateway's responses.

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

/// Time limit for one exchange.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before a failed registration is retried.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// First poll interval during a drain, or until the gateway has probed the engine.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum poll interval, up to which it doubles.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A gateway's response to a registration: the engine's status there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct RegistrationResponse {
    pub(crate) id: String,
    /// Whether the gateway routes to the engine.
    pub(crate) usable: bool,
    /// Why it does not.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// The gateway's requests in flight on the engine.
    pub(crate) load: u32,
}

/// The state of the link to one gateway.
#[derive(Debug, Default)]
pub(crate) struct GatewayLink {
    /// Time and response of the latest accepted registration.
    pub(crate) last_registration: Option<(Instant, RegistrationResponse)>,
    /// Why the latest registration failed; `None` if it was accepted.
    pub(crate) error: Option<String>,
    /// Time since which every response reports no routing to the engine and no requests in flight.
    pub(crate) quiet_since: Option<Instant>,
    pub(crate) cancel: CancellationToken,
}

/// HTTP client for one gateway.
#[derive(Clone)]
struct GatewayClient {
    address: SocketAddr,
    scheme: HttpScheme,
    client: reqwest::Client,
}

impl GatewayClient {
    fn new(
        sidecar: &SidecarContext,
        address: SocketAddr,
        identity: &GatewayIdentity,
    ) -> reqwest::Result<Self> {
        // For a host that is not a valid certificate name, the certificate must contain the address.
        let trust = &sidecar.gateway_trust;
        let trust = trust.for_name(&identity.host).unwrap_or_else(|_| trust.clone());
        Ok(Self { address, scheme: identity.scheme, client: sidecar::client(&trust)? })
    }

    fn workers_url(&self) -> String {
        format!("{}://{}/workers", self.scheme.as_str(), self.address)
    }
}

/// Starts links to new gateways. If the list is `complete`, links to gateways that are not in it are closed.
pub(crate) fn sync_links(
    sidecar: &Arc<SidecarContext>,
    gateways: &BTreeMap<SocketAddr, GatewayIdentity>,
    complete: bool,
) {
    let mut links = sidecar.links.lock();
    if complete {
        links.retain(|gateway, link| {
            let is_listed = gateways.contains_key(gateway);
            if !is_listed {
                link.cancel.cancel();
            }
            is_listed
        });
    }
    for (&address, identity) in gateways {
        if links.contains_key(&address) {
            continue;
        }
        let gateway = match GatewayClient::new(sidecar, address, identity) {
            Ok(gateway) => gateway,
            Err(error) => {
                tracing::warn!(gateway = %address, error = root_cause(&error), "cannot create an HTTP client for the gateway");
                continue;
            }
        };
        links.entry(address).or_insert_with(|| {
            tracing::info!(gateway = %address, "gateway found");
            let cancel = sidecar.supervisor.token().child_token();
            let (context, stop) = (Arc::clone(sidecar), cancel.clone());
            sidecar.supervisor.spawn_restarted("sidecar-gateway-link", move || {
                run(Arc::clone(&context), gateway.clone(), stop.clone())
            });
            GatewayLink { cancel, ..GatewayLink::default() }
        });
    }
}

async fn run(sidecar: Arc<SidecarContext>, gateway: GatewayClient, stop: CancellationToken) {
    let mut states = sidecar.state.subscribe();
    let mut sent: Option<EngineRegistration> = None;
    let mut id = None;
    let mut poll_interval = MIN_POLL_INTERVAL;
    loop {
        let registration = states.borrow_and_update().registration(&sidecar.options);
        if registration != sent {
            poll_interval = MIN_POLL_INTERVAL;
        }
        let delay = match &registration {
            None => sidecar.options.lease,
            Some(registration) => {
                let outcome = tokio::select! {
                    () = stop.cancelled() => break,
                    outcome = register(&sidecar, &gateway, registration) => outcome,
                };
                match outcome {
                    RegistrationOutcome::Rejected => RETRY_INTERVAL,
                    RegistrationOutcome::InSync(registered_id) => {
                        id = Some(registered_id);
                        sidecar.options.lease / 3
                    }
                    RegistrationOutcome::Pending(registered_id) => {
                        id = Some(registered_id);
                        let next = (poll_interval * 2).min(MAX_POLL_INTERVAL);
                        std::mem::replace(&mut poll_interval, next)
                    }
                }
            }
        };
        sent = registration;
        let changed = async {
            // Most changes of the state do not change the registration.
            let change = states.wait_for(|state| state.registration(&sidecar.options) != sent);
            if change.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            () = changed => {}
            () = tokio::time::sleep(delay) => {}
        }
    }
    if let Some(id) = id {
        deregister(&sidecar, &gateway, &id).await;
    }
}

/// The outcome of a registration, with the engine's id in the gateway.
enum RegistrationOutcome {
    /// The gateway's status of the engine matches the registration.
    InSync(String),
    /// The gateway's status does not match yet: it still has to probe the engine, or has requests on a draining engine.
    Pending(String),
    Rejected,
}

async fn register(
    sidecar: &SidecarContext,
    client: &GatewayClient,
    registration: &EngineRegistration,
) -> RegistrationOutcome {
    let sent_at = Instant::now();
    let outcome = post(sidecar, client, registration).await;
    let gateway = client.address;
    let mut links = sidecar.links.lock();
    // The link was closed during the exchange.
    let Some(link) = links.get_mut(&gateway) else { return RegistrationOutcome::Rejected };
    match outcome {
        Ok(response) => {
            let is_quiet = !response.usable && response.load == 0;
            link.quiet_since = is_quiet.then(|| link.quiet_since.unwrap_or(sent_at));
            if link.last_registration.is_none() || link.error.is_some() {
                tracing::info!(%gateway, id = response.id, "registered");
            }
            let is_in_sync = if registration.held.is_none() { response.usable } else { is_quiet };
            let id = response.id.clone();
            link.error = None;
            link.last_registration = Some((sent_at, response));
            sidecar.registrations_accepted.fetch_add(1, Ordering::Relaxed);
            if is_in_sync { RegistrationOutcome::InSync(id) } else { RegistrationOutcome::Pending(id) }
        }
        Err(error) => {
            if link.error.as_ref() != Some(&error) {
                tracing::warn!(%gateway, error, "registration failed");
            }
            link.error = Some(error);
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
    serde_json::from_slice(&body).map_err(|error| format!("POST /workers: not a gateway's response: {error}"))
}

/// Deregisters the engine. A gateway that is unreachable removes it when the lease expires.
async fn deregister(sidecar: &SidecarContext, client: &GatewayClient, id: &str) {
    let mut url = url::Url::parse(&client.workers_url()).ok();
    let gateway = client.address;
    if let Some(mut segments) = url.as_mut().and_then(|url| url.path_segments_mut().ok()) {
        segments.push(id);
    }
    let Some(url) = url else { return };
    let request = authorized(sidecar, client.client.delete(url).timeout(REQUEST_TIMEOUT));
    match request.send().await.and_then(reqwest::Response::error_for_status) {
        Ok(_) => tracing::info!(%gateway, id, "deregistered"),
        Err(error) => {
            tracing::warn!(%gateway, error = root_cause(&error), "deregistration failed; the lease will expire");
        }
    }
}

fn authorized(sidecar: &SidecarContext, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    match &sidecar.options.registration_token {
        Some(token) => request.bearer_auth(token),
        None => request,
    }
}
