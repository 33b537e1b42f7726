//! Outcome of every request, and the results computed from them.

use serde::Serialize;

use super::indices::{PrefillIndex, WorkloadIndex};
use super::prefill::PrefillResult;
use super::request_class::RequestClass;
use super::settings::SimulationOptions;
use super::workload::SimulatedWorkload;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimulatedOutcome {
    Open,
    Served,
    Rejected,
    /// Lost with an engine after its response had started, or with no engine left to try.
    Failed,
}

/// History of one request. Times are in seconds.
#[derive(Debug, Clone, Copy)]
pub struct RequestHistory {
    /// When the client sent it; NaN before.
    pub arrived_s: f64,
    /// When it was last sent to an engine; NaN before.
    pub sent_s: f64,
    /// When its prompt had been computed; NaN before.
    pub computed_s: f64,
    /// Seconds of computation of its prompt.
    pub service_s: f64,
    /// When the client received the first token; NaN before.
    pub first_token_s: f64,
    /// When it ended; NaN before.
    pub ended_s: f64,
    /// Index of the engine that computed its prompt.
    pub engine: PrefillIndex,
    /// Tokens found on the device.
    pub l1_tokens: u32,
    /// … in host memory.
    pub l2_tokens: u32,
    /// … fetched from the shared store.
    pub l3_tokens: u32,
    pub state: SimulatedOutcome,
    /// Value of `Retry-After` sent to a rejected client, in seconds; NaN without a rejection.
    pub retry_after_s: f64,
    /// When the client retried after a rejection; NaN if it did not.
    pub retried_s: f64,
}

/// Complete record of a run.
#[derive(Debug, Clone)]
pub struct SimulationResult {
    /// One per request of the workload.
    pub records: Vec<RequestHistory>,
    /// Number of requests that have not ended, without background requests.
    pub open: usize,
    /// Number of background requests that have been sent and have not ended.
    pub(crate) running_background: usize,
    /// Number of initial requests, which warm the caches and are excluded.
    warmup: usize,
    /// Tenant and priority of each request.
    classes: Vec<RequestClass>,
    /// Prompt tokens of each request.
    input_tokens: Vec<u32>,
    /// Tokens of each response.
    output_tokens: Vec<u32>,
    /// TTFT target of each request in seconds.
    ttft_target_s: Vec<f64>,
    tpot_target_s: f64,
    /// When the last request ended.
    end_s: f64,
    /// When the simulation last made progress.
    pub(crate) progress_s: f64,
    /// Seconds of computation of each prefill engine.
    pub busy_s: Vec<f64>,
}

/// Results of one run, or the mean of several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SimulationSummary {
    /// Mean time to first token of the served requests.
    pub ttft_mean_s: f64,
    /// Median time to first token.
    pub ttft_p50_s: f64,
    /// 90th percentile of the time to first token.
    pub ttft_p90_s: f64,
    /// 99th percentile of the time to first token.
    pub ttft_p99_s: f64,
    /// Share of all requests whose first token arrived within twice the computation of the whole prompt, or two
    /// seconds.
    pub slo_attainment: f64,
    /// Mean time per output token after the first, over the served requests.
    pub tpot_mean_s: f64,
    /// 99th percentile of the requests' times per output token.
    pub tpot_p99_s: f64,
    /// Share of all requests whose first token and whose time per output token met their targets.
    pub goodput: f64,
    /// Share of all requests that were finally rejected.
    pub rejected: f64,
    /// Share of all requests that were lost.
    pub failed: f64,
    /// Share of the prompt tokens that were found on the device.
    pub hit_l1: f64,
    /// … in host memory.
    pub hit_l2: f64,
    /// … in the shared store.
    pub hit_l3: f64,
    /// Prompt tokens served per second, from the first counted arrival to the last end.
    pub input_tokens_per_s: f64,
    /// Of the clients that retried after `Retry-After` while others still arrived: the share whose first token then met
    /// the target.
    pub retry_after_accuracy: Option<f64>,
    /// Mean `Retry-After` of rejected clients in seconds.
    pub retry_after_s: Option<f64>,
    /// Standard deviation of the mean time to first token over the seeds.
    pub ttft_mean_sd_s: f64,
    /// Maximum time that any request was queued before its first token.
    pub ttft_max_s: f64,
}

impl SimulationResult {
    pub(crate) fn new(settings: &SimulationOptions, workload: &SimulatedWorkload) -> Self {
        let record = RequestHistory {
            arrived_s: f64::NAN,
            sent_s: f64::NAN,
            computed_s: f64::NAN,
            service_s: 0.0,
            first_token_s: f64::NAN,
            ended_s: f64::NAN,
            engine: PrefillIndex::default(),
            l1_tokens: 0,
            l2_tokens: 0,
            l3_tokens: 0,
            state: SimulatedOutcome::Open,
            retry_after_s: f64::NAN,
            retried_s: f64::NAN,
        };
        let requests = &workload.requests;
        Self {
            records: vec![record; requests.len()],
            open: requests.iter().filter(|request| !request.class.background).count(),
            running_background: 0,
            warmup: (requests.len() as f64 * settings.warmup_share.clamp(0.0, 1.0)) as usize,
            classes: requests.iter().map(|request| request.class).collect(),
            input_tokens: requests.iter().map(|request| request.input_tokens).collect(),
            output_tokens: requests.iter().map(|request| request.output_tokens).collect(),
            tpot_target_s: settings.tpot_target_s,
            ttft_target_s: requests
                .iter()
                .map(|request| settings.ttft_target_s(request.input_tokens))
                .collect(),
            end_s: 0.0,
            progress_s: 0.0,
            busy_s: Vec::new(),
        }
    }

