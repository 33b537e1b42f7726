//! What the sidecar knows and wants, in one place that every task watches. Pure: time is given.

use std::time::Duration;

use moongate_discovery::{
    EngineKind, EngineLoad, EngineRegistration, EngineRole, PhysicalLocation, StaticInstance,
};
use tokio::time::Instant;

use crate::options::SidecarOptions;

/// A drained state ends by itself so long after it was last asked for.
pub(crate) const DRAIN_TTL: Duration = Duration::from_secs(600);
/// What gateways are told while it lasts.
const DRAINING: &str = "draining";

/// An engine that has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalEngine {
    /// Where the sidecar reaches it.
    pub(crate) url: String,
    /// Where others do.
    pub(crate) advertised: String,
    pub(crate) engine: EngineKind,
    pub(crate) role: EngineRole,
}

/// What the latest look at the engine has told.
#[derive(Debug, Clone)]
pub(crate) struct EngineObservation {
    /// When it began.
    pub(crate) started_at: Instant,
    /// What runs there; `None` if it does not tell.
    pub(crate) load: Option<EngineLoad>,
}

/// Somebody wants the engine to be drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineDrain {
    pub(crate) since: Instant,
    /// When it was last asked for.
    pub(crate) renewed_at: Instant,
    /// Whether the engine was away since; the drain ends when it is back.
    pub(crate) engine_was_down: bool,
}

/// How far the engine's adapters are those that it shall have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LoraAdapterStatus {
    pub(crate) loaded: Vec<String>,
    pub(crate) pending: Vec<String>,
    /// Name, and why not.
    pub(crate) failed: Vec<(String, String)>,
}

/// All of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SidecarState {
    /// The engine, from its first answer on.
    pub(crate) local_engine: Option<LocalEngine>,
    /// Why it cannot serve now; `None` while it can.
    pub(crate) error: Option<String>,
    pub(crate) observation: Option<EngineObservation>,
    pub(crate) drain: Option<EngineDrain>,
    pub(crate) location: PhysicalLocation,
    pub(crate) adapters: LoraAdapterStatus,
    /// Counts changes of what the engine serves.
    pub(crate) revision: u64,
}

impl SidecarState {
    /// The engine answers and serves.
    pub(crate) fn set_up(&mut self, found: LocalEngine, look: EngineObservation) {
        if self.drain.as_ref().is_some_and(|drain| drain.engine_was_down) {
            tracing::info!("the engine has restarted; it is not drained any more");
            self.drain = None;
        }
        self.local_engine = Some(found);
        self.observation = Some(look);
        self.error = None;
    }

    /// The engine does not serve. Answers whether that is news.
    pub(crate) fn set_down(&mut self, reason: String) -> bool {
        if let Some(drain) = &mut self.drain {
            drain.engine_was_down = true;
        }
        let news = self.error.is_none();
        self.error = Some(reason);
        self.observation = None;
        news
    }

    /// Begins a drain, or goes on with it.
    pub(crate) fn drain(&mut self, now: Instant) {
        let drain =
            self.drain.get_or_insert(EngineDrain { since: now, renewed_at: now, engine_was_down: false });
        drain.renewed_at = now;
    }

    /// Ends a drain that nobody asks for any more.
    pub(crate) fn expire_drain(&mut self, now: Instant) {
        if self.drain.as_ref().is_some_and(|drain| now.duration_since(drain.renewed_at) >= DRAIN_TTL) {
            tracing::warn!(hold = ?DRAIN_TTL, "nobody asks for the drain any more; the engine serves again");
            self.drain = None;
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.local_engine.is_some() && self.error.is_none() && self.drain.is_none()
    }

    /// What gateways are to be told; `None` before the engine has answered for the first time.
    pub(crate) fn registration(&self, options: &SidecarOptions) -> Option<EngineRegistration> {
        let found = self.local_engine.as_ref()?;
        let draining = self.drain.is_some().then(|| DRAINING.to_owned());
        Some(EngineRegistration {
            instance: StaticInstance {
                id: options.id.clone(),
                engine: Some(found.engine),
                connector: options.kv_connector.filter(|_| found.engine == EngineKind::Vllm),
                bootstrap_port: options.bootstrap_port.filter(|_| found.role == EngineRole::Prefill),
                place: self.location.clone(),
                ..StaticInstance::new(found.role, found.advertised.clone())
            },
            lease_seconds: Some(u32::try_from(options.lease.as_secs()).unwrap_or(u32::MAX)),
            held: draining.or_else(|| self.error.as_deref().map(sanitize_reason)),
            revision: self.revision,
        })
    }
}

/// A reason as gateways take it: no control characters, and short.
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

    fn found() -> LocalEngine {
        let url = "http://127.0.0.1:8000".to_owned();
        LocalEngine {
            url: url.clone(),
            advertised: url,
            engine: EngineKind::Sglang,
            role: EngineRole::Decode,
        }
    }

    fn look(at: Instant) -> EngineObservation {
        EngineObservation { started_at: at, load: None }
    }

    #[test]
    fn a_drain_lasts_until_the_engine_was_away_and_is_back() {
        let (mut state, now) = (SidecarState::default(), Instant::now());
        state.set_up(found(), look(now));
        state.drain(now);
        state.set_up(found(), look(now));
        assert!(state.drain.is_some() && !state.is_ready(), "it is the same engine still");
        assert!(state.set_down("refused".to_owned()), "news");
        assert!(!state.set_down("refused".to_owned()));
        assert!(state.drain.is_some());
        state.set_up(found(), look(now));
        assert!(state.drain.is_none() && state.is_ready());
    }

    #[test]
    fn a_drain_that_is_not_asked_for_any_more_ends() {
        let (mut state, now) = (SidecarState::default(), Instant::now());
        state.drain(now);
        state.drain(now + Duration::from_secs(500));
        state.expire_drain(now + Duration::from_secs(1000));
        assert_eq!(state.drain.as_ref().map(|drain| drain.since), Some(now), "asked again, begun once");
        state.expire_drain(now + Duration::from_secs(1100));
        assert!(state.drain.is_none());
    }

    #[test]
    fn registration_has_hold_reason_and_applicable_options() {
        let args = ["x", "--kv-connector=nixl", "--bootstrap-port=9", "--lease=9s", "--id=ns/p@u"];
        let options = TestSidecarArgs::try_parse_from(args).unwrap().options;
        assert_eq!(options.engine_url.len(), 2, "two places to look for an engine");
        let (mut state, now) = (SidecarState::default(), Instant::now());
        assert_eq!(state.registration(&options), None);
        state.set_up(found(), look(now));
        let said = state.registration(&options).unwrap();
        assert_eq!((said.lease_seconds, said.held, said.instance.connector), (Some(9), None, None));
        assert_eq!((said.instance.bootstrap_port, said.instance.id.as_deref()), (None, Some("ns/p@u")));
        state.set_down(format!("line\nbreak {}", "é".repeat(500)));
        let held = state.registration(&options).unwrap().held.unwrap();
        assert!(held.starts_with("line break é") && held.len() < 300, "{held}");
        state.drain(now);
        assert_eq!(state.registration(&options).unwrap().held.as_deref(), Some("draining"));
    }
}
