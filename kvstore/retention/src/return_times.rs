//! Learns after which times blocks are used again.

use crate::age_bins::{AGE_BINS, age_bin, length_s, split_by_bin};
use crate::block_class::BlockClass;
use crate::learned_counts::{self, LearnedCountsError};
use crate::retention_values::{RetentionValues, ReturnHazards};
use crate::sampled_blocks::{SampledBlocks, SampledUse};
use crate::trial::{RetentionTrial, TrialHits};

/// Weight of the average return rates in those of one class, in blocks: a class with few blocks is treated like the average. That is
/// the average of the other tenants' hints, for a hint; otherwise, and if those have few blocks too, of all classes.
const POOLED_BLOCKS: f64 = 20.0;

/// If a class has more uses, all of its counts are halved, so that old ones lose their weight.
const MAX_USES: f64 = 16_384.0;

/// Observations of one class by age: returns, and the seconds during which they could have happened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ReturnCounts {
    pub(crate) uses: f64,
    pub(crate) returns: [f64; AGE_BINS],
    pub(crate) absent_s: [f64; AGE_BINS],
}

impl ReturnCounts {
    pub(crate) const NONE: Self = Self { uses: 0.0, returns: [0.0; AGE_BINS], absent_s: [0.0; AGE_BINS] };

    fn count_time(&mut self, last: &SampledUse, now_ms: u64) {
        let (from_ms, to_ms) = last.uncounted_ages_ms(now_ms);
        split_by_bin(from_ms, to_ms, |bin, seconds| self.absent_s[bin] += seconds);
    }

    fn add(&mut self, other: &Self) {
        for bin in 0..AGE_BINS {
            self.returns[bin] += other.returns[bin];
            self.absent_s[bin] += other.absent_s[bin];
        }
    }

    fn halve_old(&mut self) {
        if self.uses > MAX_USES {
            self.uses /= 2.0;
            self.returns.iter_mut().chain(&mut self.absent_s).for_each(|count| *count /= 2.0);
        }
    }

    /// Returns per second of absence, by age. `pooled` are those of the average.
    fn rates(&self, pooled: &[f64; AGE_BINS]) -> [f64; AGE_BINS] {
        std::array::from_fn(|bin| {
            let pooled_s = POOLED_BLOCKS * length_s(bin);
            (self.returns[bin] + pooled_s * pooled[bin]) / (self.absent_s[bin] + pooled_s)
        })
    }

    fn hazards(&self, pooled: &[f64; AGE_BINS]) -> ReturnHazards {
        let rates = self.rates(pooled);
        std::array::from_fn(|bin| 1.0 - (-rates[bin] * length_s(bin)).exp())
    }
}

/// Learns the distribution of the return times of every class from a sample of all blocks. Blocks count whether they are
/// stored or not, so that eviction does not bias what is learned. Memory is bounded by the size of the sample.
#[derive(Debug)]
pub struct ReturnTimeLearner {
    sample: SampledBlocks,
    classes: Box<[ReturnCounts]>,
    /// By the last observations; not used by the store while LRU would have had more hits.
    values: RetentionValues,
    trial: RetentionTrial,
}

impl ReturnTimeLearner {
    /// A learner without observations that samples at most `max_sampled` blocks.
    #[must_use]
    pub fn new(max_sampled: usize) -> Self {
        let classes = vec![ReturnCounts::NONE; BlockClass::COUNT].into();
        Self {
            sample: SampledBlocks::new(max_sampled),
            classes,
            values: RetentionValues::default(),
            trial: RetentionTrial::default(),
        }
    }

    /// The largest hash that is sampled. It only decreases, and only in calls that record something.
    #[must_use]
    pub fn max_hash(&self) -> u64 {
        self.sample.max_hash()
    }

