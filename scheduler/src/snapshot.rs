//! One decision with all its inputs, for display and replay.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::adapter_loads::AdapterResidencies;
use crate::decision::ScheduleRejection;
use crate::fleet::{InstanceLoad, SchedulableFleet, SchedulableInstance};
use crate::options::SchedulerOptions;
use crate::policy::{PolicyInput, PolicyName, PolicyVerdict, ScheduleRound};
use crate::prediction::CacheHitPrediction;
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::request::RequestProfile;
use crate::seconds::Seconds;

/// Inputs of a policy's decision. Policies with state of their own may decide otherwise in a replay, which lacks that
/// state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionSnapshot {
    pub policy: PolicyName,
    pub settings: SchedulerOptions,
    pub request: RequestProfile,
    pub instances: Arc<[SchedulableInstance]>,
    /// Load of each instance. Waits include the work of queued requests that went first.
    pub loads: Vec<InstanceLoad>,
    /// Queued requests that had not been decided yet, including this one.
    pub queued_requests: usize,
    /// Recent distribution of prefill times.
    pub prefill_times: PrefillTimeDistribution,
    /// Recent average share of a prompt's computation that was not avoided by caches.
    pub uncached_share: f64,
    /// Expected length of each sequence of the response, in tokens.
    pub expected_output_tokens: u32,
    /// Cache hits, without the keys of the prompt's blocks.
    pub prediction: CacheHitPrediction,
    /// Residency of the request's LoRA adapter on each instance.
    #[serde(default)]
    pub adapters: AdapterResidencies,
    /// Time of the decision by the caller's clock.
    pub now: Seconds,
    /// Arrival time of the request by the caller's clock.
    pub arrived: Seconds,
    /// Number of the decision, from 0.
    pub sequence: u64,
    /// Random bits passed to the policy.
    pub entropy: u64,
}

impl DecisionSnapshot {
    /// Captures the inputs of `policy` before it decides.
    #[must_use]
    pub(crate) fn capture(
        policy: PolicyName,
        settings: &SchedulerOptions,
        queued_requests: usize,
        input: &PolicyInput<'_>,
    ) -> Self {
        Self {
            policy,
            settings: settings.clone(),
            request: input.request.clone(),
            instances: input.cluster.shared_instances(),
            loads: input.loads.to_vec(),
            queued_requests,
            prefill_times: input.prefill_times.clone(),
            uncached_share: input.uncached_share,
            expected_output_tokens: input.expected_output_tokens,
            prediction: CacheHitPrediction {
                pages: [].into(),
                text_prefixes: [].into(),
                ..input.prediction.clone()
            },
            adapters: input.adapters.clone(),
            now: input.now,
            arrived: input.arrived,
            sequence: input.sequence,
            entropy: input.entropy,
        }
    }

