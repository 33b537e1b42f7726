//! Encoding of a change of the metadata: one byte for its kind, the key's length as u32 (little-endian), the key, then the value up to
//! the end.

/// Kind byte of a written entry.
const PUT: u8 = 1;
/// Kind byte of a removed entry.
const DELETE: u8 = 2;

/// A change of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetadataRecord<'a> {
    Put { key: &'a str, value: &'a [u8] },
    Delete { key: &'a str },
}

impl<'a> MetadataRecord<'a> {
    pub(super) fn encode(self) -> Vec<u8> {
        let (kind, key, value) = match self {
            Self::Put { key, value } => (PUT, key, value),
            Self::Delete { key } => (DELETE, key, &[][..]),
        };
        let mut bytes = Vec::with_capacity(5 + key.len() + value.len());
        bytes.push(kind);
        // Keys are short: the store rejects others.
        bytes.extend_from_slice(&u32::try_from(key.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(key.as_bytes());
        bytes.extend_from_slice(value);
        bytes
    }

    /// Decodes a record. `None` if it is invalid.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (key, value) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let key = std::str::from_utf8(key).ok()?;
        match *kind {
            PUT => Some(Self::Put { key, value }),
            DELETE if value.is_empty() => Some(Self::Delete { key }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn metadata_records_round_trip(key in ".{0,40}", value in prop::collection::vec(any::<u8>(), 0..40)) {
            for record in [MetadataRecord::Put { key: &key, value: &value }, MetadataRecord::Delete { key: &key }] {
                let bytes = record.encode();
                prop_assert_eq!(MetadataRecord::decode(&bytes), Some(record));
            }
        }

        #[test]
        fn decoded_records_encode_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(record) = MetadataRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
