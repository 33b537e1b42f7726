//! Multipart messages of ZeroMQ.

use bytes::{BufMut, Bytes};

use super::{MORE, put_frame_header};

/// A message of one or more parts. Cloning copies no payload.
///
/// Parts of a received message are slices of the connection's read buffer: keeping one keeps up to the whole buffer in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZmtpMessage {
    /// At least one part.
    parts: Vec<Bytes>,
}

impl ZmtpMessage {
    /// Creates a message. ZMTP has no message without parts: an empty list becomes one empty part.
    pub fn new(mut parts: Vec<Bytes>) -> Self {
        if parts.is_empty() {
            parts.push(Bytes::new());
        }
        Self { parts }
    }

    /// Borrows the parts, at least one.
    pub fn parts(&self) -> &[Bytes] {
        &self.parts
    }

    /// Returns the parts, at least one.
    pub fn into_parts(self) -> Vec<Bytes> {
        self.parts
    }

    /// Appends the encoded message.
    pub fn encode(&self, out: &mut impl BufMut) {
        self.encode_after(&[], out);
    }

    /// Appends a message that consists of the parts of `envelope` followed by this message's parts.
    pub(crate) fn encode_after(&self, envelope: &[Bytes], out: &mut impl BufMut) {
        let last = envelope.len() + self.parts.len() - 1;
        for (index, part) in envelope.iter().chain(&self.parts).enumerate() {
            put_frame_header(if index < last { MORE } else { 0 }, part.len(), out);
            out.put_slice(part);
        }
    }
}

impl<const N: usize> From<[Bytes; N]> for ZmtpMessage {
    fn from(parts: [Bytes; N]) -> Self {
        Self::new(parts.into())
    }
}