    pub(crate) fn record_arrival(&mut self, now: f64, request: WorkloadIndex) {
        let record = &mut self.records[request.get()];
        if record.arrived_s.is_nan() {
            record.arrived_s = now;
            self.running_background += usize::from(self.classes[request.get()].background);
        } else {
            record.retried_s = now;
        }
        self.progress_s = now;
    }

    pub(crate) fn record_send(&mut self, now: f64, request: WorkloadIndex, engine: PrefillIndex) {
        let record = &mut self.records[request.get()];
        (record.sent_s, record.engine) = (now, engine);
        self.progress_s = now;
    }

    pub(crate) fn record_computed(&mut self, now: f64, request: WorkloadIndex, service_s: f64) {
        let record = &mut self.records[request.get()];
        (record.computed_s, record.service_s) = (now, service_s);
    }

    pub(crate) fn record_first_token(&mut self, now: f64, request: WorkloadIndex, computed: &PrefillResult) {
        let record = &mut self.records[request.get()];
        record.first_token_s = now;
        record.l1_tokens = computed.l1_tokens;
        record.l2_tokens = computed.l2_tokens;
        record.l3_tokens = computed.l3_tokens;
        self.progress_s = now;
    }

    /// Records the first token of a live engine's response, which reports only the number of cached tokens.
    pub(crate) fn record_live_first_token(&mut self, time: f64, request: WorkloadIndex, cached_tokens: u32) {
        self.record_first_token(
            time,
            request,
            &PrefillResult { l1_tokens: cached_tokens, ..PrefillResult::default() },
        );
    }

    pub(crate) fn record_end(&mut self, now: f64, request: WorkloadIndex, state: SimulatedOutcome) {
        let record = &mut self.records[request.get()];
        (record.state, record.ended_s) = (state, now);
        match self.classes[request.get()].background {
            true => self.running_background -= 1,
            false => self.open -= 1,
        }
        self.end_s = now;
        self.progress_s = now;
    }

    /// When the last request ended.
    #[must_use]
    pub fn end_s(&self) -> f64 {
        self.end_s
    }

    #[must_use]
    pub fn input_tokens(&self, request: usize) -> u32 {
        self.input_tokens[request]
    }

    #[must_use]
    pub fn class(&self, request: usize) -> RequestClass {
        self.classes[request]
    }

    /// Requests after the warm-up, with their numbers, without background requests.
    pub(crate) fn counted(&self) -> impl Iterator<Item = (usize, &RequestHistory)> {
        let counted = self.records.iter().enumerate().skip(self.warmup);
        counted.filter(|(request, _)| !self.classes[*request].background)
    }

