//! Prompts that were sent and whose blocks the engines' caches do not report yet: later prompts with the same prefix
//! will find them on the same engine, because an engine computes prompts in order.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

/// More prompts than an engine computes before it reports the blocks of the first of them. Of those that it has computed, the newest count.
const MAX_COMPUTED: usize = 256;

/// Most prompts that one is compared with, in the order of their common prefixes. What is left out has less in common than all these.
const MAX_COMPARED: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct PendingPrompts {
    prompts: BTreeMap<AttemptId, PendingPrompt>,
    /// By the key of the first block, which all prompts with a common prefix share.
    families: BTreeMap<u64, PromptFamily>,
    /// Computed prompts in the order in which they stop counting.
    expiring: VecDeque<(Seconds, AttemptId)>,
    /// Those of each engine, in the same order.
    computed: BTreeMap<InstanceIndex, VecDeque<AttemptId>>,
}

/// Prompts with a common first block, sorted so that those with the longest common prefix are next to each other.
#[derive(Debug, Default)]
struct PromptFamily {
    by_blocks: BTreeSet<(PrefixKeys, AttemptId)>,
    /// Prompts of which only the beginning may have been tokenized, by the keys of their beginnings.
    by_text: BTreeSet<(PrefixKeys, AttemptId)>,
    /// Number of these prompts by engine.
    engines: BTreeMap<InstanceIndex, usize>,
}

/// Keys of a prompt's beginnings, each of which covers those before it. Lexicographically ordered.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PrefixKeys(Arc<[u64]>);

#[derive(Debug)]
struct PendingPrompt {
    engine: InstanceIndex,
    /// Keys of its full blocks, as far as it was tokenized, each of which covers its block and all before it.
    pages: Arc<[u64]>,
    /// Keys of the beginnings of its text.
    texts: Arc<[u64]>,
    is_computed: bool,
}

impl PendingPrompts {
    /// Records that an engine was sent the prompt of a prediction.
    pub(crate) fn add(&mut self, attempt: AttemptId, engine: InstanceIndex, prediction: &CacheHitPrediction) {
        if !prediction.pages.is_empty() && self.prompts.len() < MAX_PROMPTS {
            let (pages, texts) = (prediction.pages.clone(), text_keys(&prediction.text_prefixes));
            self.insert(attempt, PendingPrompt { engine, pages, texts, is_computed: false });
        }
    }

    fn insert(&mut self, attempt: AttemptId, prompt: PendingPrompt) {
        let Some(&first) = prompt.pages.first() else { return };
        let family = self.families.entry(first).or_default();
        family.by_blocks.insert((PrefixKeys(prompt.pages.clone()), attempt));
        if !prompt.texts.is_empty() {
            family.by_text.insert((PrefixKeys(prompt.texts.clone()), attempt));
        }
        *family.engines.entry(prompt.engine).or_default() += 1;
        self.prompts.insert(attempt, prompt);
    }

    fn remove(&mut self, attempt: AttemptId) {
        let Some(prompt) = self.prompts.remove(&attempt) else { return };
        let Some(first) = prompt.pages.first() else { return };
        let Some(family) = self.families.get_mut(first) else { return };
        family.by_blocks.remove(&(PrefixKeys(prompt.pages.clone()), attempt));
        family.by_text.remove(&(PrefixKeys(prompt.texts.clone()), attempt));
        if let Some(count) = family.engines.get_mut(&prompt.engine) {
            *count -= 1;
            if *count == 0 {
                family.engines.remove(&prompt.engine);
            }
        }
        if family.by_blocks.is_empty() {
            self.families.remove(first);
        }
        if let Some(computed) = self.computed.get_mut(&prompt.engine) {
            computed.pop_front_if(|oldest| *oldest == attempt);
        }
    }

    /// Records that a prompt has been computed: its blocks will be reported soon.
    pub(crate) fn computed(&mut self, now: Seconds, attempt: AttemptId) {
        if let Some(prompt) = self.prompts.get_mut(&attempt)
            && !std::mem::replace(&mut prompt.is_computed, true)
        {
            self.expiring.push_back((now + REPORT_DELAY, attempt));
            let computed = self.computed.entry(prompt.engine).or_default();
            computed.push_back(attempt);
            if computed.len() > MAX_COMPUTED
                && let Some(&oldest) = computed.front()
            {
                self.remove(oldest);
            }
        }
    }

    /// Removes a request that ended; one that was not computed leaves nothing behind.
    pub(crate) fn ended(&mut self, attempt: AttemptId) {
        if self.prompts.get(&attempt).is_some_and(|prompt| !prompt.is_computed) {
            self.remove(attempt);
        }
    }

    /// Removes what does not count any more.
    pub(crate) fn advance(&mut self, now: Seconds) {
        while let Some((_, attempt)) = self.expiring.pop_front_if(|(until, _)| *until <= now) {
            self.remove(attempt);
        }
    }