    /// Observes a use of the block with this hash, or that it was written. `class` is its class from now on. Hashes must
    /// be uniformly distributed.
    pub fn record_use(&mut self, now_ms: u64, hash: u64, class: BlockClass) {
        if self.sample.is_sampled(hash) {
            self.record(hash, SampledUse { class, at_ms: now_ms, counted_until_ms: now_ms, is_miss: false });
            self.classes[class.index()].uses += 1.0;
            self.trial.record_stored(now_ms, hash, class, &self.values);
        }
    }

    /// Observes that the block with this hash was looked up but is not stored.
    pub fn record_miss(&mut self, now_ms: u64, hash: u64) {
        if let Some(last) = self.sample.last_use(hash) {
            self.record(hash, SampledUse { at_ms: now_ms, counted_until_ms: now_ms, is_miss: true, ..last });
        }
    }

    /// Observes what is known about the last use of the block with this hash: `class` is its class from now on.
    pub fn record_description(&mut self, now_ms: u64, hash: u64, class: BlockClass) {
        let Some(last) = self.sample.last_use(hash) else { return };
        self.classes[last.class.index()].count_time(&last, now_ms);
        self.classes[class.index()].uses += 1.0;
        let counted_until_ms = last.counted_until_ms.max(now_ms);
        self.sample.record(hash, SampledUse { class, counted_until_ms, ..last });
        self.trial.record_description(now_ms, hash, class);
    }

    fn record(&mut self, hash: u64, this: SampledUse) {
        let Some(last) = self.sample.record(hash, this) else { return };
        let counts = &mut self.classes[last.class.index()];
        counts.count_time(&last, this.at_ms);
        if !last.is_miss {
            counts.returns[age_bin(this.at_ms.saturating_sub(last.at_ms))] += 1.0;
            self.trial.record_lookup(hash);
        }
    }

    /// Values by everything observed so far, for a store that holds this many blocks when it is full. All are zero while
    /// LRU would have had more hits.
    pub fn values(&mut self, now_ms: u64, stored: u64) -> RetentionValues {
        let Self { sample, classes, .. } = self;
        sample.count_times(now_ms, |last| classes[last.class.index()].count_time(last, now_ms));
        let mut all = ReturnCounts::NONE;
        for class in &mut *classes {
            class.halve_old();
            all.add(class);
        }
        let pooled = all.rates(&[0.0; AGE_BINS]);
        self.values = RetentionValues::of_hazards(BlockClass::all().map(|class| {
            let mut others = ReturnCounts::NONE;
            class.of_other_tenants().for_each(|other| others.add(&classes[other.index()]));
            classes[class.index()].hazards(&others.rates(&pooled))
        }));
        let capacity = stored as f64 * sample.share();
        self.trial.resize(capacity as usize, |hash| sample.is_sampled(hash));
        let TrialHits { lru, learned, .. } = self.trial.hits();
        if learned >= lru { self.values.clone() } else { RetentionValues::default() }
    }

    /// Whether anything was counted.
    #[must_use]
    pub fn has_counts(&self) -> bool {
        self.classes.iter().any(|class| class.uses > 0.0)
    }

    /// Everything that was counted, for [`Self::restore`]. The sample is not part of it: it is rebuilt within minutes.
    #[must_use]
    pub fn counts(&self) -> Vec<u8> {
        learned_counts::encode(&self.classes)
    }

    /// Replaces the counts by those of an earlier learner.
    ///
    /// # Errors
    /// When the bytes are not from [`Self::counts`] of this version. The counts stay as they are.
    pub fn restore(&mut self, counts: &[u8]) -> Result<(), LearnedCountsError> {
        self.classes = learned_counts::decode(counts)?;
        Ok(())
    }

    /// Recent hits of sampled blocks with LRU and with learned values.
    #[must_use]
    pub fn trial_hits(&self) -> TrialHits {
        self.trial.hits()
    }

