//! Whether what clients saw of one key can be explained by one register: each write and read took effect at one moment between its call
//! and its answer. A read may miss at any time, because a store may evict; it may not return a value that was replaced before the read
//! began, nor one that was never written.

use std::collections::HashSet;

/// What a client did with a key. Values are unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOperation {
    /// Put or upserted this value.
    Write(u64),
    Remove,
    /// A read that returned this value.
    Read(u64),
}

/// One call. A call without a response may have taken effect at any later time, or not at all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedCall {
    pub(crate) operation: KeyOperation,
    pub(crate) call_time: u64,
    pub(crate) response_time: Option<u64>,
}

/// Most orders that are examined for one key.
const MAX_STATES: usize = 4_000_000;

/// Which calls have taken effect, and the value that there is.
type SearchState = (Vec<u64>, Option<u64>);

/// Searches for an order of the calls of one key that explains all reads.
///
/// # Errors
/// When there is none, or when there are too many to examine.
pub(crate) fn check(calls: &[RecordedCall]) -> Result<(), String> {
    let mut calls: Vec<RecordedCall> = calls.iter().filter(|it| is_evidence(it)).copied().collect();
    calls.sort_by_key(|it| it.call_time);
    let mut seen: HashSet<SearchState> = HashSet::new();
    let mut open: Vec<SearchState> = vec![(vec![0; calls.len().div_ceil(64)], None)];
    while let Some((done, value)) = open.pop() {
        let has = |at: usize| done[at / 64] >> (at % 64) & 1 == 1;
        let left = || calls.iter().enumerate().filter(|(at, _)| !has(*at));
        // Whatever takes effect next was called before any other call that is left was answered.
        let Some(limit) = left().filter_map(|(_, it)| it.response_time).min() else { return Ok(()) };
        for (at, call) in left().take_while(|(_, it)| it.call_time <= limit) {
            let value = match call.operation {
                KeyOperation::Write(value) => Some(value),
                KeyOperation::Remove => None,
                KeyOperation::Read(found) if value == Some(found) => value,
                KeyOperation::Read(_) => continue,
            };
            let mut next = done.clone();
            next[at / 64] |= 1 << (at % 64);
            let state = (next, value);
            if seen.len() >= MAX_STATES {
                return Err(format!("more than {MAX_STATES} orders of {} calls", calls.len()));
            }
            if seen.insert(state.clone()) {
                open.push(state);
            }
        }
    }
    Err(format!("no order explains these calls: {calls:?}"))
}

/// An unanswered read is no evidence.
fn is_evidence(call: &RecordedCall) -> bool {
    call.response_time.is_some() || !matches!(call.operation, KeyOperation::Read(_))
}

#[cfg(test)]
mod tests {
    use super::KeyOperation::{Read, Remove, Write};
    use super::*;

    fn call(operation: KeyOperation, called: u64, answered: u64) -> RecordedCall {
        RecordedCall { operation, call_time: called, response_time: Some(answered).filter(|it| *it > 0) }
    }

    #[test]
    fn what_a_register_does_is_accepted() {
        check(&[]).unwrap();
        check(&[call(Write(1), 0, 1), call(Read(1), 2, 3), call(Write(2), 4, 5), call(Read(2), 6, 7)])
            .unwrap();
        // While a write is under way, both values may be read, the new one first by one reader and never the old one after that.
        let overlapped =
            [call(Write(1), 0, 1), call(Write(2), 2, 9), call(Read(1), 3, 4), call(Read(2), 5, 6)];
        check(&overlapped).unwrap();
        check(&[&overlapped[..], &[call(Read(1), 7, 8)]].concat()).unwrap_err();
        // A write that was not answered takes effect late, or never.
        let unanswered = [call(Write(1), 0, 1), call(Write(2), 2, 0), call(Read(1), 3, 4)];
        check(&unanswered).unwrap();
        check(&[&unanswered[..], &[call(Read(2), 5, 6)]].concat()).unwrap();
        check(&[call(Write(1), 0, 1), call(Remove, 2, 0), call(Read(1), 9, 10)]).unwrap();
    }

    #[test]
    fn a_stale_read_is_refused() {
        check(&[call(Write(1), 0, 1), call(Write(2), 2, 3), call(Read(1), 4, 5)]).unwrap_err();
        check(&[call(Write(1), 0, 1), call(Remove, 2, 3), call(Read(1), 4, 5)]).unwrap_err();
    }

    #[test]
    fn a_foreign_value_is_refused() {
        check(&[call(Write(1), 0, 1), call(Read(7), 2, 3)]).unwrap_err();
        check(&[call(Read(1), 0, 1), call(Write(1), 2, 3)]).unwrap_err();
    }

    #[test]
    fn a_lost_update_is_refused() {
        // The second write was acknowledged, and what it replaced is there again after it was read.
        let calls = [call(Write(1), 0, 1), call(Write(2), 2, 3), call(Read(2), 4, 5), call(Read(1), 6, 7)];
        check(&calls).unwrap_err();
        check(&[call(Write(1), 0, 0), call(Write(2), 1, 2), call(Read(2), 3, 4), call(Read(1), 5, 6)])
            .unwrap();
    }
}