    /// Applies a new fleet: `moved` returns an engine's new index.
    pub(crate) fn set_cluster(&mut self, moved: impl Fn(InstanceIndex) -> Option<InstanceIndex>) {
        self.families.clear();
        self.computed.clear();
        for (attempt, prompt) in std::mem::take(&mut self.prompts) {
            if let Some(engine) = moved(prompt.engine) {
                self.insert(attempt, PendingPrompt { engine, ..prompt });
            }
        }
        for (_, attempt) in &self.expiring {
            if let Some(prompt) = self.prompts.get(attempt) {
                self.computed.entry(prompt.engine).or_default().push_back(*attempt);
            }
        }
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
        let family = self.families.get(prediction.pages.first()?)?;
        // What all engines have already need not be compared.
        let least = family.engines.keys().map(|engine| own_tokens(prediction.hits(*engine)));
        let least = least.min().unwrap_or(0);
        let mut changed: Option<CacheHitPrediction> = None;
        let mut add = |prompt: &PendingPrompt| {
            let tokens = prompt.common_tokens(prediction);
            let known = changed.as_ref().unwrap_or(prediction).hits(prompt.engine);
            let Some(hits) = with_pending(known, tokens) else { return };
            let changed = changed.get_or_insert_with(|| prediction.clone());
            changed.per_instance.resize(engines, TierHits::default());
            if let Some(entry) = changed.per_instance.get_mut(prompt.engine.as_usize()) {
                *entry = hits;
            }
        };
        let block_tokens =
            |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(prediction.page_tokens);
        self.visit_nearest(
            family,
            &family.by_blocks,
            PrefixKeys(prediction.pages.clone()),
            |blocks| block_tokens(blocks) > least,
            &mut add,
        );
        let text_tokens = |texts: usize| {
            texts
                .checked_sub(1)
                .and_then(|last| prediction.text_prefixes.get(last))
                .map_or(0, |text| text.tokens)
        };
        if !family.by_text.is_empty() {
            let keys = PrefixKeys(text_keys(&prediction.text_prefixes));
            self.visit_nearest(family, &family.by_text, keys, |texts| text_tokens(texts) > least, &mut add);
        }
        changed
    }

    /// Visits prompts in the order of the number of keys that they start with in common with `keys`, as long as `is_enough` of it. Once one
    /// prompt of each engine has been visited, no other has more.
    fn visit_nearest(
        &self,
        family: &PromptFamily,
        sorted: &BTreeSet<(PrefixKeys, AttemptId)>,
        keys: PrefixKeys,
        is_enough: impl Fn(usize) -> bool,
        mut visit: impl FnMut(&PendingPrompt),
    ) {
        let start = (keys, AttemptId(0));
        let with_common =
            |(others, attempt): &(PrefixKeys, AttemptId)| (start.0.common_prefix(others), *attempt);
        let mut before = sorted.range(..&start).rev().map(with_common).peekable();
        let mut after = sorted.range(&start..).map(with_common).peekable();
        let mut visited: BTreeSet<InstanceIndex> = BTreeSet::new();
        for _ in 0..MAX_COMPARED {
            let is_before =
                before.peek().map(|(common, _)| *common) > after.peek().map(|(common, _)| *common);
            let next = if is_before { before.next() } else { after.next() };
            let Some((_, attempt)) = next.filter(|(common, _)| is_enough(*common)) else { return };
            let Some(prompt) = self.prompts.get(&attempt) else { continue };
            visit(prompt);
            visited.insert(prompt.engine);
            if visited.len() == family.engines.len() {
                return;
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.prompts.is_empty() && self.families.is_empty()
    }
}

impl PrefixKeys {
    /// Number of keys that both start with.
    fn common_prefix(&self, PrefixKeys(others): &PrefixKeys) -> usize {
        let PrefixKeys(own) = self;
        common_prefix(own.len().min(others.len()), |key| own[key] == others[key])
    }
}

impl Ord for PrefixKeys {
    fn cmp(&self, other: &Self) -> Ordering {
        let common = self.common_prefix(other);
        self.0.get(common).cmp(&other.0.get(common))
    }
}

impl PartialOrd for PrefixKeys {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
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
        let (own, other) = (&self.texts, &prediction.text_prefixes);
        let texts = common_prefix(own.len().min(other.len()), |text| own[text] == other[text].key);
        let common = texts.checked_sub(1).map_or(0, |last| other[last].tokens.saturating_sub(1));
        tokens.max(common - common % prediction.page_tokens.max(1))
    }
}

fn text_keys(prefixes: &[TextPrefix]) -> Arc<[u64]> {
    prefixes.iter().map(|prefix| prefix.key).collect()
}

/// What the engine has in its own memory.
fn own_tokens(hits: TierHits) -> u32 {
    hits.l1_tokens.saturating_add(hits.l2_tokens)
}

/// Hits if the first `tokens` will be on the device, too; `None` if the engine has them already.
fn with_pending(hits: TierHits, tokens: u32) -> Option<TierHits> {
    let more = tokens.checked_sub(own_tokens(hits)).filter(|more| *more > 0)?;
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
    use std::hash::{DefaultHasher, Hash, Hasher};

    use proptest::prelude::*;

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
        prompts.computed(5.0, AttemptId(1));
        prompts.ended(AttemptId(1));
        prompts.advance(5.9);
        assert_eq!(hits(&prompts, &other), Some(expected));
        prompts.advance(6.0);
        assert!(prompts.is_empty());
    }

