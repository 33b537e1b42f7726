//! Network distance between engines and the blocks that they would fetch from the store.

use std::sync::Arc;

use moongate_scheduler::index::StoreBlockRun;
use moongate_scheduler::{
    InstanceIndex, StoreMedium, StoreSite, StoreSiteIndex, StoreSiteRun, StoreTokenRun, TierHits,
    network_distance, tokens_by_site,
};

use super::feeds::StoreView;
use crate::fleet::FleetSnapshot;

/// Locations of a prompt's blocks in the store. Empty if they are unknown or make no difference.
#[derive(Debug, Clone, Default)]
pub(super) struct StoredBlockSites {
    runs: Vec<StoreSiteRun>,
    /// Hosts of store nodes, with the media of the blocks.
    sites: Vec<(Arc<str>, StoreMedium)>,
}

impl StoredBlockSites {
    /// Sites of blocks with `page_tokens` tokens each.
    pub(super) fn of(
        blocks: &[StoreBlockRun],
        page_tokens: u32,
        fleet: &FleetSnapshot,
        store: &StoreView,
    ) -> Self {
        let is_slow = |run: &StoreBlockRun| run.location.medium == StoreMedium::Nvme;
        if fleet.hosts.is_empty() && !blocks.iter().any(is_slow) {
            return Self::default();
        }
        // Indexed by node and medium.
        let mut numbers: Vec<Option<StoreSiteIndex>> = Vec::new();
        let mut sites = Vec::new();
        let mut number = |run: &StoreBlockRun| {
            let index = run.location.node.as_usize() * 2 + usize::from(is_slow(run));
            if numbers.len() <= index {
                numbers.resize(index + 1, None);
            }
            *numbers[index].get_or_insert_with(|| {
                sites.push((run.location.node, run.location.medium));
                StoreSiteIndex(u32::try_from(sites.len() - 1).unwrap_or(u32::MAX))
            })
        };
        let runs = blocks.iter().map(|run| StoreSiteRun {
            first_token: run.first.saturating_mul(page_tokens),
            tokens: run.blocks.saturating_mul(page_tokens),
            site: number(run),
        });
        let runs = runs.collect();
        let hosts = store.hosts(sites.iter().map(|(node, _)| *node));
        let media = sites.iter().map(|(_, medium)| *medium);
        Self { runs, sites: hosts.into_iter().zip(media).collect() }
    }
}

/// The tokens that an engine would fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FetchedTokens {
    /// Position of the engine's group.
    group: usize,
    tokens: StoreTokenRun,
}

/// Fetches of the engines of one fleet. Engines with equal hits share the result.
pub(super) struct StoreDistance<'a> {
    fleet: &'a FleetSnapshot,
    stored: &'a [StoredBlockSites],
    sites: Vec<Vec<StoreSite>>,
    cached_counts: Vec<(FetchedTokens, Vec<u32>)>,
}

impl<'a> StoreDistance<'a> {
    /// `None` if no locations are known.
    pub(super) fn new(stored: &'a [StoredBlockSites], fleet: &'a FleetSnapshot) -> Option<Self> {
        if stored.iter().all(|index| index.runs.is_empty()) {
            return None;
        }
        let site = |(host, medium): &(Arc<str>, StoreMedium)| StoreSite {
            location: fleet.hosts.location(host).copied().unwrap_or_default(),
            medium: *medium,
        };
        let sites = stored.iter().map(|index| index.sites.iter().map(site).collect()).collect();
        Some(Self { fleet, stored, sites, cached_counts: Vec::new() })
    }

    /// Slow-down factor of the fetch by an engine with these hits, for the block locations of the group at position `group`.
    pub(super) fn network_distance(&mut self, engine: InstanceIndex, group: usize, hits: TierHits) -> f32 {
        let (Some(stored), Some(sites)) = (self.stored.get(group), self.sites.get(group)) else { return 1.0 };
        let instance = self.fleet.cluster.get(engine).filter(|_| hits.l3_tokens > 0);
        let Some(instance) = instance else { return 1.0 };
        let first_token = hits.l1_tokens.saturating_add(hits.l2_tokens);
        let key = FetchedTokens { group, tokens: StoreTokenRun { first_token, tokens: hits.l3_tokens } };
        let index =
            self.cached_counts.iter().position(|(cached_key, _)| *cached_key == key).unwrap_or_else(|| {
                let tokens = tokens_by_site(&stored.runs, sites.len(), key.tokens);
                self.cached_counts.push((key, tokens));
                self.cached_counts.len() - 1
            });
        self.cached_counts
            .get(index)
            .map_or(1.0, |(_, tokens)| network_distance(tokens, sites, &instance.location))
    }
}
