//! Clients that use the same keys of a master and record all calls, and a check that the calls of each key are those of one register.

mod checker;
mod clients;
mod history;
mod master;

use std::time::Duration;

pub(crate) use clients::start_clients;
pub(crate) use history::{CallHistory, CheckedCalls};
pub(crate) use master::{connect, mount};

/// How long a recorded run lasts, in seconds, unless `MOONGATE_TEST_LINEARIZABILITY_SECONDS` is set.
const SECONDS: u64 = 10;

/// How long to record, and the random numbers of this run: those of `MOONGATE_TEST_SEED` again, if it is set.
pub(crate) fn settings() -> (Duration, fastrand::Rng) {
    let read = |name| std::env::var(name).ok().map(|it| it.parse::<u64>().unwrap());
    let seed = read("MOONGATE_TEST_SEED").unwrap_or_else(|| fastrand::u64(..));
    #[expect(clippy::print_stderr, reason = "the seed repeats a failed run")]
    {
        eprintln!("MOONGATE_TEST_SEED={seed}");
    }
    let seconds = read("MOONGATE_TEST_LINEARIZABILITY_SECONDS").unwrap_or(SECONDS);
    (Duration::from_secs(seconds), fastrand::Rng::with_seed(seed))
}
