//! Prompts that were sent and whose blocks the engines' caches do not report yet: later prompts with the same prefix
//! will find them on the same engine, because an engine computes prompts in order.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::attempt::AttemptId;
use crate::fleet::InstanceIndex;
use crate::prediction::{CacheHitPrediction, TextPrefix, TierHits};
use crate::seconds::Seconds;

/// How long a computed prompt counts: engines report new blocks within milliseconds, and at most a second later when
/// they are busy. Blocks that were never reported stop counting then.
const REPORT_DELAY: Seconds = 1.0;

/// More prompts than all engines of a fleet compute at a time. Further ones are not tracked.
const MAX_PROMPTS: usize = 16_384;

#[derive(Debug)]
pub(crate) struct PendingPrompts {
    /// By the key of the first block, which all prompts with a common prefix share.
    by_first: BTreeMap<u64, Vec<PendingPrompt>>,
    count: usize,
    /// Not later than the time at which the first of them stops counting.
    first_until: Seconds,
}

#[derive(Debug)]
struct PendingPrompt {
    attempt: AttemptId,
    engine: InstanceIndex,
    /// Keys of its full blocks, as far as it was tokenized, each of which covers its block and all before it.
    pages: Arc<[u64]>,
    text_prefixes: Arc<[TextPrefix]>,
    /// When it stops counting; infinite while it is being computed.
    until: Seconds,
}

impl Default for PendingPrompts {
    fn default() -> Self {
        Self { by_first: BTreeMap::new(), count: 0, first_until: f64::INFINITY }
    }
}

impl PendingPrompts {
    /// Records that an engine was sent the prompt of a prediction.
    pub(crate) fn add(&mut self, attempt: AttemptId, engine: InstanceIndex, prediction: &CacheHitPrediction) {
        let CacheHitPrediction { pages, text_prefixes, .. } = prediction;
        if let Some(&first) = pages.first()
            && self.count < MAX_PROMPTS
        {
            let (pages, text_prefixes) = (pages.clone(), text_prefixes.clone());
            let prompt = PendingPrompt { attempt, engine, pages, text_prefixes, until: f64::INFINITY };
            self.by_first.entry(first).or_default().push(prompt);
            self.count += 1;
        }
    }

    /// Records that a prompt, which begins with the block `first`, has been computed: its blocks will be reported soon.
    pub(crate) fn computed(&mut self, now: Seconds, attempt: AttemptId, first: u64) {
        let until = now + REPORT_DELAY;
        for prompt in self.by_first.get_mut(&first).into_iter().flatten() {
            if prompt.attempt == attempt && prompt.until > until {
                prompt.until = until;
                self.first_until = self.first_until.min(until);
            }
        }
    }

    /// Removes a request that ended; one that was not computed leaves nothing behind.
    pub(crate) fn ended(&mut self, attempt: AttemptId, first: u64) {
        if let Some(prompts) = self.by_first.get_mut(&first) {
            let before = prompts.len();
            prompts.retain(|prompt| prompt.attempt != attempt || prompt.until.is_finite());
            self.count -= before - prompts.len();
            if prompts.is_empty() {
                self.by_first.remove(&first);
            }
        }
    }

    /// Removes what does not count any more.
    pub(crate) fn advance(&mut self, now: Seconds) {
        if now >= self.first_until {
            self.retain(|prompt| now < prompt.until);
        }
    }

    /// Applies a new fleet: `moved` returns an engine's new index.
    pub(crate) fn set_cluster(&mut self, moved: impl Fn(InstanceIndex) -> Option<InstanceIndex>) {
        self.retain(|prompt| match moved(prompt.engine) {
            Some(engine) => {
                prompt.engine = engine;
                true
            }
            None => false,
        });
    }

