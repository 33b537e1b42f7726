//! The state of the sidecar, which all tasks watch. Pure: callers pass the time.

use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{
    DiscoveryError, EngineKind, EngineLoad, EngineLoadError, EngineRegistration, EngineRole,
    PhysicalLocation, StaticInstance,
};
use tokio::time::Instant;

use crate::options::SidecarOptions;

/// A drain expires this long after the last `POST /drain`.
pub(crate) const DRAIN_TTL: Duration = Duration::from_secs(600);
/// Reason for unavailability in registrations during a drain.
const DRAINING: &str = "draining";

/// The engine that the sidecar has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalEngine {
    /// URL for the sidecar's own requests.
    pub(crate) url: String,
    /// URL for gateways and other engines.
    pub(crate) advertised: String,
    pub(crate) engine: EngineKind,
    pub(crate) role: EngineRole,
}

/// Why the engine does not serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineUnavailableError {
    /// The engine's URL, or the advertised host, is invalid.
    #[error("{url}: {source}")]
    Url { url: String, source: url::ParseError },
    /// No probe was possible with these settings.
    #[error(transparent)]
    Probe(#[from] DiscoveryError),
    /// The engine was probed, and must not get requests.
    #[error("{reason}")]
    NotReady { reason: String, timed_out: bool },
    #[error(transparent)]
    Load(#[from] EngineLoadError),
    /// None of the candidate addresses has an engine.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NotFound(Vec<EngineUnavailableError>),
}

impl EngineUnavailableError {
    /// Whether a request timed out, so that a busy engine may exist.
    pub(crate) fn timed_out(&self) -> bool {
        match self {
            Self::Url { .. } | Self::Probe(_) => false,
            Self::NotReady { timed_out, .. } => *timed_out,
            Self::Load(error) => error.timed_out(),
            Self::NotFound(errors) => errors.iter().any(Self::timed_out),
        }
    }
}

/// Result of the latest poll of the engine.
#[derive(Debug, Clone)]
pub(crate) struct EngineObservation {
    /// Time at which the poll started.
    pub(crate) started_at: Instant,
    /// The engine's load; `None` if not reported.
    pub(crate) load: Option<EngineLoad>,
}

/// A requested drain of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineDrain {
    pub(crate) since: Instant,
    /// Time of the last `POST /drain`.
    pub(crate) renewed_at: Instant,
    /// Whether the engine was down since the start of the drain; the drain ends when it serves again.
    pub(crate) engine_was_down: bool,
}

/// Which of the desired adapters the engine has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LoraAdapterStatus {
    pub(crate) loaded: Vec<String>,
    pub(crate) pending: Vec<String>,
    /// Name and reason of each adapter that failed to load.
    pub(crate) failed: Vec<(String, String)>,
}

/// The complete state of the sidecar.
#[derive(Debug, Clone, Default)]
pub(crate) struct SidecarState {
    /// The engine, once it has been found.
    pub(crate) local_engine: Option<LocalEngine>,
    /// Why the engine does not serve; `None` while it does.
    pub(crate) error: Option<Arc<EngineUnavailableError>>,
    pub(crate) observation: Option<EngineObservation>,
    pub(crate) drain: Option<EngineDrain>,
    pub(crate) location: PhysicalLocation,
    pub(crate) adapters: LoraAdapterStatus,
    /// Incremented when the engine's models change.
    pub(crate) revision: u64,
}

impl SidecarState {
    /// Records that the engine serves.
    pub(crate) fn set_up(&mut self, engine: LocalEngine, observation: EngineObservation) {
        if self.drain.as_ref().is_some_and(|drain| drain.engine_was_down) {
            tracing::info!("the engine has restarted; drain ended");
            self.drain = None;
        }
        self.local_engine = Some(engine);
        self.observation = Some(observation);
        self.error = None;
    }

    /// Records that the engine does not serve. Returns whether it served before.
    pub(crate) fn set_down(&mut self, error: EngineUnavailableError) -> bool {
        if let Some(drain) = &mut self.drain {
            drain.engine_was_down = true;
        }
        let was_up = self.error.is_none();
        self.error = Some(Arc::new(error));
        self.observation = None;
        was_up
    }

    /// Starts a drain, or renews it.
    pub(crate) fn drain(&mut self, now: Instant) {
        let drain =
            self.drain.get_or_insert(EngineDrain { since: now, renewed_at: now, engine_was_down: false });
        drain.renewed_at = now;
    }

