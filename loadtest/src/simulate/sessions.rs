//! Detects which requests of a trace continue an earlier one. Traces have no conversation ids, but a later turn
//! contains all full blocks of an earlier prompt.

use std::collections::HashMap;

use super::indices::WorkloadIndex;
use crate::generate::trace::TraceRow;

/// A prompt with fewer full blocks is not matched: all of it may be a shared system prompt.
const MIN_FULL_BLOCKS: usize = 2;

/// For each row, the row that it continues: the latest one whose last full block is the deepest in this row.
pub(crate) fn predecessors(rows: &[TraceRow]) -> Vec<Option<WorkloadIndex>> {
    let mut ends: HashMap<u64, WorkloadIndex> = HashMap::new();
    let mut found = Vec::with_capacity(rows.len());
    for (number, row) in rows.iter().enumerate() {
        found.push(row.blocks.iter().rev().find_map(|block| ends.get(block)).copied());
        let full = row.input_tokens / row.block_tokens.max(1);
        if full >= MIN_FULL_BLOCKS
            && let Some(&last) = row.blocks.get(full - 1)
        {
            ends.insert(last, WorkloadIndex::new(number));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn row(input_tokens: usize, blocks: &[u64]) -> TraceRow {
        TraceRow {
            at: Duration::ZERO,
            input_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            block_tokens: 512,
        }
    }

    #[test]
    fn a_turn_contains_its_predecessor() {
        let rows = [
            row(1_100, &[0, 1, 2]),
            row(600, &[0, 9]),
            row(1_100, &[0, 5, 6]),
            row(1_600, &[0, 1, 3, 4]),
            row(2_100, &[0, 1, 3, 7, 8]),
        ];
        let before = |position| Some(WorkloadIndex::new(position));
        assert_eq!(predecessors(&rows), [None, None, None, before(0), before(3)]);
    }
}
