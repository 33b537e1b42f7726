//! Controllers that planners are compared with: Kubernetes' horizontal pod autoscaler, and one on decode tokens.

use std::collections::VecDeque;

use super::fleet::WantedReplicas;
use super::observation::FleetObservation;
use super::run::ScalingController;

/// Kubernetes' defaults: seconds between two syncs, tolerance of the ratio, and stabilization of scaling down.
const SYNC_S: f64 = 15.0;
const TOLERANCE: f64 = 0.1;
const DOWN_STABILIZATION_S: f64 = 300.0;
/// Kubernetes' default policy of scaling up: this many replicas, or as many as there are, per sync.
const UP_REPLICAS: u32 = 4;

/// One autoscaler of Kubernetes: the ratio of a metric to its target, with tolerance and stabilization.
#[derive(Debug)]
struct PodAutoscaler {
    /// Average value of the metric per replica.
    target: f64,
    down_stabilization_s: f64,
    /// Recommendations of the stabilization window with their times.
    recommended: VecDeque<(f64, u32)>,
}

impl PodAutoscaler {
    fn new(target: f64, down_stabilization_s: f64) -> Self {
        Self { target, down_stabilization_s, recommended: VecDeque::new() }
    }

    /// The wanted replicas for the sum of the metric.
    fn desired(&mut self, now: f64, current: u32, total: f64) -> u32 {
        let ratio = total / (self.target * f64::from(current.max(1)));
        let desired =
            if (ratio - 1.0).abs() <= TOLERANCE { current } else { (total / self.target).ceil() as u32 };
        let desired = desired.max(1);
        while self.recommended.front().is_some_and(|&(at_s, _)| at_s < now - self.down_stabilization_s) {
            self.recommended.pop_front();
        }
        self.recommended.push_back((now, desired));
        if desired < current {
            let stabilized = self.recommended.iter().map(|&(_, desired)| desired).max().unwrap_or(desired);
            return stabilized.min(current);
        }
        desired.min((current + UP_REPLICAS).max(2 * current))
    }
}

/// Two autoscalers, one per role, on the requests in flight: those that wait and those that are served.
#[derive(Debug)]
pub(crate) struct QueueAutoscaler {
    prefill: PodAutoscaler,
    decode: PodAutoscaler,
}

impl QueueAutoscaler {
    pub(crate) fn new(prefill_target: f64, decode_target: f64) -> Self {
        let autoscaler = |target| PodAutoscaler::new(target, DOWN_STABILIZATION_S);
        Self { prefill: autoscaler(prefill_target), decode: autoscaler(decode_target) }
    }
}

impl ScalingController for QueueAutoscaler {
    fn interval_s(&self) -> f64 {
        SYNC_S
    }

    fn decide(&mut self, observation: &FleetObservation) -> WantedReplicas {
        let input = &observation.input;
        let (prefill, decode) = (input.prefill_replicas.current(), input.decode_replicas.current());
        WantedReplicas::new(
            self.prefill.desired(input.time_s, prefill, observation.prefill_in_flight),
            self.decode.desired(input.time_s, decode, observation.decode_in_flight),
        )
    }
}

/// As `HeteroScale`: the decode tokens per second determine the decode replicas, and a fixed ratio the prefill replicas.
#[derive(Debug)]
pub(crate) struct TokenRateController {
    decode: PodAutoscaler,
    prefill_per_decode: f64,
}

impl TokenRateController {
    pub(crate) fn new(decode_tokens_per_s: f64, prefill_per_decode: f64, down_stabilization_s: f64) -> Self {
        Self { decode: PodAutoscaler::new(decode_tokens_per_s, down_stabilization_s), prefill_per_decode }
    }
}

impl ScalingController for TokenRateController {
    fn interval_s(&self) -> f64 {
        SYNC_S
    }

    fn decide(&mut self, observation: &FleetObservation) -> WantedReplicas {
        let input = &observation.input;
        let tokens_per_s = input.decode.generated_tokens_per_s.unwrap_or(0.0);
        let decode = self.decode.desired(input.time_s, input.decode_replicas.current(), tokens_per_s);
        let prefill = (f64::from(decode) * self.prefill_per_decode).ceil() as u32;
        WantedReplicas::new(prefill.max(1), decode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_autoscaler_follows_the_ratio_with_tolerance() {
        let mut autoscaler = PodAutoscaler::new(10.0, 300.0);
        assert_eq!(autoscaler.desired(0.0, 4, 43.0), 4);
        assert_eq!(autoscaler.desired(15.0, 4, 61.0), 7);
        // At most four more, or twice as many.
        assert_eq!(autoscaler.desired(30.0, 2, 200.0), 6);
        assert_eq!(autoscaler.desired(45.0, 20, 900.0), 40);
    }

    #[test]
    fn the_autoscaler_scales_down_after_the_stabilization() {
        let mut autoscaler = PodAutoscaler::new(10.0, 300.0);
        assert_eq!(autoscaler.desired(0.0, 8, 80.0), 8);
        assert_eq!(autoscaler.desired(15.0, 8, 20.0), 8);
        assert_eq!(autoscaler.desired(301.0, 8, 20.0), 2);
    }
}
