//! Putting packed values together.

use bytes::{BufMut, BytesMut};

use super::{HEAD_HAS_META, META_WIDTH_SHIFT, TypeSignature};
use crate::dialect::Dialect;

/// Why a value could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A length needs more bytes than those that this attempt uses for lengths. [`super::encode`] tries again
    /// with wider lengths and never returns this.
    #[error("a length does not fit")]
    LengthTooWide,
    /// The release has no way to say this.
    #[error("Mooncake {dialect} has no {what}")]
    NotInDialect {
        /// What cannot be said.
        what: &'static str,
        /// The release.
        dialect: Dialect,
    },
    /// The message is larger than a frame can be.
    #[error("a message of {0} bytes does not fit into a frame")]
    TooLarge(usize),
}

/// Where a packed value is appended, and what has to be known to write it.
#[derive(Debug)]
pub struct PackWriter<'b> {
    out: &'b mut BytesMut,
    /// Bytes of every length.
    width: usize,
    dialect: Dialect,
}

impl<'b> PackWriter<'b> {
    pub(super) fn new(out: &'b mut BytesMut, width: usize, dialect: Dialect) -> Self {
        Self { out, width, dialect }
    }

    /// Appends the head, and the metadata if lengths are wider than a byte.
    pub(super) fn begin(signature: &TypeSignature, width_log2: u8, out: &mut BytesMut) {
        if width_log2 == 0 {
            out.put_u32_le(signature.hash());
        } else {
            out.put_u32_le(signature.hash() | HEAD_HAS_META);
            out.put_u8(width_log2 << META_WIDTH_SHIFT);
        }
    }

    /// The dialect that the value is written in.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Appends bytes as they are.
    pub fn put(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Appends a length.
    ///
    /// # Errors
    /// When it needs more bytes than lengths have here.
    pub fn length(&mut self, length: usize) -> Result<(), PackError> {
        let bytes = (length as u64).to_le_bytes();
        let (low, high) = bytes.split_at(self.width);
        if high.iter().any(|byte| *byte != 0) {
            return Err(PackError::LengthTooWide);
        }
        self.put(low);
        Ok(())
    }

    /// Appends a string.
    ///
    /// # Errors
    /// When its length does not fit.
    pub fn text(&mut self, text: &str) -> Result<(), PackError> {
        self.length(text.len())?;
        self.put(text.as_bytes());
        Ok(())
    }
}
