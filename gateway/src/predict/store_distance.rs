//! How far what engines would fetch from the store is from them.

use std::sync::Arc;

use moongate_scheduler::index::StoreBlockRun;
use moongate_scheduler::{StoreMedium, StoreSite, StoreSiteRun, TierHits, network_distance, tokens_by_site};

use super::feeds::StoreView;
use crate::fleet::FleetSnapshot;

/// Where the store has the pages of a prompt. Empty where nobody knows, or it makes no difference.
#[derive(Debug, Clone, Default)]
pub(super) struct StoredBlockSites {
    runs: Vec<StoreSiteRun>,
    /// Hosts of store nodes, and what they keep the pages on.
    sites: Vec<(Arc<str>, StoreMedium)>,
}

impl StoredBlockSites {
    /// Pages of `page_tokens` each.
    pub(super) fn of(
        pages: &[StoreBlockRun],
        page_tokens: u32,
        fleet: &FleetSnapshot,
        store: &StoreView,
    ) -> Self {
        let is_slow = |run: &StoreBlockRun| run.location.medium == StoreMedium::Nvme;
        if fleet.hosts.is_empty() && !pages.iter().any(is_slow) {
            return Self::default();
        }
        // By node and medium.
        let mut numbers: Vec<Option<u32>> = Vec::new();
        let mut sites = Vec::new();
        let mut number = |run: &StoreBlockRun| {
            let at = run.location.node.as_usize() * 2 + usize::from(is_slow(run));
            if numbers.len() <= at {
                numbers.resize(at + 1, None);
            }
            *numbers[at].get_or_insert_with(|| {
                sites.push((run.location.node, run.location.medium));
                u32::try_from(sites.len() - 1).unwrap_or(u32::MAX)
            })
        };
        let runs = pages.iter().map(|run| StoreSiteRun {
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

/// What engines of one fleet would fetch. Engines that have the same of a prompt share the count.
pub(super) struct StoreDistance<'a> {
    fleet: &'a FleetSnapshot,
    stored: &'a [StoredBlockSites],
    sites: Vec<Vec<StoreSite>>,
    cached_counts: Vec<((usize, u32, u32), Vec<u32>)>,
}

impl<'a> StoreDistance<'a> {
    /// `None` if nothing is known of where pages are.
    pub(super) fn new(stored: &'a [StoredBlockSites], fleet: &'a FleetSnapshot) -> Option<Self> {
        if stored.iter().all(|at| at.runs.is_empty()) {
            return None;
        }
        let site = |(host, medium): &(Arc<str>, StoreMedium)| StoreSite {
            place: fleet.hosts.location(host).copied().unwrap_or_default(),
            medium: *medium,
        };
        let sites = stored.iter().map(|at| at.sites.iter().map(site).collect()).collect();
        Some(Self { fleet, stored, sites, cached_counts: Vec::new() })
    }

    /// How much longer than usual a fetch takes of the engine that is the `member`th of the fleet and has so much of the prompt, whose
    /// pages are where the `group`th says.
    pub(super) fn network_distance(&mut self, member: usize, group: usize, hits: TierHits) -> f32 {
        let (Some(stored), Some(sites)) = (self.stored.get(group), self.sites.get(group)) else { return 1.0 };
        let instance = self.fleet.cluster.instances().get(member).filter(|_| hits.l3_tokens > 0);
        let Some(instance) = instance else { return 1.0 };
        let key = (group, hits.l1_tokens.saturating_add(hits.l2_tokens), hits.l3_tokens);
        let at = self.cached_counts.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let tokens = tokens_by_site(&stored.runs, sites.len(), key.1, key.2);
            self.cached_counts.push((key, tokens));
            self.cached_counts.len() - 1
        });
        self.cached_counts.get(at).map_or(1.0, |(_, tokens)| network_distance(tokens, sites, &instance.place))
    }
}
