//! Arguments of `moongate loadtest scaling`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::Args;

use super::comparison::{Contender, check_stop, compare, scaling_options, table};
use super::fleet::WantedReplicas;
use super::tune::ComparedDay;
use super::workload::{DayOptions, DayRequest, synthetic_day, trace_day};
use crate::generate::trace::read_trace;

/// Arguments of `moongate loadtest scaling`.
#[derive(Debug, Clone, Args)]
pub struct ScalingArgs {
    /// Azure CSV to stretch over the day.
    ///
    /// Default: a synthetic day with noise and a burst.
    #[arg(long, env = "MOONGATE_LOADTEST_TRACE")]
    pub trace: Option<PathBuf>,
    /// Mean requests per second of the day.
    #[arg(long, default_value_t = 16.0, env = "MOONGATE_LOADTEST_RATE")]
    pub rate: f64,
    /// Length of the day in seconds.
    #[arg(long, default_value_t = 86_400.0, env = "MOONGATE_LOADTEST_DAY")]
    pub day: f64,
    /// Seconds from the creation of a replica until it is ready. Each of several values has a table of its own.
    #[arg(long, value_delimiter = ',', default_value = "120", env = "MOONGATE_LOADTEST_START")]
    pub start: Vec<f64>,
    /// Number of days that the planner observes before the compared one.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_HISTORY")]
    pub history: u32,
    /// Run only Moongate's planner.
    #[arg(long, env = "MOONGATE_LOADTEST_PLANNER_ONLY")]
    pub planner_only: bool,
    /// Seed of arrivals and lengths.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_SEED")]
    pub seed: u64,
}

impl ScalingArgs {
    fn validate(&self) -> anyhow::Result<()> {
        for (flag, value) in [("--rate", self.rate), ("--day", self.day)] {
            anyhow::ensure!(value.is_finite() && value > 0.0, "{flag} {value}: give a number above 0");
        }
        for start in &self.start {
            anyhow::ensure!(start.is_finite() && *start >= 0.0, "--start {start}: give seconds, 0 or more");
        }
        Ok(())
    }

    /// The compared day, and then the days before it.
    fn days(&self) -> anyhow::Result<Vec<Vec<DayRequest>>> {
        let rows = self.trace.as_deref().map(|path| read_trace(path, None)).transpose()?;
        let day = |number: u32| {
            let seed = self.seed.wrapping_add(u64::from(number));
            let options = DayOptions { day_s: self.day, mean_rate: self.rate, seed };
            match &rows {
                Some(rows) => trace_day(rows, options),
                None => synthetic_day(options),
            }
        };
        Ok((0..=self.history).map(day).collect())
    }
}

/// Compares ways to scale and returns the tables to print. Setting `stop` ends it.
///
/// # Errors
/// A setting is out of range, the trace cannot be read, or the run was stopped.
pub fn scaling(args: &ScalingArgs, stop: &AtomicBool) -> anyhow::Result<String> {
    args.validate()?;
    let days = args.days()?;
    let Some((requests, history)) = days.split_first() else { return Ok(String::new()) };
    let history: Vec<&[DayRequest]> = history.iter().map(Vec::as_slice).collect();
    let contenders: &[Contender] =
        if args.planner_only { &[Contender::Planner, Contender::FlippingPlanner] } else { &Contender::ALL };
    let mut text = String::new();
    for &start_s in &args.start {
        let options = scaling_options(args.day, start_s);
        let day = ComparedDay { options: &options, requests, initial: WantedReplicas::new(4, 2), stop };
        let mut rows = Vec::new();
        for &contender in contenders {
            rows.push(compare(contender, day, &history)?);
            check_stop(stop)?;
        }
        let _ = writeln!(text, "Start-up {start_s} s, {} requests:\n\n{}", requests.len(), table(&rows));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct ScalingTestArgs {
        #[command(flatten)]
        args: ScalingArgs,
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for flag in ["--rate=0", "--day=-1", "--start=x", "--start=-1"] {
            let args = ScalingTestArgs::try_parse_from(["x", flag]);
            assert!(args.is_err() || args.is_ok_and(|parsed| parsed.args.validate().is_err()), "{flag}");
        }
    }
}
