//! Requests of a day whose rate follows a tide.

use crate::generate::trace::TraceRow;
use crate::simulate::agents::{exponential, log_normal, standard_normal};
use crate::simulate::tide::ArrivalTide;

/// Highest divided by lowest rate of the day.
pub(crate) const TIDE_RATIO: f64 = 10.0;
/// Share of the requests that return: most of their prompt has been computed before. Azure's traces do not have it.
const RETURNING_SHARE: f64 = 0.5;
/// Share of a returning prompt that warm caches have.
const RETURNING_CACHED: f32 = 0.8;
/// Standard deviation of the logarithm of the noise on the synthetic rate.
const NOISE_SIGMA: f64 = 0.1;
/// Time after which the noise is mostly another one, in seconds.
const NOISE_TIME_S: f64 = 600.0;
/// Time between two changes of the noise, in seconds.
const NOISE_STEP_S: f64 = 10.0;
/// The burst of the synthetic day: when it starts, as a share of the day, how long it is, and the factor on the rate.
const BURST_START_SHARE: f64 = 0.4;
const BURST_S: f64 = 600.0;
const BURST_FACTOR: f64 = 2.0;
/// Lengths of the synthetic prompts and responses: mean, and standard deviation of the logarithm.
const INPUT_TOKENS: (f64, f64) = (3_000.0, 0.8);
const OUTPUT_TOKENS: (f64, f64) = (250.0, 0.8);
const MAX_INPUT_TOKENS: f64 = 32_000.0;
const MAX_OUTPUT_TOKENS: f64 = 4_000.0;

/// A request of the day.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DayRequest {
    pub(crate) at_s: f64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Share of the prompt that warm caches have.
    pub(crate) cached_share: f32,
}

/// Length and rate of a day.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DayOptions {
    pub(crate) day_s: f64,
    /// Mean requests per second.
    pub(crate) mean_rate: f64,
    pub(crate) seed: u64,
}

impl DayOptions {
    fn tide(&self) -> ArrivalTide {
        ArrivalTide { ratio: TIDE_RATIO, period_s: self.day_s }
    }
}

/// A sine with slow noise and one burst, Poisson arrivals, and log-normal lengths. It starts at the lowest rate.
pub(crate) fn synthetic_day(options: DayOptions) -> Vec<DayRequest> {
    let mut random = fastrand::Rng::with_seed(options.seed);
    let tide = options.tide();
    let keep = (-NOISE_STEP_S / NOISE_TIME_S).exp();
    let mut noise = 0.0;
    let mut requests = Vec::with_capacity((options.day_s * options.mean_rate * 1.1) as usize);
    // Arrivals of a Poisson process of rate 1, on an axis that advances by the rate.
    let (mut due, mut passed, mut start_s) = (exponential(&mut random, 1.0), 0.0, 0.0);
    while start_s < options.day_s {
        noise = keep * noise + (1.0 - keep * keep).sqrt() * NOISE_SIGMA * standard_normal(&mut random);
        let burst_start_s = BURST_START_SHARE * options.day_s;
        let burst_s = BURST_S.min(options.day_s / 20.0);
        let is_burst = (burst_start_s..burst_start_s + burst_s).contains(&start_s);
        let rate = options.mean_rate
            * tide.relative_rate(start_s)
            * f64::exp(noise - NOISE_SIGMA * NOISE_SIGMA / 2.0)
            * if is_burst { BURST_FACTOR } else { 1.0 };
        while due < passed + rate * NOISE_STEP_S {
            let at_s = start_s + (due - passed) / rate;
            requests.push(synthetic_request(&mut random, at_s));
            due += exponential(&mut random, 1.0);
        }
        passed += rate * NOISE_STEP_S;
        start_s += NOISE_STEP_S;
    }
    requests.retain(|request| request.at_s < options.day_s);
    requests
}

fn synthetic_request(random: &mut fastrand::Rng, at_s: f64) -> DayRequest {
    let length = |random: &mut fastrand::Rng, (mean, spread): (f64, f64), most: f64| {
        log_normal(random, mean, spread).round().clamp(1.0, most) as u32
    };
    DayRequest {
        at_s,
        input_tokens: length(random, INPUT_TOKENS, MAX_INPUT_TOKENS),
        output_tokens: length(random, OUTPUT_TOKENS, MAX_OUTPUT_TOKENS),
        cached_share: cached_share(random),
    }
}

