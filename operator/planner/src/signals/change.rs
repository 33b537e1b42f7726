//! What the gateways' counters have counted between two rounds of samples.

use std::collections::BTreeMap;

use crate::gateway_metrics::{CumulativeHistogram, EndedRequests, GatewaySample};
use crate::scrape::GatewayAddress;

/// Differences of counters, summed over all gateways. A metric that any sample lacks is `None`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleChange {
    pub(super) prompt_tokens: Option<f64>,
    pub(super) cached_tokens: Option<f64>,
    pub(super) completion_tokens: Option<f64>,
    pub(super) ended: EndedRequests,
    /// Change of the requests in flight.
    pub(super) in_flight: f64,
    pub(super) ttft: CumulativeHistogram,
    pub(super) itl: CumulativeHistogram,
}

impl Default for SampleChange {
    fn default() -> Self {
        Self {
            prompt_tokens: Some(0.0),
            cached_tokens: Some(0.0),
            completion_tokens: Some(0.0),
            ended: EndedRequests::default(),
            in_flight: 0.0,
            ttft: CumulativeHistogram::default(),
            itl: CumulativeHistogram::default(),
        }
    }
}

impl SampleChange {
    /// `None` if a gateway was added or removed, or has restarted: what it has counted meanwhile is not known.
    pub(super) fn between(
        before: &BTreeMap<GatewayAddress, GatewaySample>,
        after: &BTreeMap<GatewayAddress, GatewaySample>,
    ) -> Option<Self> {
        if !before.keys().eq(after.keys()) {
            return None;
        }
        let mut sum = Self::default();
        for (before, after) in before.values().zip(after.values()) {
            sum.add(before, after)?;
        }
        Some(sum)
    }

    /// All that the gateways have counted since their start.
    pub(super) fn since_start(samples: &BTreeMap<GatewayAddress, GatewaySample>) -> Self {
        let nothing = GatewaySample {
            prompt_tokens: Some(0.0),
            cached_tokens: Some(0.0),
            completion_tokens: Some(0.0),
            ..GatewaySample::default()
        };
        let mut sum = Self::default();
        for sample in samples.values() {
            // Counters are never below 0.
            let _increasing = sum.add(&nothing, sample);
        }
        sum
    }

    fn add(&mut self, before: &GatewaySample, after: &GatewaySample) -> Option<()> {
        add_counter(&mut self.prompt_tokens, before.prompt_tokens, after.prompt_tokens)?;
        add_counter(&mut self.cached_tokens, before.cached_tokens, after.cached_tokens)?;
        add_counter(&mut self.completion_tokens, before.completion_tokens, after.completion_tokens)?;
        let (ended, new) = (&before.ended, &after.ended);
        self.ended = EndedRequests {
            completed: self.ended.completed + increase(ended.completed, new.completed)?,
            failed: self.ended.failed + increase(ended.failed, new.failed)?,
            rejected: self.ended.rejected + increase(ended.rejected, new.rejected)?,
            unknown_model: self.ended.unknown_model + increase(ended.unknown_model, new.unknown_model)?,
        };
        self.in_flight += after.in_flight.unwrap_or(0.0) - before.in_flight.unwrap_or(0.0);
        add_histogram(&mut self.ttft, &before.ttft, &after.ttft)?;
        add_histogram(&mut self.itl, &before.itl, &after.itl)
    }

    /// Prompt tokens that were computed, for requests that have ended.
    pub(super) fn computed_tokens(&self) -> Option<f64> {
        Some((self.prompt_tokens? - self.cached_tokens?).max(0.0))
    }

    /// Chunks of streams.
    pub(super) fn chunks(&self) -> f64 {
        self.ttft.count() + self.itl.count()
    }
}

/// Increase of a counter; `None` if it has been reset.
fn increase(before: f64, after: f64) -> Option<f64> {
    (after >= before).then_some(after - before)
}

fn add_counter(sum: &mut Option<f64>, before: Option<f64>, after: Option<f64>) -> Option<()> {
    *sum = match (*sum, before, after) {
        (Some(sum), Some(before), Some(after)) => Some(sum + increase(before, after)?),
        _ => None,
    };
    Some(())
}

fn add_histogram(
    sum: &mut CumulativeHistogram,
    before: &CumulativeHistogram,
    after: &CumulativeHistogram,
) -> Option<()> {
    // A gateway without observations has no buckets. Without those of before, it has restarted.
    if after.count() < before.count() {
        return None;
    }
    for (index, &(bound, count)) in after.buckets.iter().enumerate() {
        let before =
            before.buckets.get(index).filter(|(known, _)| *known == bound).map_or(0.0, |(_, count)| *count);
        let increase = increase(before, count)?;
        match sum.buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += increase,
            None => {
                let index = sum.buckets.partition_point(|(known, _)| *known < bound);
                sum.buckets.insert(index, (bound, increase));
            }
        }
    }
    Some(())
}
