//! State around a policy: queued requests, load of every engine, and requests sent.

mod adapters;
mod engine_groups;
mod excluded;
mod in_flight;
mod load_refresh;
mod snapshot_budget;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use self::engine_groups::EngineGroups;
use self::excluded::ExcludedEngines;
use self::in_flight::InFlightAttempt;
use self::load_refresh::LoadRefresh;
use self::snapshot_budget::SnapshotBudget;
use crate::adapter_loads::{AdapterLoadTracker, AdapterResidencies};
use crate::attempt::AttemptId;
use crate::background::BackgroundAdmission;
use crate::decision::{RoutingDecision, ScheduleRejection};
use crate::fleet::{InstanceIndex, InstanceLoad, InstanceRole, ReportedLoad, SchedulableFleet};
use crate::load_tracker::EngineLoadTracker;
use crate::options::SchedulerOptions;
use crate::pending_prompts::PendingPrompts;
use crate::policy::{HeldChoice, Policy, PolicyInput, PolicyVerdict, ScheduleRound};
use crate::prediction::CacheHitPrediction;
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::request::RequestProfile;
use crate::seconds::Seconds;
use crate::snapshot::DecisionSnapshot;

/// A request to be scheduled.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleRequest {
    pub request: RequestProfile,
    /// Predicted cache hits, in the cluster's order.
    pub prediction: CacheHitPrediction,
    /// Engines excluded for this request: already tried, or unable.
    pub excluded: Vec<InstanceIndex>,
}

/// Outcome of a queued request.
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerEvent {
    /// Dispatch it. Its load is tracked until [`Scheduler::ended`].
    Send {
        attempt: AttemptId,
        /// Chosen engines with the reasons.
        decision: RoutingDecision,
    },
    /// Reject it. The scheduler keeps no state of it.
    Reject { attempt: AttemptId, rejection: ScheduleRejection },
}

/// A policy with its state. Time comes from the caller and must not run backwards.
///
/// After every change ([`Scheduler::submit`], [`Scheduler::first_token`], [`Scheduler::ended`], a report, a new cluster)
/// and at [`Scheduler::next_poll_at`], call [`Scheduler::poll`].
#[derive(Debug)]
pub struct Scheduler {
    policy: Box<dyn Policy>,
    settings: SchedulerOptions,
    cluster: Arc<SchedulableFleet>,
    /// Load of each engine, in the cluster's order.
    engines: Vec<EngineLoadTracker>,
    groups: EngineGroups,
    /// By `order`, then by submission.
    queued: Vec<QueuedScheduleRequest>,
    in_flight: BTreeMap<AttemptId, InFlightAttempt>,
    pending: PendingPrompts,
    adapter_loads: AdapterLoadTracker,
    /// Number of requests ever submitted.
    submitted: u64,
    /// Number of decisions ever made.
    decided: u64,
    next_poll_at: Option<Seconds>,
    /// Average share of a prompt that has to be computed.
    uncached_share: f64,
    prefill_times: PrefillTimeDistribution,
    background: BackgroundAdmission,
    /// Latest time passed by the caller.
    now: Seconds,
    /// Queued requests that this poll has not decided yet.
    undecided: usize,
    snapshot_budget: SnapshotBudget,
    capturing: bool,
    captured: Vec<(AttemptId, DecisionSnapshot)>,
    /// As of the latest refresh.
    loads: Vec<InstanceLoad>,
    load_refresh: LoadRefresh,
}

#[derive(Debug)]
struct QueuedScheduleRequest {
    rank: f64,
    /// The rank with the factor of its tenant.
    order: f64,
    sequence: u64,
    attempt: AttemptId,
    arrived: Seconds,
    /// [`CacheHitPrediction::max_store_fetch_tokens`] of its prediction.
    max_store_fetch_tokens: f64,
    submission: ScheduleRequest,
    /// Of its last decision.
    held: Option<HeldChoice>,
}

impl QueuedScheduleRequest {
    fn by_order(&self, other: &Self) -> Ordering {
        self.order.total_cmp(&other.order).then(self.sequence.cmp(&other.sequence))
    }
}