/// A trace of an hour as a day: copies of it, each shifted by an equal part of its length, are repeated at recorded
/// speed until the day ends, so that the mean rate is the whole multiple of the recorded one that is nearest to the
/// wanted one. Then the times are moved so that the rate follows the tide: bursts of the trace remain, but are longer at
/// night and shorter by day.
pub(crate) fn trace_day(rows: &[TraceRow], options: DayOptions) -> Vec<DayRequest> {
    let Some(last) = rows.last() else { return Vec::new() };
    let mut random = fastrand::Rng::with_seed(options.seed);
    let length_s = last.at.as_secs_f64() + 1.0;
    let copies = (options.mean_rate * length_s / rows.len() as f64).round().max(1.0);
    let mut recorded: Vec<(f64, u32, u32)> = Vec::with_capacity(rows.len() * copies as usize);
    for copy in 0..copies as usize {
        let shift_s = copy as f64 / copies * length_s;
        recorded.extend(rows.iter().map(|row| {
            let at_s = (row.at.as_secs_f64() + shift_s) % length_s;
            (at_s, u32::try_from(row.input_tokens).unwrap_or(u32::MAX), row.output_tokens)
        }));
    }
    recorded.sort_by(|one, other| one.0.total_cmp(&other.0));
    let tide = options.tide();
    let rounds = (options.day_s / length_s).ceil() as usize;
    let mut requests = Vec::with_capacity(rounds * recorded.len());
    for round in 0..rounds {
        for &(at_s, input_tokens, output_tokens) in &recorded {
            let due_s = round as f64 * length_s + at_s;
            if due_s >= options.day_s {
                break;
            }
            let cached_share = cached_share(&mut random);
            requests.push(DayRequest {
                at_s: tide.arrival_s(due_s),
                input_tokens: input_tokens.max(1),
                output_tokens: output_tokens.max(1),
                cached_share,
            });
        }
    }
    requests
}

fn cached_share(random: &mut fastrand::Rng) -> f32 {
    if random.f64() < RETURNING_SHARE { RETURNING_CACHED } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn between(requests: &[DayRequest], from_s: f64, until_s: f64) -> f64 {
        requests.iter().filter(|request| (from_s..until_s).contains(&request.at_s)).count() as f64
    }

    #[test]
    fn the_synthetic_rate_has_a_tide_and_a_burst() {
        let options = DayOptions { day_s: 20_000.0, mean_rate: 10.0, seed: 1 };
        let requests = synthetic_day(options);
        let mean = requests.len() as f64 / options.day_s;
        assert!((9.0..=12.0).contains(&mean), "{mean}");
        assert!(requests.is_sorted_by_key(|request| request.at_s));
        let ratio = between(&requests, 9_000.0, 11_000.0) / between(&requests, 0.0, 1_000.0) / 2.0;
        assert!((6.0..=14.0).contains(&ratio), "{ratio}");
        let burst = between(&requests, 8_000.0, 8_600.0) / between(&requests, 7_400.0, 8_000.0);
        assert!((1.6..=2.6).contains(&burst), "{burst}");
    }

    #[test]
    fn a_trace_fills_the_day_at_the_wanted_rate() {
        let rows: Vec<TraceRow> = (0..1_000)
            .map(|number| TraceRow {
                at: Duration::from_secs(number),
                input_tokens: 100,
                output_tokens: 10,
                blocks: Vec::new(),
                block_tokens: 512,
            })
            .collect();
        let requests = trace_day(&rows, DayOptions { day_s: 20_000.0, mean_rate: 3.2, seed: 1 });
        assert_eq!(requests.len(), 60_000);
        assert!(requests.is_sorted_by_key(|request| request.at_s));
        let ratio = between(&requests, 9_500.0, 10_500.0) / between(&requests, 0.0, 500.0) / 2.0;
        assert!((8.0..=11.0).contains(&ratio), "{ratio}");
    }
}
