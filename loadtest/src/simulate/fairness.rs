//! Results by tenant and priority: times to first token, and the division of the computation.

use serde::Serialize;

use super::outcome::{RequestHistory, SimulationResult, quantile};

/// Results of the requests of one tenant or one priority, of one run or as the mean of several.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ClassSummary {
    pub name: String,
    /// Mean time to first token.
    pub ttft_mean_s: f64,
    /// 99th percentile of the time to first token.
    pub ttft_p99_s: f64,
    /// Maximum time to first token.
    pub ttft_max_s: f64,
    /// Share of the computation of prompts while the fleet was saturated: at least as many prompts waited as there were
    /// prefill engines.
    pub computation: f64,
    /// Computation received while the fleet was saturated and prompts of this class waited, relative to an equal division
    /// among the classes that had prompts then. `None` if that never happened.
    pub equal_share: Option<f64>,
}

impl ClassSummary {
    /// The mean over several runs with the same classes.
    pub(crate) fn means(runs: &[Vec<ClassSummary>]) -> Vec<ClassSummary> {
        let Some(first) = runs.first() else { return Vec::new() };
        let mean = |(index, class): (usize, &ClassSummary)| {
            let of_run = || runs.iter().filter_map(|run| run.get(index));
            let count = of_run().count().max(1) as f64;
            let mean = |value: fn(&ClassSummary) -> f64| of_run().map(value).sum::<f64>() / count;
            let equal: Vec<f64> = of_run().filter_map(|class| class.equal_share).collect();
            ClassSummary {
                name: class.name.clone(),
                ttft_mean_s: mean(|class| class.ttft_mean_s),
                ttft_p99_s: mean(|class| class.ttft_p99_s),
                ttft_max_s: mean(|class| class.ttft_max_s),
                computation: mean(|class| class.computation),
                equal_share: (!equal.is_empty()).then(|| equal.iter().sum::<f64>() / equal.len() as f64),
            }
        };
        first.iter().enumerate().map(mean).collect()
    }
}

/// Results of every tenant, then of urgent requests and of the others; without tenants or urgent requests, none of these.
pub(crate) fn class_summaries(result: &SimulationResult) -> Vec<ClassSummary> {
    let mut requests = 0..result.records.len();
    let last_tenant = requests.clone().filter_map(|request| result.class(request).tenant).max();
    let mut summaries = Vec::new();
    if let Some(last) = last_tenant {
        let names = (0..=last).map(|tenant| format!("tenant {}", tenant + 1)).collect();
        summaries.extend(summaries_of(result, names, |request| result.class(request).tenant.unwrap_or(0)));
    }
    if requests.any(|request| result.class(request).urgent) {
        let names = vec!["urgent".to_owned(), "not urgent".to_owned()];
        summaries.extend(summaries_of(result, names, |request| usize::from(!result.class(request).urgent)));
    }
    summaries
}

fn summaries_of(
    result: &SimulationResult,
    names: Vec<String>,
    class_of: impl Fn(usize) -> usize,
) -> Vec<ClassSummary> {
    let division = ComputationDivision::of(result, names.len(), &class_of);
    let total = division.received.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let summary = |(class, name): (usize, String)| {
        let of_class = result.counted().filter(|(request, _)| class_of(*request) == class);
        let served = of_class.filter(|(_, record)| !record.first_token_s.is_nan());
        let mut times: Vec<f64> = served.map(|(_, record)| record.first_token_s - record.arrived_s).collect();
        times.sort_by(f64::total_cmp);
        let equal = division.equal[class];
        ClassSummary {
            name,
            ttft_mean_s: times.iter().sum::<f64>() / times.len().max(1) as f64,
            ttft_p99_s: quantile(&times, 0.99),
            ttft_max_s: quantile(&times, 1.0),
            computation: division.received[class] / total,
            equal_share: (equal > 0.0).then(|| division.received_waiting[class] / equal),
        }
    };
    names.into_iter().enumerate().map(summary).collect()
}

/// Seconds of computation by class, while the fleet was saturated.
#[derive(Debug, PartialEq)]
struct ComputationDivision {
    received: Vec<f64>,
    /// The same, only while prompts of the class waited.
    received_waiting: Vec<f64>,
    /// What it would have received then if each class with prompts had received the same.
    equal: Vec<f64>,
}

/// A change of the number of waiting and computed prompts of a class.
struct PromptCountChange {
    at_s: f64,
    class: usize,
    waiting: i32,
    computed: i32,
}

