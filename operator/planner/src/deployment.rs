//! One deployment: a loop that observes, decides and scales.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moongate_capacity::{
    InvalidSettings, Planner, PlannerDecision, PlannerInput, PlannerState, RoleDecision, RoleReplicas,
};
use moongate_runtime::LogRateLimiter;
use tokio::time::{MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

use crate::controller::PlannerContext;
use crate::deployments_file::{DeploymentSpec, ScaleTargets, ScaledRole};
use crate::plan_board::{PlanReport, RoleReport};
use crate::role_tracker::{RoleTracker, UnknownReplicas, WriteOutcome};
use crate::scrape::{GatewayScraper, ScrapeRound};
use crate::signals::{SignalConverter, SignalSettings};
use crate::state_store::{StateError, StateStore};

/// Attempts to read the learned state before planning begins without it.
const LOAD_ATTEMPTS: u32 = 5;
/// Pause between them.
const LOAD_PAUSE: Duration = Duration::from_secs(3);

/// Runs one deployment until `stop`.
pub(crate) async fn run(context: Arc<PlannerContext>, spec: Arc<DeploymentSpec>, stop: CancellationToken) {
    let mut store = StateStore::new(context.client.clone(), &context.own_namespace, &spec.key);
    let carried = context.carried_states.lock().remove(&spec.key);
    let state = match carried {
        Some(state) => state,
        None => match stop.run_until_cancelled(load(&context, &spec, &mut store)).await {
            Some(state) => state,
            None => return,
        },
    };
    let mut deployment = match Deployment::new(&context, &spec, store, state) {
        Ok(deployment) => deployment,
        // The file is checked with the same rules.
        Err(error) => {
            tracing::error!(deployment = %spec.key, %error, "the settings are not accepted");
            return;
        }
    };
    deployment.run(&stop).await;
}

/// The stored state. Without one, or if it is damaged or cannot be read, planning starts with an empty state.
async fn load(context: &PlannerContext, spec: &DeploymentSpec, store: &mut StateStore) -> PlannerState {
    for attempt in 1..=LOAD_ATTEMPTS {
        match store.load().await {
            Ok(Some(state)) => return state,
            Ok(None) => return PlannerState::default(),
            Err(error) => {
                let is_damaged = matches!(error, StateError::Damaged(_));
                context.metrics.count_state_failure(&spec.key, if is_damaged { "damaged" } else { "read" });
                let config_map = store.name();
                if is_damaged {
                    tracing::warn!(deployment = %spec.key, config_map, %error, "the learned state is discarded");
                    return PlannerState::default();
                }
                tracing::warn!(deployment = %spec.key, config_map, attempt, %error, "the learned state cannot be read");
            }
        }
        tokio::time::sleep(LOAD_PAUSE).await;
    }
    PlannerState::default()
}

struct Deployment<'a> {
    context: &'a PlannerContext,
    spec: &'a DeploymentSpec,
    planner: Planner,
    store: StateStore,
    scraper: GatewayScraper,
    signals: SignalConverter,
    roles: Vec<RoleTracker>,
    scrape_log: LogRateLimiter,
    problem_log: LogRateLimiter,
    state_log: LogRateLimiter,
}

impl<'a> Deployment<'a> {
    fn new(
        context: &'a PlannerContext,
        spec: &'a DeploymentSpec,
        store: StateStore,
        state: PlannerState,
    ) -> Result<Self, InvalidSettings> {
        let roles = spec.scale.roles().into_iter();
        let roles =
            roles.map(|(role, target)| RoleTracker::new(context.client.clone(), &spec.key, role, target));
        Ok(Self {
            context,
            spec,
            planner: Planner::restore(spec.settings.clone(), state)?,
            store,
            scraper: GatewayScraper::new(context.gateways.clone(), spec.gateways.clone()),
            signals: SignalConverter::default(),
            roles: roles.collect(),
            scrape_log: LogRateLimiter::new(),
            problem_log: LogRateLimiter::new(),
            state_log: LogRateLimiter::new(),
        })
    }

