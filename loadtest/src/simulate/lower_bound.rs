//! A lower bound of the mean time to first token of every schedule of given arrivals.
//!
//! At most `m` engines compute at a time, so for every price λ(t) ≥ 0 of a second of an engine at time t, the sum of
//! the times to first token of any schedule is at least
//!
//! ```text
//! Σ min over start ≥ arrival of (start + computation + transfer − arrival + ∫ λ while it computes) − m ∫ λ
//! ```
//!
//! because the prices of all computations together are at most `m ∫ λ`. This holds for all prices (Lagrangian
//! relaxation); subgradient steps find good ones. The computation of a prompt is the shortest possible one: on the
//! fastest engine, with every block cached that another request can have computed before. Of the requests that share a
//! prefix, one computes it: the one for which this costs least.

use super::fleet::noise;
use super::outcome::SimulationResult;
use super::settings::SimulationOptions;
use super::shared_prefixes::SharedPrefixes;
use super::workload::SimulatedWorkload;
use crate::engine::EngineTimeModel;

/// Seconds for which a price is constant.
const CELL_S: f64 = 0.5;
/// Number of subgradient steps.
const STEPS: usize = 150;
/// Change of the price for twice as many computations as engines, in the first step.
const FIRST_STEP: f64 = 0.3;
/// The step length is halved after this many steps, then at twice as many, and so on.
const STEP_HALVING: f64 = 60.0;
/// Weight of the last step in the moving mean of the excess.
const TREND_WEIGHT: f64 = 0.3;

/// A prompt to be computed, with all blocks cached that can be.
#[derive(Debug, Clone, Copy)]
struct BoundedPrompt {
    arrived_s: f64,
    computation_s: f64,
    /// From the end of the computation to the first token.
    transfer_s: f64,
}

/// Prices of a second of an engine, constant within cells of [`CELL_S`] from `start_s` on, and 0 outside.
#[derive(Debug, Clone)]
struct EnginePrices {
    start_s: f64,
    prices: Vec<f64>,
    /// Integral of the prices up to the start of each cell, and up to the end.
    integral: Vec<f64>,
}

impl EnginePrices {
    fn new(start_s: f64, prices: Vec<f64>) -> Self {
        let mut sum = 0.0;
        let mut integral = vec![0.0];
        integral.extend(prices.iter().map(|price| {
            sum += price * CELL_S;
            sum
        }));
        Self { start_s, prices, integral }
    }

    /// Integral of the prices up to this time.
    fn until(&self, time: f64) -> f64 {
        let position = ((time - self.start_s) / CELL_S).max(0.0);
        let cell = position as usize;
        match self.prices.get(cell) {
            Some(price) => self.integral[cell] + (position - cell as f64) * CELL_S * price,
            None => self.total(),
        }
    }

    fn total(&self) -> f64 {
        self.integral.last().copied().unwrap_or(0.0)
    }

    /// The start that minimizes a prompt's time to first token plus the price of its computation, and this minimum.
    fn cheapest_start(&self, prompt: &BoundedPrompt) -> (f64, f64) {
        let BoundedPrompt { arrived_s, computation_s, transfer_s } = *prompt;
        let least = computation_s + transfer_s;
        let cost =
            |start: f64| start - arrived_s + least + self.until(start + computation_s) - self.until(start);
        let mut best = (arrived_s, cost(arrived_s));
        // The cost is linear between the starts at which the computation begins or ends with a cell.
        for offset_s in [0.0, computation_s] {
            let first = ((arrived_s + offset_s - self.start_s) / CELL_S).ceil();
            for cell in (0..).map(f64::from) {
                let start = (self.start_s + (first + cell) * CELL_S - offset_s).max(arrived_s);
                // Waiting until then costs more, even if the computation is free.
                if start - arrived_s + least >= best.1 {
                    break;
                }
                let at_start = cost(start);
                if at_start < best.1 {
                    best = (start, at_start);
                }
            }
        }
        best
    }
}

