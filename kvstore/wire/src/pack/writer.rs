//! Encoding of packed values.

use bytes::{BufMut, BytesMut};

use super::{HEAD_HAS_META, META_WIDTH_SHIFT, TypeSignature};
use crate::dialect::Dialect;

/// Why a value could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A length exceeds the current width of lengths. [`super::encode`] retries with wider lengths and never returns this.
    #[error("a length exceeds the current width")]
    LengthTooWide,
    /// The dialect cannot express the value.
    #[error("Mooncake {dialect} has no {what}")]
    NotInDialect {
        /// The field or method that the dialect lacks.
        what: &'static str,
        /// The dialect of the message.
        dialect: Dialect,
    },
    /// The message exceeds the maximum size of a frame.
    #[error("a message of {0} bytes exceeds the maximum size of a frame")]
    TooLarge(usize),
}

/// Writer of a packed value.
#[derive(Debug)]
pub struct PackWriter<'b> {
    out: &'b mut BytesMut,
    /// Size of every length in bytes.
    width: usize,
    dialect: Dialect,
}

impl<'b> PackWriter<'b> {
    pub(super) fn new(out: &'b mut BytesMut, width: usize, dialect: Dialect) -> Self {
        Self { out, width, dialect }
    }

    /// Appends the head, and the metadata if lengths are wider than one byte.
    pub(super) fn begin(signature: &TypeSignature, width_log2: u8, out: &mut BytesMut) {
        if width_log2 == 0 {
            out.put_u32_le(signature.hash());
        } else {
            out.put_u32_le(signature.hash() | HEAD_HAS_META);
            out.put_u8(width_log2 << META_WIDTH_SHIFT);
        }
    }

    /// The dialect of the value.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Appends a length.
    ///
    /// # Errors
    /// When it exceeds the width of lengths.
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
    /// When its length exceeds the width of lengths.
    pub fn text(&mut self, text: &str) -> Result<(), PackError> {
        self.length(text.len())?;
        self.put(text.as_bytes());
        Ok(())
    }
}
