//! Encoding of packed values.

use bytes::{BufMut, BytesMut};

use super::{HEAD_HAS_META, META_COMPATIBLE_U16, META_COMPATIBLE_U32, META_WIDTH_SHIFT, TypeSignature};
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

    /// Appends the head, and the metadata if lengths are wider than one byte or the message has a size. The size, of two bytes, is
    /// filled in by [`fill_size`].
    pub(super) fn begin(signature: &TypeSignature, width_log2: u8, out: &mut BytesMut) {
        let width = width_log2 << META_WIDTH_SHIFT;
        if signature.has_compatible() {
            out.put_u32_le(signature.hash() | HEAD_HAS_META);
            out.put_u8(width | META_COMPATIBLE_U16);
            out.put_u16_le(0);
        } else if width_log2 == 0 {
            out.put_u32_le(signature.hash());
        } else {
            out.put_u32_le(signature.hash() | HEAD_HAS_META);
            out.put_u8(width);
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

/// Offset of the metadata in a message.
const META_OFFSET: usize = 4;
/// Offset of the size.
const SIZE_OFFSET: usize = META_OFFSET + 1;

/// Writes the size of the message that starts at `start`, and makes its field wider if two bytes do not suffice.
pub(super) fn fill_size(out: &mut BytesMut, start: usize) {
    let size = out.len() - start;
    let field = start + SIZE_OFFSET;
    if let Ok(size) = u16::try_from(size) {
        out[field..field + size_of::<u16>()].copy_from_slice(&size.to_le_bytes());
        return;
    }
    // Frames are smaller than 4 GiB, so more is rejected later.
    let size = u32::try_from(size + size_of::<u16>()).unwrap_or(u32::MAX);
    out.put_u16_le(0);
    let moved = field + size_of::<u16>()..out.len() - size_of::<u16>();
    out.copy_within(moved, field + size_of::<u32>());
    out[start + META_OFFSET] = out[start + META_OFFSET] & !META_COMPATIBLE_U16 | META_COMPATIBLE_U32;
    out[field..field + size_of::<u32>()].copy_from_slice(&size.to_le_bytes());
}
