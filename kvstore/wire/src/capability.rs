//! Capabilities: signed permissions to read or write a range of a segment until an expiry time. An extension of this project, used only
//! between programs that authenticate each other with certificates.
//!
//! A node registers a random key per segment with the master ([`SegmentKeyArguments`]). The master signs the ranges in its replies with
//! that key for the certificate of the caller, and attaches the capabilities to the response ([`grants`]). The caller sends them to
//! the node with each transfer, and the node verifies them with its key. So nodes enforce the master's grants without calling it.

pub mod grants;
mod segment_key;

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::types::Uuid;

pub use segment_key::{SegmentKeyArguments, decode_reply, encode_reply};

/// Bytes of an encoded capability.
pub const CAPABILITY: usize = 64;
const MAC: usize = 32;
/// Domain separation from any other use of the same key.
const DOMAIN: &[u8] = b"moongate capability 1";

/// SHA-256 of a peer's certificate.
pub type CertificateFingerprint = [u8; 32];

/// The permitted operation on a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessRights {
    Read,
    Write,
}

/// Why a node rejects a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapabilityError {
    /// The signature does not match: another certificate, another segment, an earlier run of the node, or changed bytes.
    #[error("the capability was not issued for this certificate and this segment")]
    InvalidSignature,
    #[error("the capability has expired")]
    Expired,
    /// The transfer exceeds its range.
    #[error("the capability is for another range")]
    OutOfRange,
    /// The capability permits only the other operation (read or write).
    #[error("the capability does not grant this operation")]
    WrongOperation,
}

impl CapabilityError {
    pub const ALL: [Self; 4] =
        [Self::InvalidSignature, Self::Expired, Self::OutOfRange, Self::WrongOperation];

    /// Value of the `reason` label in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::InvalidSignature => "invalid_signature",
            Self::Expired => "expired",
            Self::OutOfRange => "out_of_range",
            Self::WrongOperation => "wrong_operation",
        }
    }
}

/// The contents of a capability, without the signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessGrant {
    pub rights: AccessRights,
    /// Address of the first byte, as in replica descriptors.
    pub start: u64,
    pub size: u64,
    /// Expiry time, in milliseconds of the node's clock.
    pub expires_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    pub grant: AccessGrant,
    mac: [u8; MAC],
}

/// The encoded rights are neither read nor write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown rights {0} in a capability")]
pub struct UnknownRightsError(pub u64);

impl Capability {
    /// Encodes the capability: start, size, expiry and rights, eight bytes each (little-endian), followed by the signature.
    #[must_use]
    pub fn encode(&self) -> [u8; CAPABILITY] {
        let mut bytes = [0; CAPABILITY];
        let (grant, mac) = bytes.split_at_mut(CAPABILITY - MAC);
        grant.copy_from_slice(&self.grant.encode());
        mac.copy_from_slice(&self.mac);
        bytes
    }

    /// Decodes a capability without verifying it.
    ///
    /// # Errors
    /// [`UnknownRightsError`].
    pub fn decode(bytes: &[u8; CAPABILITY]) -> Result<Self, UnknownRightsError> {
        let number = |offset: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[offset..offset + 8]);
            u64::from_le_bytes(number)
        };
        let rights = match number(24) {
            0 => AccessRights::Read,
            1 => AccessRights::Write,
            other => return Err(UnknownRightsError(other)),
        };
        let mut mac = [0; MAC];
        mac.copy_from_slice(&bytes[CAPABILITY - MAC..]);
        let grant = AccessGrant { rights, start: number(0), size: number(8), expires_ms: number(16) };
        Ok(Self { grant, mac })
    }
}

impl AccessGrant {
    fn encode(&self) -> [u8; CAPABILITY - MAC] {
        let rights = match self.rights {
            AccessRights::Read => 0,
            AccessRights::Write => 1,
        };
        let mut bytes = [0; CAPABILITY - MAC];
        for (chunk, number) in bytes.chunks_exact_mut(8).zip([self.start, self.size, self.expires_ms, rights])
        {
            chunk.copy_from_slice(&u64::to_le_bytes(number));
        }
        bytes
    }

    /// Whether a transfer of `size` bytes at `start` is within the range.
    #[must_use]
    pub fn covers(&self, start: u64, size: u64) -> bool {
        let Some(offset) = start.checked_sub(self.start) else { return false };
        offset.checked_add(size).is_some_and(|end| end <= self.size)
    }
}

/// The secret key of a segment, shared by its node and the master.
#[derive(Clone, PartialEq, Eq)]
pub struct SegmentKey([u8; 32]);

