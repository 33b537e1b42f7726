//! A multipart message.

use bytes::{BufMut, Bytes};

use super::{MORE, put_frame_header};

/// A message of one or more parts. Cloning copies no payload.
///
/// Parts of a received message are slices of the connection's read buffer: keeping one keeps up to that buffer in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZmtpMessage {
    /// Never empty.
    parts: Vec<Bytes>,
}

impl ZmtpMessage {
    /// A message of these parts. ZMTP has no message without parts: no parts are sent as one empty part.
    pub fn new(mut parts: Vec<Bytes>) -> Self {
        if parts.is_empty() {
            parts.push(Bytes::new());
        }
        Self { parts }
    }

    /// The parts, at least one.
    pub fn parts(&self) -> &[Bytes] {
        &self.parts
    }

    /// The parts, at least one.
    pub fn into_parts(self) -> Vec<Bytes> {
        self.parts
    }

    /// Appends the message as it travels.
    pub fn encode(&self, out: &mut impl BufMut) {
        self.encode_after(&[], out);
    }

    /// Appends a message of the parts of an `envelope` and then of this one.
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
