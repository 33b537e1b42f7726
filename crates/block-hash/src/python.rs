//! CPython's `hash` of numbers and tuples, used by LMCache's `builtin`. Unchanged since CPython 3.8, on 64-bit machines.

/// Numbers hash to themselves modulo this prime.
const MODULUS: u64 = (1 << 61) - 1;
const PRIME_1: u64 = 11_400_714_785_074_694_791;
const PRIME_2: u64 = 14_029_467_366_897_019_727;
const PRIME_5: u64 = 2_870_177_450_012_600_261;
/// Mixed with the length as the last step.
const LENGTH_MASK: u64 = PRIME_5 ^ 3_527_539;
/// Hash of a tuple instead of -1, which CPython reserves for errors.
const HASH_FOR_MINUS_ONE: u64 = 1_546_275_796;

/// Python's `hash(number)` of a signed number.
pub(crate) fn signed(number: i64) -> i64 {
    let rest = (number.unsigned_abs() % MODULUS) as i64;
    match (number < 0, rest) {
        (true, 1) => -2,
        (true, rest) => -rest,
        (false, rest) => rest,
    }
}

/// Python's `hash(number)` of an unsigned number.
pub(crate) fn unsigned(number: u64) -> i64 {
    (number % MODULUS) as i64
}

/// Python's `hash` of a tuple whose items have these hashes: the xxHash-like mix of CPython's tuple object.
pub(crate) fn tuple(items: impl ExactSizeIterator<Item = i64>) -> i64 {
    let length = items.len() as u64;
    let mixed = items.fold(PRIME_5, |state, item| {
        state.wrapping_add((item as u64).wrapping_mul(PRIME_2)).rotate_left(31).wrapping_mul(PRIME_1)
    });
    match mixed.wrapping_add(length ^ LENGTH_MASK) {
        u64::MAX => HASH_FOR_MINUS_ONE as i64,
        hash => hash as i64,
    }
}

/// Hash of the first item of a tuple with this hash, from the hashes of its other items. `None` if no number or tuple has such a hash, as
/// for a `hash` that is not one of such a tuple: three of four are recognized.
pub(crate) fn first_of_tuple(hash: i64, others: &[i64]) -> Option<i64> {
    let length = others.len() as u64 + 1;
    let unmix = |state: u64| state.wrapping_mul(inverse(PRIME_1)).rotate_right(31);
    let mixed = (hash as u64).wrapping_sub(length ^ LENGTH_MASK);
    let after_first = others
        .iter()
        .rev()
        .fold(mixed, |state, item| unmix(state).wrapping_sub((*item as u64).wrapping_mul(PRIME_2)));
    let first = unmix(after_first).wrapping_sub(PRIME_5).wrapping_mul(inverse(PRIME_2)) as i64;
    (first.unsigned_abs() < MODULUS).then_some(first)
}

/// Inverse of an odd number modulo 2^64, by Newton's method: each step doubles the number of correct bits.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut step = 0;
    while step < 6 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_item_follows_from_the_hash_of_a_tuple() {
        assert_eq!(PRIME_1.wrapping_mul(inverse(PRIME_1)), 1);
        for first in [0, 7, -2, 1 << 60, -(1 << 60)] {
            let hash = tuple([first, 11, -13].into_iter());
            assert_eq!(first_of_tuple(hash, &[11, -13]), Some(first));
        }
        let recognized = (0..1000).filter(|hash| first_of_tuple(hash * 0x0123_4567_89ab, &[1, 2]).is_none());
        assert!((700..800).contains(&recognized.count()));
    }

    #[test]
    fn equals_cpython() {
        assert_eq!(tuple([].into_iter()), 5_740_354_900_026_072_187, "hash(())");
        assert_eq!(signed(-1), -2);
        assert_eq!(signed(-7), -7);
        assert_eq!(signed(i64::MIN), -4, "hash(-2**63)");
        assert_eq!(unsigned(MODULUS + 5), 5);
    }
}
