//! What a run has found wrong, and what it has done.

use std::cell::RefCell;
use std::collections::BTreeMap;

use moongate_runtime::net::simulated::record;

/// Characters of a description that are shown; the trace has all.
const MAX_DESCRIPTION_CHARS: usize = 400;

thread_local! {
    static VIOLATIONS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static COUNTS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// An invariant does not hold.
pub(crate) fn violation(invariant: &str, what: &str) {
    record(format_args!("VIOLATION {invariant}: {what}"));
    let what: String = what.chars().take(MAX_DESCRIPTION_CHARS).collect();
    VIOLATIONS.with_borrow_mut(|all| all.push(format!("{invariant}: {what}")));
}

/// All of them.
pub(crate) fn violations() -> Vec<String> {
    VIOLATIONS.with_borrow(Vec::clone)
}

/// Counts something that shows how much a run has tested.
pub(crate) fn count(what: &'static str) {
    COUNTS.with_borrow_mut(|counts| *counts.entry(what).or_default() += 1);
}

/// The counts, in one line.
pub(crate) fn counts() -> String {
    COUNTS.with_borrow(|counts| {
        counts.iter().map(|(what, count)| format!("{what}={count}")).collect::<Vec<_>>().join(" ")
    })
}
