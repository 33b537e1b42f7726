//! Violations and statistics of a run.

use std::cell::RefCell;
use std::collections::BTreeMap;

use moongate_runtime::net::simulated::record;

/// Maximum length of a printed description; the trace has the full text.
const MAX_DESCRIPTION_CHARS: usize = 400;

thread_local! {
    static VIOLATIONS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static COUNTS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Records that an invariant does not hold.
pub(crate) fn violation(invariant: &str, what: &str) {
    record(format_args!("VIOLATION {invariant}: {what}"));
    let what: String = what.chars().take(MAX_DESCRIPTION_CHARS).collect();
    VIOLATIONS.with_borrow_mut(|all| all.push(format!("{invariant}: {what}")));
}

/// All violations of the run.
pub(crate) fn violations() -> Vec<String> {
    VIOLATIONS.with_borrow(Vec::clone)
}

/// Counts an event that shows how much a run has tested.
pub(crate) fn count(what: &'static str) {
    COUNTS.with_borrow_mut(|counts| *counts.entry(what).or_default() += 1);
}

/// The counts, in one line.
pub(crate) fn counts() -> String {
    COUNTS.with_borrow(|counts| {
        counts.iter().map(|(what, count)| format!("{what}={count}")).collect::<Vec<_>>().join(" ")
    })
}
