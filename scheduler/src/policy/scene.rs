//! One request before a small fleet, for the tests of policies.

use super::{Input, Policy, Verdict};
use crate::cache_rules::CacheRules;
use crate::cluster::{Cluster, Instance, InstanceIx, Load, ModelIx, PairingDomain, Place, Role};
use crate::decision::{Decision, Refusal};
use crate::prediction::{Prediction, TierHits};
use crate::request::{Request, Seconds};
use crate::service_mix::ServiceMix;

/// Tokens of the prompt unless a test says otherwise.
pub(super) const PROMPT: u32 = 1000;

pub(super) struct Scene {
    pub(super) cluster: Cluster,
    pub(super) loads: Vec<Load>,
    pub(super) prediction: Prediction,
    pub(super) mix: ServiceMix,
    pub(super) request: Request,
    pub(super) now: Seconds,
    pub(super) entropy: u64,
}

impl Scene {
    /// `prefills` idle prefills and two idle decodes behind them.
    pub(super) fn new(prefills: usize) -> Self {
        let roles = (0..prefills).map(|_| Role::Prefill).chain([Role::Decode; 2]);
        let instances: Vec<Instance> = roles.enumerate().map(|(at, role)| instance(at, role)).collect();
        let engines = instances.len();
        Self {
            cluster: Cluster::new(instances),
            loads: vec![Load { available: true, ..Load::default() }; engines],
            prediction: Prediction {
                per_instance: vec![TierHits::default(); engines],
                page_tokens: 100,
                ..Prediction::default()
            },
            request: Request {
                model: ModelIx(0),
                input_tokens: PROMPT,
                output_tokens: 100,
                sequences: 1,
                priority: 0,
                session: None,
                tenant: None,
                ttft_target: None,
            },
            now: 0.0,
            mix: ServiceMix::default(),
            entropy: 0,
        }
    }

    /// The prompt consists of these pages of 100 tokens.
    pub(super) fn with_prompt(mut self, pages: &[u64]) -> Self {
        self.ask(pages);
        self
    }

    pub(super) fn ask(&mut self, pages: &[u64]) {
        self.prediction.pages = pages.into();
        self.request.input_tokens = u32::try_from(pages.len()).unwrap() * 100;
    }

    pub(super) fn cached(&mut self, at: usize, l1_tokens: u32, l2_tokens: u32, l3_tokens: u32) {
        self.prediction.per_instance[at] = TierHits { l1_tokens, l2_tokens, l3_tokens };
    }

    /// A prefill has so many requests without a first token.
    pub(super) fn busy(&mut self, at: usize, requests: u32) {
        self.loads[at].in_flight = requests;
        self.loads[at].pending_prefills = requests;
    }

    pub(super) fn input(&self) -> Input<'_> {
        Input {
            request: &self.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &self.prediction,
            mix: &self.mix,
            now: self.now,
            arrived: self.now,
            sequence: 0,
            entropy: self.entropy,
        }
    }

    pub(super) fn verdict(&self, policy: &mut dyn Policy) -> Result<Verdict, Refusal> {
        policy.decide(&self.input())
    }

    pub(super) fn decision(&self, policy: &mut dyn Policy) -> Decision {
        match self.verdict(policy) {
            Ok(Verdict::Send(decision)) => decision,
            other => panic!("no decision: {other:?}"),
        }
    }

    /// The chosen entry, after telling the policy that the request was sent.
    pub(super) fn send(&self, policy: &mut dyn Policy) -> usize {
        let decision = self.decision(policy);
        policy.sent(&self.input(), &decision);
        decision.route.entry().at()
    }

    /// How often each engine is the entry over many draws.
    pub(super) fn draws(&mut self, policy: &mut dyn Policy) -> Vec<u32> {
        let mut chosen = vec![0; self.loads.len()];
        for step in 0..300_u64 {
            self.entropy = super::name_hash::scatter(step);
            chosen[self.decision(policy).route.entry().at()] += 1;
        }
        chosen
    }

    pub(super) fn remove(&mut self, gone: InstanceIx) {
        let left = self.cluster.instances().iter().enumerate().filter(|(at, _)| *at != gone.at());
        self.cluster = Cluster::new(left.map(|(_, instance)| instance.clone()).collect());
        self.loads.remove(gone.at());
        self.prediction.per_instance.remove(gone.at());
    }
}

fn instance(at: usize, role: Role) -> Instance {
    Instance {
        name: format!("engine-{at}").into(),
        role,
        models: vec![ModelIx(0)],
        domain: PairingDomain(0),
        dp_size: 1,
        place: Place::default(),
        cache: CacheRules::default(),
    }
}