    /// Ends a drain that has not been renewed for [`DRAIN_TTL`].
    pub(crate) fn expire_drain(&mut self, now: Instant) {
        if self.drain.as_ref().is_some_and(|drain| now.duration_since(drain.renewed_at) >= DRAIN_TTL) {
            tracing::warn!(ttl = ?DRAIN_TTL, "drain expired; the engine is back in service");
            self.drain = None;
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.local_engine.is_some() && self.error.is_none() && self.drain.is_none()
    }

    /// The registration for gateways; `None` until the engine has been found.
    pub(crate) fn registration(&self, options: &SidecarOptions) -> Option<EngineRegistration> {
        let engine = self.local_engine.as_ref()?;
        let draining = self.drain.is_some().then(|| DRAINING.to_owned());
        Some(EngineRegistration {
            instance: StaticInstance {
                id: options.id.clone(),
                engine: Some(engine.engine),
                connector: options.kv_connector.filter(|_| engine.engine == EngineKind::Vllm),
                bootstrap_port: options.bootstrap_port.filter(|_| engine.role == EngineRole::Prefill),
                place: self.location.clone(),
                ..StaticInstance::new(engine.role, engine.advertised.clone())
            },
            lease_seconds: Some(u32::try_from(options.lease.as_secs()).unwrap_or(u32::MAX)),
            held: draining.or_else(|| self.error.as_ref().map(|error| sanitize_reason(&error.to_string()))),
            revision: self.revision,
        })
    }
}

/// The reason in the form that gateways accept: without control characters, at most 100 characters.
fn sanitize_reason(reason: &str) -> String {
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(100).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct TestSidecarArgs {
        #[command(flatten)]
        options: SidecarOptions,
    }

    fn engine() -> LocalEngine {
        let url = "http://127.0.0.1:8000".to_owned();
        LocalEngine {
            url: url.clone(),
            advertised: url,
            engine: EngineKind::Sglang,
            role: EngineRole::Decode,
        }
    }

    fn unavailable(reason: &str) -> EngineUnavailableError {
        EngineUnavailableError::NotReady { reason: reason.to_owned(), timed_out: false }
    }

    fn observation(started_at: Instant) -> EngineObservation {
        EngineObservation { started_at, load: None }
    }

    #[test]
    fn a_drain_lasts_until_the_engine_has_restarted() {
        let (mut state, now) = (SidecarState::default(), Instant::now());
        state.set_up(engine(), observation(now));
        state.drain(now);
        state.set_up(engine(), observation(now));
        assert!(state.drain.is_some() && !state.is_ready(), "the engine has not restarted");
        assert!(state.set_down(unavailable("refused")), "it served before");
        assert!(!state.set_down(unavailable("refused")));
        assert!(state.drain.is_some());
        state.set_up(engine(), observation(now));
        assert!(state.drain.is_none() && state.is_ready());
    }

    #[test]
    fn a_drain_that_is_not_renewed_expires() {
        let (mut state, now) = (SidecarState::default(), Instant::now());
        state.drain(now);
        state.drain(now + Duration::from_secs(500));
        state.expire_drain(now + Duration::from_secs(1000));
        assert_eq!(state.drain.as_ref().map(|drain| drain.since), Some(now), "renewed, but started once");
        state.expire_drain(now + Duration::from_secs(1100));
        assert!(state.drain.is_none());
    }

    #[test]
    fn registration_has_unavailable_reason_and_applicable_options() {
        let args = ["x", "--kv-connector=nixl", "--bootstrap-port=9", "--lease=9s", "--id=ns/p@u"];
        let options = TestSidecarArgs::try_parse_from(args).unwrap().options;
        assert_eq!(options.engine_url.len(), 2, "two candidate addresses of the engine");
        let (mut state, now) = (SidecarState::default(), Instant::now());
        assert_eq!(state.registration(&options), None);
        state.set_up(engine(), observation(now));
        let sent = state.registration(&options).unwrap();
        assert_eq!((sent.lease_seconds, sent.held, sent.instance.connector), (Some(9), None, None));
        assert_eq!((sent.instance.bootstrap_port, sent.instance.id.as_deref()), (None, Some("ns/p@u")));
        state.set_down(unavailable(&format!("line\nbreak {}", "é".repeat(500))));
        let held = state.registration(&options).unwrap().held.unwrap();
        assert!(held.starts_with("line break é") && held.len() < 300, "{held}");
        state.drain(now);
        assert_eq!(state.registration(&options).unwrap().held.as_deref(), Some("draining"));
    }
}
