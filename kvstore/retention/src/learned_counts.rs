//! What a learner has counted, as bytes that outlive its process.
//!
//! A version byte, the number of bins, then for every class with uses: its index, the uses, the returns and the seconds of absence
//! of every bin, each as a little-endian `f32`.

use crate::age_bins::AGE_BINS;
use crate::block_class::BlockClass;
use crate::return_times::ReturnCounts;

/// Changes when classes or bins mean something else.
const VERSION: u8 = 1;
const NUMBER: usize = size_of::<f32>();
const RECORD: usize = 1 + NUMBER * (1 + 2 * AGE_BINS);

/// Why bytes are not a learner's counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LearnedCountsError {
    /// Written by a release with other classes or bins.
    #[error("return times of another version")]
    Version,
    /// Truncated, or a number that is no count.
    #[error("damaged return times")]
    Damaged,
}

#[expect(clippy::cast_possible_truncation, reason = "counts do not need more precision than f32 has")]
pub(crate) fn encode(classes: &[ReturnCounts]) -> Vec<u8> {
    let mut bytes = vec![VERSION, AGE_BINS as u8];
    for (index, counts) in (0_u8..).zip(classes).filter(|(_, counts)| counts.uses > 0.0) {
        bytes.push(index);
        let numbers = std::iter::once(&counts.uses).chain(&counts.returns).chain(&counts.absent_s);
        bytes.extend(numbers.flat_map(|number| (*number as f32).to_le_bytes()));
    }
    bytes
}

/// Counts by class.
pub(crate) fn decode(bytes: &[u8]) -> Result<Box<[ReturnCounts]>, LearnedCountsError> {
    let mut classes = vec![ReturnCounts::NONE; BlockClass::COUNT];
    let Some((&[version, bins], records)) = bytes.split_first_chunk() else {
        return Err(LearnedCountsError::Damaged);
    };
    if version != VERSION || usize::from(bins) != AGE_BINS {
        return Err(LearnedCountsError::Version);
    }
    for record in records.chunks(RECORD) {
        let (index, numbers) = record.split_first().ok_or(LearnedCountsError::Damaged)?;
        let counts = classes.get_mut(usize::from(*index)).ok_or(LearnedCountsError::Damaged)?;
        let (numbers, rest) = numbers.as_chunks::<NUMBER>();
        if numbers.len() != 1 + 2 * AGE_BINS || !rest.is_empty() {
            return Err(LearnedCountsError::Damaged);
        }
        let ReturnCounts { uses, returns, absent_s } = counts;
        let targets = std::iter::once(uses).chain(returns).chain(absent_s);
        for (target, number) in targets.zip(numbers) {
            *target = f64::from(f32::from_le_bytes(*number));
            if !target.is_finite() || *target < 0.0 {
                return Err(LearnedCountsError::Damaged);
            }
        }
    }
    Ok(classes.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(seed: u64) -> Vec<ReturnCounts> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut of_class = |_| {
            // A class without uses has no counts, and is not encoded.
            let mut number = || f64::from(random.u16(1..));
            ReturnCounts {
                uses: number(),
                returns: std::array::from_fn(|_| number()),
                absent_s: std::array::from_fn(|_| number()),
            }
        };
        let mut classes: Vec<ReturnCounts> = (0..BlockClass::COUNT).map(&mut of_class).collect();
        classes[3] = ReturnCounts::NONE;
        classes
    }

    proptest! {
        #[test]
        fn counts_survive_and_prefixes_are_damaged(seed: u64, cut in 0.0_f64..1.0) {
            let classes = counts(seed);
            let bytes = encode(&classes);
            prop_assert_eq!(&*decode(&bytes).unwrap(), &classes[..]);
            let cut = (cut * bytes.len() as f64) as usize;
            let is_whole = cut >= 2 && (cut - 2).is_multiple_of(RECORD);
            prop_assert_eq!(decode(&bytes[..cut]).is_ok(), is_whole);
        }

        #[test]
        fn arbitrary_bytes_give_an_error_or_counts(mut bytes: Vec<u8>) {
            let _ = decode(&bytes);
            bytes.splice(0..0, [VERSION, AGE_BINS as u8]);
            if let Ok(classes) = decode(&bytes) {
                prop_assert!(classes.iter().all(|counts| counts.uses.is_finite() && counts.uses >= 0.0));
            }
        }
    }

    #[test]
    fn other_versions_are_rejected() {
        assert_eq!(decode(&[]), Err(LearnedCountsError::Damaged));
        assert_eq!(decode(&[VERSION + 1, AGE_BINS as u8]), Err(LearnedCountsError::Version));
        assert_eq!(decode(&[VERSION, 7]), Err(LearnedCountsError::Version));
        let mut bytes = encode(&counts(1));
        bytes[3..7].copy_from_slice(&f32::NAN.to_le_bytes());
        assert_eq!(decode(&bytes), Err(LearnedCountsError::Damaged));
    }
}
