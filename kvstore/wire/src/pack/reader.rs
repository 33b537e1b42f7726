//! Taking packed values apart.

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
    /// The value is of another type, or of another release's form of it.
    #[error("the type hash is {found:08x}, expected {expected:08x}")]
    TypeHash {
        /// What the bytes say.
        found: u32,
        /// What the type has.
        expected: u32,
    },
    /// The hashes are equal, but the type literal is another.
    #[error("the type literal differs from that of the expected type")]
    TypeLiteral,
    /// Metadata with bits that have no meaning.
    #[error("the metadata byte {0:#04x} is unknown")]
    Meta(u8),
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
    /// A variant's index beyond its alternatives.
    #[error("there is no alternative {0} of a variant")]
    VariantIndex(u8),
    /// There are bytes after the value.
    #[error("{0} bytes follow the value")]
    TrailingBytes(usize),
    /// The RPC, or this form of its arguments, is in no release that is known.
    #[error("no known release has this form of {0}")]
    UnknownForm(&'static str),
}

/// The rest of a packed value, and what has to be known to read it.
#[derive(Debug)]
pub struct PackReader<'a> {
    rest: &'a [u8],
    /// Bytes of every length.
    width: usize,
    dialect: Dialect,
    /// Whether a newer peer may have added members at the end.
    extended: bool,
}

impl<'a> PackReader<'a> {
    /// Reads the head, and the type literal if there is one.
    ///
    /// # Errors
    /// When the value is of another type than `signature` says.
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
        reader.take(size_field)?;
        if meta & META_LITERAL != 0 {
            let literal = reader.take(signature.literal().len())?;
            if literal != signature.literal() || reader.byte()? != 0 {
                return Err(UnpackError::TypeLiteral);
            }
        }
        Ok(reader)
    }

    /// A reader of nothing, for RPCs without arguments: they have no body, not even a head.
    pub(crate) fn empty(dialect: Dialect) -> Self {
        Self { rest: &[], width: 1, dialect, extended: false }
    }

    /// The dialect that the value is read in.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Takes the next `size` bytes.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn take(&mut self, size: usize) -> Result<&'a [u8], UnpackError> {
        let (taken, rest) = self.rest.split_at_checked(size).ok_or(UnpackError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Takes the next `N` bytes.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], UnpackError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(UnpackError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// Takes one byte.
    ///
    /// # Errors
    /// When there is none.
    pub fn byte(&mut self) -> Result<u8, UnpackError> {
        self.array().map(|[byte]| byte)
    }

    /// Takes a value.
    ///
    /// # Errors
    /// As [`Unpack::read`].
    pub fn read<T: Unpack<'a>>(&mut self) -> Result<T, UnpackError> {
        T::read(self)
    }

    fn length(&mut self) -> Result<usize, UnpackError> {
        let mut number = [0; 8];
        let bytes = self.take(self.width)?;
        number[..bytes.len()].copy_from_slice(bytes);
        // A length beyond the address space is beyond the input too.
        usize::try_from(u64::from_le_bytes(number)).map_err(|_| UnpackError::Truncated)
    }

    /// Takes the number of elements of a container, which is no more than the rest of the input can hold.
    ///
    /// # Errors
    /// When it is more.
    pub fn count<T: Unpack<'a>>(&mut self) -> Result<usize, UnpackError> {
        let count = self.length()?;
        let possible = self.rest.len() / T::min_size(self.dialect).max(1);
        if count <= possible { Ok(count) } else { Err(UnpackError::Truncated) }
    }

    /// Takes a string.
    ///
    /// # Errors
    /// When the input ends early, or it is not UTF-8.
    pub fn text(&mut self) -> Result<&'a str, UnpackError> {
        let length = self.length()?;
        std::str::from_utf8(self.take(length)?).map_err(|_| UnpackError::NotUtf8)
    }

    /// Checks that nothing follows.
    ///
    /// # Errors
    /// When something does, and the peer has not said that it added members.
    pub fn finish(self) -> Result<(), UnpackError> {
        if self.rest.is_empty() || self.extended {
            Ok(())
        } else {
            Err(UnpackError::TrailingBytes(self.rest.len()))
        }
    }
}