/// Lower bound in seconds of the mean time to first token of the requests that `reference` counts, at the arrival times
/// of that run. Engines must compute one prompt after the other.
pub(crate) fn lower_bound_s(
    settings: &SimulationOptions,
    workload: &SimulatedWorkload,
    seed: u64,
    reference: &SimulationResult,
) -> f64 {
    let times = ComputationTimes {
        settings,
        workload,
        noise: noise(workload.requests.len(), settings.noise_sigma, seed),
    };
    let shared = SharedPrefixes::new(workload);
    let mut prompts = vec![None; workload.requests.len()];
    for (request, record) in reference.counted().filter(|(_, record)| !record.first_token_s.is_nan()) {
        let prompt = times.prompt(request, record.arrived_s, shared.reusable_blocks[request]);
        prompts[request] = Some(prompt);
    }
    let sharing = |request: usize, first_block: usize| {
        prompts[request].map(|prompt: BoundedPrompt| times.prompt(request, prompt.arrived_s, first_block))
    };
    let problem = BoundProblem { prompts: &prompts, shared: &shared, sharing: &sharing };
    problem.maximize(settings.prefill as f64) / reference.ttfts().len().max(1) as f64
}

/// What a schedule must compute.
struct BoundProblem<'a> {
    /// By request; `None` if it is not counted.
    prompts: &'a [Option<BoundedPrompt>],
    shared: &'a SharedPrefixes,
    /// A request's prompt if it computes everything from this block on.
    sharing: &'a dyn Fn(usize, usize) -> Option<BoundedPrompt>,
}

impl BoundProblem<'_> {
    /// The best bound of the sum that the subgradient method finds.
    fn maximize(&self, engines: f64) -> f64 {
        let counted = || self.prompts.iter().flatten();
        let start_s = counted().map(|prompt| prompt.arrived_s).fold(f64::INFINITY, f64::min);
        let last_s = counted().map(|prompt| prompt.arrived_s).fold(0.0, f64::max);
        let work_s: f64 = counted().map(|prompt| prompt.computation_s).sum();
        if !start_s.is_finite() {
            return 0.0;
        }
        let cells = ((last_s - start_s + work_s / engines) / CELL_S).ceil() as usize + 1;
        let mut prices = vec![0.0; cells];
        // A moving mean of the excess of the last steps: prompts move between cells from one step to the next.
        let mut trend = vec![0.0; cells];
        let mut best_s = 0.0_f64;
        for number in 0..STEPS {
            // Seconds of engines used beyond those that exist, per cell.
            let mut excess = vec![-engines * CELL_S; cells];
            let of_step = EnginePrices::new(start_s, prices.clone());
            best_s = best_s.max(self.bound(&of_step, &mut excess) - engines * of_step.total());
            let step = FIRST_STEP / (1.0 + number as f64 / STEP_HALVING);
            for ((price, trend), excess) in prices.iter_mut().zip(&mut trend).zip(&excess) {
                *trend += TREND_WEIGHT * (excess / (engines * CELL_S) - *trend);
                *price = (*price + step * *trend).max(0.0);
            }
        }
        best_s
    }

    /// Least sum of times and prices. Adds the seconds of engines that it uses to `used`.
    fn bound(&self, prices: &EnginePrices, used: &mut [f64]) -> f64 {
        let start = |prompt: &BoundedPrompt| prices.cheapest_start(prompt);
        let alone: Vec<Option<(f64, f64)>> =
            self.prompts.iter().map(|prompt| prompt.as_ref().map(start)).collect();
        let mut computed: Vec<Option<BoundedPrompt>> = self.prompts.to_vec();
        let shared = self.shared.cheapest(|request, prefix| {
            // A request that is not counted computes the prefix for nothing.
            let Some((_, cost)) = alone[request] else { return 0.0 };
            (self.sharing)(request, prefix.first_block)
                .map_or(0.0, |prompt| (start(&prompt).1 - cost).max(0.0))
        });
        for &(request, prefix) in &shared.computed {
            if computed[request].is_some() {
                computed[request] = (self.sharing)(request, self.shared.prefixes[prefix].first_block);
            }
        }
        for prompt in computed.iter().flatten() {
            add_use(used, start(prompt).0 - prices.start_s, prompt.computation_s);
        }
        alone.iter().flatten().map(|&(_, cost)| cost).sum::<f64>() + shared.cost
    }
}

