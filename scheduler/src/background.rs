//! When background requests may start: only where they hardly ever delay others.
//!
//! The prompt of a background request keeps one engine busy. It delays another request that arrives meanwhile and finds no idle
//! engine. The expected number of such requests follows from their rate, the duration of the prompt, and the number of engines that
//! stay idle. It is paid from a credit that every other request adds to, so that the share of delayed requests is bounded however
//! many engines there are. While other requests keep the engines busy most of the time, even one delayed request delays those behind
//! it, so none starts. Without other requests nothing is delayed, and background requests run freely.

use crate::fleet::{InstanceIndex, InstanceLoad, ModelIndex, SchedulableFleet};
use crate::request::RequestProfile;
use crate::seconds::Seconds;

/// Priority of background requests, below that of all others.
pub const BACKGROUND_PRIORITY: i32 = i32::MIN;

/// Largest share of other requests that may find no idle engine because of background requests. The 99th percentile of the time
/// to first token then becomes at most what the 99.1st was.
const MAX_DELAYED_SHARE: f64 = 0.001;
/// Most requests that may be delayed at once, after a long time without background requests, and at the start.
const MAX_CREDIT: f64 = 1.0;
/// Largest share of the time in which the engines compute prompts of other requests.
const MAX_OTHERS_SHARE: f64 = 0.65;
/// Time constant of the average rate of other requests.
const RATE_WINDOW: Seconds = 30.0;
/// Traffic that has just begun is averaged over at least this time.
const MIN_WINDOW: Seconds = 2.0;
/// Below this many requests in the window there is no other traffic to protect.
const MIN_TRAFFIC: f64 = 0.5;
/// Weight of a new prompt in the average duration of background prompts.
const DURATION_GAIN: f64 = 0.1;
/// Uncached tokens of a background prompt before any has been sent.
const INITIAL_PROMPT_TOKENS: u64 = 4_096;
/// Largest share of a decode step that background sequences may add to it while there is other traffic: a step takes part in
/// the time to first token, and bounds the time per output token.
const MAX_STEP_GROWTH: f64 = 0.05;

/// Traffic of each model, for the admission of background requests.
#[derive(Debug, Default)]
pub(crate) struct BackgroundAdmission {
    models: Vec<ModelTraffic>,
}

#[derive(Debug, Clone, Copy)]
struct ModelTraffic {
    /// Requests in the last [`RATE_WINDOW`], with exponentially decreasing weights.
    recent: f64,
    /// Computation of their prompts, with the same weights.
    recent_computation: Seconds,
    updated_at: Seconds,
    /// First request after a time without others.
    begun_at: Seconds,
    /// Requests that may be delayed.
    credit: f64,
    /// Average duration of background prompts; 0 before the first.
    prompt: Seconds,
}

impl Default for ModelTraffic {
    fn default() -> Self {
        Self {
            recent: 0.0,
            recent_computation: 0.0,
            updated_at: 0.0,
            begun_at: f64::NEG_INFINITY,
            credit: MAX_CREDIT,
            prompt: 0.0,
        }
    }
}

impl ModelTraffic {
    fn advance(&mut self, now: Seconds) {
        let decay = (-(now - self.updated_at).max(0.0) / RATE_WINDOW).exp();
        self.recent *= decay;
        self.recent_computation *= decay;
        self.updated_at = now;
    }

    /// Total weight of the time since the traffic has begun.
    fn window(&self) -> Seconds {
        let elapsed = self.updated_at - self.begun_at;
        (RATE_WINDOW * (1.0 - (-elapsed / RATE_WINDOW).exp())).max(MIN_WINDOW)
    }

    /// Share of the time of so many engines that prompts of other requests take.
    fn others_share(&self, engines: usize) -> f64 {
        self.recent_computation / (self.window() * engines.max(1) as f64)
    }

    /// Requests that are expected to be delayed by another background prompt, if so many engines are idle now.
    fn expected_delays(&self, idle: usize, prompt: Seconds) -> f64 {
        if self.recent < MIN_TRAFFIC {
            return 0.0;
        }
        expected_excess(self.recent / self.window() * prompt, idle.saturating_sub(1))
    }
}

