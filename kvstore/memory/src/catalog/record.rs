//! Encoding of an object record.

/// Version of an object, ordered by the master's epoch, then by its sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct ObjectVersion {
    /// Epoch of the master that reported the object.
    pub epoch: u64,
    /// The master's sequence number of the replica. A later version of a key has a higher number.
    pub sequence: u64,
}

/// An object in a segment, with all that a master needs to restore it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ObjectRecord {
    /// Tenant that owns the object.
    pub tenant: String,
    pub key: String,
    /// Group with which the object is leased and evicted; empty for none.
    pub group: String,
    /// Offset of the object in the segment.
    pub offset: u64,
    /// Length of the object in bytes.
    pub size: u64,
    /// Version of the object's key.
    pub version: ObjectVersion,
    /// The writer's checksum as stored by the master.
    pub checksum: Option<u64>,
    /// Whether the object is exempt from eviction.
    pub hard_pin: bool,
    /// CRC-32C of the object's bytes, as in the ledger.
    pub crc: u32,
}

/// Length of the fixed part before the strings.
const FIXED: usize = 50;
/// Maximum length of an encoded record.
pub(super) const MAX_ENCODED: usize = super::slots::MAX_CHAIN * super::slots::PAYLOAD;
const HAS_CHECKSUM: u8 = 1;
const HARD_PIN: u8 = 2;

impl ObjectRecord {
    /// Encodes the record; `None` if its strings are too long.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(FIXED + self.key.len() + self.tenant.len() + self.group.len());
        let checksum = self.checksum.unwrap_or(0);
        for word in [self.offset, self.size, self.version.epoch, self.version.sequence, checksum] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.crc.to_le_bytes());
        let checksum_flag = if self.checksum.is_some() { HAS_CHECKSUM } else { 0 };
        bytes.push(checksum_flag | if self.hard_pin { HARD_PIN } else { 0 });
        bytes.push(u8::try_from(self.tenant.len()).ok()?);
        bytes.extend(u16::try_from(self.key.len()).ok()?.to_le_bytes());
        bytes.extend(u16::try_from(self.group.len()).ok()?.to_le_bytes());
        for text in [&self.tenant, &self.key, &self.group] {
            bytes.extend(text.as_bytes());
        }
        (bytes.len() <= MAX_ENCODED).then_some(bytes)
    }

    /// Decodes a record, ignoring padding after it.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |offset: usize| Some(u64::from_le_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?));
        let short = |offset: usize| {
            Some(usize::from(u16::from_le_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?)))
        };
        let flags = *bytes.get(44)?;
        let lengths = [usize::from(*bytes.get(45)?), short(46)?, short(48)?];
        let mut rest = bytes.get(FIXED..)?;
        let mut texts = [const { String::new() }; 3];
        for (text, length) in texts.iter_mut().zip(lengths) {
            let (text_bytes, remaining) = rest.split_at_checked(length)?;
            *text = String::from_utf8(text_bytes.to_vec()).ok()?;
            rest = remaining;
        }
        let [tenant, key, group] = texts;
        Some(Self {
            tenant,
            key,
            group,
            offset: word(0)?,
            size: word(8)?,
            version: ObjectVersion { epoch: word(16)?, sequence: word(24)? },
            checksum: (flags & HAS_CHECKSUM != 0).then_some(word(32)?),
            hard_pin: flags & HARD_PIN != 0,
            crc: u32::from_le_bytes(bytes.get(40..44)?.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_long_ones_are_rejected() {
        let record = ObjectRecord {
            tenant: "t".into(),
            key: "a key".into(),
            group: "g".into(),
            offset: 1,
            size: 2,
            version: ObjectVersion { epoch: 3, sequence: 4 },
            checksum: Some(5),
            hard_pin: true,
            crc: 6,
        };
        let mut bytes = record.encode().unwrap();
        bytes.resize(MAX_ENCODED, 0);
        assert_eq!(ObjectRecord::decode(&bytes), Some(record.clone()));
        for length in 0..FIXED + 7 {
            assert_eq!(ObjectRecord::decode(&bytes[..length]), None, "{length} bytes");
        }
        let long = |length| ObjectRecord { key: "k".repeat(length), ..record.clone() };
        assert!(long(MAX_ENCODED - FIXED - 2).encode().is_some());
        assert_eq!(long(MAX_ENCODED - FIXED - 1).encode(), None);
        assert_eq!(ObjectRecord { tenant: "t".repeat(256), ..record }.encode(), None);
    }
}
