//! In which dialect to call a master whose release is not known.

use std::sync::atomic::{AtomicU8, Ordering};

use mooncake_wire::rpc::RpcMethod;
use mooncake_wire::{Dialect, DialectSet};

/// The newest dialect that fits all that the master has shown lately.
#[derive(Debug)]
pub(super) struct DialectGuess(AtomicU8);

impl DialectGuess {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(dialect_index(Dialect::NEWEST)))
    }

    pub(super) fn get(&self) -> Dialect {
        let place = usize::from(self.0.load(Ordering::Relaxed));
        Dialect::ALL.get(place).copied().unwrap_or(Dialect::NEWEST)
    }

    /// A call in `used` was answered in the form of the dialects in `answered`. Tells the new guess if it is
    /// another. The answer counts for more than the arguments: those of different releases look alike more often.
    pub(super) fn observe(&self, method: RpcMethod, used: Dialect, answered: DialectSet) -> Option<Dialect> {
        let arguments: DialectSet =
            method.dialects().iter().filter(|d| same_arguments(method, *d, used)).collect();
        let both = arguments.intersection(answered);
        let fitting = if both.is_empty() { answered } else { both };
        if fitting.contains(self.get()) {
            return None;
        }
        let better = fitting.newest()?;
        self.0.store(dialect_index(better), Ordering::Relaxed);
        Some(better)
    }
}

fn dialect_index(dialect: Dialect) -> u8 {
    let place = Dialect::ALL.into_iter().take_while(|other| *other < dialect).count();
    u8::try_from(place).unwrap_or(u8::MAX)
}

/// Whether the arguments have the same form in both dialects.
fn same_arguments(method: RpcMethod, one: Dialect, other: Dialect) -> bool {
    method.arguments_signature(one).hash() == method.arguments_signature(other).hash()
}

/// The dialects to call in, one for each form of the arguments: the guess, then older ones, then newer ones (the
/// master may have been replaced by another release).
pub(super) fn attempts(method: RpcMethod, guess: Dialect) -> Vec<Dialect> {
    let known: Vec<_> = method.dialects().iter().collect();
    let (older, newer): (Vec<_>, Vec<_>) = known.into_iter().rev().partition(|dialect| *dialect <= guess);
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
    fn each_form_is_tried_once_the_guess_first() {
        assert_eq!(attempts(RpcMethod::ServiceReady, Dialect::NEWEST), [Dialect::V0_3_13]);
        assert_eq!(attempts(RpcMethod::ExistKey, Dialect::NEWEST), [Dialect::V0_3_13, Dialect::V0_3_11]);
        assert_eq!(attempts(RpcMethod::ExistKey, Dialect::V0_3_10), [Dialect::V0_3_10, Dialect::V0_3_13]);
        let puts =
            [Dialect::V0_3_11, Dialect::V0_3_10_post2, Dialect::V0_3_10, Dialect::V0_3_13, Dialect::V0_3_12];
        assert_eq!(attempts(RpcMethod::PutStart, Dialect::V0_3_11), puts);
    }

    #[test]
    fn answers_correct_the_guess() {
        let guess = DialectGuess::new();
        let learn = |method: RpcMethod, used, speaks: Dialect| {
            let mut answered = method.dialects();
            let hash = method.reply_signature(speaks).hash();
            answered = answered.iter().filter(|d| method.reply_signature(*d).hash() == hash).collect();
            guess.observe(method, used, answered)
        };
        // The same in all releases since 0.3.12.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_13, Dialect::V0_3_12), None);
        assert_eq!(guess.get(), Dialect::V0_3_13);
        // Answered in an older form.
        assert_eq!(
            learn(RpcMethod::GetReplicaList, Dialect::V0_3_13, Dialect::V0_3_12),
            Some(Dialect::V0_3_12)
        );
        // Taken only in an older form, and answered in a still older one.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_11, Dialect::V0_3_9), Some(Dialect::V0_3_11));
        assert_eq!(
            learn(RpcMethod::GetReplicaList, Dialect::V0_3_11, Dialect::V0_3_9),
            Some(Dialect::V0_3_10_post2)
        );
        assert_eq!(learn(RpcMethod::PutStart, Dialect::V0_3_10, Dialect::V0_3_9), Some(Dialect::V0_3_10));
        // The master has been upgraded.
        assert_eq!(learn(RpcMethod::ExistKey, Dialect::V0_3_13, Dialect::V0_3_13), Some(Dialect::V0_3_13));
    }
}