impl ComputationDivision {
    fn of(result: &SimulationResult, classes: usize, class_of: impl Fn(usize) -> usize) -> Self {
        let start_s = result.counted().map(|(_, record)| record.arrived_s).fold(f64::INFINITY, f64::min);
        let mut changes: Vec<PromptCountChange> = Vec::new();
        for (request, record) in result.records.iter().enumerate() {
            changes.extend(changes_by(record, class_of(request)).into_iter().flatten());
        }
        changes.sort_by(|left, right| left.at_s.total_cmp(&right.at_s));
        let zero = || vec![0.0; classes];
        let mut division = Self { received: zero(), received_waiting: zero(), equal: zero() };
        let (mut waiting, mut computed) = (vec![0_i32; classes], vec![0_i32; classes]);
        let engines = i32::try_from(result.busy_s.len()).unwrap_or(i32::MAX);
        let mut since_s = start_s;
        for change in changes {
            let seconds = change.at_s - since_s;
            if seconds > 0.0 {
                since_s = change.at_s;
                if waiting.iter().sum::<i32>() >= engines {
                    division.add(seconds, &waiting, &computed);
                }
            }
            waiting[change.class] += change.waiting;
            computed[change.class] += change.computed;
        }
        division
    }

    fn add(&mut self, seconds: f64, waiting: &[i32], computed: &[i32]) {
        let all = seconds * f64::from(computed.iter().sum::<i32>());
        let present = waiting.iter().zip(computed).filter(|(waiting, computed)| **waiting + **computed > 0);
        let equal = all / (present.count().max(1) as f64);
        for (class, (&waiting, &computed)) in waiting.iter().zip(computed).enumerate() {
            let received = seconds * f64::from(computed);
            self.received[class] += received;
            if waiting > 0 {
                self.received_waiting[class] += received;
                self.equal[class] += equal;
            }
        }
    }
}

/// A prompt waits from its arrival, or its client's retry, until its computation begins. With passes of several prompts,
/// each counts as computed for its own part of them, up to its end.
fn changes_by(record: &RequestHistory, class: usize) -> Option<[PromptCountChange; 3]> {
    let change = |at_s, waiting, computed| PromptCountChange { at_s, class, waiting, computed };
    let arrived_s = if record.retried_s.is_nan() { record.arrived_s } else { record.retried_s };
    let begin_s = f64::max(record.computed_s - record.service_s, arrived_s);
    let is_computed = !record.computed_s.is_nan();
    is_computed.then(|| [change(arrived_s, 1, 0), change(begin_s, -1, 1), change(record.computed_s, 0, -1)])
}

#[cfg(test)]
mod tests {
    use super::super::WorkloadIndex;
    use super::super::request_class::RequestClass;
    use super::super::settings::SimulationOptions;
    use super::super::workload::{ArrivalMode, NewRequest, WorkloadBuilder};
    use super::*;

    /// Requests of tenants on one engine, given as (tenant, arrival, begin, end of the computation).
    fn result(requests: &[(usize, f64, f64, f64)]) -> SimulationResult {
        let mut builder = WorkloadBuilder::new(512);
        for &(_, recorded_s, ..) in requests {
            builder.push(NewRequest {
                recorded_s,
                input_tokens: 1,
                output_tokens: 1,
                block_ids: &[],
                predecessor: None,
                session: 0,
            });
        }
        let mut workload = builder.finish(ArrivalMode::Open);
        for (request, &(tenant, ..)) in workload.requests.iter_mut().zip(requests) {
            request.class = RequestClass { tenant: Some(tenant), ..RequestClass::default() };
        }
        let settings = SimulationOptions { warmup_share: 0.0, ..SimulationOptions::one_engine() };
        let mut result = SimulationResult::new(&settings, &workload);
        result.busy_s = vec![0.0];
        for (number, &(_, arrived_s, begin_s, end_s)) in requests.iter().enumerate() {
            result.record_arrival(arrived_s, WorkloadIndex::new(number));
            result.record_computed(end_s, WorkloadIndex::new(number), end_s - begin_s);
            result.record_live_first_token(end_s, WorkloadIndex::new(number), 0);
        }
        result
    }

    #[test]
    fn only_computation_while_others_wait_is_divided() {
        // From 2 to 10 a prompt waits: first of the second tenant, then of the first.
        let result =
            result(&[(0, 0.0, 0.0, 4.0), (1, 2.0, 4.0, 10.0), (0, 3.0, 10.0, 20.0), (0, 30.0, 30.0, 31.0)]);
        let division = ComputationDivision::of(&result, 2, |request| {
            result.class(request).tenant.expect("all have a tenant")
        });
        assert_eq!(division.received, [2.0, 6.0]);
        // The first tenant waits from 3 and is computed until 4; the second from 2 until 4, without computation.
        assert_eq!(division.received_waiting, [1.0, 0.0]);
        assert_eq!(division.equal, [3.5, 1.0]);
        let classes = class_summaries(&result);
        assert_eq!(classes.len(), 2, "nothing is urgent");
        assert_eq!((classes[0].computation, classes[1].computation), (0.25, 0.75));
        assert_eq!((classes[1].ttft_mean_s, classes[1].ttft_max_s), (8.0, 8.0));
        assert_eq!(classes[1].equal_share, Some(0.0));
    }

    #[test]
    fn runs_without_tenants_have_no_classes() {
        let mut workload = WorkloadBuilder::new(512).finish(ArrivalMode::Open);
        workload.requests.clear();
        let result = SimulationResult::new(&SimulationOptions::one_engine(), &workload);
        assert_eq!((class_summaries(&result), ClassSummary::means(&[])), (Vec::new(), Vec::new()));
    }
}
