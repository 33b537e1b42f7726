//! Merges the bytes of a word into tokens: of all possible merges the one of the lowest rank, and of several of that rank the leftmost.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::merge_table::{MergeTable, NO_MERGE};

/// Up to this many tokens, all ranks are compared for each merge; beyond, a heap is faster.
const SHORT: usize = 48;

/// Appends the tokens of the word whose bytes have the tokens `symbols`.
pub(super) fn merge(table: &MergeTable, symbols: impl ExactSizeIterator<Item = u32>, tokens: &mut Vec<u32>) {
    if symbols.len() <= SHORT {
        merge_short(table, symbols, tokens);
    } else {
        merge_long(table, symbols, tokens);
    }
}

fn merge_short(table: &MergeTable, symbols: impl ExactSizeIterator<Item = u32>, tokens: &mut Vec<u32>) {
    let mut left = symbols.len();
    let mut symbol = [0; SHORT];
    // The rank of merging each symbol with the next one.
    let mut rank = [NO_MERGE; SHORT];
    for (place, token) in symbol.iter_mut().zip(symbols) {
        *place = token;
    }
    for at in 1..left {
        rank[at - 1] = table.rank(symbol[at - 1], symbol[at]);
    }
    while let Some((at, &lowest)) =
        rank[..left.saturating_sub(1)].iter().enumerate().min_by_key(|&(_, &rank)| rank)
        && lowest != NO_MERGE
    {
        symbol[at] = table.product(lowest);
        symbol.copy_within(at + 2..left, at + 1);
        rank.copy_within(at + 2..left, at + 1);
        left -= 1;
        rank[left - 1] = NO_MERGE;
        if at + 1 < left {
            rank[at] = table.rank(symbol[at], symbol[at + 1]);
        }
        if at > 0 {
            rank[at - 1] = table.rank(symbol[at - 1], symbol[at]);
        }
    }
    tokens.extend_from_slice(&symbol[..left]);
}

/// A symbol of a long word, in a linked list.
#[derive(Clone, Copy)]
struct Symbol {
    token: u32,
    before: u32,
    after: u32,
}

const NONE: u32 = u32::MAX;
/// The token of a symbol that was merged into the one before it.
const MERGED: u32 = u32::MAX;

fn merge_long(table: &MergeTable, symbols: impl ExactSizeIterator<Item = u32>, tokens: &mut Vec<u32>) {
    let count = symbols.len();
    let mut list: Vec<Symbol> = (0_u32..)
        .zip(symbols)
        .map(|(at, token)| Symbol { token, before: at.wrapping_sub(1), after: at + 1 })
        .collect();
    list[count - 1].after = NONE;
    let mut heap = BinaryHeap::with_capacity(count);
    let push = |heap: &mut BinaryHeap<_>, list: &[Symbol], at: u32| {
        let Symbol { token, after, .. } = list[at as usize];
        if after == NONE {
            return;
        }
        let rank = table.rank(token, list[after as usize].token);
        if rank != NO_MERGE {
            heap.push(Reverse((rank, at)));
        }
    };
    (0..count as u32).for_each(|at| push(&mut heap, &list, at));
    while let Some(Reverse((rank, at))) = heap.pop() {
        let Symbol { token, before, after } = list[at as usize];
        // The symbols may have changed since the entry was added.
        if token == MERGED || after == NONE || table.rank(token, list[after as usize].token) != rank {
            continue;
        }
        let behind = list[after as usize].after;
        list[after as usize].token = MERGED;
        list[at as usize] = Symbol { token: table.product(rank), before, after: behind };
        if behind != NONE {
            list[behind as usize].before = at;
        }
        if before != NONE {
            push(&mut heap, &list, before);
        }
        push(&mut heap, &list, at);
    }
    tokens.extend(list.iter().map(|symbol| symbol.token).filter(|&token| token != MERGED));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::merge_table::Merge;
    use super::*;

    /// Merges as the model is defined.
    fn expected(merges: &[Merge], mut symbols: Vec<u32>) -> Vec<u32> {
        loop {
            let rank = |at: usize| {
                // Of equal merges the last one is valid.
                merges.iter().rposition(|merge| (merge.left, merge.right) == (symbols[at], symbols[at + 1]))
            };
            let pairs = 0..symbols.len().saturating_sub(1);
            let Some((rank, at)) = pairs.filter_map(|at| Some((rank(at)?, at))).min() else { return symbols };
            symbols.splice(at..at + 2, [merges[rank].product]);
        }
    }

    proptest! {
        #[test]
        fn words_are_merged_in_the_order_of_ranks(
            pairs in prop::collection::vec((0..12_u32, 0..12_u32, 4..12_u32), 0..40),
            symbols in prop::collection::vec(0..4_u32, 0..SHORT * 2),
        ) {
            let merges: Vec<Merge> =
                pairs.into_iter().map(|(left, right, product)| Merge { left, right, product }).collect();
            let table = MergeTable::new(&merges).unwrap();
            let mut tokens = Vec::new();
            merge(&table, symbols.iter().copied(), &mut tokens);
            prop_assert_eq!(&tokens, &expected(&merges, symbols.clone()));
            if !symbols.is_empty() {
                tokens.clear();
                merge_long(&table, symbols.iter().copied(), &mut tokens);
                prop_assert_eq!(tokens, expected(&merges, symbols));
            }
        }
    }

    #[test]
    fn a_word_of_a_megabyte_is_merged_in_a_moment() {
        let merges: Vec<Merge> =
            (0..10).map(|rank| Merge { left: rank, right: rank, product: rank + 1 }).collect();
        let mut tokens = Vec::new();
        merge(&MergeTable::new(&merges).unwrap(), std::iter::repeat_n(0, 1 << 20), &mut tokens);
        assert_eq!(tokens, [10; 1 << 10]);
    }
}
