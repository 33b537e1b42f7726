//! The last route of each session.

use std::time::Duration;

use moka::sync::Cache;
use moongate_discovery::InstanceId;
use moongate_scheduler::{CacheHitPrediction, TierHits};

use crate::fleet::FleetSnapshot;

/// Most sessions that are kept; the least recently used are dropped.
const MAX_SESSIONS: u64 = 100_000;
/// How long a session is kept without a request. Engines evict a prompt that is not used for so long.
const IDLE_TIME: Duration = Duration::from_secs(1800);

/// Where the last request of a session went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionRoute {
    /// The engine that computed its prompt.
    pub(crate) engine: InstanceId,
    /// Number of its prompt tokens.
    pub(crate) prompt_tokens: u32,
}

impl SessionRoute {
    /// What a session's next request, of `input_tokens`, is assumed to find in the engines of a fleet. Nothing in an engine with several
    /// ranks, whose caches are separate.
    pub(crate) fn hits(&self, fleet: &FleetSnapshot, input_tokens: u32) -> CacheHitPrediction {
        let l1_tokens = self.prompt_tokens.min(input_tokens);
        let per_instance = fleet.members.iter().map(|member| {
            let has_prompt = member.endpoint.id == self.engine && member.rank_count() == 1;
            TierHits { l1_tokens: if has_prompt { l1_tokens } else { 0 }, ..TierHits::default() }
        });
        CacheHitPrediction { per_instance: per_instance.collect(), ..CacheHitPrediction::default() }
    }
}

/// The last routes of all sessions.
#[derive(Debug)]
pub(crate) struct SessionRoutes {
    routes: Cache<u64, SessionRoute>,
}

impl Default for SessionRoutes {
    fn default() -> Self {
        Self { routes: Cache::builder().max_capacity(MAX_SESSIONS).time_to_idle(IDLE_TIME).build() }
    }
}

impl SessionRoutes {
    /// The last route of a session; `None` for a new one.
    pub(crate) fn get(&self, session: u64) -> Option<SessionRoute> {
        self.routes.get(&session)
    }

    /// Records the route of a session's request.
    pub(crate) fn record(&self, session: u64, route: SessionRoute) {
        self.routes.insert(session, route);
    }
}