impl Scheduler {
    /// Creates a scheduler of an empty cluster.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, settings: SchedulerOptions) -> Self {
        let adapter_loads = AdapterLoadTracker::new(settings.adapter_load_prior);
        Self {
            policy,
            settings,
            cluster: Arc::new(SchedulableFleet::default()),
            engines: Vec::new(),
            groups: EngineGroups::default(),
            queued: Vec::new(),
            in_flight: BTreeMap::new(),
            pending: PendingPrompts::default(),
            adapter_loads,
            submitted: 0,
            decided: 0,
            next_poll_at: None,
            uncached_share: 1.0,
            prefill_times: PrefillTimeDistribution::default(),
            background: BackgroundAdmission::default(),
            now: 0.0,
            undecided: 0,
            snapshot_budget: SnapshotBudget::default(),
            capturing: false,
            captured: Vec::new(),
            loads: Vec::new(),
            load_refresh: LoadRefresh::default(),
        }
    }

    /// Applies a new fleet. Engines keep their load by name; queued requests keep their predictions.
    pub fn set_cluster(&mut self, now: Seconds, cluster: Arc<SchedulableFleet>) {
        let mut new_ix: BTreeMap<&str, InstanceIndex> = BTreeMap::new();
        for (ix, instance) in InstanceIndex::all().zip(cluster.instances()) {
            new_ix.insert(&instance.name, ix);
        }
        let moved: Vec<Option<InstanceIndex>> =
            self.cluster.instances().iter().map(|old| new_ix.get(&*old.name).copied()).collect();
        let moved = |ix: InstanceIndex| moved.get(ix.as_usize()).copied().flatten();

        let mut previous: Vec<Option<InstanceIndex>> = vec![None; cluster.instances().len()];
        let mut engines: Vec<EngineLoadTracker> =
            cluster.instances().iter().map(|_| EngineLoadTracker::new()).collect();
        for (old, book) in InstanceIndex::all().zip(self.engines.drain(..)) {
            if let Some(new) = moved(old) {
                previous[new.as_usize()] = Some(old);
                engines[new.as_usize()] = book;
            }
        }
        self.groups = self.groups.regrouped(&cluster, &previous, &self.settings);
        self.engines = engines;
        self.pending.set_cluster(moved);
        self.adapter_loads.set_cluster(now, &cluster, moved);
        for sent in self.in_flight.values_mut() {
            sent.prefill = sent.prefill.and_then(moved);
            sent.decode = sent.decode.and_then(moved);
        }
        for queued in &mut self.queued {
            queued.held = None;
            queued.submission.excluded =
                queued.submission.excluded.iter().filter_map(|&ix| moved(ix)).collect();
            let hits = std::mem::take(&mut queued.submission.prediction.per_instance);
            if !hits.is_empty() {
                let per_instance = &mut queued.submission.prediction.per_instance;
                per_instance.resize(cluster.instances().len(), Default::default());
                for (old, hits) in InstanceIndex::all().zip(hits) {
                    if let Some(new) = moved(old) {
                        per_instance[new.as_usize()] = hits;
                    }
                }
            }
        }
        self.cluster = cluster;
        self.loads.clear();
        self.next_poll_at = Some(now);
    }

    /// Whether new requests may be sent to an engine: it is healthy and not draining.
    pub fn set_available(&mut self, ix: InstanceIndex, available: bool) {
        if let Some(book) = self.engines.get_mut(ix.as_usize()) {
            book.available = available;
            self.load_refresh.mark(ix);
        }
    }

    /// Applies an engine's load report.
    pub fn report(&mut self, now: Seconds, ix: InstanceIndex, reported: ReportedLoad) {
        if let (Some(book), Some(learned)) = (self.engines.get_mut(ix.as_usize()), self.groups.models(ix)) {
            let computes_only =
                self.cluster.get(ix).is_some_and(|instance| instance.role == InstanceRole::Prefill);
            let uncached = computes_only.then_some(self.uncached_share);
            book.apply_report(now, reported, learned, uncached);
            self.load_refresh.mark(ix);
        }
        if reported.waiting > 0 {
            self.expect_late_first_tokens(ix);
        }
    }

    /// Queues a request. [`Scheduler::poll`] returns its outcome.
    pub fn submit(&mut self, now: Seconds, attempt: AttemptId, submission: ScheduleRequest) {
        self.submit_waiting(now, attempt, submission, 0.0);
    }

    /// Queues a request that has already waited for this long in the queue of another scheduler.
    pub fn submit_waiting(
        &mut self,
        now: Seconds,
        attempt: AttemptId,
        submission: ScheduleRequest,
        waited: Seconds,
    ) {
        let number = self.submitted;
        self.submitted += 1;
        let stored = submission.prediction.max_store_fetch_tokens();
        let mut queued = QueuedScheduleRequest {
            rank: 0.0,
            order: 0.0,
            sequence: number,
            attempt,
            arrived: now - waited.max(0.0),
            max_store_fetch_tokens: stored,
            submission,
            held: None,
        };
        // Ranks depend on learned service times only, which do not change at once.
        if queued.submission.request.is_background() || self.loads.len() != self.engines.len() {
            self.refresh_loads(now);
        }
        self.now = now;
        self.background.submitted(now, &queued.submission.request, (&self.cluster, &self.loads));
        queued.rank = self.rank(&queued);
        self.enqueue(queued);
        self.next_poll_at = Some(now);
    }

    /// Decides all queued requests: those that leave the queue are in `out`, in order.
    pub fn poll(&mut self, now: Seconds, entropy: u64, out: &mut Vec<SchedulerEvent>) {
        self.next_poll_at = None;
        if self.queued.is_empty() {
            return;
        }
        self.refresh_loads(now);
        let max_adapter_load = self.max_adapter_load(now);
        self.policy.begin_round(&ScheduleRound {
            cluster: &self.cluster,
            loads: &self.loads,
            refreshed: self.load_refresh.since_last_round(),
            refreshed_at: self.load_refresh.refreshed_at(),
            queued_requests: self.queued.len(),
            max_store_fetch_tokens: self
                .queued
                .iter()
                .map(|queued| queued.max_store_fetch_tokens)
                .fold(0.0, f64::max),
            max_adapter_load,
            now,
        });
        self.load_refresh.start_round();
        self.apply_tenant_factors();
        let mut queued = std::mem::take(&mut self.queued);
        self.undecided = queued.len();
        queued.retain_mut(|queued| self.decide(now, entropy, queued, out));
        self.queued = queued;
    }

    fn input<'a>(
        &'a self,
        now: Seconds,
        entropy: u64,
        queued: &'a QueuedScheduleRequest,
        adapters: &'a AdapterResidencies,
    ) -> PolicyInput<'a> {
        PolicyInput {
            request: &queued.submission.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &queued.submission.prediction,
            adapters,
            prefill_times: &self.prefill_times,
            uncached_share: self.uncached_share,
            expected_output_tokens: self.expected_output_tokens(&queued.submission.request),
            now,
            arrived: queued.arrived,
            sequence: self.decided,
            entropy,
            is_explained: false,
            held: None,
        }
    }

    /// Decides one request. Returns whether it is still queued.
    fn decide(
        &mut self,
        now: Seconds,
        entropy: u64,
        queued: &mut QueuedScheduleRequest,
        out: &mut Vec<SchedulerEvent>,
    ) -> bool {
        let attempt = queued.attempt;
        let unasked = self.undecided;
        self.undecided = unasked.saturating_sub(1);
        let excluded = ExcludedEngines::apply(&mut self.loads, &queued.submission.excluded);
        let prediction = &queued.submission.prediction;
        let with_pending = self.pending.applied_to(prediction, self.cluster.instances().len());
        let prediction = with_pending.as_ref().unwrap_or(prediction);
        let adapters = self.adapter_residencies(now, &queued.submission.request);
        let input = PolicyInput {
            request: &queued.submission.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction,
            adapters: &adapters,
            prefill_times: &self.prefill_times,
            uncached_share: self.uncached_share,
            expected_output_tokens: self.expected_output_tokens(&queued.submission.request),
            now,
            arrived: queued.arrived,
            sequence: self.decided,
            entropy: mix_entropy(entropy, self.decided),
            is_explained: self.snapshot_budget.allows(now, self.decided, self.cluster.instances().len()),
            // What the engines will have changes with each request that is sent.
            held: queued.held.as_ref().filter(|_| with_pending.is_none() && adapters.is_empty()),
        };
        let verdict = self.policy.decide(&input);
        if let Ok(PolicyVerdict::Send(decision)) = &verdict {
            if self.capturing && input.is_explained {
                let mut snapshot =
                    DecisionSnapshot::capture(self.policy.name(), &self.settings, unasked, &input);
                for (ix, load) in InstanceIndex::all().zip(&mut snapshot.loads) {
                    load.prefill_wait += self.policy.planned_work(ix);
                }
                self.captured.push((attempt, snapshot));
            }
            self.policy.on_sent(&input, decision);
            if input.is_explained {
                self.snapshot_budget.spend(now);
            }
        }
        excluded.restore(&mut self.loads);
        match verdict {
            Ok(PolicyVerdict::Send(decision)) => {
                self.decided += 1;
                let request = &queued.submission.request;
                let prediction = with_pending.as_ref().unwrap_or(&queued.submission.prediction);
                self.track(now, attempt, (request, prediction, &adapters), &decision);
                out.push(SchedulerEvent::Send { attempt, decision });
                false
            }
            Ok(PolicyVerdict::Defer { until, held }) => {
                queued.held = held;
                if until.is_finite() {
                    self.next_poll_at = Some(self.next_poll_at.map_or(until, |first| first.min(until)));
                }
                true
            }
            Err(refusal) => {
                out.push(SchedulerEvent::Reject { attempt, rejection: refusal });
                false
            }
        }
    }

    /// Turns the capture of decision inputs on or off, for [`Scheduler::take_captured`].
    pub fn set_capture(&mut self, captures: bool) {
        self.capturing = captures;
    }

    /// Captured inputs of the decisions since the last call.
    pub fn take_captured(&mut self) -> impl Iterator<Item = (AttemptId, DecisionSnapshot)> + '_ {
        self.captured.drain(..)
    }

    /// When to poll again if nothing else happens; `None` if only an event can change something.
    #[must_use]
    pub fn next_poll_at(&self) -> Option<Seconds> {
        self.next_poll_at
    }

    /// Replaces the prediction of a queued request.
    pub fn update_prediction(&mut self, attempt: AttemptId, prediction: CacheHitPrediction) {
        let Some(position) = self.queued.iter().position(|queued| queued.attempt == attempt) else { return };
        let mut queued = self.queued.remove(position);
        queued.max_store_fetch_tokens = prediction.max_store_fetch_tokens();
        queued.submission.prediction = prediction;
        queued.held = None;
        self.refresh_loads(self.now);
        queued.rank = self.rank(&queued);
        self.enqueue(queued);
    }

    /// Replaces the excluded engines of a queued request.
    pub fn exclude(&mut self, attempt: AttemptId, excluded: Vec<InstanceIndex>) {
        if let Some(queued) = self.queued.iter_mut().find(|queued| queued.attempt == attempt) {
            queued.submission.excluded = excluded;
            queued.held = None;
        }
    }

    /// Current load of every engine, in the cluster's order.
    pub fn loads(&mut self, now: Seconds) -> &[InstanceLoad] {
        self.refresh_loads(now);
        &self.loads
    }

    /// Load of the busiest model's engines, for the admission of background requests: 0 to about 1; infinite while one would delay
    /// others. `unknown` has the number of each engine's requests that were sent without this scheduler, if there are any.
    pub fn background_load(&mut self, now: Seconds, unknown: &[u32]) -> f64 {
        if !self.queued.is_empty() {
            return f64::INFINITY;
        }
        self.refresh_loads(now);
        self.background.load(now, (&self.cluster, &self.loads), unknown)
    }

    /// Attempts in the queue, in order of submission.
    pub fn queued(&self) -> impl Iterator<Item = AttemptId> {
        let mut queued: Vec<(u64, AttemptId)> =
            self.queued.iter().map(|queued| (queued.sequence, queued.attempt)).collect();
        queued.sort_unstable();
        queued.into_iter().map(|(_, attempt)| attempt)
    }

    /// Expected length of one sequence of the response.
    fn expected_output_tokens(&self, request: &RequestProfile) -> u32 {
        let decode = self.cluster.decodes(request.model).first();
        let learned = decode
            .or(self.cluster.prefills(request.model).first())
            .and_then(|&ix| self.groups.models(ix))
            .map_or(0.0, |models| models.decode.response_tokens());
        request.max_output_tokens.unwrap_or(u32::MAX).min(learned.ceil() as u32)
    }

    fn rank(&self, queued: &QueuedScheduleRequest) -> f64 {
        // Ranks do not depend on loads.
        self.policy.rank(&self.input(self.now, 0, queued, &AdapterResidencies::default()))
    }

    fn enqueue(&mut self, mut queued: QueuedScheduleRequest) {
        queued.order = self.order(&queued);
        let position = self.queued.partition_point(|other| other.by_order(&queued) == Ordering::Less);
        self.queued.insert(position, queued);
    }

    fn order(&self, queued: &QueuedScheduleRequest) -> f64 {
        let factor = self.policy.tenant_factor(queued.submission.request.tenant);
        if factor == 1.0 { queued.rank } else { queued.arrived + factor * (queued.rank - queued.arrived) }
    }

    /// Sorts the queue by the current factors.
    fn apply_tenant_factors(&mut self) {
        let mut queued = std::mem::take(&mut self.queued);
        for queued in &mut queued {
            queued.order = self.order(queued);
        }
        // Nearly sorted, which a stable sort does in linear time.
        queued.sort_by(QueuedScheduleRequest::by_order);
        self.queued = queued;
    }
}

/// Different random bits for each decision of one poll (SplitMix64).
fn mix_entropy(entropy: u64, number: u64) -> u64 {
    let mut bits = entropy.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod adapter_tests;
#[cfg(test)]
mod closed_loop_tests;
#[cfg(test)]
mod tests;