    /// Decides again from the captured inputs.
    ///
    /// # Errors
    /// [`ScheduleRejection`] of the policy.
    pub fn replay(&self) -> Result<PolicyVerdict, ScheduleRejection> {
        let cluster = SchedulableFleet::new(self.instances.to_vec());
        let mut policy = self.policy.build(&self.settings);
        policy.begin_round(&ScheduleRound {
            cluster: &cluster,
            loads: &self.loads,
            refreshed: None,
            refreshed_at: &[],
            queued_requests: self.queued_requests,
            max_store_fetch_tokens: self.prediction.max_store_fetch_tokens(),
            max_adapter_load: self.adapters.max_wait(),
            now: self.now,
        });
        policy.decide(&PolicyInput {
            request: &self.request,
            cluster: &cluster,
            loads: &self.loads,
            prediction: &self.prediction,
            adapters: &self.adapters,
            prefill_times: &self.prefill_times,
            uncached_share: self.uncached_share,
            expected_output_tokens: self.expected_output_tokens,
            now: self.now,
            arrived: self.arrived,
            sequence: self.sequence,
            entropy: self.entropy,
            is_explained: true,
            held: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::AttemptId;
    use crate::cache_params::EngineCacheParams;
    use crate::fleet::{InstanceRole, LocationIds, ModelIndex, PairingDomain};
    use crate::prediction::TierHits;
    use crate::scheduler::{ScheduleRequest, Scheduler, SchedulerEvent};

    fn instance(number: usize) -> SchedulableInstance {
        SchedulableInstance {
            name: format!("engine-{number}").into(),
            role: if number < 3 { InstanceRole::Prefill } else { InstanceRole::Decode },
            models: vec![ModelIndex(0)],
            loadable: Vec::new(),
            domain: PairingDomain(0),
            rank: 0,
            location: LocationIds::default(),
            cache: EngineCacheParams::default(),
            local_prefill: false,
        }
    }

    fn submission(number: u32) -> ScheduleRequest {
        let hit = TierHits { l1_tokens: 4096, ..TierHits::default() };
        let mut per_instance = vec![TierHits::default(); 5];
        per_instance[number as usize % 3] = hit;
        ScheduleRequest {
            request: RequestProfile {
                model: ModelIndex(0),
                input_tokens: 6000 + 100 * number,
                max_output_tokens: Some(100),
                sequences: 1,
                priority: 0,
                session: None,
                tenant: None,
                ttft_target: None,
            },
            prediction: CacheHitPrediction { per_instance, ..CacheHitPrediction::default() },
            excluded: Vec::new(),
        }
    }

    /// Ten concurrent requests for three prefills, so that some are planned after others; then first tokens let the
    /// rest go.
    #[test]
    fn a_part_of_a_large_fleets_decisions_is_kept() {
        let kept = |instances: usize| {
            let settings = SchedulerOptions::default();
            let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
            scheduler.set_capture(true);
            let plain = |number| SchedulableInstance { role: InstanceRole::Plain, ..instance(number) };
            scheduler.set_cluster(0.0, Arc::new(SchedulableFleet::new((0..instances).map(plain).collect())));
            let mut events = Vec::new();
            for number in 0..60 {
                scheduler.submit(0.0, AttemptId(number), submission(0));
                scheduler.poll(100.0 * number as f64, 0, &mut events);
            }
            let explained = |event: &&SchedulerEvent| match event {
                SchedulerEvent::Send { decision, .. } => decision.explanation.candidates.len() == instances,
                SchedulerEvent::Reject { .. } => false,
            };
            (events.len(), scheduler.take_captured().count(), events.iter().filter(explained).count())
        };
        let (sent, captured, explained) = kept(64);
        assert!(sent > 5 && (captured, explained) == (sent, sent), "{sent} {captured} {explained}");
        let (sent, captured, explained) = kept(320);
        assert_eq!((captured, explained), (sent.div_ceil(25), sent.div_ceil(25)), "of {sent}");
    }

    #[test]
    fn decision_is_replayed_from_its_snapshot() {
        let settings = SchedulerOptions::default();
        let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
        scheduler.set_capture(true);
        scheduler.set_cluster(0.0, Arc::new(SchedulableFleet::new((0..5).map(instance).collect())));
        (0..10).for_each(|number| scheduler.submit(0.0, AttemptId(number.into()), submission(number)));
        let mut replayed = 0;
        for step in 0..10 {
            let mut events = Vec::new();
            scheduler.poll(f64::from(step), 7, &mut events);
            let captured: Vec<_> = scheduler.take_captured().collect();
            for (event, (attempt, snapshot)) in events.into_iter().zip(captured) {
                let SchedulerEvent::Send { attempt: sent, decision } = event else { panic!("{event:?}") };
                assert_eq!(sent, attempt);
                let text = serde_json::to_string(&snapshot).unwrap();
                let snapshot: DecisionSnapshot = serde_json::from_str(&text).unwrap();
                let Ok(PolicyVerdict::Send(again)) = snapshot.replay() else { panic!("deferred") };
                assert_eq!(again.route, decision.route);
                assert_eq!(again.explanation.reason, decision.explanation.reason);
                for (again, then) in again.explanation.candidates.iter().zip(&decision.explanation.candidates)
                {
                    assert!((again.cost - then.cost).abs() < 1e-9, "{again:?} instead of {then:?}");
                }
                scheduler.first_token(f64::from(step) + 0.5, attempt, None);
                replayed += 1;
            }
        }
        assert_eq!(replayed, 10);
    }
}