impl SegmentKey {
    /// A key from random bytes.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    fn mac(&self, segment: Uuid, grant: &AccessGrant, holder: &CertificateFingerprint) -> Hmac<Sha256> {
        // HMAC pads a key with zeros to the block size.
        let mut block = [0; 64];
        block[..self.0.len()].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        for part in [DOMAIN, &segment.first.to_le_bytes(), &segment.second.to_le_bytes(), holder] {
            mac.update(part);
        }
        mac.update(&grant.encode());
        mac
    }

    /// Signs a grant for the peer with the certificate `holder`.
    #[must_use]
    pub fn sign(&self, segment: Uuid, grant: AccessGrant, holder: &CertificateFingerprint) -> Capability {
        Capability { grant, mac: self.mac(segment, &grant, holder).finalize().into_bytes().into() }
    }

    /// Verifies a capability that the peer with the certificate `holder` presents for a transfer. Compares signatures in constant time.
    ///
    /// # Errors
    /// [`CapabilityError`].
    pub fn check(
        &self,
        segment: Uuid,
        capability: &Capability,
        holder: &CertificateFingerprint,
        transfer: RequestedAccess,
    ) -> Result<(), CapabilityError> {
        let grant = &capability.grant;
        let signature = self.mac(segment, grant, holder).verify_slice(&capability.mac);
        signature.map_err(|_| CapabilityError::InvalidSignature)?;
        if grant.expires_ms <= transfer.now_ms {
            return Err(CapabilityError::Expired);
        }
        if !grant.covers(transfer.start, transfer.size) {
            return Err(CapabilityError::OutOfRange);
        }
        if grant.rights == transfer.rights { Ok(()) } else { Err(CapabilityError::WrongOperation) }
    }
}

impl fmt::Debug for SegmentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SegmentKey")
    }
}

/// A transfer to be checked against a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedAccess {
    pub rights: AccessRights,
    /// Address of the first byte.
    pub start: u64,
    pub size: u64,
    /// Current time of the node's clock.
    pub now_ms: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: Uuid = Uuid { first: 1, second: 2 };
    const HOLDER: CertificateFingerprint = [3; 32];
    const GRANT: AccessGrant =
        AccessGrant { rights: AccessRights::Read, start: 4096, size: 100, expires_ms: 1000 };
    const READ: RequestedAccess =
        RequestedAccess { rights: AccessRights::Read, start: 4096, size: 100, now_ms: 999 };

    #[test]
    fn capability_binds_certificate_segment_range_rights_time() {
        let key = SegmentKey::new([7; 32]);
        let signed = key.sign(SEGMENT, GRANT, &HOLDER);
        let check = |transfer| key.check(SEGMENT, &signed, &HOLDER, transfer);
        assert_eq!(check(READ), Ok(()));
        assert_eq!(check(RequestedAccess { start: 4100, size: 96, ..READ }), Ok(()));
        assert_eq!(check(RequestedAccess { start: 4100, ..READ }), Err(CapabilityError::OutOfRange));
        assert_eq!(check(RequestedAccess { start: 4095, size: 1, ..READ }), Err(CapabilityError::OutOfRange));
        assert_eq!(check(RequestedAccess { size: u64::MAX, ..READ }), Err(CapabilityError::OutOfRange));
        assert_eq!(
            check(RequestedAccess { rights: AccessRights::Write, ..READ }),
            Err(CapabilityError::WrongOperation)
        );
        assert_eq!(check(RequestedAccess { now_ms: 1000, ..READ }), Err(CapabilityError::Expired));
        assert_eq!(key.check(SEGMENT, &signed, &[4; 32], READ), Err(CapabilityError::InvalidSignature));
        assert_eq!(
            key.check(Uuid::default(), &signed, &HOLDER, READ),
            Err(CapabilityError::InvalidSignature)
        );
        let other = SegmentKey::new([8; 32]);
        assert_eq!(other.check(SEGMENT, &signed, &HOLDER, READ), Err(CapabilityError::InvalidSignature));
        let wider = Capability { grant: AccessGrant { size: 101, ..GRANT }, ..signed };
        assert_eq!(key.check(SEGMENT, &wider, &HOLDER, READ), Err(CapabilityError::InvalidSignature));
        assert_eq!(format!("{key:?}"), "SegmentKey", "debug output must not contain the key");
    }

    proptest! {
        #[test]
        fn capabilities_round_trip(start: u64, size: u64, expires_ms: u64, write: bool, key: [u8; 32]) {
            let rights = if write { AccessRights::Write } else { AccessRights::Read };
            let signed = SegmentKey::new(key).sign(SEGMENT, AccessGrant { rights, start, size, expires_ms }, &HOLDER);
            prop_assert_eq!(Capability::decode(&signed.encode()), Ok(signed));
        }

        #[test]
        fn decoded_bytes_re_encode_identically(halves: [[u8; 32]; 2]) {
            let mut bytes = [0; CAPABILITY];
            bytes[..32].copy_from_slice(&halves[0]);
            bytes[32..].copy_from_slice(&halves[1]);
            if let Ok(capability) = Capability::decode(&bytes) {
                prop_assert_eq!(capability.encode(), bytes);
            }
        }

        #[test]
        fn any_flipped_bit_is_rejected(byte in 0..CAPABILITY, bit in 0..8_u32) {
            let key = SegmentKey::new([7; 32]);
            let mut bytes = key.sign(SEGMENT, GRANT, &HOLDER).encode();
            bytes[byte] ^= 1 << bit;
            if let Ok(changed) = Capability::decode(&bytes) {
                prop_assert_eq!(key.check(SEGMENT, &changed, &HOLDER, READ), Err(CapabilityError::InvalidSignature));
            }
        }
    }
}
