//! Records of a log that are no facts of the state machine. A fact begins with its version; these begin with a byte that is none.

use moongate_master_core::{StateChange, decode};

use crate::epochs::EpochHistory;

/// First byte of a record that is no fact.
const AUX_RECORD: u8 = 0xf0;

const EPOCH: u8 = 1;
const EPOCHS: u8 = 2;
const EVENTS: u8 = 3;
const METADATA: u8 = 4;
const NEEDS_THROUGH: u8 = 5;

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MasterLogRecord<'a> {
    /// A change of the state machine.
    Fact(StateChange<'a>),
    /// An epoch begins with this record.
    Epoch(u64),
    /// The epochs so far. Only in a snapshot.
    Epochs(EpochHistory),
    /// KV events and messages may have numbers up to this one.
    Events(u64),
    /// A change of the transfer metadata, as the metadata server writes it.
    Metadata(&'a [u8]),
}

fn head(kind: u8) -> Vec<u8> {
    vec![AUX_RECORD, kind]
}

/// An epoch begins.
pub(crate) fn epoch(id: u64) -> Vec<u8> {
    let mut bytes = head(EPOCH);
    bytes.extend(id.to_le_bytes());
    bytes
}

/// The epochs so far.
pub(crate) fn epochs(epochs: &EpochHistory) -> Vec<u8> {
    let mut bytes = head(EPOCHS);
    for (id, first) in epochs.iter() {
        bytes.extend(id.to_le_bytes());
        bytes.extend(first.to_le_bytes());
    }
    bytes
}

/// Numbers of KV events up to this one may be given out.
pub(crate) fn events(bound: u64) -> Vec<u8> {
    let mut bytes = head(EVENTS);
    bytes.extend(bound.to_le_bytes());
    bytes
}

/// A change of the transfer metadata.
pub(crate) fn metadata(change: &[u8]) -> Vec<u8> {
    let mut bytes = head(METADATA);
    bytes.extend(change);
    bytes
}

/// A snapshot is of no use without the log up to this record. Older releases leave it out.
pub(crate) fn snapshot_needs(number: u64) -> Vec<u8> {
    let mut bytes = head(NEEDS_THROUGH);
    bytes.extend(number.to_le_bytes());
    bytes
}

/// Reads what [`snapshot_needs`] writes.
pub(crate) fn needs_through(bytes: &[u8]) -> Option<u64> {
    match bytes {
        [AUX_RECORD, NEEDS_THROUGH, rest @ ..] => number(rest),
        _ => None,
    }
}

fn numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| numbers.iter().map(|it| u64::from_le_bytes(*it)).collect())
}

fn number(bytes: &[u8]) -> Option<u64> {
    match numbers(bytes)?[..] {
        [number] => Some(number),
        _ => None,
    }
}

/// Reads a record. Nothing if it is none, or one of a later release.
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
            odd.is_empty()
                .then(|| MasterLogRecord::Epochs(pairs.iter().map(|[id, first]| (*id, *first)).collect()))
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
        fn what_was_written_is_read(id: u64, change: Vec<u8>, all in prop::collection::vec((any::<u64>(), 1..u64::MAX), 0..9)) {
            let all: EpochHistory = all.into_iter().collect();
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
        fn anything_is_refused_or_read(bytes: Vec<u8>, kind in 0..8_u8) {
            let _ = read(&bytes);
            let _ = read(&[&[AUX_RECORD, kind], &bytes[..]].concat());
        }
    }
}