    async fn run(&mut self, stop: &CancellationToken) {
        let period = Duration::from_secs_f64(self.spec.settings.interval_s);
        let mut ticks = interval_at(tokio::time::Instant::now() + self.stagger(period), period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {
                    if stop.run_until_cancelled(self.step()).await.is_none() {
                        break;
                    }
                }
                () = next_event(&mut self.roles) => {}
            }
        }
        self.save().await;
        self.context.carried_states.lock().insert(self.spec.key.clone(), self.planner.state().clone());
    }

    /// Spreads the steps of all deployments over the interval.
    fn stagger(&self, period: Duration) -> Duration {
        let mut hasher = DefaultHasher::new();
        self.spec.key.hash(&mut hasher);
        period.mul_f64((hasher.finish() % 1000) as f64 / 1000.0)
    }

    async fn step(&mut self) {
        let started = Instant::now();
        let time_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let round = self.scraper.scrape().await;
        let unreachable = self.report_scrape(&round);
        let settings = self.signal_settings();
        let input = self.signals.convert(time_s, round, &settings);
        let mut report = PlanReport {
            time_s,
            dry_run: self.context.dry_run,
            unreachable_gateways: unreachable,
            problem: None,
            input: None,
            decision: None,
            roles: BTreeMap::new(),
        };
        let key = &self.spec.key;
        match self.replicas(time_s).await {
            Ok(replicas) => {
                let input = self.with_replicas(input, &replicas);
                let decision = self.planner.step(&input);
                report.roles = self.scale(&decision, &replicas, time_s).await;
                report.input = Some(input);
                report.decision = Some(decision);
            }
            Err(problem) => {
                if self.problem_log.is_due() {
                    tracing::warn!(deployment = %key, %problem, "nothing is decided");
                }
                self.context.metrics.clear_replicas(key);
                report.problem = Some(problem.to_string());
            }
        }
        self.context.metrics.count_step(key, report.decision.is_some());
        self.context.plans.publish(key, report);
        if self.store.is_due() {
            self.save().await;
        }
        tracing::debug!(deployment = %key, took = ?started.elapsed(), "step");
    }

    fn report_scrape(&self, round: &ScrapeRound) -> BTreeMap<String, String> {
        let mut unreachable = BTreeMap::new();
        for ((url, address), sample) in round {
            let Err(error) = sample else { continue };
            let name = address.map_or_else(|| url.clone(), |address| format!("{url} at {address}"));
            if self.scrape_log.is_due() {
                tracing::warn!(deployment = %self.spec.key, gateway = name, %error, "a gateway's metrics cannot be read; its signals are missing");
            }
            unreachable.insert(name, error.to_string());
        }
        if !unreachable.is_empty() {
            self.context.metrics.count_scrape_failures(&self.spec.key, unreachable.len());
        }
        unreachable
    }

    fn signal_settings(&self) -> SignalSettings {
        let settings = &self.spec.settings;
        SignalSettings {
            roles: self.spec.scale.engine_roles(),
            ttft_target_s: settings.targets.ttft_s,
            tpot_target_s: settings.targets.tpot_s,
            share: settings.targets.share,
            first_prefill_tokens_per_s: settings.prefill.first_tokens_per_s,
            decode_kv_tokens: self.spec.decode_kv_tokens.map(|tokens| tokens as f64),
        }
    }

    async fn replicas(&mut self, now_s: f64) -> Result<Vec<RoleReplicas>, UnknownReplicas> {
        let mut replicas = Vec::with_capacity(self.roles.len());
        for role in &mut self.roles {
            replicas.push(role.replicas(now_s).await?);
        }
        Ok(replicas)
    }

    fn with_replicas(&self, input: PlannerInput, replicas: &[RoleReplicas]) -> PlannerInput {
        let of = |index: usize| replicas.get(index).cloned().unwrap_or_default();
        let decode = match self.spec.scale {
            ScaleTargets::Pair { .. } => of(1),
            ScaleTargets::Plain { .. } => of(0),
        };
        PlannerInput { prefill_replicas: of(0), decode_replicas: decode, ..input }
    }

    async fn scale(
        &mut self,
        decision: &PlannerDecision,
        replicas: &[RoleReplicas],
        now_s: f64,
    ) -> BTreeMap<&'static str, RoleReport> {
        let (metrics, key) = (&self.context.metrics, &self.spec.key);
        let mut reports = BTreeMap::new();
        for (tracker, observed) in self.roles.iter_mut().zip(replicas) {
            let role = tracker.role;
            let decided = of_role(decision, role);
            let (wanted, explanation) = (decided.wanted, &decided.explanation);
            metrics.set_replicas(key, role, wanted, observed.current(), observed.ready);
            metrics.count_decision(key, role, explanation.reason, &explanation.missing);
            let present = observed.current();
            let result = if wanted == present {
                "unchanged"
            } else if self.context.dry_run {
                "dry_run"
            } else {
                let (target, reason) = (&tracker.target, explanation.reason);
                tracing::info!(deployment = %key, %target, from = present, to = wanted, ?reason, "scaling");
                match tracker.write(wanted, now_s, |result| metrics.count_write(key, role, result)).await {
                    WriteOutcome::Written => "written",
                    WriteOutcome::Overtaken => "overtaken",
                    WriteOutcome::Failed => "failed",
                }
            };
            let target = tracker.target.to_string();
            reports.insert(role.name(), RoleReport { target, replicas: present, wanted, result });
        }
        reports
    }

    async fn save(&mut self) {
        if self.context.dry_run {
            return;
        }
        if let Err(error) = self.store.save(self.planner.state()).await {
            self.context.metrics.count_state_failure(&self.spec.key, "write");
            if self.state_log.is_due() {
                let config_map = self.store.name();
                tracing::warn!(deployment = %self.spec.key, config_map, %error, "the learned state cannot be written");
            }
        }
    }
}

/// The decision about a role. Plain engines do the work of both: the role that needs more decides.
fn of_role(decision: &PlannerDecision, role: ScaledRole) -> &RoleDecision {
    match role {
        ScaledRole::Prefill => &decision.prefill,
        ScaledRole::Decode => &decision.decode,
        ScaledRole::Plain if decision.decode.wanted > decision.prefill.wanted => &decision.decode,
        ScaledRole::Plain => &decision.prefill,
    }
}

/// Applies the next event of any watch.
async fn next_event(roles: &mut [RoleTracker]) {
    match roles {
        [first, second] => tokio::select! {
            () = first.next_event() => {}
            () = second.next_event() => {}
        },
        [only] => only.next_event().await,
        _ => std::future::pending().await,
    }
}
