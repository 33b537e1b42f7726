//! Dynamo's SLA planner, as published for disaggregated deployments: a prediction of the next interval, capacities from
//! a profile, and factors that correct the profile.

use super::fleet::{ScalingOptions, WantedReplicas};
use super::observation::FleetObservation;
use super::run::ScalingController;
use super::workload::DayRequest;

/// Constants of its Kalman filter.
const KALMAN_LEVEL: f64 = 1.0;
const KALMAN_TREND: f64 = 0.1;
const KALMAN_NOISE: f64 = 10.0;

/// How the number of requests of the next interval is predicted.
#[derive(Debug, Clone)]
pub(crate) enum RequestPredictor {
    /// As many as in the last one.
    Constant,
    /// A local linear trend.
    Kalman(KalmanFilter),
    /// The true number: better than any predictor, such as ARIMA or Prophet.
    Exact(Vec<f64>),
}

impl RequestPredictor {
    pub(crate) fn kalman() -> Self {
        Self::Kalman(KalmanFilter::default())
    }

    pub(crate) fn exact(requests: &[DayRequest], interval_s: f64, day_s: f64) -> Self {
        let mut counts = vec![0.0; (day_s / interval_s).ceil() as usize + 2];
        for request in requests {
            if let Some(count) = counts.get_mut((request.at_s / interval_s) as usize) {
                *count += 1.0;
            }
        }
        Self::Exact(counts)
    }

    fn predict(&mut self, requests: f64, time_s: f64, interval_s: f64) -> f64 {
        match self {
            Self::Constant => requests,
            Self::Kalman(filter) => filter.next(requests),
            Self::Exact(counts) => {
                counts.get((time_s / interval_s).round() as usize).copied().unwrap_or(requests)
            }
        }
    }
}

/// A filter of level and trend.
#[derive(Debug, Clone, Default)]
pub(crate) struct KalmanFilter {
    level: f64,
    trend: f64,
    /// Covariance: level, both, trend.
    covariance: Option<(f64, f64, f64)>,
}

impl KalmanFilter {
    fn next(&mut self, value: f64) -> f64 {
        let Some((level, both, trend)) = self.covariance else {
            self.level = value;
            self.covariance = Some((1_000.0, 0.0, 1_000.0));
            return value;
        };
        // Prediction of this value.
        let predicted = self.level + self.trend;
        let (level, both, trend) =
            (level + 2.0 * both + trend + KALMAN_LEVEL, both + trend, trend + KALMAN_TREND);
        let (level_gain, trend_gain) = (level / (level + KALMAN_NOISE), both / (level + KALMAN_NOISE));
        let error = value - predicted;
        self.level = predicted + level_gain * error;
        self.trend += trend_gain * error;
        self.covariance =
            Some((level * (1.0 - level_gain), both * (1.0 - level_gain), trend - trend_gain * both));
        (self.level + self.trend).max(0.0)
    }
}

#[derive(Debug)]
pub(crate) struct DynamoPlanner<'a> {
    options: &'a ScalingOptions,
    interval_s: f64,
    predictor: RequestPredictor,
    /// Share of the profiled capacity that is used. Published planners use all of it.
    utilization: f64,
    last: Option<WantedReplicas>,
}

impl<'a> DynamoPlanner<'a> {
    pub(crate) fn new(
        options: &'a ScalingOptions,
        interval_s: f64,
        predictor: RequestPredictor,
        utilization: f64,
    ) -> Self {
        Self { options, interval_s, predictor, utilization, last: None }
    }

    /// Profiled time to first token of one prompt without cache hits on an idle engine.
    fn profiled_ttft_s(&self, input_tokens: f64) -> f64 {
        let service = &self.options.engines.service;
        service.prefill_base_s
            + service.prefill_compute_s(input_tokens as usize, 0)
            + service.transfer_s(service.last_transfer_tokens(input_tokens as usize, input_tokens as usize))
    }

    fn profiled_tpot_s(&self, sequences: f64, context: f64) -> f64 {
        let engines = &self.options.engines;
        engines.service.decode_step_s(sequences.max(0.0) as u64, (sequences.max(0.0) * context) as u64)
    }

    /// Profiled tokens per second of the largest batch that meets a time per output token.
    fn profiled_decode_tokens_per_s(&self, tpot_s: f64, context: f64) -> f64 {
        let engines = &self.options.engines;
        let fits = (engines.decode_tokens as f64 / context.max(1.0)) as usize;
        let most = fits.min(engines.max_running).max(1);
        let sequences =
            (1..=most).take_while(|&count| self.profiled_tpot_s(count as f64, context) <= tpot_s).last();
        let sequences = sequences.unwrap_or(1) as f64;
        sequences / self.profiled_tpot_s(sequences, context)
    }
}

impl ScalingController for DynamoPlanner<'_> {
    fn interval_s(&self) -> f64 {
        self.interval_s
    }

    fn decide(&mut self, observation: &FleetObservation) -> WantedReplicas {
        let input = &observation.input;
        let (prefill, decode) = (input.prefill_replicas.current(), input.decode_replicas.current());
        let unchanged = self.last.unwrap_or(WantedReplicas::new(prefill, decode));
        let (Some(input_tokens), Some(output_tokens), Some(ttft_s), Some(tpot_s), Some(request_s)) = (
            observation.mean_input_tokens,
            observation.mean_output_tokens,
            observation.mean_ttft_s,
            observation.mean_tpot_s,
            observation.mean_request_s,
        ) else {
            return unchanged;
        };
        let context = input_tokens + output_tokens / 2.0;
        let prefill_correction = ttft_s / self.profiled_ttft_s(input_tokens);
        let concurrency = observation.requests / f64::from(input.decode_replicas.ready.max(1)) * request_s
            / observation.interval_s;
        let decode_correction = tpot_s / self.profiled_tpot_s(concurrency, context);
        let requests = self.predictor.predict(observation.requests, input.time_s, self.interval_s);
        let per_s = requests / observation.interval_s / self.utilization;

        let prefill_load = per_s * input_tokens * prefill_correction.min(1.0);
        let prefill_capacity = input_tokens / self.profiled_ttft_s(input_tokens);
        let decode_capacity = self
            .profiled_decode_tokens_per_s(self.options.tpot_target_s / decode_correction.max(1e-3), context);
        let wanted = WantedReplicas::new(
            ((prefill_load / prefill_capacity).ceil() as u32).max(1),
            ((per_s * output_tokens / decode_capacity).ceil() as u32).max(1),
        );
        self.last = Some(wanted);
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_follows_a_trend() {
        let mut filter = KalmanFilter::default();
        let predicted = (0..50).map(|step| filter.next(100.0 + 10.0 * f64::from(step))).last();
        assert!((predicted.expect("some") - 600.0).abs() < 5.0, "{predicted:?}");
    }
}
