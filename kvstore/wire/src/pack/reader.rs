//! Decoding of packed values.

use super::{
    HEAD_HAS_META, META_COMPATIBLE, META_LITERAL, META_UNKNOWN, META_WIDTH_SHIFT, TypeSignature, Unpack,
};
use crate::dialect::Dialect;

/// Why bytes are not a packed value of the expected type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnpackError {
    /// The bytes end before the value does.
    #[error("the value ends early")]
    Truncated,
    /// The value has another type, or another release's layout.
    #[error("the type hash is {found:08x}, expected {expected:08x}")]
    TypeHash {
        found: u32,
        /// Hash of the expected type.
        expected: u32,
    },
    /// The hashes are equal, but the type literals differ.
    #[error("the type literal differs from that of the expected type")]
    TypeLiteral,
    /// The metadata has undefined bits.
    #[error("the metadata byte {0:#04x} is unknown")]
    Meta(u8),
    /// A string is not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
    /// The index of a variant is out of range.
    #[error("variant index {0} is out of range")]
    VariantIndex(u8),
    /// Bytes follow after the value.
    #[error("{0} bytes follow the value")]
    TrailingBytes(usize),
    /// Lists of which each has one member of the same records have different lengths.
    #[error("the lists of the records have different lengths")]
    UnequalLists,
    /// No known release has the RPC, or this layout of its arguments.
    #[error("no known Mooncake release has this layout of {0}")]
    UnknownForm(&'static str),
}

/// Reader of a packed value.
#[derive(Debug)]
pub struct PackReader<'a> {
    rest: &'a [u8],
    /// Size of every length in bytes.
    width: usize,
    dialect: Dialect,
    /// Whether compatible members, also unknown ones, may follow the fields.
    extended: bool,
}

impl<'a> PackReader<'a> {
    /// Reads the head, and the type literal if the message has one.
    ///
    /// # Errors
    /// When the value's type does not match `signature`.
    pub fn open(packed: &'a [u8], signature: &TypeSignature, dialect: Dialect) -> Result<Self, UnpackError> {
        let mut reader = Self { rest: packed, width: 1, dialect, extended: false };
        let head = u32::from_le_bytes(reader.array()?);
        let (found, expected) = (head & !HEAD_HAS_META, signature.hash());
        if found != expected {
            return Err(UnpackError::TypeHash { found, expected });
        }
        if head & HEAD_HAS_META == 0 {
            return Ok(reader);
        }
        let meta = reader.byte()?;
        if meta & META_UNKNOWN != 0 {
            return Err(UnpackError::Meta(meta));
        }
        reader.width = 1 << (meta >> META_WIDTH_SHIFT);
        let size_field = match meta & META_COMPATIBLE {
            0 => 0,
            power => 1 << power,
        };
        reader.extended = size_field != 0;
        let size = reader.number(size_field)?;
        if reader.extended && size > packed.len() {
            return Err(UnpackError::Truncated);
        }
        if meta & META_LITERAL != 0 {
            let literal = reader.take(signature.literal().len())?;
            if literal != signature.literal() || reader.byte()? != 0 {
                return Err(UnpackError::TypeLiteral);
            }
        }
        Ok(reader)
    }

    /// A reader of an empty body, for RPCs without arguments: these have not even a head.
    pub(crate) fn empty(dialect: Dialect) -> Self {
        Self { rest: &[], width: 1, dialect, extended: false }
    }

    /// The dialect of the value.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Reads the next `size` bytes.
    ///
    /// # Errors
    /// When fewer bytes remain.
    pub fn take(&mut self, size: usize) -> Result<&'a [u8], UnpackError> {
        let (taken, rest) = self.rest.split_at_checked(size).ok_or(UnpackError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads the next `N` bytes.
    ///
    /// # Errors
    /// When fewer bytes remain.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], UnpackError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(UnpackError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// When no byte remains.
    pub fn byte(&mut self) -> Result<u8, UnpackError> {
        self.array().map(|[byte]| byte)
    }

    /// Reads a value.
    ///
    /// # Errors
    /// As [`Unpack::read`].
    pub fn read<T: Unpack<'a>>(&mut self) -> Result<T, UnpackError> {
        T::read(self)
    }

    fn length(&mut self) -> Result<usize, UnpackError> {
        self.number(self.width)
    }

    /// Reads a number of `size` bytes, at most eight.
    fn number(&mut self, size: usize) -> Result<usize, UnpackError> {
        let mut number = [0; 8];
        let bytes = self.take(size)?;
        number[..bytes.len()].copy_from_slice(bytes);
        // A length beyond the address space is beyond the input too.
        usize::try_from(u64::from_le_bytes(number)).map_err(|_| UnpackError::Truncated)
    }

    /// Whether compatible members follow.
    pub(super) fn may_continue(&self) -> bool {
        self.extended && !self.rest.is_empty()
    }

    /// Reads a compatible member, which is absent if the message ends before it: its writer's release lacks it.
    ///
    /// # Errors
    /// As [`Unpack::read`].
    pub(crate) fn compatible<T: Unpack<'a>>(&mut self) -> Result<Option<T>, UnpackError> {
        if self.may_continue() { self.read() } else { Ok(None) }
    }

    /// Reads the number of elements of a container, which is limited by the remaining input.
    ///
    /// # Errors
    /// When the number exceeds that limit.
    pub fn count<T: Unpack<'a>>(&mut self) -> Result<usize, UnpackError> {
        let count = self.length()?;
        let possible = self.rest.len() / T::min_size(self.dialect).max(1);
        if count <= possible { Ok(count) } else { Err(UnpackError::Truncated) }
    }

    /// Reads a string.
    ///
    /// # Errors
    /// When the input ends early, or it is not UTF-8.
    pub fn text(&mut self) -> Result<&'a str, UnpackError> {
        let length = self.length()?;
        std::str::from_utf8(self.take(length)?).map_err(|_| UnpackError::NotUtf8)
    }

    /// Checks that no bytes remain.
    ///
    /// # Errors
    /// When bytes remain and the metadata does not permit additional fields.
    pub fn finish(self) -> Result<(), UnpackError> {
        if self.rest.is_empty() || self.extended {
            Ok(())
        } else {
            Err(UnpackError::TrailingBytes(self.rest.len()))
        }
    }
}
