//! The `struct_pack` encoding of yalantinglibs, as used by Mooncake.
//!
//! A packed value is a 32-bit head, an optional byte of metadata, and the fields in order, little-endian and without names. The head is
//! a hash of the type's literal, so both sides must use exactly the same layout. All lengths of one value have the same width,
//! determined by the longest one. Debug builds of Mooncake, which include the published wheels, also send the literal; it is checked
//! if present and never sent.
//!
//! A release can add members to a struct without another hash (`struct_pack::compatible`). They are optional, are not part of the
//! literal, and follow after all other fields of the message, in the same order: those of every element of a list, for example. The
//! metadata of such messages has the size of the message, by which a reader recognizes that members are missing. Releases that lack
//! the members ignore the rest of the message.

mod layout;
mod primitive;
mod reader;
mod writer;

use bytes::BytesMut;
use md5::{Digest, Md5};

use crate::dialect::Dialect;

pub(crate) use layout::{arguments, field_has_compatible, field_literal, field_min_size, layout, wire_code};
pub use reader::{PackReader, UnpackError};
pub use writer::{PackError, PackWriter};

/// Markers in a type literal.
pub(crate) mod type_marker {
    pub(crate) const STRING: [u8; 2] = [0x80, 0x0c];
    pub(crate) const MAP: u8 = 0x82;
    pub(crate) const VECTOR: u8 = 0x84;
    pub(crate) const OPTIONAL: u8 = 0x85;
    pub(crate) const VARIANT: u8 = 0x86;
    pub(crate) const EXPECTED: u8 = 0x87;
    /// Packing or alignment of eight bytes, at the end of a struct that is copied as it is in memory: 129 + 8.
    pub(crate) const ALIGNED_8: u8 = 0x89;
    pub(crate) const VOID: u8 = 0xfa;
    pub(crate) const STRUCT: u8 = 0xfd;
    pub(crate) const END: u8 = 0xff;
}

/// Bit of the head: a byte of metadata follows.
const HEAD_HAS_META: u32 = 1;
/// Bit of the metadata: a type literal follows, terminated by a zero byte.
const META_LITERAL: u8 = 1 << 2;
/// Shift of the width of lengths in the metadata; the width is a power of two.
const META_WIDTH_SHIFT: u8 = 3;
/// Mask of the metadata: width of a field with the message's size, present if its type has compatible members.
const META_COMPATIBLE: u8 = 0b11;
/// The size has two bytes.
const META_COMPATIBLE_U16: u8 = 0b01;
/// The size has four bytes.
const META_COMPATIBLE_U32: u8 = 0b10;
/// Mask of the metadata: undefined bits.
const META_UNKNOWN: u8 = 0b1110_0000;

/// A type that can be packed.
pub trait Pack {
    /// Appends the type's literal in a dialect.
    fn literal(dialect: Dialect, out: &mut Vec<u8>);

    /// Appends the value.
    ///
    /// # Errors
    /// When the value cannot be expressed in the writer's dialect, or a length does not fit its width.
    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError>;

    /// Whether values have compatible members in a dialect: optional ones at the end of the message.
    fn has_compatible(_dialect: Dialect) -> bool {
        false
    }

    /// Appends the compatible members.
    ///
    /// # Errors
    /// As [`Pack::write`].
    fn write_compatible(&self, _writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        Ok(())
    }
}

/// A type that can be unpacked from bytes with lifetime `'a`.
pub trait Unpack<'a>: Pack + Sized {
    /// Minimum size of a value in bytes. It limits the number of elements in the remaining input.
    fn min_size(dialect: Dialect) -> usize;

    /// Reads one value.
    ///
    /// # Errors
    /// When the bytes are not such a value.
    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError>;

    /// Reads the compatible members, which are absent after [`Unpack::read`].
    ///
    /// # Errors
    /// As [`Unpack::read`].
    fn read_compatible(&mut self, _reader: &mut PackReader<'a>) -> Result<(), UnpackError> {
        Ok(())
    }
}

/// The caller's string type: `&str` borrows from the input, `String` and `Arc<str>` own.
pub trait WireString<'a>: Unpack<'a> + Default + From<&'a str> {}

impl<'a, T: Unpack<'a> + Default + From<&'a str>> WireString<'a> for T {}

/// Type literal and hash, by which peers identify a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeSignature {
    literal: Box<[u8]>,
    hash: u32,
    has_compatible: bool,
}

impl TypeSignature {
    /// The signature of `T` in a dialect.
    pub fn of<T: Pack>(dialect: Dialect) -> Self {
        let mut literal = Vec::new();
        T::literal(dialect, &mut literal);
        let hash = md5_prefix(&literal) & !HEAD_HAS_META;
        Self { literal: literal.into(), hash, has_compatible: T::has_compatible(dialect) }
    }

    /// The type literal, without its terminating zero byte.
    pub fn literal(&self) -> &[u8] {
        &self.literal
    }

    /// The type hash. Its lowest bit is always clear.
    pub fn hash(&self) -> u32 {
        self.hash
    }

    /// Whether the type has compatible members, which are not part of the literal.
    pub fn has_compatible(&self) -> bool {
        self.has_compatible
    }
}

/// The first four bytes of an MD5 sum as a big-endian number, used for type hashes and function ids.
pub(crate) fn md5_prefix(bytes: &[u8]) -> u32 {
    let [a, b, c, d, ..] = Md5::digest(bytes).0;
    u32::from_be_bytes([a, b, c, d])
}

/// The type hash of a packed value; `None` if it is shorter than four bytes.
pub fn type_hash(packed: &[u8]) -> Option<u32> {
    let head = packed.first_chunk()?;
    Some(u32::from_le_bytes(*head) & !HEAD_HAS_META)
}

/// Whether a packed value states its size: its type has compatible members in the writer's release.
pub(crate) fn states_size(packed: &[u8]) -> bool {
    matches!(packed, [head, _, _, _, meta, ..] if u32::from(*head) & HEAD_HAS_META != 0 && meta & META_COMPATIBLE != 0)
}

/// Appends a packed value. `signature` must be that of `T` in `dialect`.
///
/// # Errors
/// As [`Pack::write`]. Then nothing is appended.
pub fn encode<T: Pack>(
    value: &T,
    signature: &TypeSignature,
    dialect: Dialect,
    out: &mut BytesMut,
) -> Result<(), PackError> {
    let start = out.len();
    let mut written = Err(PackError::LengthTooWide);
    for width_log2 in 0..=3 {
        PackWriter::begin(signature, width_log2, out);
        let mut writer = PackWriter::new(out, 1 << width_log2, dialect);
        written = value.write(&mut writer);
        if written.is_ok() && signature.has_compatible {
            written = value.write_compatible(&mut writer);
        }
        if written.is_ok() {
            if signature.has_compatible {
                writer::fill_size(out, start);
            }
            return Ok(());
        }
        out.truncate(start);
        if written != Err(PackError::LengthTooWide) {
            break;
        }
    }
    written
}

/// Reads a packed value. `signature` must be that of `T` in `dialect`.
///
/// # Errors
/// When the bytes are not a value of that type, or more bytes follow.
pub fn decode<'a, T: Unpack<'a>>(
    packed: &'a [u8],
    signature: &TypeSignature,
    dialect: Dialect,
) -> Result<T, UnpackError> {
    let mut reader = PackReader::open(packed, signature, dialect)?;
    let mut value = T::read(&mut reader)?;
    if signature.has_compatible && reader.may_continue() {
        value.read_compatible(&mut reader)?;
    }
    reader.finish()?;
    Ok(value)
}

#[cfg(test)]
mod tests;