impl BackgroundAdmission {
    fn model(&mut self, model: ModelIndex) -> &mut ModelTraffic {
        let index = model.0 as usize;
        if index >= self.models.len() {
            self.models.resize(index + 1, ModelTraffic::default());
        }
        &mut self.models[index]
    }

    /// Counts a request that has been submitted; a background request has passed [`Self::load`].
    pub(crate) fn submitted(
        &mut self,
        now: Seconds,
        request: &RequestProfile,
        fleet: (&SchedulableFleet, &[InstanceLoad]),
    ) {
        let traffic = self.model(request.model);
        traffic.advance(now);
        if request.is_background() {
            // Of a large fleet, this costs more than a decision: other requests do not need it.
            let engines = PromptEngines::of(request.model, fleet, &[]);
            let prompt = engines.prompt_duration(traffic.prompt);
            let delays = traffic.expected_delays(engines.idle, prompt);
            traffic.credit = (traffic.credit - delays).max(0.0);
        } else {
            if traffic.recent < MIN_TRAFFIC {
                traffic.begun_at = now;
            }
            traffic.recent += 1.0;
            traffic.credit = (traffic.credit + MAX_DELAYED_SHARE).min(MAX_CREDIT);
        }
    }

    /// Counts a prompt that has been sent to an engine, and takes this long.
    pub(crate) fn sent(&mut self, now: Seconds, request: &RequestProfile, prompt: Seconds) {
        let traffic = self.model(request.model);
        traffic.advance(now);
        if !request.is_background() {
            traffic.recent_computation += prompt;
            return;
        }
        match traffic.prompt {
            0.0 => traffic.prompt = prompt,
            average => traffic.prompt += DURATION_GAIN * (prompt - average),
        }
    }

    /// Load of the busiest model's engines, 0 to about 1; infinite while a background request would delay others.
    /// `unknown` has the number of each engine's requests that the scheduler has not seen.
    pub(crate) fn load(
        &mut self,
        now: Seconds,
        fleet: (&SchedulableFleet, &[InstanceLoad]),
        unknown: &[u32],
    ) -> f64 {
        let models = fleet.0.instances().iter().flat_map(|instance| &instance.models);
        let models = models.map(|model| model.0 + 1).max().unwrap_or(0);
        (0..models).map(|model| self.model_load(now, ModelIndex(model), fleet, unknown)).fold(0.0, f64::max)
    }

    fn model_load(
        &mut self,
        now: Seconds,
        model: ModelIndex,
        (cluster, loads): (&SchedulableFleet, &[InstanceLoad]),
        unknown: &[u32],
    ) -> f64 {
        let engines = PromptEngines::of(model, (cluster, loads), unknown);
        if engines.available.is_empty() {
            return 0.0;
        }
        let traffic = self.model(model);
        traffic.advance(now);
        let prompt = engines.prompt_duration(traffic.prompt);
        if engines.idle == 0
            || traffic.others_share(engines.available.len()) > MAX_OTHERS_SHARE
            || traffic.expected_delays(engines.idle, prompt) > traffic.credit
        {
            return f64::INFINITY;
        }
        let decodes = available(cluster.decodes(model), loads);
        // Plain workers generate too; without decodes, all are plain.
        let generating = if decodes.is_empty() { &engines.available } else { &decodes };
        let is_full =
            generating.iter().all(|(_, load)| load.reported.is_some_and(|report| report.waiting > 0));
        let growth = mean(generating.iter().map(|(_, load)| load.background_step_growth()));
        if is_full || (traffic.recent >= MIN_TRAFFIC && growth > MAX_STEP_GROWTH) {
            return f64::INFINITY;
        }
        let computing = mean(engines.available.iter().map(|(_, load)| load.prefill_share));
        computing.max(mean(generating.iter().map(|(_, load)| load.used_cache_share())))
    }
}

/// The engines that could compute a prompt of a model now.
struct PromptEngines {
    available: Vec<(InstanceIndex, InstanceLoad)>,
    /// How many of them have none to compute.
    idle: usize,
}

