//! Relative cost of fetching a prompt's blocks from the shared store.

use crate::fleet::{LocationIds, TopologyDistance};
use crate::prediction::{StoreMedium, StoreTokenRun};

/// Time factor of a fetch from the same host.
const SAME_HOST_FACTOR: f32 = 0.5;

/// Time factor of a fetch from another zone.
const CROSS_ZONE_FACTOR: f32 = 4.0;

/// Time factor of a read from disk instead of memory.
const NVME_FACTOR: f32 = 3.0;

/// A store node and one of its media.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreSite {
    /// Location of the node; the default if unknown.
    pub location: LocationIds,
    /// Medium on which the blocks are stored.
    pub medium: StoreMedium,
}

/// A site in the list of sites of a prompt's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreSiteIndex(pub u32);

/// A run of consecutive blocks of a prompt on one site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreSiteRun {
    /// Prompt tokens before the run.
    pub first_token: u32,
    pub tokens: u32,
    pub site: StoreSiteIndex,
}

/// Counts how many of the `wanted` tokens are on each of the sites, of which there are `sites`. Runs of other sites do
/// not count.
#[must_use]
pub fn tokens_by_site(runs: &[StoreSiteRun], sites: usize, wanted: StoreTokenRun) -> Vec<u32> {
    let (first, last) = (wanted.first_token, wanted.first_token.saturating_add(wanted.tokens));
    let mut on_site = vec![0_u32; sites];
    for run in runs {
        let end = run.first_token.saturating_add(run.tokens).min(last);
        if let Some(on_site) = on_site.get_mut(run.site.0 as usize) {
            *on_site += end.saturating_sub(run.first_token.max(first));
        }
    }
    on_site
}

/// Time factor of fetching these numbers of tokens from each of the sites to `location`. 1 is a read from memory in the
/// same zone, or from an unknown location.
#[must_use]
pub fn network_distance(tokens: &[u32], sites: &[StoreSite], location: &LocationIds) -> f32 {
    let (mut weighted, mut all) = (0.0, 0.0);
    for (&tokens, site) in tokens.iter().zip(sites) {
        let of_link = match site.location.distance(location) {
            TopologyDistance::Nvlink | TopologyDistance::Node => SAME_HOST_FACTOR,
            TopologyDistance::Rack | TopologyDistance::Zone | TopologyDistance::Unknown => 1.0,
            TopologyDistance::CrossZone => CROSS_ZONE_FACTOR,
        };
        let of_medium = match site.medium {
            StoreMedium::Dram => 1.0,
            StoreMedium::Nvme => NVME_FACTOR,
        };
        weighted += tokens as f32 * of_link * of_medium;
        all += tokens as f32;
    }
    if all > 0.0 { weighted / all } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_and_slow_stores_take_longer() {
        let here = LocationIds { zone: Some(1), rack: Some(1), node: Some(1), ..LocationIds::default() };
        let far = LocationIds { zone: Some(9), ..LocationIds::default() };
        let sites = [(here, StoreMedium::Dram), (far, StoreMedium::Dram), (here, StoreMedium::Nvme)];
        let sites = sites.map(|(location, medium)| StoreSite { location, medium });
        let run = |first_token, site| StoreSiteRun { first_token, tokens: 100, site: StoreSiteIndex(site) };
        let runs = [run(0, 0), run(100, 1), run(200, 2), run(300, 7)];
        let of = |first_token, tokens| {
            let wanted = StoreTokenRun { first_token, tokens };
            network_distance(&tokens_by_site(&runs, 3, wanted), &sites, &here)
        };
        assert_eq!(of(0, 100), 0.5);
        assert_eq!(of(0, 200), 2.25);
        assert_eq!(of(150, 100), 2.75);
        assert_eq!(of(200, u32::MAX), 1.5, "what is on no site does not count");
        assert_eq!(of(300, 100), 1.0, "no run covers these tokens");
        assert_eq!(
            network_distance(
                &[100],
                &[StoreSite { location: LocationIds::default(), medium: StoreMedium::Dram }],
                &here
            ),
            1.0
        );
    }
}
