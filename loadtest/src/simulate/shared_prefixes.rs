//! Blocks that several prompts share before any of them has been computed: whichever is first must compute them.

use std::collections::HashMap;

use super::indices::WorkloadIndex;
use super::workload::SimulatedWorkload;

/// Blocks of a prompt with the same users of which none must wait for another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedPrefix {
    /// Position in the prompt of its first block.
    pub(crate) first_block: usize,
    /// Requests that may be the first to compute it, at least two.
    pub(crate) candidates: Vec<usize>,
    /// The longest shared prefix that ends before this one.
    parent: Option<usize>,
}

/// The shared prefixes of a workload as a forest. A parent has a smaller index than its children.
#[derive(Debug, Default)]
pub(crate) struct SharedPrefixes {
    pub(crate) prefixes: Vec<SharedPrefix>,
    /// For each request the deepest shared prefix of its prompt.
    deepest: Vec<Option<usize>>,
    /// For each request, the number of leading blocks that another request can have computed before.
    pub(crate) reusable_blocks: Vec<usize>,
}

/// Who may be the first to compute a block.
#[derive(Debug, Clone, Copy)]
enum BlockOwner {
    /// Only this request: all others wait for its end.
    Request(usize),
    /// The candidates of this shared prefix.
    Shared(usize),
}

/// Who computes each shared prefix at the lowest cost.
#[derive(Debug, Default)]
pub(crate) struct CheapestComputations {
    pub(crate) cost: f64,
    /// Requests that compute a shared prefix and all after it, with the index of the prefix.
    pub(crate) computed: Vec<(usize, usize)>,
}

impl SharedPrefixes {
    pub(crate) fn new(workload: &SimulatedWorkload) -> Self {
        let uses = workload.uses_of_blocks();
        let mut found = Self::default();
        let mut known: HashMap<u32, BlockOwner> = HashMap::new();
        for request in 0..workload.requests.len() {
            let blocks = workload.blocks(WorkloadIndex::new(request));
            let (mut deepest, mut reusable) = (None, 0);
            for (position, &block) in blocks.iter().enumerate() {
                let owner = *known.entry(block).or_insert_with(|| {
                    let users = uses[block as usize].iter().map(|&user| user as usize);
                    let candidates: Vec<usize> =
                        users.filter(|&user| !waits(workload, user, position, block)).collect();
                    match candidates[..] {
                        [only] => BlockOwner::Request(only),
                        _ => BlockOwner::Shared(found.add(position, candidates, deepest)),
                    }
                });
                match owner {
                    BlockOwner::Request(first) if first == request => break,
                    BlockOwner::Request(_) => {}
                    BlockOwner::Shared(prefix) => deepest = Some(prefix),
                }
                reusable = position + 1;
            }
            found.deepest.push(deepest);
            found.reusable_blocks.push(reusable);
        }
        found
    }

    /// Adds a shared block after those of `parent`; returns the prefix that contains it.
    fn add(&mut self, first_block: usize, candidates: Vec<usize>, parent: Option<usize>) -> usize {
        if let Some(parent) = parent.filter(|&parent| self.prefixes[parent].candidates == candidates) {
            return parent;
        }
        self.prefixes.push(SharedPrefix { first_block, candidates, parent });
        self.prefixes.len() - 1
    }