    /// Times to first token after the warm-up, in ascending order.
    #[must_use]
    pub fn ttfts(&self) -> Vec<f64> {
        let served = self.counted().filter(|(_, record)| !record.first_token_s.is_nan());
        let mut times: Vec<f64> = served.map(|(_, record)| record.first_token_s - record.arrived_s).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// Seconds per token after the first of a request; `None` if it was not served or has only one token.
    #[must_use]
    pub fn tpot_s(&self, request: usize) -> Option<f64> {
        let record = self.records.get(request).filter(|record| record.state == SimulatedOutcome::Served)?;
        let tokens = self.output_tokens.get(request)?.checked_sub(1).filter(|&tokens| tokens > 0)?;
        Some((record.ended_s - record.first_token_s) / f64::from(tokens))
    }

    /// Times per output token after the warm-up, in ascending order.
    fn tpots(&self) -> Vec<f64> {
        let mut times: Vec<f64> = self.counted().filter_map(|(index, _)| self.tpot_s(index)).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// Computes the results of the run.
    #[must_use]
    pub fn summary(&self) -> SimulationSummary {
        let (times, tpots) = (self.ttfts(), self.tpots());
        let all = self.counted().count().max(1) as f64;
        let share = |state: SimulatedOutcome| {
            self.counted().filter(|(_, record)| record.state == state).count() as f64 / all
        };
        let in_time = |(index, record): &(usize, &RequestHistory)| {
            record.first_token_s - record.arrived_s <= self.ttft_target_s[*index]
                && record.state != SimulatedOutcome::Failed
        };
        let met = self.counted().filter(in_time).count();
        let in_pace = |&(index, _): &(usize, &RequestHistory)| {
            self.tpot_s(index).is_none_or(|tpot_s| tpot_s <= self.tpot_target_s)
        };
        let good = self.counted().filter(in_time).filter(in_pace).count();
        let sum = |of: &dyn Fn(usize, &RequestHistory) -> u32| -> f64 {
            let served = self.counted().filter(|(_, record)| !record.first_token_s.is_nan());
            served.map(|(index, record)| f64::from(of(index, record))).sum()
        };
        let tokens = sum(&|index, _| self.input_tokens[index]);
        let hit = |of: fn(&RequestHistory) -> u32| sum(&|_, record| of(record)) / tokens.max(1.0);
        let first = self.counted().map(|(_, record)| record.arrived_s).fold(f64::INFINITY, f64::min);
        SimulationSummary {
            ttft_mean_s: times.iter().sum::<f64>() / (times.len().max(1) as f64),
            ttft_p50_s: quantile(&times, 0.5),
            ttft_p90_s: quantile(&times, 0.9),
            ttft_p99_s: quantile(&times, 0.99),
            ttft_max_s: quantile(&times, 1.0),
            slo_attainment: met as f64 / all,
            tpot_mean_s: tpots.iter().sum::<f64>() / (tpots.len().max(1) as f64),
            tpot_p99_s: quantile(&tpots, 0.99),
            goodput: good as f64 / all,
            rejected: share(SimulatedOutcome::Rejected),
            failed: share(SimulatedOutcome::Failed) + share(SimulatedOutcome::Open),
            hit_l1: hit(|record| record.l1_tokens),
            hit_l2: hit(|record| record.l2_tokens),
            hit_l3: hit(|record| record.l3_tokens),
            input_tokens_per_s: tokens / (self.end_s - first).max(1e-9),
            retry_after_accuracy: self.retry_after_accuracy(),
            retry_after_s: self.retry_after_s(),
            ttft_mean_sd_s: 0.0,
        }
    }

    fn retry_after_s(&self) -> Option<f64> {
        let retry_after = self
            .counted()
            .map(|(_, record)| record.retry_after_s)
            .filter(|retry_after| !retry_after.is_nan());
        let (count, sum) =
            retry_after.fold((0_u32, 0.0), |(count, sum), retry_after| (count + 1, sum + retry_after));
        (count > 0).then(|| sum / f64::from(count))
    }

    fn retry_after_accuracy(&self) -> Option<f64> {
        // Retries after the last arrival meet an empty fleet and do not count.
        let last = self.records.iter().map(|record| record.arrived_s).fold(0.0, f64::max);
        let (mut right, mut all) = (0_u32, 0_u32);
        for (index, record) in self.counted().filter(|(_, record)| record.retried_s <= last) {
            all += 1;
            right += u32::from(record.first_token_s - record.retried_s <= self.ttft_target_s[index]);
        }
        (all > 0).then(|| f64::from(right) / f64::from(all))
    }
}

/// The value at `sorted[floor(share × length)]`, as bench_multiturn computes percentiles; the last one for 1.
#[must_use]
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted.get(index.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

impl SimulationSummary {
    /// The mean over several runs.
    #[must_use]
    pub fn mean(runs: &[SimulationSummary]) -> SimulationSummary {
        let count = runs.len().max(1) as f64;
        let mean = |of: fn(&SimulationSummary) -> f64| runs.iter().map(of).sum::<f64>() / count;
        let ttft_mean_s = mean(|run| run.ttft_mean_s);
        let squares: f64 = runs.iter().map(|run| (run.ttft_mean_s - ttft_mean_s).powi(2)).sum();
        let mean_of_some = |of: fn(&SimulationSummary) -> Option<f64>| {
            let values: Vec<f64> = runs.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / (values.len() as f64))
        };
        SimulationSummary {
            ttft_mean_s,
            ttft_p50_s: mean(|run| run.ttft_p50_s),
            ttft_p90_s: mean(|run| run.ttft_p90_s),
            ttft_p99_s: mean(|run| run.ttft_p99_s),
            ttft_max_s: mean(|run| run.ttft_max_s),
            slo_attainment: mean(|run| run.slo_attainment),
            tpot_mean_s: mean(|run| run.tpot_mean_s),
            tpot_p99_s: mean(|run| run.tpot_p99_s),
            goodput: mean(|run| run.goodput),
            rejected: mean(|run| run.rejected),
            failed: mean(|run| run.failed),
            hit_l1: mean(|run| run.hit_l1),
            hit_l2: mean(|run| run.hit_l2),
            hit_l3: mean(|run| run.hit_l3),
            input_tokens_per_s: mean(|run| run.input_tokens_per_s),
            retry_after_accuracy: mean_of_some(|run| run.retry_after_accuracy),
            retry_after_s: mean_of_some(|run| run.retry_after_s),
            ttft_mean_sd_s: (squares / (count - 1.0).max(1.0)).sqrt(),
        }
    }

    /// Share of the prompt tokens that were reused.
    #[must_use]
    pub fn hit(&self) -> f64 {
        self.hit_l1 + self.hit_l2 + self.hit_l3
    }
}
