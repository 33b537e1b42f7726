//! Arrival times of requests.

use std::path::Path;
use std::time::Duration;

use super::prompt::{prompt_of_row, unique_prompt};
use super::trace::{TraceFileError, TraceRow, read_trace};
use crate::engine::tokens::mix;

#[derive(Debug, Clone)]
pub struct Arrival {
    /// Time after the start of the run.
    pub at: Duration,
    /// Number of the request, from 0.
    pub number: u64,
    pub input_tokens: usize,
    /// Number of output tokens to request.
    pub output_tokens: u32,
    prompt: ArrivalPrompt,
}

#[derive(Debug, Clone)]
enum ArrivalPrompt {
    Unique { seed: u64 },
    Row { row: TraceRow, seed: u64 },
}

impl Arrival {
    /// The prompt, generated when it is sent, so that waiting requests take no memory.
    #[must_use]
    pub fn prompt(&self) -> String {
        match &self.prompt {
            ArrivalPrompt::Unique { seed } => unique_prompt(self.input_tokens, *seed),
            ArrivalPrompt::Row { row, seed } => prompt_of_row(row, *seed),
        }
    }
}

#[derive(Debug)]
pub enum ArrivalProcess {
    /// Independent arrivals at a mean rate (Poisson).
    Rate {
        /// Random source of the gaps.
        random: fastrand::Rng,
        /// Mean requests per second.
        per_second: f64,
        input_tokens: usize,
        output_tokens: u32,
        /// Makes this run's prompts differ from those of other runs.
        seed: u64,
        /// Number of requests so far.
        sent: u64,
        /// Time of the latest one in seconds.
        at_s: f64,
    },
    Trace {
        /// Remaining rows with their numbers.
        rows: std::iter::Enumerate<std::vec::IntoIter<TraceRow>>,
        /// Speed relative to the recording.
        speed: f64,
        /// Seed of the text for rows without block ids.
        seed: u64,
    },
}

impl ArrivalProcess {
    #[must_use]
    pub fn at_rate(per_second: f64, input_tokens: usize, output_tokens: u32, seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        Self::Rate { random, per_second, input_tokens, output_tokens, seed, sent: 0, at_s: 0.0 }
    }

    /// The arrivals of a trace file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of_trace(
        path: &Path,
        speed: f64,
        seed: u64,
        limit: Option<usize>,
    ) -> Result<Self, TraceFileError> {
        let rows = read_trace(path, limit)?.into_iter().enumerate();
        Ok(Self::Trace { rows, speed, seed })
    }

    /// Total number of requests, if known.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        match self {
            Self::Rate { .. } => None,
            Self::Trace { rows, .. } => Some(rows.len() as u64),
        }
    }
}

impl Iterator for ArrivalProcess {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        match self {
            Self::Rate { random, per_second, input_tokens, output_tokens, seed, sent, at_s } => {
                if *sent > 0 {
                    // An exponential gap; 1 - f64() is never zero.
                    *at_s -= (1.0 - random.f64()).ln() / *per_second;
                }
                let number = *sent;
                *sent += 1;
                Some(Arrival {
                    at: Duration::try_from_secs_f64(*at_s).unwrap_or(Duration::MAX),
                    number,
                    input_tokens: *input_tokens,
                    output_tokens: *output_tokens,
                    prompt: ArrivalPrompt::Unique { seed: mix(*seed, number) },
                })
            }
            Self::Trace { rows, speed, seed } => {
                let (number, row) = rows.next()?;
                let number = number as u64;
                Some(Arrival {
                    at: Duration::try_from_secs_f64(row.at.as_secs_f64() / *speed).unwrap_or(Duration::MAX),
                    number,
                    input_tokens: row.input_tokens,
                    output_tokens: row.output_tokens.max(1),
                    prompt: ArrivalPrompt::Row { row, seed: mix(*seed, number) },
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_met_on_average_and_repeats_with_its_seed() {
        let last = ArrivalProcess::at_rate(50.0, 10, 1, 7).nth(10_000).expect("endless").at.as_secs_f64();
        assert!((190.0..210.0).contains(&last), "10000 arrivals at 50/s took {last} s");
        let again = ArrivalProcess::at_rate(50.0, 10, 1, 7).nth(10_000).expect("endless");
        assert!((again.at.as_secs_f64() - last).abs() < f64::EPSILON);
        let prompts: Vec<String> =
            ArrivalProcess::at_rate(50.0, 10, 1, 7).take(2).map(|next| next.prompt()).collect();
        assert_ne!(prompts[0], prompts[1]);
    }
}