    /// The least sum of costs if every shared prefix is computed by one of its candidates, which then also computes all
    /// that follows in its prompt. `extra` is the cost of a request that computes a prefix; it must not be negative.
    pub(crate) fn cheapest(&self, extra: impl Fn(usize, &SharedPrefix) -> f64) -> CheapestComputations {
        let count = self.prefixes.len();
        let mut least = vec![(0.0, 0); count];
        // Sum of the least costs of the children of each prefix.
        let mut below = vec![0.0; count];
        for (index, prefix) in self.prefixes.iter().enumerate().rev() {
            let costs = prefix.candidates.iter().map(|&request| {
                let mut cost = extra(request, prefix);
                // The request's own path is computed with it; what branches off is not.
                for inner in self.path(request, index) {
                    cost += below[inner] - if inner == index { 0.0 } else { least[inner].0 };
                }
                (cost, request)
            });
            least[index] = costs.min_by(|left, right| left.0.total_cmp(&right.0)).unwrap_or((0.0, 0));
            if let Some(parent) = prefix.parent {
                below[parent] += least[index].0;
            }
        }
        let mut is_computed = vec![false; count];
        let mut chosen = CheapestComputations::default();
        for (index, prefix) in self.prefixes.iter().enumerate() {
            if prefix.parent.is_none() {
                chosen.cost += least[index].0;
            }
            if !is_computed[index] {
                let request = least[index].1;
                chosen.computed.push((request, index));
                self.path(request, index).for_each(|inner| is_computed[inner] = true);
            }
        }
        chosen
    }

    /// The shared prefixes of a request's prompt from the deepest to `first`.
    fn path(&self, request: usize, first: usize) -> impl Iterator<Item = usize> {
        let deepest = self.deepest.get(request).copied().flatten();
        std::iter::successors(deepest, |&inner| self.prefixes[inner].parent)
            .take_while(move |&inner| inner >= first)
    }
}

/// Whether the request waits for the end of another one that has the block at this position.
fn waits(workload: &SimulatedWorkload, request: usize, position: usize, block: u32) -> bool {
    let before = |request: usize| workload.requests[request].predecessor.map(WorkloadIndex::get);
    std::iter::successors(before(request), |&request| before(request))
        .any(|request| workload.blocks(WorkloadIndex::new(request)).get(position) == Some(&block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::workload::{ArrivalMode, NewRequest, WorkloadBuilder};

    fn workload(requests: &[(&[u64], Option<usize>)]) -> SimulatedWorkload {
        let mut prompts = WorkloadBuilder::new(512);
        for &(ids, predecessor) in requests {
            prompts.push(NewRequest {
                recorded_s: 0.0,
                input_tokens: ids.len() * 512,
                output_tokens: 1,
                block_ids: ids,
                predecessor: predecessor.map(WorkloadIndex::new),
                session: 0,
            });
        }
        prompts.finish(ArrivalMode::Open)
    }

    #[test]
    fn blocks_are_reusable_from_all_but_later_turns() {
        let load = workload(&[(&[0, 1], None), (&[0, 1, 2], Some(0)), (&[0, 9], None)]);
        let shared = SharedPrefixes::new(&load);
        // Block 1 of the first request returns only in its own next turn.
        assert_eq!(shared.reusable_blocks, [1, 2, 1]);
        let candidates: Vec<Vec<usize>> = shared
            .prefixes
            .iter()
            .map(|prefix| {
                let mut candidates = prefix.candidates.clone();
                candidates.sort_unstable();
                candidates
            })
            .collect();
        assert_eq!(candidates, [[0, 2]]);
    }

    #[test]
    fn one_request_of_every_branch_computes_it() {
        // All share block 0, two pairs share another one each.
        let load =
            workload(&[(&[0, 1, 5], None), (&[0, 1, 6], None), (&[0, 2, 7], None), (&[0, 2, 8], None)]);
        let shared = SharedPrefixes::new(&load);
        assert_eq!(shared.prefixes.len(), 3);
        let blocks_after = |_: usize, prefix: &SharedPrefix| 3.0 - prefix.first_block as f64;
        let least = shared.cheapest(blocks_after);
        // One computes three blocks, and one of the other pair two.
        assert!((least.cost - 5.0).abs() < 1e-9, "{}", least.cost);
        assert_eq!(least.computed.len(), 2);
        // A request whose computation costs nothing is chosen.
        let least =
            shared.cheapest(|request, prefix| if request == 3 { 0.0 } else { blocks_after(request, prefix) });
        assert!((least.cost - 2.0).abs() < 1e-9, "{}", least.cost);
        assert_eq!(least.computed[0].0, 3);
    }
}
