//! The best parameters of a controller: those of the cheapest day on which enough requests meet the targets.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::fleet::{ScalingOptions, WantedReplicas};
use super::run::{DayResult, EarlyEnd, FixedReplicas, ScalingController, run_day};
use super::workload::DayRequest;

/// Steps between two parameters of the first search, and number of refinements, each with half the step.
const GRID: i32 = 5;
const REFINEMENTS: usize = 3;

/// A day to compare controllers on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComparedDay<'a> {
    pub(crate) options: &'a ScalingOptions,
    pub(crate) requests: &'a [DayRequest],
    pub(crate) initial: WantedReplicas,
    pub(crate) stop: &'a AtomicBool,
}

/// Parameters of a controller with the result of the day.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TunedResult<P> {
    pub(crate) parameters: P,
    pub(crate) result: DayResult,
}

impl ComparedDay<'_> {
    /// The cheapest of the candidates that reach the share; `None` if none does.
    pub(crate) fn cheapest<P: Copy + Send + Sync>(
        &self,
        candidates: &[P],
        known: Option<TunedResult<P>>,
        controller: impl Fn(P) -> Box<dyn ScalingController> + Sync,
    ) -> Option<TunedResult<P>> {
        let gpus = f64::from(self.options.gpus_per_replica);
        let start = |parameters: P, early_end: EarlyEnd<'_>| {
            run_day(self.options, self.requests, self.initial, &mut *controller(parameters), Some(early_end))
        };
        let known_s =
            known.as_ref().map_or(u64::MAX, |known| (known.result.gpu_hours * 3_600.0) as u64 + gpus as u64);
        self.search(candidates, known_s, start).or(known)
    }

    /// The smallest number of replicas that reaches the share without any scaling.
    pub(crate) fn smallest_fixed(&self) -> Option<TunedResult<WantedReplicas>> {
        let none = || u64::MAX;
        let run = |initial: WantedReplicas, early_end: EarlyEnd<'_>| {
            run_day(self.options, self.requests, initial, &mut FixedReplicas, Some(early_end))
        };
        let reaches = |initial| self.search(&[initial], none(), run).is_some();
        let plenty = self.initial.prefill.max(self.initial.decode).saturating_mul(32).max(64);
        let least = |reaches: &dyn Fn(u32) -> bool| {
            let (mut low, mut high) = (1, plenty);
            while low < high {
                let middle = low.midpoint(high);
                if reaches(middle) { high = middle } else { low = middle + 1 }
            }
            low
        };
        let prefill = least(&|prefill| reaches(WantedReplicas::new(prefill, plenty)));
        let decode = least(&|decode| reaches(WantedReplicas::new(plenty, decode)));
        (0..plenty).find_map(|extra| {
            let split: Vec<WantedReplicas> =
                (0..=extra).map(|more| WantedReplicas::new(prefill + more, decode + extra - more)).collect();
            self.search(&split, none(), run)
        })
    }

    fn search<P: Copy + Send + Sync>(
        &self,
        candidates: &[P],
        cheapest_gpu_s: u64,
        run: impl Fn(P, EarlyEnd<'_>) -> Option<DayResult> + Sync,
    ) -> Option<TunedResult<P>> {
        let cheapest_gpu_s = AtomicU64::new(cheapest_gpu_s);
        let early_end = EarlyEnd { share: self.options.share, cheapest_gpu_s: &cheapest_gpu_s };
        let next = AtomicUsize::new(0);
        let best: Mutex<Option<(usize, DayResult)>> = Mutex::new(None);
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(candidates.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= candidates.len() || self.stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let result = run(candidates[index], early_end)
                            .filter(|result| result.within_both >= self.options.share);
                        if let Some(result) = result {
                            let mut best = best.lock();
                            let is_better = best
                                .as_ref()
                                .is_none_or(|(at, other)| (result.gpu_hours, index) < (other.gpu_hours, *at));
                            if is_better {
                                *best = Some((index, result));
                            }
                        }
                    }
                });
            }
        });
        let (index, result) = best.into_inner()?;
        Some(TunedResult { parameters: candidates[index], result })
    }

    /// The best pair of parameters: a grid around a first guess in equal ratios, refined around the best.
    pub(crate) fn tune_pair(
        &self,
        guess: (f64, f64),
        controller: impl Fn((f64, f64)) -> Box<dyn ScalingController> + Sync,
    ) -> Option<TunedResult<(f64, f64)>> {
        let grid = |center: (f64, f64), ratio: f64, steps: i32| -> Vec<(f64, f64)> {
            let offsets = -steps..=steps;
            offsets
                .clone()
                .flat_map(|one| offsets.clone().map(move |other| (one, other)))
                .map(|(one, other)| (center.0 * ratio.powi(one), center.1 * ratio.powi(other)))
                .collect()
        };
        let mut ratio = 1.2_f64;
        let mut best = self.cheapest(&grid(guess, ratio, GRID), None, &controller)?;
        for _ in 0..REFINEMENTS {
            ratio = ratio.sqrt();
            let around = grid(best.parameters, ratio, 1);
            best = self.cheapest(&around, Some(best), &controller)?;
        }
        Some(best)
    }
}
