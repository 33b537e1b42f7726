//! Hash of an engine's name that is stable across fleet changes, gateways and releases.

/// A well-spread hash of `name` and `salt` (FNV-1a, then a finaliser that lets every bit depend on every bit).
pub(super) fn name_hash(name: &str, salt: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ splitmix64(salt);
    splitmix64(
        name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)),
    )
}

/// A bijection of 64-bit numbers in which every bit depends on every bit (the finaliser of SplitMix64).
pub(super) fn splitmix64(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_and_salts_give_different_hashes() {
        let names = ["", "a", "b", "ab", "http://10.0.0.1:30000", "http://10.0.0.1:30001"];
        let all = names.iter().flat_map(|name| (0..150).map(move |salt| name_hash(name, salt)));
        assert_eq!(all.collect::<BTreeSet<_>>().len(), names.len() * 150);
    }

    #[test]
    fn hashes_stay_the_same_between_releases() {
        assert_eq!(name_hash("engine", 0), name_hash("engine", 0));
        assert_eq!(splitmix64(1), 0x5692_161d_100b_05e5);
    }
}