    /// Number of blocks in the sample.
    #[must_use]
    pub fn sampled(&self) -> usize {
        self.sample.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::prompt_description::{PromptDescription, PromptLength, ReturnHint, TenantBucket};

    fn class(uses: u32) -> BlockClass {
        BlockClass::new(uses, PromptDescription::default())
    }

    /// The class of a block that is used once, with a hint by a tenant of this bucket.
    fn hinted_by(bucket: u8, hint: ReturnHint) -> BlockClass {
        let tenants = TenantBucket::new(bucket);
        BlockClass::new(1, PromptDescription { length: PromptLength::Long, hint, tenants })
    }

    fn hinted(hint: ReturnHint) -> BlockClass {
        hinted_by(0, hint)
    }

    #[test]
    fn blocks_that_return_are_worth_more() {
        let mut learner = ReturnTimeLearner::new(10_000);
        let mut random = fastrand::Rng::with_seed(1);
        for number in 0..4_000 {
            let now_ms = number * 1_000;
            // One is used once; the other is used again after a minute.
            learner.record_use(now_ms, random.u64(..), class(1));
            let returning = random.u64(..);
            learner.record_use(now_ms, returning, class(2));
            learner.record_use(now_ms + 60_000, returning, class(3));
        }
        let values = learner.values(4_100_000, 2_000);
        assert!(values.value(class(2), 10_000) > 20.0 * values.value(class(1), 10_000));
        // After the time at which it would have returned it is worth as little.
        assert!(values.value(class(2), 10_000) > 20.0 * values.value(class(2), 600_000));
    }

    #[test]
    fn hints_count_as_much_as_they_prove_right() {
        let mut learner = ReturnTimeLearner::new(100_000);
        let mut random = fastrand::Rng::with_seed(2);
        for number in 0..10_000_u64 {
            let now_ms = number * 100;
            for (hint, probability) in [(ReturnHint::Never, 0.5), (ReturnHint::Expected, 0.5)] {
                let hash = random.u64(..);
                learner.record_use(now_ms, hash, hinted(hint));
                if random.f64() < probability {
                    learner.record_use(now_ms + 30_000, hash, class(8));
                }
            }
        }
        let values = learner.values(1_200_000, 2_000);
        let [never, expected] =
            [ReturnHint::Never, ReturnHint::Expected].map(|hint| values.value(hinted(hint), 1_000));
        assert!((0.9..1.1).contains(&(never / expected)), "{never} {expected}");
    }

    /// Observes blocks with the hint that they return: those of bucket 1 do, those of bucket 2 do not.
    fn learner_of_a_right_and_a_wrong_tenant(blocks: u64, wrong_per_right: u64) -> ReturnTimeLearner {
        let mut learner = ReturnTimeLearner::new(100_000);
        let mut random = fastrand::Rng::with_seed(4);
        for number in 0..blocks {
            let now_ms = number * 1_000;
            let returning = random.u64(..);
            learner.record_use(now_ms, returning, hinted_by(1, ReturnHint::Expected));
            learner.record_use(now_ms + 30_000, returning, class(8));
            for _ in 0..wrong_per_right {
                learner.record_use(now_ms, random.u64(..), hinted_by(2, ReturnHint::Expected));
            }
        }
        learner
    }

    #[test]
    fn wrong_hints_of_a_tenant_devalue_only_its_own() {
        let value = |wrong_per_right, bucket| {
            let mut learner = learner_of_a_right_and_a_wrong_tenant(1_000, wrong_per_right);
            learner.values(1_100_000, 2_000).value(hinted_by(bucket, ReturnHint::Expected), 1_000)
        };
        let alone = value(0, 1);
        for wrong_per_right in [1, 5] {
            let [right, wrong] = [1, 2].map(|bucket| value(wrong_per_right, bucket));
            assert!((0.95..1.05).contains(&(right / alone)), "{right} of {alone}");
            assert!(wrong < alone / 20.0, "{wrong} of {alone}");
        }
    }

    #[test]
    fn hints_of_a_new_tenant_count_like_the_average() {
        let value = |wrong_per_right, bucket| {
            let mut learner = learner_of_a_right_and_a_wrong_tenant(1_000, wrong_per_right);
            learner.values(1_100_000, 2_000).value(hinted_by(bucket, ReturnHint::Expected), 1_000)
        };
        // One tenant is right: so is the new one, until it has proved otherwise.
        assert!(value(0, 5) > 0.9 * value(0, 1));
        // Half of the hints are wrong: in between.
        assert!((0.2..0.8).contains(&(value(1, 5) / value(1, 1))), "{}", value(1, 5) / value(1, 1));
    }

    #[test]
    fn values_are_not_used_while_lru_has_more_hits() {
        let mut learner = ReturnTimeLearner::new(100);
        let _ = learner.values(0, 1);
        // Wrong values: the class that returns is worth nothing, the other one much.
        let valuable = class(2).index();
        let hazards = |class| [if class == valuable { 0.5 } else { 0.0 }; AGE_BINS];
        learner.values = RetentionValues::of_hazards((0..BlockClass::COUNT).map(hazards));
        for second in 0..20 {
            let now_ms = second * 1_000;
            // The caches hold one block: LRU the second one, the other cache the first.
            learner.record_use(now_ms, 1, class(2));
            learner.record_use(now_ms + 1, 2, class(1));
            learner.record_use(now_ms + 2, 2, class(1));
        }
        let TrialHits { lru, learned, .. } = learner.trial_hits();
        assert!(lru > learned, "{lru} {learned}");
        let values = learner.values(20_000, 1);
        assert!([1, 2].iter().all(|uses| values.value(class(*uses), 0) == 0.0));
        assert!(learner.values.value(class(1), 0) > 0.0);
    }

    #[test]
    fn descriptions_after_a_use_are_no_return() {
        let mut learner = ReturnTimeLearner::new(100_000);
        let mut random = fastrand::Rng::with_seed(3);
        for number in 0..10_000_u64 {
            let (now_ms, hash) = (number * 100, random.u64(..));
            learner.record_use(now_ms, hash, hinted(ReturnHint::Unknown));
            let hint = if number % 2 == 0 { ReturnHint::Never } else { ReturnHint::Expected };
            learner.record_description(now_ms + 500, hash, hinted(hint));
            if hint == ReturnHint::Expected {
                learner.record_use(now_ms + 30_000, hash, class(8));
            }
        }
        let values = learner.values(1_200_000, 2_000);
        let value = |hint| values.value(hinted(hint), 1_000);
        assert!(value(ReturnHint::Expected) > 20.0 * value(ReturnHint::Never));
        assert!(value(ReturnHint::Never) < 0.001, "{}", value(ReturnHint::Never));
    }

    #[test]
    fn a_restored_learner_has_the_same_values() {
        let mut learner = ReturnTimeLearner::new(10_000);
        for number in 0..4_000 {
            learner.record_use(number * 1_000, (number % 40) << 50, class(2));
        }
        let mut restored = ReturnTimeLearner::new(10_000);
        let before = learner.values(4_100_000, 2_000).value(class(2), 10_000);
        restored.restore(&learner.counts()).unwrap();
        let after = restored.values(0, 2_000).value(class(2), 10_000);
        assert!(before > 0.0 && (0.99..1.01).contains(&(after / before)), "{before} {after}");
        assert!(restored.restore(b"x").is_err());
    }

    proptest! {
        #[test]
        fn the_sample_is_bounded_and_values_are_finite(
            uses in prop::collection::vec((any::<u64>(), 0_u64..1_000_000_000, 0..BlockClass::COUNT), 0..400),
            max in 1_usize..50,
        ) {
            let mut learner = ReturnTimeLearner::new(max);
            for (hash, now_ms, class) in uses {
                learner.record_use(now_ms, hash, BlockClass::from_index(class).unwrap());
                prop_assert!(learner.sampled() <= max);
            }
            let values = learner.values(500_000_000, 20);
            for class in (0..BlockClass::COUNT).filter_map(BlockClass::from_index) {
                for age_ms in [0, 1_000, 60_000, 100_000_000, u64::MAX] {
                    let value = values.value(class, age_ms);
                    prop_assert!(value.is_finite() && value >= 0.0);
                }
            }
        }
    }
}