impl PromptEngines {
    fn of(
        model: ModelIndex,
        (cluster, loads): (&SchedulableFleet, &[InstanceLoad]),
        unknown: &[u32],
    ) -> Self {
        let available = available(cluster.prefills(model), loads);
        let is_idle = |(ix, load): &&(InstanceIndex, InstanceLoad)| {
            let is_known = unknown.get(ix.as_usize()).is_none_or(|count| *count == 0);
            is_known && load.pending_prefills == 0 && load.prefill_wait <= 0.0
        };
        let idle = available.iter().filter(is_idle).count();
        Self { available, idle }
    }

    /// Expected duration of a background prompt, which is `average` if it is known.
    fn prompt_duration(&self, average: Seconds) -> Seconds {
        if average > 0.0 {
            return average;
        }
        mean(self.available.iter().map(|(_, load)| load.service.seconds(INITIAL_PROMPT_TOKENS, 0)))
    }
}

fn available(engines: &[InstanceIndex], loads: &[InstanceLoad]) -> Vec<(InstanceIndex, InstanceLoad)> {
    let engines = engines.iter().filter_map(|ix| Some((*ix, *loads.get(ix.as_usize())?)));
    engines.filter(|(_, load)| load.available).collect()
}

/// Expected value of what a Poisson variable with this mean exceeds `limit` by.
fn expected_excess(mean: f64, limit: usize) -> f64 {
    /// Beyond this mean, what is below a small limit does not count.
    const LARGE: f64 = 100.0;
    if mean > LARGE {
        return mean;
    }
    let (mut probability, mut below) = ((-mean).exp(), 0.0);
    // The mean, less the expected minimum of the variable and the limit.
    let mut cumulative = 0.0;
    for count in 0..limit {
        cumulative += probability;
        below += 1.0 - cumulative;
        probability *= mean / (count + 1) as f64;
    }
    (mean - below).max(0.0)
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len();
    if count == 0 { 0.0 } else { values.sum::<f64>() / count as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_params::EngineCacheParams;
    use crate::fleet::{InstanceRole, LocationIds, PairingDomain, ReportedLoad, SchedulableInstance};

    #[test]
    fn excess_is_that_of_the_distribution() {
        let exact = |mean: f64, limit: usize| {
            let mut probability = (-mean).exp();
            (1..200).fold(0.0, |sum, count| {
                probability *= mean / f64::from(count);
                sum + probability * (f64::from(count) - limit as f64).max(0.0)
            })
        };
        for mean in [0.01, 0.3, 2.0, 10.0] {
            for limit in [0, 1, 3, 8] {
                let (excess, exact) = (expected_excess(mean, limit), exact(mean, limit));
                assert!((excess - exact).abs() < 1e-12, "{mean} {limit}: {excess} {exact}");
            }
        }
        assert!(expected_excess(1e6, 3) > 1e5);
    }

    #[test]
    fn delays_depend_on_rate_duration_and_idle_engines() {
        let traffic = ModelTraffic { recent: 300.0, ..ModelTraffic::default() };
        assert_eq!(traffic.expected_delays(1, 0.2), 2.0, "ten a second");
        let of = |idle| traffic.expected_delays(idle, 0.2);
        assert!(of(1) > of(2) && of(2) > of(5) && of(5) > of(9));
        assert_eq!(ModelTraffic::default().expected_delays(1, 0.2), 0.0);
        let mut traffic = traffic;
        traffic.advance(30.0 * RATE_WINDOW);
        assert_eq!(traffic.expected_delays(1, 0.2), 0.0, "the traffic has ended");
    }

    fn fleet(count: usize) -> (SchedulableFleet, Vec<InstanceLoad>) {
        let instance = |number| SchedulableInstance {
            name: format!("{number}").into(),
            role: InstanceRole::Plain,
            models: vec![ModelIndex(0)],
            loadable: Vec::new(),
            domain: PairingDomain(0),
            rank: 0,
            location: LocationIds::default(),
            cache: EngineCacheParams::default(),
            local_prefill: false,
        };
        let load = InstanceLoad { available: true, ..InstanceLoad::default() };
        (SchedulableFleet::new((0..count).map(instance).collect()), vec![load; count])
    }

    fn request(priority: i32) -> RequestProfile {
        RequestProfile {
            model: ModelIndex(0),
            input_tokens: 1_000,
            max_output_tokens: None,
            sequences: 1,
            priority,
            session: None,
            tenant: None,
            ttft_target: None,
        }
    }

    /// How many background requests may start beside ten others a second for a minute, each after the prompt of the last.
    fn started(engines: usize) -> usize {
        let (cluster, loads) = fleet(engines);
        let fleet = (&cluster, &*loads);
        let mut admission = BackgroundAdmission::default();
        admission.sent(0.0, &request(BACKGROUND_PRIORITY), 0.1);
        let mut started = 0;
        for step in 0..600 {
            let now = f64::from(step) * 0.1;
            admission.submitted(now, &request(0), fleet);
            if admission.load(now, fleet, &[]) < 1.0 {
                admission.submitted(now, &request(BACKGROUND_PRIORITY), fleet);
                started += 1;
            }
        }
        started
    }

    #[test]
    fn more_engines_run_more_background_requests() {
        let started = [1, 2, 4, 8].map(started);
        assert!(started.is_sorted() && started[0] > 0, "{started:?}");
        // One engine has the credit of the start, while the rate is still low, and that of 600 requests.
        assert!(started[0] < 60 && started[2] > 10, "{started:?}");
    }

    #[test]
    fn busy_engines_start_nothing_until_others_end() {
        let (cluster, loads) = fleet(4);
        let fleet = (&cluster, &*loads);
        let mut admission = BackgroundAdmission::default();
        // The engines compute for 0.5 and for 0.8 of the time, and are idle at the moment.
        for (share, starts) in [(0.5, true), (0.8, false)] {
            for step in 0..1_200 {
                let now = f64::from(step) * 0.1;
                admission.sent(now, &request(0), share * 0.1 * 4.0);
            }
            assert_eq!(admission.load(120.0, fleet, &[]) == 0.0, starts, "{share}");
            assert_eq!(admission.load(140.0, fleet, &[]), 0.0, "{share}: they have ended");
            admission = BackgroundAdmission::default();
        }
    }

    #[test]
    fn busy_and_full_engines_start_nothing() {
        let (cluster, idle) = fleet(2);
        let mut admission = BackgroundAdmission::default();
        let mut load =
            |loads: &[InstanceLoad], unknown: &[u32]| admission.load(0.0, (&cluster, loads), unknown);
        assert_eq!(load(&idle, &[]), 0.0);
        let busy = InstanceLoad { pending_prefills: 1, prefill_share: 0.5, ..idle[0] };
        assert_eq!(load(&[busy, idle[0]], &[]), 0.25);
        assert_eq!(load(&[busy, busy], &[]), f64::INFINITY);
        let down = InstanceLoad { available: false, ..idle[0] };
        assert_eq!(load(&[busy, down], &[]), f64::INFINITY);
        assert_eq!(load(&[down, down], &[]), 0.0);
        assert_eq!(load(&idle, &[1, 0]), 0.0);
        assert_eq!(load(&idle, &[1, 2]), f64::INFINITY);
        let report = ReportedLoad { used_tokens: 30, capacity_tokens: 100, ..ReportedLoad::default() };
        let used = InstanceLoad { reported: Some(report), active_decode_tokens: 40, ..idle[0] };
        assert_eq!(load(&[used, used], &[]), 0.4);
        let waiting = ReportedLoad { waiting: 1, ..ReportedLoad::default() };
        let full = InstanceLoad { reported: Some(waiting), ..idle[0] };
        assert_eq!(load(&[full, full], &[]), f64::INFINITY);
    }

    #[test]
    fn sequences_are_limited_beside_other_traffic() {
        let (cluster, mut loads) = fleet(2);
        let mut admission = BackgroundAdmission::default();
        for load in &mut loads {
            (load.decode_sequences, load.background_sequences) = (30, 20);
        }
        assert_eq!(admission.load(0.0, (&cluster, &loads), &[]), 0.0);
        admission.submitted(0.0, &request(0), (&cluster, &loads));
        assert_eq!(admission.load(0.0, (&cluster, &loads), &[]), f64::INFINITY);
        loads.iter_mut().for_each(|load| load.background_sequences = 2);
        assert_eq!(admission.load(0.0, (&cluster, &loads), &[]), 0.0);
    }
}
