//! Compares ways to scale over a day, each with its best parameters.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_capacity::{
    EngineStart, FlipSettings, InvalidSettings, Planner, PlannerSettings, RoleSettings, ServiceTargets,
};

use super::dynamo::{DynamoPlanner, RequestPredictor};
use super::fleet::{ScalingOptions, WantedReplicas};
use super::planned::PlannedReplicas;
use super::rivals::{QueueAutoscaler, TokenRateController};
use super::run::{DayResult, ScalingController, run_day};
use super::tune::ComparedDay;
use super::workload::DayRequest;
use crate::engine::EngineTimeModel;
use crate::simulate::settings::SimulationOptions;

/// GPUs of one calibrated engine.
const GPUS_PER_REPLICA: u32 = 4;
/// Prompt tokens after which a cache has 63 % of its hits.
const WARM_TOKENS: f64 = 500_000.0;
/// Intervals of Dynamo's planner: its default, a shorter one, and the best published one.
const DYNAMO_INTERVALS_S: [f64; 3] = [180.0, 60.0, 10.0];
/// Shares of its profiled capacity.
const DYNAMO_UTILIZATIONS: [f64; 11] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5];
/// Stabilization of scaling down for the controller on decode tokens.
const TOKEN_RATE_STABILIZATIONS_S: [f64; 2] = [300.0, 60.0];

/// One row of the table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ComparisonRow {
    pub(crate) contender: Contender,
    pub(crate) parameters: String,
    /// `None` if no parameters reach the share.
    pub(crate) result: Option<DayResult>,
}

/// A way to scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    FixedPeak,
    QueueAutoscaler,
    TokenRate,
    Dynamo,
    Planner,
    /// With flips of roles.
    FlippingPlanner,
}

impl Contender {
    pub(crate) const ALL: [Self; 6] = [
        Self::FixedPeak,
        Self::QueueAutoscaler,
        Self::TokenRate,
        Self::Dynamo,
        Self::Planner,
        Self::FlippingPlanner,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::FixedPeak => "fixed peak",
            Self::QueueAutoscaler => "HPA on queue length",
            Self::TokenRate => "decode tokens/s",
            Self::Dynamo => "Dynamo's SLA planner",
            Self::Planner => "Moongate",
            Self::FlippingPlanner => "Moongate with role flips",
        }
    }
}

/// Engines of the calibrated kind with these targets and start-up time.
pub(crate) fn scaling_options(day_s: f64, start_s: f64) -> ScalingOptions {
    ScalingOptions {
        engines: SimulationOptions {
            service: EngineTimeModel::default(),
            ..SimulationOptions::eight_plus_four()
        },
        start_s,
        warm_tokens: WARM_TOKENS,
        flip_s: None,
        gpus_per_replica: GPUS_PER_REPLICA,
        ttft_target_s: 2.0,
        tpot_target_s: 0.05,
        share: 0.95,
        day_s,
    }
}

/// Settings of the planner for such engines. Capacities and times are learned, and no setting is tuned for the day.
pub(crate) fn planner_settings(options: &ScalingOptions) -> PlannerSettings {
    let role = RoleSettings {
        min: 1,
        max: 1_000,
        gpus_per_replica: options.gpus_per_replica,
        start: EngineStart { start_s: options.start_s, ..EngineStart::default() },
        ..RoleSettings::default()
    };
    PlannerSettings {
        targets: ServiceTargets {
            ttft_s: options.ttft_target_s,
            tpot_s: options.tpot_target_s,
            share: options.share,
        },
        prefill: role,
        decode: role,
        flip: options.flip_s.map(|flip_s| FlipSettings { flip_s }),
        ..PlannerSettings::default()
    }
}

/// Runs a contender with its best parameters.
///
/// # Errors
/// The planner rejects its settings.
pub(crate) fn compare(
    contender: Contender,
    day: ComparedDay<'_>,
    history: &[&[DayRequest]],
) -> Result<ComparisonRow, InvalidSettings> {
    let row = |parameters: String, result: Option<DayResult>| ComparisonRow { contender, parameters, result };
    Ok(match contender {
        Contender::FixedPeak => match day.smallest_fixed() {
            Some(best) => {
                let WantedReplicas { prefill, decode, .. } = best.parameters;
                row(format!("{prefill} + {decode}"), Some(best.result))
            }
            None => row(String::new(), None),
        },
        Contender::QueueAutoscaler => {
            let best = day
                .tune_pair((1.0, 120.0), |(prefill, decode)| Box::new(QueueAutoscaler::new(prefill, decode)));
            match best {
                Some(best) => {
                    let (prefill, decode) = best.parameters;
                    row(format!("{prefill:.2} prompts, {decode:.0} sequences"), Some(best.result))
                }
                None => row(String::new(), None),
            }
        }
        Contender::TokenRate => token_rate(day),
        Contender::Dynamo => dynamo(day),
        Contender::Planner => {
            let result = run_planner(day, history)?;
            row(String::new(), result)
        }
        Contender::FlippingPlanner => {
            let options = ScalingOptions { flip_s: Some(10.0), ..day.options.clone() };
            let result = run_planner(ComparedDay { options: &options, ..day }, history)?;
            row(String::new(), result)
        }
    })
}