    fn retain(&mut self, mut keep: impl FnMut(&mut PendingPrompt) -> bool) {
        (self.count, self.first_until) = (0, f64::INFINITY);
        self.by_first.retain(|_, prompts| {
            prompts.retain_mut(&mut keep);
            self.count += prompts.len();
            let until = prompts.iter().map(|prompt| prompt.until).fold(f64::INFINITY, f64::min);
            self.first_until = self.first_until.min(until);
            !prompts.is_empty()
        });
    }

    /// The prediction with the blocks that engines will have by the time they compute the prompt; `None` if that changes
    /// nothing.
    pub(crate) fn applied_to(
        &self,
        prediction: &CacheHitPrediction,
        engines: usize,
    ) -> Option<CacheHitPrediction> {
        if prediction.excludes_pending {
            return None;
        }
        let prompts = self.by_first.get(prediction.pages.first()?)?;
        let mut changed: Option<CacheHitPrediction> = None;
        for prompt in prompts {
            let tokens = prompt.common_tokens(prediction);
            let known = changed.as_ref().unwrap_or(prediction).hits(prompt.engine);
            let Some(hits) = with_pending(known, tokens) else { continue };
            let changed = changed.get_or_insert_with(|| prediction.clone());
            changed.per_instance.resize(engines, TierHits::default());
            if let Some(entry) = changed.per_instance.get_mut(prompt.engine.as_usize()) {
                *entry = hits;
            }
        }
        changed
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_first.is_empty() && self.count == 0
    }
}

impl PendingPrompt {
    /// Number of tokens in full blocks that both prompts start with.
    fn common_tokens(&self, prediction: &CacheHitPrediction) -> u32 {
        let (own, other) = (&self.pages, &prediction.pages);
        let blocks = common_prefix(own.len().min(other.len()), |block| own[block] == other[block]);
        let tokens = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(prediction.page_tokens);
        if blocks < own.len() && blocks < other.len() {
            return tokens;
        }
        // One of them may have been tokenized only as far as this.
        let (own, other) = (&self.text_prefixes, &prediction.text_prefixes);
        let texts = common_prefix(own.len().min(other.len()), |text| own[text].key == other[text].key);
        let common = texts.checked_sub(1).map_or(0, |last| other[last].tokens.saturating_sub(1));
        tokens.max(common - common % prediction.page_tokens.max(1))
    }
}

/// Hits if the first `tokens` will be on the device, too; `None` if the engine has them already.
fn with_pending(hits: TierHits, tokens: u32) -> Option<TierHits> {
    let own = hits.l1_tokens.saturating_add(hits.l2_tokens);
    let more = tokens.checked_sub(own).filter(|more| *more > 0)?;
    Some(TierHits {
        l1_tokens: hits.l1_tokens + more,
        l3_tokens: hits.l3_tokens.saturating_sub(more),
        pending_tokens: hits.pending_tokens + more,
        ..hits
    })
}

