//! Estimates the dialect of a master whose release is unknown.

use std::sync::atomic::{AtomicU8, Ordering};

use mooncake_wire::rpc::RpcMethod;
use mooncake_wire::{Dialect, DialectSet};

/// The newest dialect that is consistent with the master's latest responses.
#[derive(Debug)]
pub(super) struct DialectGuess(AtomicU8);

impl DialectGuess {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(dialect_index(Dialect::NEWEST)))
    }

    pub(super) fn get(&self) -> Dialect {
        let index = usize::from(self.0.load(Ordering::Relaxed));
        Dialect::ALL.get(index).copied().unwrap_or(Dialect::NEWEST)
    }

    /// Records that a call in `used` got a response in the format of the dialects in `response`. Returns the new guess if it
    /// changed. The response outweighs the arguments, whose formats are more often equal between releases.
    pub(super) fn observe(&self, method: RpcMethod, used: Dialect, response: DialectSet) -> Option<Dialect> {
        let arguments: DialectSet =
            method.dialects().iter().filter(|d| same_arguments(method, *d, used)).collect();
        let both = arguments.intersection(response);
        let candidates = if both.is_empty() { response } else { both };
        if candidates.contains(self.get()) {
            return None;
        }
        let guess = candidates.newest()?;
        self.0.store(dialect_index(guess), Ordering::Relaxed);
        Some(guess)
    }
}

fn dialect_index(dialect: Dialect) -> u8 {
    let index = Dialect::ALL.into_iter().take_while(|other| *other < dialect).count();
    u8::try_from(index).unwrap_or(u8::MAX)
}

/// Whether the arguments have the same format in both dialects.
fn same_arguments(method: RpcMethod, one: Dialect, other: Dialect) -> bool {
    method.arguments_signature(one).hash() == method.arguments_signature(other).hash()
}

/// The dialects to try, one for each format of the arguments: the guess, then older ones, then newer ones, because the master
/// may have been upgraded.
pub(super) fn attempts(method: RpcMethod, guess: Dialect) -> Vec<Dialect> {
    let dialects: Vec<_> = method.dialects().iter().collect();
    let (older, newer): (Vec<_>, Vec<_>) = dialects.into_iter().rev().partition(|dialect| *dialect <= guess);
    let mut chosen: Vec<Dialect> = Vec::new();
    for dialect in older.into_iter().chain(newer) {
        if !chosen.iter().any(|earlier| same_arguments(method, *earlier, dialect)) {
            chosen.push(dialect);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_tried_once_starting_with_the_guess() {
        assert_eq!(attempts(RpcMethod::ServiceReady, Dialect::NEWEST), [Dialect::V0_3_14]);
        assert_eq!(attempts(RpcMethod::ExistKey, Dialect::NEWEST), [Dialect::V0_3_14, Dialect::V0_3_11]);
        assert_eq!(attempts(RpcMethod::ExistKey, Dialect::V0_3_10), [Dialect::V0_3_10, Dialect::V0_3_14]);
        let puts =
            [Dialect::V0_3_11, Dialect::V0_3_10_post2, Dialect::V0_3_10, Dialect::V0_3_14, Dialect::V0_3_12];
        assert_eq!(attempts(RpcMethod::PutStart, Dialect::V0_3_11), puts);
    }

    #[test]
    fn responses_correct_the_guess() {
        let guess = DialectGuess::new();
        let learn = |method: RpcMethod, used, master_dialect: Dialect| {
            let mut answered = method.dialects();
            let hash = method.reply_signature(master_dialect).hash();
            let exact = |d: &Dialect| {
                let signature = method.reply_signature(*d);
                signature.hash() == hash
                    && signature.has_compatible() == method.reply_signature(master_dialect).has_compatible()
            };
            answered = answered.iter().filter(exact).collect();
            guess.observe(method, used, answered)
        };
        // The same in all releases since 0.3.12.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_13, Dialect::V0_3_12), None);
        assert_eq!(guess.get(), Dialect::V0_3_14);
        // Without compatible members.
        assert_eq!(
            learn(RpcMethod::GetReplicaList, Dialect::V0_3_14, Dialect::V0_3_13),
            Some(Dialect::V0_3_13)
        );
        // The response has an older format.
        assert_eq!(
            learn(RpcMethod::GetReplicaList, Dialect::V0_3_13, Dialect::V0_3_12),
            Some(Dialect::V0_3_12)
        );
        // Only an older format is accepted, and the response format is older still.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_11, Dialect::V0_3_9), Some(Dialect::V0_3_11));
        assert_eq!(
            learn(RpcMethod::GetReplicaList, Dialect::V0_3_11, Dialect::V0_3_9),
            Some(Dialect::V0_3_10_post2)
        );
        assert_eq!(learn(RpcMethod::PutStart, Dialect::V0_3_10, Dialect::V0_3_9), Some(Dialect::V0_3_10));
        // The master has been upgraded.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_13, Dialect::V0_3_13), Some(Dialect::V0_3_14));
    }
}
