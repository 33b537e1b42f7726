//! Records of a log outside the state machine. A record of the state machine starts with its version; these start with a byte that
//! is no version.

use moongate_master_core::{StateChange, decode};

use crate::epochs::{EpochHistory, LeaderEpoch};

/// First byte of a record outside the state machine.
const AUX_RECORD: u8 = 0xf0;

const EPOCH: u8 = 1;
const EPOCHS: u8 = 2;
const EVENTS: u8 = 3;
const METADATA: u8 = 4;
const NEEDS_THROUGH: u8 = 5;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MasterLogRecord<'a> {
    /// A change of the state machine.
    Fact(StateChange<'a>),
    /// A new epoch that starts with this record.
    Epoch(u64),
    /// All epochs so far. Only in a snapshot.
    Epochs(EpochHistory),
    /// KV events and messages may have numbers up to this one.
    Events(u64),
    /// A change of the transfer metadata, in the encoding of the metadata store.
    Metadata(&'a [u8]),
}

fn head(kind: u8) -> Vec<u8> {
    vec![AUX_RECORD, kind]
}

/// Encodes the start of an epoch.
pub(crate) fn epoch(id: u64) -> Vec<u8> {
    let mut bytes = head(EPOCH);
    bytes.extend(id.to_le_bytes());
    bytes
}

/// Encodes the epochs of a snapshot.
pub(crate) fn epochs(epochs: &EpochHistory) -> Vec<u8> {
    let mut bytes = head(EPOCHS);
    for LeaderEpoch { id, first } in epochs.iter() {
        bytes.extend(id.to_le_bytes());
        bytes.extend(first.to_le_bytes());
    }
    bytes
}

/// Encodes the upper bound of reserved KV event numbers.
pub(crate) fn events(bound: u64) -> Vec<u8> {
    let mut bytes = head(EVENTS);
    bytes.extend(bound.to_le_bytes());
    bytes
}

/// Encodes a change of the transfer metadata.
pub(crate) fn metadata(change: &[u8]) -> Vec<u8> {
    let mut bytes = head(METADATA);
    bytes.extend(change);
    bytes
}

/// Encodes that a snapshot needs the log up to this record. Older releases do not write it.
pub(crate) fn snapshot_needs(number: u64) -> Vec<u8> {
    let mut bytes = head(NEEDS_THROUGH);
    bytes.extend(number.to_le_bytes());
    bytes
}

/// Whether a record is outside the state machine.
pub(crate) fn is_aux(bytes: &[u8]) -> bool {
    bytes.first() == Some(&AUX_RECORD)
}

/// Decodes the record that [`snapshot_needs`] encodes.
pub(crate) fn needs_through(bytes: &[u8]) -> Option<u64> {
    match bytes {
        [AUX_RECORD, NEEDS_THROUGH, rest @ ..] => number(rest),
        _ => None,
    }
}

fn numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

fn number(bytes: &[u8]) -> Option<u64> {
    match numbers(bytes)?[..] {
        [number] => Some(number),
        _ => None,
    }
}

/// Decodes a record. `None` if it is invalid or from a later release.
pub(crate) fn read(bytes: &[u8]) -> Option<MasterLogRecord<'_>> {
    let [AUX_RECORD, kind, rest @ ..] = bytes else {
        let (fact, rest) = decode(bytes).ok()?;
        return rest.is_empty().then_some(MasterLogRecord::Fact(fact));
    };
    match *kind {
        EPOCH => Some(MasterLogRecord::Epoch(number(rest)?)),
        EVENTS => Some(MasterLogRecord::Events(number(rest)?)),
        METADATA => Some(MasterLogRecord::Metadata(rest)),
        EPOCHS => {
            let numbers = numbers(rest)?;
            let (pairs, odd) = numbers.as_chunks::<2>();
            let epoch = |[id, first]: &[u64; 2]| LeaderEpoch { id: *id, first: *first };
            odd.is_empty().then(|| MasterLogRecord::Epochs(pairs.iter().map(epoch).collect()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn log_records_round_trip(id: u64, change: Vec<u8>, all in prop::collection::vec((any::<u64>(), 1..u64::MAX), 0..9)) {
            let all: EpochHistory = all.into_iter().map(|(id, first)| LeaderEpoch { id, first }).collect();
            let written = [
                (epoch(id), MasterLogRecord::Epoch(id)),
                (epochs(&all), MasterLogRecord::Epochs(all)),
                (events(id), MasterLogRecord::Events(id)),
                (metadata(&change), MasterLogRecord::Metadata(&change)),
            ];
            for (bytes, record) in written {
                prop_assert_eq!(read(&bytes), Some(record));
            }
        }

        #[test]
        fn arbitrary_records_do_not_panic(bytes: Vec<u8>, kind in 0..8_u8) {
            let _ = read(&bytes);
            let _ = read(&[&[AUX_RECORD, kind], &bytes[..]].concat());
        }
    }
}