fn token_rate(day: ComparedDay<'_>) -> ComparisonRow {
    let requests = day.requests.len().max(1) as f64;
    let input = day.requests.iter().map(|request| f64::from(request.input_tokens)).sum::<f64>() / requests;
    let output = day.requests.iter().map(|request| f64::from(request.output_tokens)).sum::<f64>() / requests;
    let service = &day.options.engines.service;
    // As many prefill engines for one decode engine with a batch of 100 as could compute its prompts.
    let decode_rate = 100.0 / service.decode_step_s(100, (100.0 * input) as u64);
    let prefill_s = service.prefill_base_s + service.prefill_compute_s(input as usize, 0);
    let guess = (decode_rate, decode_rate / output * prefill_s);
    let best = TOKEN_RATE_STABILIZATIONS_S
        .into_iter()
        .filter_map(|stabilization_s| {
            let controller = |(tokens_per_s, ratio)| -> Box<dyn ScalingController> {
                Box::new(TokenRateController::new(tokens_per_s, ratio, stabilization_s))
            };
            Some((stabilization_s, day.tune_pair(guess, controller)?))
        })
        .min_by(|(_, one), (_, other)| one.result.gpu_hours.total_cmp(&other.result.gpu_hours));
    let contender = Contender::TokenRate;
    match best {
        Some((stabilization_s, best)) => {
            let (tokens_per_s, ratio) = best.parameters;
            let parameters =
                format!("{tokens_per_s:.0} tokens/s, {ratio:.2} P per D, {stabilization_s:.0} s");
            ComparisonRow { contender, parameters, result: Some(best.result) }
        }
        None => ComparisonRow { contender, parameters: String::new(), result: None },
    }
}

fn dynamo(day: ComparedDay<'_>) -> ComparisonRow {
    let ComparedDay { options, requests, .. } = day;
    let mut best: Option<(f64, &str, f64, DayResult)> = None;
    for interval_s in DYNAMO_INTERVALS_S {
        for (name, predictor) in [
            ("constant", RequestPredictor::Constant),
            ("kalman", RequestPredictor::kalman()),
            ("exact", RequestPredictor::exact(requests, interval_s, options.day_s)),
        ] {
            let tuned = DYNAMO_UTILIZATIONS.iter().find_map(|&utilization| {
                let mut planner = DynamoPlanner::new(options, interval_s, predictor.clone(), utilization);
                let result = run_day(options, requests, day.initial, &mut planner, None)?;
                (result.within_both >= options.share || day.stop.load(Ordering::Relaxed)).then_some((
                    interval_s,
                    name,
                    utilization,
                    result,
                ))
            });
            if let Some(tuned) = tuned
                && best.is_none_or(|best| tuned.3.gpu_hours < best.3.gpu_hours)
            {
                best = Some(tuned);
            }
        }
    }
    let contender = Contender::Dynamo;
    match best {
        Some((interval_s, predictor, utilization, result)) => {
            let parameters =
                format!("{interval_s:.0} s, {predictor}, {:.0} % of the profile", 100.0 * utilization);
            ComparisonRow { contender, parameters, result: Some(result) }
        }
        None => ComparisonRow { contender, parameters: String::new(), result: None },
    }
}

/// Runs Moongate's planner on the day, after it has run on the days of the history.
fn run_planner(
    day: ComparedDay<'_>,
    history: &[&[DayRequest]],
) -> Result<Option<DayResult>, InvalidSettings> {
    let ComparedDay { options, requests, initial, .. } = day;
    let mut planner = Planner::new(planner_settings(options))?;
    for requests in history {
        let mut controller = PlannedReplicas::new(planner);
        run_day(options, requests, initial, &mut controller, None);
        planner = controller.planner;
    }
    Ok(run_day(options, requests, initial, &mut PlannedReplicas::new(planner), None))
}

/// The table of a day in Markdown.
pub(crate) fn table(rows: &[ComparisonRow]) -> String {
    let mut text = "| scaling | best parameters | GPU-hours | of fixed peak | within both, % | TTFT, % | TPOT, % | created |\n\
                    |---|---|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    let peak = rows.iter().find(|row| row.contender == Contender::FixedPeak);
    let peak = peak.and_then(|row| row.result).map(|result| result.gpu_hours);
    for ComparisonRow { contender, parameters, result } in rows {
        let parameters = if parameters.is_empty() { "–" } else { parameters };
        let _ = match result {
            Some(result) => {
                let share =
                    peak.map_or_else(|| "–".to_owned(), |peak| format!("{:.3}", result.gpu_hours / peak));
                writeln!(
                    text,
                    "| {} | {parameters} | {:.0} | {share} | {:.2} | {:.2} | {:.2} | {} |",
                    contender.name(),
                    result.gpu_hours,
                    100.0 * result.within_both,
                    100.0 * result.within_ttft,
                    100.0 * result.within_tpot,
                    result.created
                )
            }
            None => writeln!(text, "| {} | none reach the share | – | – | – | – | – | – |", contender.name()),
        };
    }
    text
}

/// Whether a run was stopped.
pub(crate) fn check_stop(stop: &AtomicBool) -> anyhow::Result<()> {
    anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
    Ok(())
}
