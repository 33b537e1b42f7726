//! How long requests stay queued.

use super::super::PolicyInput;
use super::{CheapestPair, DecodeChoice, MAX_PLANNED_PER_ENGINE, PredictivePolicy};
use crate::estimate::{FETCH_LATENCY, PrefillEstimate};
use crate::seconds::Seconds;

/// A request is dispatched once its decode is expected to meet the target of the time per token this long after the
/// prompt has been computed. 0 to 5 s differ little: a smaller value keeps more responses within the target, a larger
/// one more first tokens.
const PACE_SLACK: Seconds = 1.0;

/// How long a request is to stay queued; not if the time is not positive.
pub(super) struct DueTime {
    pub(super) seconds: Seconds,
    /// The decode that will be fast enough only then.
    pub(super) waits_for: Option<DecodeChoice>,
}

impl PredictivePolicy {
    /// When a request is to be sent to the engines with the least price.
    pub(super) fn due(&self, best: &CheapestPair) -> DueTime {
        let PrefillEstimate { wait, pass_wait, fetch, service, handover, truncates_fetch, .. } =
            best.estimate;
        let mut due = pass_wait - best.estimate.ready() - self.settings.slack;
        let planned = self.plan.work(best.prefill);
        if truncates_fetch && fetch > 0.0 && planned > 0.0 {
            // Sent before the requests planned ahead of it, it would be computed before them, and without its blocks.
            due = due.max(wait - planned - self.settings.slack);
        }
        if let Some(choice) = best.decode {
            let in_pace = choice.pace_wait - service - handover - PACE_SLACK;
            if in_pace > due.max(0.0) {
                return DueTime { seconds: in_pace, waits_for: Some(choice) };
            }
        }
        DueTime { seconds: due, waits_for: None }
    }

    /// How long to queue a request that no engine is ready for, whatever its price there; `None` if it must be priced.
    pub(super) fn recheck_after(&mut self, input: &PolicyInput<'_>) -> Option<Seconds> {
        let due = match self.plan.first_due() {
            None if self.plan.requests()
                < MAX_PLANNED_PER_ENGINE * input.cluster.prefills(input.request.model).len() =>
            {
                return None;
            }
            None => self.earliest_due(input)?,
            Some(due) => due,
        };
        // Without any engine it is rejected in the usual way.
        (due.is_finite() && self.meets_deadline(input)).then_some(due)
    }

    /// How long until any engine could be given this request, if that is not now.
    fn earliest_due(&self, input: &PolicyInput<'_>) -> Option<Seconds> {
        let mut due = f64::INFINITY;
        let entries = input.cluster.prefills(input.request.model).iter();
        for &ix in entries.chain(self.local_prefills(input)) {
            let Some(load) = input.loads.get(ix.as_usize()).filter(|load| load.available) else { continue };
            let stored = f64::from(input.prediction.hits(ix).l3_tokens);
            let fetch = if stored > 0.0 {
                let distance = input.prediction.network_distance(ix);
                load.fetch_wait + FETCH_LATENCY + distance * stored * self.plan.fetch_per_token(ix)
            } else {
                0.0
            };
            let preparation = fetch + input.adapters.of(ix).wait();
            let wait = load.min_wait().min(load.prefill_wait - preparation);
            let shared = self.plan.next_pass(ix).unwrap_or(load.next_pass).work;
            due = due.min(wait + self.plan.work(ix) - shared - self.settings.slack);
            if due <= 0.0 {
                return None;
            }
        }
        Some(due)
    }
}
