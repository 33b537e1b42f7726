//! Response attachment with capabilities for the ranges in the response: a magic number, and for each capability the node's endpoint
//! preceded by its length (two bytes), the lifetime in milliseconds (four bytes), and the encoded capability. Numbers are
//! little-endian.

use bytes::{BufMut as _, BytesMut};

use super::{CAPABILITY, Capability};

const MAGIC: [u8; 4] = *b"MgC1";

/// A capability with the data that its holder needs to use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IssuedCapability<'a> {
    /// Endpoint of the node, as in replica descriptors.
    pub endpoint: &'a str,
    pub lifetime_ms: u32,
    pub capability: Capability,
}

/// Appends a capability to an attachment. Omits it if its endpoint is longer than 64 KiB.
pub fn append(attachment: &mut BytesMut, grant: &IssuedCapability<'_>) {
    let Ok(length) = u16::try_from(grant.endpoint.len()) else { return };
    if attachment.is_empty() {
        attachment.put_slice(&MAGIC);
    }
    attachment.put_u16_le(length);
    attachment.put_slice(grant.endpoint.as_bytes());
    attachment.put_u32_le(grant.lifetime_ms);
    attachment.put_slice(&grant.capability.encode());
}

/// Reads an attachment. The iteration ends at the first invalid or truncated entry.
pub fn read(attachment: &[u8]) -> impl Iterator<Item = IssuedCapability<'_>> {
    let mut rest = attachment.strip_prefix(&MAGIC).unwrap_or_default();
    std::iter::from_fn(move || {
        let (grant, after) = first(rest)?;
        rest = after;
        Some(grant)
    })
}

fn first(bytes: &[u8]) -> Option<(IssuedCapability<'_>, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (endpoint, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let (lifetime, rest) = rest.split_first_chunk::<4>()?;
    let (capability, rest) = rest.split_first_chunk::<CAPABILITY>()?;
    let grant = IssuedCapability {
        endpoint: std::str::from_utf8(endpoint).ok()?,
        lifetime_ms: u32::from_le_bytes(*lifetime),
        capability: Capability::decode(capability).ok()?,
    };
    Some((grant, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::capability::{AccessGrant, AccessRights, SegmentKey};
    use crate::types::Uuid;

    proptest! {
        #[test]
        fn attachments_round_trip(grants in prop::collection::vec((".{0,40}", any::<u32>(), any::<u64>()), 0..5), cut in 0..100_usize) {
            let key = SegmentKey::new([1; 32]);
            let signed = |start| key.sign(Uuid::default(), AccessGrant { rights: AccessRights::Write, start, size: 1, expires_ms: 9 }, &[2; 32]);
            let issued: Vec<IssuedCapability<'_>> = grants
                .iter()
                .map(|(endpoint, lifetime_ms, start)| IssuedCapability { endpoint, lifetime_ms: *lifetime_ms, capability: signed(*start) })
                .collect();
            let mut attachment = BytesMut::new();
            issued.iter().for_each(|grant| append(&mut attachment, grant));
            prop_assert_eq!(read(&attachment).collect::<Vec<_>>(), issued.clone());
            let cut = attachment.len().saturating_sub(cut);
            let part: Vec<_> = read(&attachment[..cut]).collect();
            prop_assert_eq!(&part[..], &issued[..part.len()]);
        }

        #[test]
        fn reading_arbitrary_attachments_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let marked: Vec<u8> = MAGIC.iter().chain(&bytes).copied().collect();
            read(&bytes).for_each(drop);
            read(&marked).for_each(drop);
        }
    }
}
