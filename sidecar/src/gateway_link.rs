//! The link to one gateway: registers the engine, renews the registration, and records the gateway's responses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{EngineRegistration, HttpScheme};
use moongate_runtime::{Backoff, BackoffPolicy};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::context::SidecarContext;
use crate::gateway_address::GatewayIdentity;
use crate::http_client::{self, HttpExchangeError, read_bounded_body, root_cause};
use crate::registrations::{GatewayLink, RegistrationError, RegistrationOutcome, RegistrationResponse};

/// Time limit for one exchange.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before a failed registration is retried.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Poll intervals during a drain, or until the gateway has probed the engine.
const POLL_INTERVALS: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(100), max: Duration::from_secs(1) };

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
        Ok(Self { address, scheme: identity.scheme, client: http_client::new(&trust)? })
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
    let mut links = sidecar.registrations.links();
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
    let mut polls = Backoff::new(POLL_INTERVALS);
    loop {
        let registration = states.borrow_and_update().registration(&sidecar.options);
        if registration != sent {
            polls.reset();
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
                        // As after a failure, the interval grows.
                        polls.record_failure();
                        polls.pause()
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

async fn register(
    sidecar: &SidecarContext,
    client: &GatewayClient,
    registration: &EngineRegistration,
) -> RegistrationOutcome {
    let sent_at = Instant::now();
    let result = post(sidecar, client, registration).await;
    sidecar.registrations.record(client.address, sent_at, registration.held.is_some(), result)
}

async fn post(
    sidecar: &SidecarContext,
    gateway: &GatewayClient,
    registration: &EngineRegistration,
) -> Result<RegistrationResponse, RegistrationError> {
    let request = gateway.client.post(gateway.workers_url()).json(registration).timeout(REQUEST_TIMEOUT);
    let response = authorized(sidecar, request).send().await.map_err(HttpExchangeError::from)?;
    let status = response.status();
    let body = read_bounded_body(response).await?;
    if !status.is_success() {
        let body = String::from_utf8_lossy(&body).into_owned();
        return Err(RegistrationError::Rejected { status, body });
    }
    Ok(serde_json::from_slice(&body)?)
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
