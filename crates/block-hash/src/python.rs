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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_cpython() {
        assert_eq!(tuple([].into_iter()), 5_740_354_900_026_072_187, "hash(())");
        assert_eq!(signed(-1), -2);
        assert_eq!(signed(-7), -7);
        assert_eq!(signed(i64::MIN), -4, "hash(-2**63)");
        assert_eq!(unsigned(MODULUS + 5), 5);
    }
}
