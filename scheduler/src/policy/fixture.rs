//! One request and a small fleet, for the tests of policies.

use super::{Policy, PolicyInput, PolicyVerdict};
use crate::adapter_loads::{AdapterResidencies, AdapterResidency};
use crate::cache_params::EngineCacheParams;
use crate::decision::{RoutingDecision, ScheduleRejection};
use crate::fleet::{
    InstanceIndex, InstanceLoad, InstanceRole, LocationIds, ModelIndex, PairingDomain, SchedulableFleet,
    SchedulableInstance,
};
use crate::prediction::{CacheHitPrediction, TierHits};
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::request::RequestProfile;
use crate::seconds::Seconds;

/// Default prompt length in tokens.
pub(super) const PROMPT: u32 = 1000;

pub(super) struct PolicyFixture {
    pub(super) cluster: SchedulableFleet,
    pub(super) loads: Vec<InstanceLoad>,
    pub(super) prediction: CacheHitPrediction,
    pub(super) adapters: AdapterResidencies,
    pub(super) prefill_times: PrefillTimeDistribution,
    pub(super) request: RequestProfile,
    pub(super) now: Seconds,
    pub(super) entropy: u64,
}

impl PolicyFixture {
    /// Creates `prefills` idle prefills and two idle decodes that they can pair with.
    pub(super) fn new(prefills: usize) -> Self {
        let roles = (0..prefills).map(|_| InstanceRole::Prefill).chain([InstanceRole::Decode; 2]);
        let instances: Vec<SchedulableInstance> =
            roles.enumerate().map(|(index, role)| instance(index, role)).collect();
        let engines = instances.len();
        Self {
            cluster: SchedulableFleet::new(instances),
            loads: vec![InstanceLoad { available: true, ..InstanceLoad::default() }; engines],
            prediction: CacheHitPrediction {
                per_instance: vec![TierHits::default(); engines],
                page_tokens: 100,
                ..CacheHitPrediction::default()
            },
            adapters: AdapterResidencies::default(),
            request: RequestProfile {
                model: ModelIndex(0),
                input_tokens: PROMPT,
                max_output_tokens: Some(100),
                sequences: 1,
                priority: 0,
                session: None,
                tenant: None,
                ttft_target: None,
            },
            now: 0.0,
            prefill_times: PrefillTimeDistribution::default(),
            entropy: 0,
        }
    }

    /// Sets the prompt to these blocks of 100 tokens.
    pub(super) fn with_prompt(mut self, pages: &[u64]) -> Self {
        self.set_prompt(pages);
        self
    }

    pub(super) fn set_prompt(&mut self, pages: &[u64]) {
        self.prediction.pages = pages.into();
        self.request.input_tokens = u32::try_from(pages.len()).unwrap() * 100;
    }

    pub(super) fn set_cached(&mut self, index: usize, l1_tokens: u32, l2_tokens: u32, l3_tokens: u32) {
        self.prediction.per_instance[index] =
            TierHits { l1_tokens, l2_tokens, l3_tokens, ..TierHits::default() };
    }

    /// The request is for an adapter, which these engines have loaded; the others need a second.
    pub(super) fn set_adapter_loaded_on(&mut self, engines: &[usize]) {
        let residency = |index| match engines.contains(&index) {
            true => AdapterResidency::Loaded,
            false => AdapterResidency::Loadable { load_time: 1.0 },
        };
        self.adapters = (0..self.loads.len()).map(residency).collect();
    }

    /// Sets a prefill's number of requests without a first token.
    pub(super) fn set_pending_prefills(&mut self, index: usize, requests: u32) {
        self.loads[index].in_flight = requests;
        self.loads[index].pending_prefills = requests;
    }

    pub(super) fn input(&self) -> PolicyInput<'_> {
        PolicyInput {
            request: &self.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &self.prediction,
            adapters: &self.adapters,
            prefill_times: &self.prefill_times,
            uncached_share: 1.0,
            expected_output_tokens: 100,
            now: self.now,
            arrived: self.now,
            sequence: 0,
            entropy: self.entropy,
            is_explained: true,
            held: None,
        }
    }

    pub(super) fn verdict(&self, policy: &mut dyn Policy) -> Result<PolicyVerdict, ScheduleRejection> {
        policy.decide(&self.input())
    }

    pub(super) fn decision(&self, policy: &mut dyn Policy) -> RoutingDecision {
        match self.verdict(policy) {
            Ok(PolicyVerdict::Send(decision)) => decision,
            other => panic!("no decision: {other:?}"),
        }
    }

    /// Decides, notifies the policy that the request was sent, and returns the chosen prefill.
    pub(super) fn send(&self, policy: &mut dyn Policy) -> usize {
        let decision = self.decision(policy);
        policy.on_sent(&self.input(), &decision);
        decision.route.prefill_instance().as_usize()
    }

    /// How often each engine is the chosen prefill over many draws.
    pub(super) fn entry_counts(&mut self, policy: &mut dyn Policy) -> Vec<u32> {
        let mut chosen = vec![0; self.loads.len()];
        for step in 0..300_u64 {
            self.entropy = super::name_hash::splitmix64(step);
            chosen[self.decision(policy).route.prefill_instance().as_usize()] += 1;
        }
        chosen
    }

    /// Lets the decodes compute prompts, too.
    pub(super) fn with_local_prefill(mut self) -> Self {
        let instances = self.cluster.instances().iter().cloned();
        let instances = instances.map(|instance| SchedulableInstance { local_prefill: true, ..instance });
        self.cluster = SchedulableFleet::new(instances.collect());
        self
    }

    pub(super) fn remove(&mut self, removed: InstanceIndex) {
        let remaining =
            self.cluster.instances().iter().enumerate().filter(|(index, _)| *index != removed.as_usize());
        self.cluster = SchedulableFleet::new(remaining.map(|(_, instance)| instance.clone()).collect());
        self.loads.remove(removed.as_usize());
        self.prediction.per_instance.remove(removed.as_usize());
    }
}

fn instance(index: usize, role: InstanceRole) -> SchedulableInstance {
    SchedulableInstance {
        name: format!("engine-{index}").into(),
        role,
        models: vec![ModelIndex(0)],
        loadable: Vec::new(),
        domain: PairingDomain(0),
        rank: 0,
        location: LocationIds::default(),
        cache: EngineCacheParams::default(),
        local_prefill: false,
    }
}
