//! Encodings of numbers, strings, containers and results.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, type_marker};
use crate::dialect::Dialect;
use crate::error::ErrorCode;

macro_rules! integers {
    ($($integer:ty = $mark:literal),+) => {$(
        impl Pack for $integer {
            fn literal(_: Dialect, out: &mut Vec<u8>) {
                out.push($mark);
            }

            fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
                writer.put(&self.to_le_bytes());
                Ok(())
            }
        }

        impl Unpack<'_> for $integer {
            fn min_size(_: Dialect) -> usize {
                size_of::<Self>()
            }

            fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
                reader.array().map(Self::from_le_bytes)
            }
        }
    )+};
}

integers!(i32 = 0x01, u32 = 0x02, i64 = 0x03, u64 = 0x04, u8 = 0x06, u16 = 0x08);

impl Pack for bool {
    fn literal(_: Dialect, out: &mut Vec<u8>) {
        out.push(0x0b);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        writer.put(&[u8::from(*self)]);
        Ok(())
    }
}

impl Unpack<'_> for bool {
    fn min_size(_: Dialect) -> usize {
        1
    }

    fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        Ok(reader.byte()? != 0)
    }
}

macro_rules! packed_strings {
    ($($text:ty),+) => {$(
        impl Pack for $text {
            fn literal(_: Dialect, out: &mut Vec<u8>) {
                out.extend(type_marker::STRING);
            }

            fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
                writer.text(self)
            }
        }
    )+};
}

macro_rules! unpacked_strings {
    ($($text:ty),+) => {$(
        impl<'a> Unpack<'a> for $text {
            fn min_size(_: Dialect) -> usize {
                1
            }

            fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
                reader.text().map(Self::from)
            }
        }
    )+};
}

packed_strings!(&str, String, Box<str>, Arc<str>, Cow<'_, str>);
unpacked_strings!(&'a str, String, Box<str>, Arc<str>, Cow<'a, str>);

impl Pack for () {
    fn literal(_: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::VOID);
    }

    fn write(&self, _: &mut PackWriter<'_>) -> Result<(), PackError> {
        Ok(())
    }
}

impl Unpack<'_> for () {
    fn min_size(_: Dialect) -> usize {
        0
    }

    fn read(_: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        Ok(())
    }
}

impl<T: Pack> Pack for Vec<T> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::VECTOR);
        T::literal(dialect, out);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        writer.length(self.len())?;
        self.iter().try_for_each(|element| element.write(writer))
    }

    fn has_compatible(dialect: Dialect) -> bool {
        T::has_compatible(dialect)
    }

    fn write_compatible(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        if !T::has_compatible(writer.dialect()) {
            return Ok(());
        }
        self.iter().try_for_each(|element| element.write_compatible(writer))
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Vec<T> {
    fn min_size(_: Dialect) -> usize {
        1
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        let count = reader.count::<T>()?;
        let mut elements = Self::with_capacity(count);
        for _ in 0..count {
            elements.push(T::read(reader)?);
        }
        Ok(elements)
    }

    fn read_compatible(&mut self, reader: &mut PackReader<'a>) -> Result<(), UnpackError> {
        if !T::has_compatible(reader.dialect()) {
            return Ok(());
        }
        self.iter_mut().try_for_each(|element| element.read_compatible(reader))
    }
}

impl<K: Pack, V: Pack> Pack for BTreeMap<K, V> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::MAP);
        K::literal(dialect, out);
        V::literal(dialect, out);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        writer.length(self.len())?;
        for (key, value) in self {
            key.write(writer)?;
            value.write(writer)?;
        }
        Ok(())
    }

    fn has_compatible(dialect: Dialect) -> bool {
        V::has_compatible(dialect)
    }

    fn write_compatible(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.values().try_for_each(|value| value.write_compatible(writer))
    }
}

impl<'a, K: Unpack<'a> + Ord, V: Unpack<'a>> Unpack<'a> for BTreeMap<K, V> {
    fn min_size(_: Dialect) -> usize {
        1
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        let count = reader.count::<K>()?;
        let mut map = Self::new();
        for _ in 0..count {
            let key = K::read(reader)?;
            map.insert(key, V::read(reader)?);
        }
        Ok(map)
    }

    /// They are not read: they have the order of the sender's map, which is not sorted in Mooncake.
    fn read_compatible(&mut self, _: &mut PackReader<'a>) -> Result<(), UnpackError> {
        Ok(())
    }
}

impl<T: Pack> Pack for Option<T> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::OPTIONAL);
        T::literal(dialect, out);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.is_some().write(writer)?;
        self.as_ref().map_or(Ok(()), |value| value.write(writer))
    }

    fn has_compatible(dialect: Dialect) -> bool {
        T::has_compatible(dialect)
    }

    fn write_compatible(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.as_ref().map_or(Ok(()), |value| value.write_compatible(writer))
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Option<T> {
    fn min_size(_: Dialect) -> usize {
        1
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        if bool::read(reader)? { T::read(reader).map(Some) } else { Ok(None) }
    }

    fn read_compatible(&mut self, reader: &mut PackReader<'a>) -> Result<(), UnpackError> {
        self.as_mut().map_or(Ok(()), |value| value.read_compatible(reader))
    }
}

impl<T: Pack> Pack for Result<T, ErrorCode> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        out.push(type_marker::EXPECTED);
        T::literal(dialect, out);
        ErrorCode::literal(dialect, out);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.is_ok().write(writer)?;
        match self {
            Ok(value) => value.write(writer),
            Err(code) => code.write(writer),
        }
    }

    fn has_compatible(dialect: Dialect) -> bool {
        T::has_compatible(dialect)
    }

    fn write_compatible(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.as_ref().map_or(Ok(()), |value| value.write_compatible(writer))
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Result<T, ErrorCode> {
    fn min_size(dialect: Dialect) -> usize {
        1 + T::min_size(dialect).min(ErrorCode::min_size(dialect))
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        if bool::read(reader)? { T::read(reader).map(Ok) } else { ErrorCode::read(reader).map(Err) }
    }

    fn read_compatible(&mut self, reader: &mut PackReader<'a>) -> Result<(), UnpackError> {
        self.as_mut().map_or(Ok(()), |value| value.read_compatible(reader))
    }
}
