//! What a learner has counted, as bytes that outlive its process.
//!
//! A version byte, the number of bins, then for every class with uses: its index, the uses, the returns and the seconds of absence
//! of every bin, each as a little-endian `f32`.

use crate::age_bins::AGE_BINS;
use crate::block_class::BlockClass;
use crate::prompt_description::{PromptDescription, PromptLength, ReturnHint};
use crate::return_times::ReturnCounts;

/// Changes when classes or bins mean something else.
const VERSION: u8 = 2;
/// The version without tenants: hints had no tenant, and their classes distinguished lengths.
const WITHOUT_TENANTS: u8 = 1;
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
    let class_of = match version {
        VERSION => |index: u8| BlockClass::from_index(index.into()),
        WITHOUT_TENANTS => class_without_tenants,
        _ => return Err(LearnedCountsError::Version),
    };
    if usize::from(bins) != AGE_BINS {
        return Err(LearnedCountsError::Version);
    }
    for record in records.chunks(RECORD) {
        let (index, numbers) = record.split_first().ok_or(LearnedCountsError::Damaged)?;
        let class = class_of(*index).ok_or(LearnedCountsError::Damaged)?;
        let (numbers, rest) = numbers.as_chunks::<NUMBER>();
        if numbers.len() != 1 + 2 * AGE_BINS || !rest.is_empty() {
            return Err(LearnedCountsError::Damaged);
        }
        let ReturnCounts { uses, returns, absent_s } = &mut classes[class.index()];
        let targets = std::iter::once(uses).chain(returns).chain(absent_s);
        for (target, number) in targets.zip(numbers) {
            let number = f64::from(f32::from_le_bytes(*number));
            if !number.is_finite() || number < 0.0 {
                return Err(LearnedCountsError::Damaged);
            }
            // Several classes of the version without tenants are one now.
            *target += number;
        }
    }
    Ok(classes.into())
}

/// The present class of one of the version without tenants.
fn class_without_tenants(index: u8) -> Option<BlockClass> {
    const LENGTHS: [PromptLength; 4] =
        [PromptLength::Short, PromptLength::Medium, PromptLength::Long, PromptLength::Huge];
    const HINTS: [ReturnHint; 3] = [ReturnHint::Unknown, ReturnHint::Never, ReturnHint::Expected];
    let index = usize::from(index);
    let (prompt, hint) = (index / HINTS.len(), HINTS[index % HINTS.len()]);
    let (range, length) = (prompt / LENGTHS.len(), LENGTHS[prompt % LENGTHS.len()]);
    let description = PromptDescription { length, hint, ..PromptDescription::default() };
    (range < 4).then(|| BlockClass::new(range as u32 + 1, description))
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
    fn counts_without_tenants_are_read() {
        let record = |index: u8, uses: f32| {
            let numbers = std::iter::once(uses).chain([2.0; 2 * AGE_BINS]);
            std::iter::once(index).chain(numbers.flat_map(f32::to_le_bytes)).collect::<Vec<u8>>()
        };
        // Blocks used twice, of short and long prompts: without a hint, and expected.
        let records = [record(12, 5.0), record(14, 7.0), record(18, 1.0), record(20, 3.0)].concat();
        let classes = decode(&[vec![WITHOUT_TENANTS, AGE_BINS as u8], records].concat()).unwrap();
        let uses = |length, hint| {
            let description = PromptDescription { length, hint, ..PromptDescription::default() };
            classes[BlockClass::new(2, description).index()].uses
        };
        assert_eq!(uses(PromptLength::Short, ReturnHint::Unknown), 5.0);
        assert_eq!(uses(PromptLength::Long, ReturnHint::Unknown), 1.0);
        assert_eq!(uses(PromptLength::Huge, ReturnHint::Expected), 10.0, "the sum of both lengths");
        assert_eq!(classes.iter().filter(|counts| counts.uses > 0.0).count(), 3);
        let unknown = [vec![WITHOUT_TENANTS, AGE_BINS as u8], record(48, 1.0)].concat();
        assert_eq!(decode(&unknown), Err(LearnedCountsError::Damaged));
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
