//! One decision with everything that it depended on, to be shown and to be made again.

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Instance, Load};
use crate::decision::Refusal;
use crate::policy::{Input, PolicyName, Round, Verdict};
use crate::prediction::Prediction;
use crate::request::{Request, Seconds};
use crate::service_mix::ServiceMix;
use crate::settings::Settings;

/// What a policy was asked. Policies that keep a picture of their own of what was sent where may answer otherwise without it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Which policy was asked.
    pub policy: PolicyName,
    /// Its settings.
    pub settings: Settings,
    /// The request.
    pub request: Request,
    /// The fleet.
    pub instances: Vec<Instance>,
    /// One per instance. Waits include the work of held requests that went first.
    pub loads: Vec<Load>,
    /// Held requests that had not been decided on yet, this one included.
    pub held: usize,
    /// What prompts the engines had had to compute of late.
    pub mix: ServiceMix,
    /// Cache hits; the keys of the prompt's pages are left out.
    pub prediction: Prediction,
    /// When it was decided.
    pub now: Seconds,
    /// When the request had arrived.
    pub arrived: Seconds,
    /// Number of the decision.
    pub sequence: u64,
    /// Random bits that it was given.
    pub entropy: u64,
}

impl Snapshot {
    /// Takes down what `policy` is about to be asked.
    #[must_use]
    pub(crate) fn of(policy: PolicyName, settings: &Settings, held: usize, input: &Input<'_>) -> Self {
        Self {
            policy,
            settings: settings.clone(),
            request: input.request.clone(),
            instances: input.cluster.instances().to_vec(),
            loads: input.loads.to_vec(),
            held,
            mix: input.mix.clone(),
            prediction: Prediction { pages: [].into(), ..input.prediction.clone() },
            now: input.now,
            arrived: input.arrived,
            sequence: input.sequence,
            entropy: input.entropy,
        }
    }

    /// Decides again.
    ///
    /// # Errors
    /// [`Refusal`] as the policy says.
    pub fn replay(&self) -> Result<Verdict, Refusal> {
        let cluster = Cluster::new(self.instances.clone());
        let mut policy = self.policy.build(&self.settings);
        policy.begin(&Round {
            cluster: &cluster,
            loads: &self.loads,
            held: self.held,
            most_stored: self.prediction.stored(),
            now: self.now,
        });
        policy.decide(&Input {
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
    use crate::cache_rules::CacheRules;
    use crate::cluster::{ModelIx, PairingDomain, Place, Role};
    use crate::prediction::TierHits;
    use crate::scheduler::{Ask, Event, Scheduler, Ticket};

    fn instance(number: usize) -> Instance {
        Instance {
            name: format!("engine-{number}").into(),
            role: if number < 3 { Role::Prefill } else { Role::Decode },
            models: vec![ModelIx(0)],
            domain: PairingDomain(0),
            dp_size: 1,
            place: Place::default(),
            cache: CacheRules::default(),
        }
    }

    fn ask(number: u32) -> Ask {
        let hit = TierHits { l1_tokens: 4096, ..TierHits::default() };
        let mut per_instance = vec![TierHits::default(); 5];
        per_instance[number as usize % 3] = hit;
        Ask {
            request: Request {
                model: ModelIx(0),
                input_tokens: 6000 + 100 * number,
                output_tokens: 100,
                sequences: 1,
                priority: 0,
                session: None,
                tenant: None,
                ttft_target: None,
            },
            prediction: Prediction { per_instance, ..Prediction::default() },
            barred: Vec::new(),
        }
    }

    /// Ten requests at once for three prefills, so that some are planned behind others; then first tokens let the rest go.
    #[test]
    fn a_decision_is_made_again_from_its_snapshot() {
        let settings = Settings::default();
        let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
        scheduler.capture(true);
        scheduler.set_cluster(0.0, Arc::new(Cluster::new((0..5).map(instance).collect())));
        (0..10).for_each(|number| scheduler.submit(0.0, Ticket(number.into()), ask(number)));
        let mut replayed = 0;
        for step in 0..10 {
            let mut events = Vec::new();
            scheduler.poll(f64::from(step), 7, &mut events);
            let captured: Vec<_> = scheduler.take_captured().collect();
            for (event, (ticket, snapshot)) in events.into_iter().zip(captured) {
                let Event::Send { ticket: sent, decision } = event else { panic!("{event:?}") };
                assert_eq!(sent, ticket);
                let text = serde_json::to_string(&snapshot).unwrap();
                let snapshot: Snapshot = serde_json::from_str(&text).unwrap();
                let Ok(Verdict::Send(again)) = snapshot.replay() else { panic!("held") };
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
