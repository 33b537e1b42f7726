//! One decision with everything that it depended on, to be shown and to be made again.

use serde::{Deserialize, Serialize};

use crate::decision::ScheduleRejection;
use crate::fleet::{InstanceLoad, SchedulableFleet, SchedulableInstance};
use crate::options::SchedulerOptions;
use crate::policy::{PolicyInput, PolicyName, PolicyVerdict, ScheduleRound};
use crate::prediction::CacheHitPrediction;
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::request::{RequestProfile, Seconds};

/// What a policy was asked. Policies that keep a picture of their own of what was sent where may answer otherwise without it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionSnapshot {
    /// Which policy was asked.
    pub policy: PolicyName,
    /// Its settings.
    pub settings: SchedulerOptions,
    /// The request.
    pub request: RequestProfile,
    /// The fleet.
    pub instances: Vec<SchedulableInstance>,
    /// One per instance. Waits include the work of held requests that went first.
    pub loads: Vec<InstanceLoad>,
    /// Held requests that had not been decided on yet, this one included.
    pub held: usize,
    /// What prompts the engines had had to compute of late.
    pub mix: PrefillTimeDistribution,
    /// Cache hits; the keys of the prompt's pages are left out.
    pub prediction: CacheHitPrediction,
    /// When it was decided.
    pub now: Seconds,
    /// When the request had arrived.
    pub arrived: Seconds,
    /// Number of the decision.
    pub sequence: u64,
    /// Random bits that it was given.
    pub entropy: u64,
}

impl DecisionSnapshot {
    /// Takes down what `policy` is about to be asked.
    #[must_use]
    pub(crate) fn capture(
        policy: PolicyName,
        settings: &SchedulerOptions,
        held: usize,
        input: &PolicyInput<'_>,
    ) -> Self {
        Self {
            policy,
            settings: settings.clone(),
            request: input.request.clone(),
            instances: input.cluster.instances().to_vec(),
            loads: input.loads.to_vec(),
            held,
            mix: input.mix.clone(),
            prediction: CacheHitPrediction { pages: [].into(), ..input.prediction.clone() },
            now: input.now,
            arrived: input.arrived,
            sequence: input.sequence,
            entropy: input.entropy,
        }
    }

    /// Decides again.
    ///
    /// # Errors
    /// [`ScheduleRejection`] as the policy says.
    pub fn replay(&self) -> Result<PolicyVerdict, ScheduleRejection> {
        let cluster = SchedulableFleet::new(self.instances.clone());
        let mut policy = self.policy.build(&self.settings);
        policy.begin_round(&ScheduleRound {
            cluster: &cluster,
            loads: &self.loads,
            queued_requests: self.held,
            max_store_fetch_tokens: self.prediction.max_store_fetch_tokens(),
            now: self.now,
        });
        policy.decide(&PolicyInput {
            request: &self.request,
            cluster: &cluster,
            loads: &self.loads,
            prediction: &self.prediction,
            mix: &self.mix,
            now: self.now,
            arrived: self.arrived,
            sequence: self.sequence,
            entropy: self.entropy,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache_params::EngineCacheParams;
    use crate::fleet::{InstanceRole, LocationIds, ModelIndex, PairingDomain};
    use crate::prediction::TierHits;
    use crate::scheduler::{AttemptId, ScheduleRequest, Scheduler, SchedulerEvent};

    fn instance(number: usize) -> SchedulableInstance {
        SchedulableInstance {
            name: format!("engine-{number}").into(),
            role: if number < 3 { InstanceRole::Prefill } else { InstanceRole::Decode },
            models: vec![ModelIndex(0)],
            domain: PairingDomain(0),
            dp_size: 1,
            place: LocationIds::default(),
            cache: EngineCacheParams::default(),
        }
    }

    fn ask(number: u32) -> ScheduleRequest {
        let hit = TierHits { l1_tokens: 4096, ..TierHits::default() };
        let mut per_instance = vec![TierHits::default(); 5];
        per_instance[number as usize % 3] = hit;
        ScheduleRequest {
            request: RequestProfile {
                model: ModelIndex(0),
                input_tokens: 6000 + 100 * number,
                output_tokens: 100,
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

    /// Ten requests at once for three prefills, so that some are planned behind others; then first tokens let the rest go.
    #[test]
    fn a_decision_is_made_again_from_its_snapshot() {
        let settings = SchedulerOptions::default();
        let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
        scheduler.set_capture(true);
        scheduler.set_cluster(0.0, Arc::new(SchedulableFleet::new((0..5).map(instance).collect())));
        (0..10).for_each(|number| scheduler.submit(0.0, AttemptId(number.into()), ask(number)));
        let mut replayed = 0;
        for step in 0..10 {
            let mut events = Vec::new();
            scheduler.poll(f64::from(step), 7, &mut events);
            let captured: Vec<_> = scheduler.take_captured().collect();
            for (event, (ticket, snapshot)) in events.into_iter().zip(captured) {
                let SchedulerEvent::Send { attempt: sent, decision } = event else { panic!("{event:?}") };
                assert_eq!(sent, ticket);
                let text = serde_json::to_string(&snapshot).unwrap();
                let snapshot: DecisionSnapshot = serde_json::from_str(&text).unwrap();
                let Ok(PolicyVerdict::Send(again)) = snapshot.replay() else { panic!("held") };
                assert_eq!(again.route, decision.route);
                assert_eq!(again.explanation.reason, decision.explanation.reason);
                for (again, then) in again.explanation.candidates.iter().zip(&decision.explanation.candidates)
                {
                    assert!((again.cost - then.cost).abs() < 1e-9, "{again:?} instead of {then:?}");
                }
                scheduler.first_token(f64::from(step) + 0.5, ticket, None);
                replayed += 1;
            }
        }
        assert_eq!(replayed, 10);
    }
}