/// Adds the seconds of a computation to the cells in which it happens.
fn add_use(cells: &mut [f64], start: f64, seconds: f64) {
    let end = start + seconds;
    for (cell, used) in cells.iter_mut().enumerate().skip((start / CELL_S) as usize) {
        let from = cell as f64 * CELL_S;
        if from >= end {
            break;
        }
        *used += (end.min(from + CELL_S) - start.max(from)).max(0.0);
    }
}

/// Shortest computation times.
struct ComputationTimes<'a> {
    settings: &'a SimulationOptions,
    workload: &'a SimulatedWorkload,
    noise: Vec<f64>,
}

impl ComputationTimes<'_> {
    /// A request with this many leading blocks cached.
    fn prompt(&self, request: usize, arrived_s: f64, cached_blocks: usize) -> BoundedPrompt {
        let settings = self.settings;
        let service = &settings.service;
        let is_any_fast = settings.slow_engines < settings.prefill || settings.slow_engine < 1.0;
        let slowdown = if is_any_fast { settings.slow_engine.min(1.0) } else { settings.slow_engine };
        let input = self.workload.requests[request].input_tokens as usize;
        let cached = (cached_blocks * self.workload.block_tokens as usize).min(input.saturating_sub(1));
        let seconds = service.prefill_base_s + service.prefill_compute_s(input - cached, cached);
        let transfer_s =
            if settings.decode == 0 { 0.0 } else { least_transfer_s(service, input, cached, seconds) };
        BoundedPrompt { arrived_s, computation_s: seconds * slowdown * self.noise[request], transfer_s }
    }
}

/// Shortest transfer after the computation. A prompt of several chunks transfers at least one token at the end. A prompt
/// of one chunk transfers everything, unless it is faster to compute more than one chunk.
fn least_transfer_s(service: &EngineTimeModel, input: usize, cached: usize, computed_s: f64) -> f64 {
    let (one_token_s, all_s) = (service.transfer_s(1), service.transfer_s(input));
    let new = service.chunk_tokens + 1;
    if input - cached >= new {
        return one_token_s;
    }
    let is_longer_faster = input >= new
        && service.prefill_base_s + service.prefill_compute_s(new, input - new) + one_token_s
            < computed_s + all_s;
    if is_longer_faster { one_token_s } else { all_s }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn prompt(arrived_s: f64, computation_s: f64) -> Option<BoundedPrompt> {
        Some(BoundedPrompt { arrived_s, computation_s, transfer_s: 0.0 })
    }

    fn maximize_bound(prompts: &[Option<BoundedPrompt>], engines: f64) -> f64 {
        let shared = SharedPrefixes::default();
        BoundProblem { prompts, shared: &shared, sharing: &|request, _| prompts[request] }.maximize(engines)
    }

    #[test]
    fn bound_is_reached_by_prompts_that_never_wait() {
        let prompts = [prompt(0.0, 3.0), prompt(1.0, 2.0), prompt(10.0, 1.0)];
        assert!((maximize_bound(&prompts, 2.0) - 6.0).abs() < 1e-9);
    }

    #[test]
    fn bound_includes_waiting_and_is_never_above_the_best_order() {
        // Shortest first on one engine: 1, 1 + 2, 1 + 2 + 4. Without waiting it would be 7.
        let prompts = [prompt(0.0, 4.0), prompt(0.0, 1.0), prompt(0.0, 2.0)];
        let bound = maximize_bound(&prompts, 1.0);
        assert!((10.9..11.000_001).contains(&bound), "{bound}");
        // On two engines the longest is beside the others: 4, 1, 1 + 2.
        let bound = maximize_bound(&prompts, 2.0);
        assert!((7.1..8.000_001).contains(&bound), "{bound}");
    }
}