    #[test]
    fn of_an_engine_the_newest_computed_prompts_count() {
        let mut prompts = PendingPrompts::default();
        let sent = |number: u64, pages: &[u64]| (AttemptId(number), prediction(pages, Vec::new()));
        let (attempt, first) = sent(0, &[1, 2, 3]);
        prompts.add(attempt, InstanceIndex(1), &first);
        prompts.computed(0.0, attempt);
        for number in 1..=MAX_COMPUTED as u64 {
            assert_eq!(hits(&prompts, &first).map(|hits| hits.l1_tokens), Some(30), "{number}");
            let (attempt, other) = sent(number, &[1, 100 + number]);
            prompts.add(attempt, InstanceIndex(1), &other);
            prompts.computed(0.1, attempt);
            if number == 2 {
                prompts.set_cluster(Some);
            }
        }
        assert_eq!(hits(&prompts, &first).map(|hits| hits.l1_tokens), Some(10), "it does not count any more");
        prompts.advance(1.1);
        assert!(prompts.is_empty());
    }

    #[test]
    fn failed_request_leaves_nothing() {
        let mut prompts = pending(&[1, 2]);
        prompts.ended(AttemptId(2));
        assert!(!prompts.is_empty());
        prompts.ended(AttemptId(1));
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

    /// A prompt of these tokens, of which the first `tokenized` are known, with blocks of two tokens and a text prefix every three.
    fn prompt_of(tokens: &[u8], tokenized: usize, own: &[u32]) -> CacheHitPrediction {
        let key = |prefix: &[u8], salt: u8| {
            let mut hasher = DefaultHasher::new();
            (prefix, salt).hash(&mut hasher);
            hasher.finish()
        };
        let known = &tokens[..tokenized.min(tokens.len())];
        let ends = (3..=tokens.len()).step_by(3);
        let texts = ends.map(|end| TextPrefix { key: key(&tokens[..end], 1), tokens: end as u32 });
        CacheHitPrediction {
            per_instance: own
                .iter()
                .map(|&l1_tokens| TierHits { l1_tokens, ..TierHits::default() })
                .collect(),
            pages: (1..=known.len() / 2).map(|block| key(&known[..2 * block], 0)).collect(),
            text_prefixes: if known.len() < tokens.len() { texts.collect() } else { Arc::default() },
            page_tokens: 2,
            ..CacheHitPrediction::default()
        }
    }

    fn prompts() -> impl Strategy<Value = (Vec<u8>, usize)> {
        let tokens = prop::collection::vec(prop_oneof![9 => Just(0_u8), 1 => Just(1)], 2..24);
        tokens
            .prop_map(|mut tokens| {
                tokens[..2].fill(0);
                tokens
            })
            .prop_flat_map(|tokens| (Just(tokens), 2..30_usize))
    }

    proptest! {
        #[test]
        fn neighbours_have_the_longest_common_prefixes(
            sent in prop::collection::vec((prompts(), 0..4_u32), 1..20),
            (tokens, tokenized) in prompts(),
            own in prop::collection::vec(0..12_u32, 4),
        ) {
            let mut pending = PendingPrompts::default();
            let mut expected = prompt_of(&tokens, tokenized, &own);
            let asked = expected.clone();
            for (attempt, ((tokens, tokenized), engine)) in (0..).map(AttemptId).zip(&sent) {
                pending.add(attempt, InstanceIndex(*engine), &prompt_of(tokens, *tokenized, &[]));
                let common = pending.prompts[&attempt].common_tokens(&asked);
                let hits = &mut expected.per_instance[*engine as usize];
                *hits = with_pending(*hits, common).unwrap_or(*hits);
            }
            let expected = (expected.per_instance != asked.per_instance).then_some(expected);
            prop_assert_eq!(pending.applied_to(&asked, 4), expected);
            for attempt in (0..sent.len() as u64).map(AttemptId) {
                pending.ended(attempt);
            }
            prop_assert!(pending.is_empty());
        }
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
