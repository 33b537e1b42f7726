//! Look-ups of objects without leases.

use crate::dialect::Dialect;
use crate::pack::{Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, type_marker, wire_code};

wire_code! {
    /// Which keys of a look-up are leased.
    pub struct ProbePolicy(u8) {
        NONE = 0,
        /// The last group of keys that exist completely.
        LAST_HIT_ONLY = 1,
    }
}

/// Which keys of a look-up are leased. Since 0.3.14.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantLeasePolicy {
    pub policy: ProbePolicy,
    /// Size of a group: the number of successive keys that are useful only together.
    pub candidate_size: u64,
}

/// Bytes between the policy and the size in Mooncake's memory, which is copied to the message. Their content is undefined.
const PADDING: usize = 7;

impl Pack for GrantLeasePolicy {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::STRUCT);
        ProbePolicy::literal(dialect, out);
        u64::literal(dialect, out);
        out.extend([type_marker::ALIGNED_8, type_marker::ALIGNED_8, type_marker::END]);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.policy.write(writer)?;
        writer.put(&[0; PADDING]);
        self.candidate_size.write(writer)
    }
}

impl Unpack<'_> for GrantLeasePolicy {
    fn min_size(_: Dialect) -> usize {
        16
    }

    fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        let policy = reader.read()?;
        reader.take(PADDING)?;
        Ok(Self { policy, candidate_size: reader.read()? })
    }
}
