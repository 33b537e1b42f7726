//! What the sidecar knows and wants, in one place that every task watches. Pure: time is given.

use std::time::Duration;

use moongate_discovery::{Engine, EngineLoad, Place, Registration, Role, StaticInstance};
use tokio::time::Instant;

use crate::options::SidecarOptions;

/// A drained state ends by itself so long after it was last asked for.
pub(crate) const DRAIN_HOLD: Duration = Duration::from_secs(600);
/// What gateways are told while it lasts.
const DRAINING: &str = "draining";

/// An engine that has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Where the sidecar reaches it.
    pub(crate) url: String,
    /// Where others do.
    pub(crate) advertised: String,
    pub(crate) engine: Engine,
    pub(crate) role: Role,
}

/// What the latest look at the engine has told.
#[derive(Debug, Clone)]
pub(crate) struct Look {
    /// When it began.
    pub(crate) begun: Instant,
    /// What runs there; `None` if it does not tell.
    pub(crate) load: Option<EngineLoad>,
}

/// Somebody wants the engine to be drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Drain {
    pub(crate) since: Instant,
    /// When it was last asked for.
    pub(crate) asked: Instant,
    /// Whether the engine was away since; the drain ends when it is back.
    pub(crate) engine_gone: bool,
}

/// How far the engine's adapters are those that it shall have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AdapterState {
    pub(crate) loaded: Vec<String>,
    pub(crate) pending: Vec<String>,
    /// Name, and why not.
    pub(crate) failed: Vec<(String, String)>,
}

/// All of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// The engine, from its first answer on.
    pub(crate) found: Option<Found>,
    /// Why it cannot serve now; `None` while it can.
    pub(crate) trouble: Option<String>,
    pub(crate) look: Option<Look>,
    pub(crate) drain: Option<Drain>,
    pub(crate) place: Place,
    pub(crate) adapters: AdapterState,
    /// Counts changes of what the engine serves.
    pub(crate) revision: u64,
}

impl State {
    /// The engine answers and serves.
    pub(crate) fn serves(&mut self, found: Found, look: Look) {
        if self.drain.as_ref().is_some_and(|drain| drain.engine_gone) {
            tracing::info!("the engine has restarted; it is not drained any more");
            self.drain = None;
        }
        self.found = Some(found);
        self.look = Some(look);
        self.trouble = None;
    }

    /// The engine does not serve. Answers whether that is news.
    pub(crate) fn fails(&mut self, reason: String) -> bool {
        if let Some(drain) = &mut self.drain {
            drain.engine_gone = true;
        }
        let news = self.trouble.is_none();
        self.trouble = Some(reason);
        self.look = None;
        news
    }

    /// Begins a drain, or goes on with it.
    pub(crate) fn drain(&mut self, now: Instant) {
        let drain = self.drain.get_or_insert(Drain { since: now, asked: now, engine_gone: false });
        drain.asked = now;
    }

    /// Ends a drain that nobody asks for any more.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.drain.as_ref().is_some_and(|drain| now.duration_since(drain.asked) >= DRAIN_HOLD) {
            tracing::warn!(hold = ?DRAIN_HOLD, "nobody asks for the drain any more; the engine serves again");
            self.drain = None;
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.found.is_some() && self.trouble.is_none() && self.drain.is_none()
    }

    /// What gateways are to be told; `None` before the engine has answered for the first time.
    pub(crate) fn registration(&self, options: &SidecarOptions) -> Option<Registration> {
        let found = self.found.as_ref()?;
        let draining = self.drain.is_some().then(|| DRAINING.to_owned());
        Some(Registration {
            instance: StaticInstance {
                id: options.id.clone(),
                engine: Some(found.engine),
                connector: options.kv_connector.filter(|_| found.engine == Engine::Vllm),
                bootstrap_port: options.bootstrap_port.filter(|_| found.role == Role::Prefill),
                place: self.place.clone(),
                ..StaticInstance::new(found.role, found.advertised.clone())
            },
            lease_seconds: Some(u32::try_from(options.lease.as_secs()).unwrap_or(u32::MAX)),
            held: draining.or_else(|| self.trouble.as_deref().map(one_line)),
            revision: self.revision,
        })
    }
}

/// A reason as gateways take it: no control characters, and short.
fn one_line(reason: &str) -> String {
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(100).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Flags {
        #[command(flatten)]
        options: SidecarOptions,
    }

    fn found() -> Found {
        let url = "http://127.0.0.1:8000".to_owned();
        Found { url: url.clone(), advertised: url, engine: Engine::Sglang, role: Role::Decode }
    }

    fn look(at: Instant) -> Look {
        Look { begun: at, load: None }
    }

    #[test]
    fn a_drain_lasts_until_the_engine_was_away_and_is_back() {
        let (mut state, now) = (State::default(), Instant::now());
        state.serves(found(), look(now));
        state.drain(now);
        state.serves(found(), look(now));
        assert!(state.drain.is_some() && !state.is_ready(), "it is the same engine still");
        assert!(state.fails("refused".to_owned()), "news");
        assert!(!state.fails("refused".to_owned()));
        assert!(state.drain.is_some());
        state.serves(found(), look(now));
        assert!(state.drain.is_none() && state.is_ready());
    }

    #[test]
    fn a_drain_that_is_not_asked_for_any_more_ends() {
        let (mut state, now) = (State::default(), Instant::now());
        state.drain(now);
        state.drain(now + Duration::from_secs(500));
        state.expire(now + Duration::from_secs(1000));
        assert_eq!(state.drain.as_ref().map(|drain| drain.since), Some(now), "asked again, begun once");
        state.expire(now + Duration::from_secs(1100));
        assert!(state.drain.is_none());
    }

    #[test]
    fn gateways_are_told_why_it_is_held_and_options_only_where_they_apply() {
        let args = ["x", "--kv-connector=nixl", "--bootstrap-port=9", "--lease=9s", "--id=ns/p@u"];
        let options = Flags::try_parse_from(args).unwrap().options;
        assert_eq!(options.engine_url.len(), 2, "two places to look for an engine");
        let (mut state, now) = (State::default(), Instant::now());
        assert_eq!(state.registration(&options), None);
        state.serves(found(), look(now));
        let said = state.registration(&options).unwrap();
        assert_eq!((said.lease_seconds, said.held, said.instance.connector), (Some(9), None, None));
        assert_eq!((said.instance.bootstrap_port, said.instance.id.as_deref()), (None, Some("ns/p@u")));
        state.fails(format!("line\nbreak {}", "é".repeat(500)));
        let held = state.registration(&options).unwrap().held.unwrap();
        assert!(held.starts_with("line break é") && held.len() < 300, "{held}");
        state.drain(now);
        assert_eq!(state.registration(&options).unwrap().held.as_deref(), Some("draining"));
    }
}