/// Number of parts that two prompts start with, of at most `len`, if equal parts have equal ones before them.
fn common_prefix(len: usize, is_equal: impl Fn(usize) -> bool) -> usize {
    let (mut equal, mut different) = (0, len + 1);
    while equal + 1 < different {
        let middle = equal.midpoint(different);
        if is_equal(middle - 1) { equal = middle } else { different = middle }
    }
    equal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prediction(pages: &[u64], per_instance: Vec<TierHits>) -> CacheHitPrediction {
        CacheHitPrediction {
            per_instance,
            pages: pages.into(),
            page_tokens: 10,
            ..CacheHitPrediction::default()
        }
    }

    fn pending(pages: &[u64]) -> PendingPrompts {
        let mut prompts = PendingPrompts::default();
        prompts.add(AttemptId(1), InstanceIndex(1), &prediction(pages, Vec::new()));
        prompts
    }

    fn hits(prompts: &PendingPrompts, prediction: &CacheHitPrediction) -> Option<TierHits> {
        Some(prompts.applied_to(prediction, 2)?.hits(InstanceIndex(1)))
    }

    #[test]
    fn blocks_count_from_the_dispatch_until_they_should_be_reported() {
        let mut prompts = pending(&[1, 2, 3]);
        let other = prediction(&[1, 2, 9], Vec::new());
        let expected = TierHits { l1_tokens: 20, pending_tokens: 20, ..TierHits::default() };
        assert_eq!(hits(&prompts, &other), Some(expected));
        assert_eq!(prompts.applied_to(&other, 2).unwrap().hits(InstanceIndex(0)), TierHits::default());
        prompts.computed(5.0, AttemptId(1), 1);
        prompts.ended(AttemptId(1), 1);
        prompts.advance(5.9);
        assert_eq!(hits(&prompts, &other), Some(expected));
        prompts.advance(6.0);
        assert!(prompts.is_empty());
    }

    #[test]
    fn failed_request_leaves_nothing() {
        let mut prompts = pending(&[1, 2]);
        prompts.ended(AttemptId(2), 1);
        assert!(!prompts.is_empty());
        prompts.ended(AttemptId(1), 1);
        assert!(prompts.is_empty());
    }

    #[test]
    fn cached_blocks_are_not_counted_twice() {
        let prompts = pending(&[1, 2, 3, 4]);
        let with = |l1_tokens, l2_tokens, l3_tokens| {
            let hits = TierHits { l1_tokens, l2_tokens, l3_tokens, pending_tokens: 0 };
            prediction(&[1, 2, 3, 4, 5, 6], vec![TierHits::default(), hits])
        };
        let expected = TierHits { l1_tokens: 35, l2_tokens: 5, l3_tokens: 10, pending_tokens: 25 };
        assert_eq!(hits(&prompts, &with(10, 5, 35)), Some(expected));
        assert_eq!(hits(&prompts, &with(30, 10, 0)), None);
        assert_eq!(hits(&prompts, &prediction(&[7, 2], Vec::new())), None);
        assert_eq!(hits(&prompts, &prediction(&[], Vec::new())), None);
        let hybrid = CacheHitPrediction { excludes_pending: true, ..prediction(&[1, 2, 3, 4], Vec::new()) };
        assert_eq!(hits(&prompts, &hybrid), None);
    }

    #[test]
    fn texts_count_where_blocks_are_unknown() {
        let with_texts = |pages: &[u64], texts: &[(u64, u32)]| CacheHitPrediction {
            text_prefixes: texts.iter().map(|&(key, tokens)| TextPrefix { key, tokens }).collect(),
            ..prediction(pages, Vec::new())
        };
        let mut prompts = PendingPrompts::default();
        let sent = with_texts(&[1, 2], &[(71, 25), (72, 44), (73, 71), (74, 99)]);
        prompts.add(AttemptId(1), InstanceIndex(1), &sent);
        let l1_tokens = |other| hits(&prompts, &other).map(|hits| hits.l1_tokens);
        let pages: Vec<u64> = (1..9).collect();
        assert_eq!(l1_tokens(with_texts(&pages, &[(71, 25), (72, 46), (73, 70), (75, 86)])), Some(60));
        assert_eq!(l1_tokens(with_texts(&[1, 2], &[(71, 25), (72, 46)])), Some(40), "both are incomplete");
        assert_eq!(l1_tokens(with_texts(&pages, &[(79, 25)])), Some(20), "only the blocks");
        assert_eq!(l1_tokens(with_texts(&[1, 9], &[(71, 25)])), Some(10), "blocks are exact");
        assert_eq!(l1_tokens(with_texts(&pages, &[])), Some(20));
    }

    #[test]
    fn common_prefixes_are_found_by_bisection() {
        for equal in 0..40_u64 {
            let a: Vec<u64> = (0..40).collect();
            let b: Vec<u64> = (0..50).map(|page| if page < equal { page } else { page + 1000 }).collect();
            assert_eq!(common_prefix(40, |block| a[block] == b[block]), equal as usize);
        }
    }
}
