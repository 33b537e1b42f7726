//! Starts and stops feeds as engines are listed and delisted, and loads their tokenizers.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use moongate_discovery::KvEventSource;
use moongate_runtime::Supervisor;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::apply::EngineEventApplier;
use super::engine::{EngineFeed, EngineFeedSource};
use crate::feedback::EventFeedMetrics;
use crate::fleet::{FleetMember, FleetReader, FleetSnapshot, UpstreamEndpoint};
use crate::kv_index::RankSlots;
use crate::predict::models::{ModelTokenizers, TokenizerLoadTask};

/// A running feed, stopped on drop.
#[derive(Debug)]
struct RunningFeed {
    endpoint: Arc<UpstreamEndpoint>,
    /// Slots of the engine's ranks.
    slots: RankSlots,
    source: EngineFeedSource,
    stop: CancellationToken,
}

impl Drop for RunningFeed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Keeps one feed for each event source of each engine.
#[derive(Debug)]
pub(crate) struct FeedStarter {
    pub(crate) models: Arc<ModelTokenizers>,
    pub(crate) metrics: Arc<EventFeedMetrics>,
    pub(crate) supervisor: Supervisor,
}

/// Follows the fleet until `stop`.
pub(crate) async fn run_feeds(feeds: FeedStarter, fleet: FleetReader, stop: CancellationToken) {
    let mut running = HashMap::new();
    let mut generation = 0;
    loop {
        let current = fleet.current();
        feeds.load_tokenizers(&current);
        feeds.update(&mut running, &current);
        generation = current.generation.max(generation) + 1;
        if stop.run_until_cancelled(fleet.wait_for(generation)).await.is_none() {
            return;
        }
    }
}

impl RunningFeed {
    /// Whether the engine has the same ranks, and the source the same address.
    fn serves(&self, member: &FleetMember, source: &EngineFeedSource) -> bool {
        Arc::ptr_eq(&member.endpoint, &self.endpoint)
            && Arc::ptr_eq(&member.slots, &self.slots)
            && self.source == *source
    }
}

/// Event sources of an engine.
fn events(member: &FleetMember) -> &[KvEventSource] {
    member.facts().and_then(|facts| facts.events.as_deref()).unwrap_or_default()
}

/// Number of the engine's first rank in its events: 0, unless its ranks are a node's part of a larger deployment.
fn first_number(engine: &FleetMember) -> u32 {
    let numbers = events(engine).iter().map(|source| source.dp_rank);
    let is_part = numbers.clone().any(|number| number >= engine.rank_count());
    numbers.min().filter(|_| is_part).unwrap_or(0)
}

impl FeedStarter {
    fn update(&self, running: &mut HashMap<(String, u32), RunningFeed>, fleet: &FleetSnapshot) {
        let mut wanted = HashMap::new();
        for member in fleet.engines() {
            for event_source in events(member) {
                match EngineFeedSource::new(event_source) {
                    Ok(source) => {
                        wanted
                            .insert((member.endpoint.id.to_string(), event_source.dp_rank), (member, source));
                    }
                    Err(error) => {
                        tracing::warn!(engine = %member.endpoint.id, %error, "KV events: invalid endpoint");
                    }
                }
            }
        }
        // An engine that is briefly unavailable keeps its feed, which itself detects whether the cache was lost.
        running.retain(|key, feed| match wanted.get(key) {
            Some((member, source)) => feed.serves(member, source),
            None => fleet.has_endpoint(&feed.endpoint),
        });
        for (key, (member, source)) in wanted {
            if !running.contains_key(&key)
                && let Some(feed) = self.start(&key, member, source)
            {
                running.insert(key, feed);
            }
        }
    }

    fn start(
        &self,
        (name, rank): &(String, u32),
        member: &FleetMember,
        source: EngineFeedSource,
    ) -> Option<RunningFeed> {
        let keyspace = member.keyspace.clone()?;
        let slots = member.slots.clone();
        let target = EngineEventApplier::new(slots.clone(), *rank, first_number(member), keyspace)?
            .with_checkpoints(member.facts().and_then(|facts| facts.checkpoints));
        let stop = self.supervisor.token().child_token();
        let (name, feed_source, metrics) =
            (format!("{name} rank {rank}"), source.clone(), self.metrics.clone());
        let until = stop.clone();
        self.supervisor.spawn_restarted("kv-events", move || {
            let feed = EngineFeed::new(name.clone(), feed_source.clone(), target.clone(), metrics.clone());
            let until = until.clone();
            async move {
                let _stopped = until.run_until_cancelled(feed.run()).await;
            }
        });
        Some(RunningFeed { endpoint: member.endpoint.clone(), slots, source, stop })
    }

    /// Loads tokenizers of served models that may have a local folder.
    fn load_tokenizers(&self, fleet: &FleetSnapshot) {
        for facts in fleet.engines().filter_map(FleetMember::facts) {
            for name in &facts.models {
                let Some(claim) = self.models.claim(name, facts) else { continue };
                let models = self.models.clone();
                self.supervisor.spawn("load-tokenizer", load_on_thread(models, claim));
            }
        }
    }
}

/// Loads a tokenizer on a thread that ends then, so that the memory that loading takes is returned to the system: up to 100 MB, a part of
/// which belongs to the thread, because the library has caches for each.
async fn load_on_thread(models: Arc<ModelTokenizers>, claim: TokenizerLoadTask) {
    let (sender, loaded) = oneshot::channel();
    let load = move || {
        let loaded = catch_unwind(AssertUnwindSafe(|| models.load(&claim)));
        let _ended = sender.send(loaded);
    };
    let thread = std::thread::Builder::new().name("load-tokenizer".to_owned()).spawn(load);
    if let Err(error) = thread {
        tracing::error!(%error, "cannot start the thread that loads a tokenizer: prompts are not tokenized");
    } else if let Ok(Err(panic)) = loaded.await {
        resume_unwind(panic);
    }
}
