//! Macros that declare layouts: the fields of a struct in wire order, with the first release of each.

use super::{Pack, Unpack};
use crate::dialect::Dialect;

/// Appends the literal of the field that `_field` returns.
pub(crate) fn field_literal<T, F: Pack>(_field: fn(&T) -> &F, dialect: Dialect, out: &mut Vec<u8>) {
    F::literal(dialect, out);
}

/// Minimum size of the field that `_field` returns.
pub(crate) fn field_min_size<'a, T, F: Unpack<'a>>(_field: fn(&T) -> &F, dialect: Dialect) -> usize {
    F::min_size(dialect)
}

/// Whether the field that `_field` returns has compatible members.
pub(crate) fn field_has_compatible<T, F: Pack>(_field: fn(&T) -> &F, dialect: Dialect) -> bool {
    F::has_compatible(dialect)
}

/// Declares the wire layout of a struct: `layout! { Name<S> { field, field since V0_3_12, … } }`, in wire order.
///
/// A field with `since` is omitted in older dialects; when read in those, it has its default or the value after `or`.
/// `layout! { Name<S> { … } compatible since V0_3_14 { member, … } }` declares compatible members, which are options.
macro_rules! layout {
    (@since) => { $crate::Dialect::OLDEST };
    (@since $since:ident) => { $crate::Dialect::$since };
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
    (@read $reader:ident) => { $reader.read()? };
    (@read $reader:ident since $since:ident $(or $default:expr)?) => {
        if $reader.dialect() >= $crate::Dialect::$since {
            $reader.read()?
        } else {
            $crate::pack::layout!(@default $($default)?)
        }
    };
    (@literal $out:ident, $count:ident, $body:block) => {
        $out.push($crate::pack::type_marker::STRUCT);
        $body
        $out.push($crate::pack::type_marker::END);
        let _ = $count;
    };
    // Several arguments are packed as a tuple, a single one as itself, and none as an empty body.
    (@arguments $out:ident, $count:ident, $body:block) => {
        let start = $out.len();
        $out.push($crate::pack::type_marker::STRUCT);
        $body
        match $count {
            0 => $out.truncate(start),
            1 => _ = $out.remove(start),
            _ => $out.push($crate::pack::type_marker::END),
        }
    };
    ($name:ident $(<$s:ident>)? { $($fields:tt)* } $($compatible:tt)*) => {
        $crate::pack::layout!(@impl literal $name $(<$s>)? { $($fields)* } $($compatible)*);
    };
    (@impl $kind:ident $name:ident $(<$s:ident>)? {
        $($field:ident $(since $since:ident $(or $default:expr)?)?),+ $(,)?
    } $(compatible since $compatible_since:ident { $($member:ident),+ $(,)? })?) => {
        impl $(<$s: $crate::pack::Pack>)? $crate::pack::Pack for $name $(<$s>)? {
            fn literal(dialect: $crate::Dialect, out: &mut Vec<u8>) {
                let mut count = 0;
                $crate::pack::layout!(@$kind out, count, {
                    $(if dialect >= $crate::pack::layout!(@since $($since)?) {
                        $crate::pack::field_literal(|value: &Self| &value.$field, dialect, out);
                        count += 1;
                    })+
                });
            }

            fn write(
                &self,
                writer: &mut $crate::pack::PackWriter<'_>,
            ) -> Result<(), $crate::pack::PackError> {
                $(if writer.dialect() >= $crate::pack::layout!(@since $($since)?) {
                    $crate::pack::Pack::write(&self.$field, writer)?;
                })+
                Ok(())
            }

            fn has_compatible(dialect: $crate::Dialect) -> bool {
                $(dialect >= $crate::Dialect::$compatible_since ||)?
                $((dialect >= $crate::pack::layout!(@since $($since)?)
                    && $crate::pack::field_has_compatible(|value: &Self| &value.$field, dialect)) ||)+
                false
            }

            fn write_compatible(
                &self,
                writer: &mut $crate::pack::PackWriter<'_>,
            ) -> Result<(), $crate::pack::PackError> {
                $(if writer.dialect() >= $crate::pack::layout!(@since $($since)?) {
                    $crate::pack::Pack::write_compatible(&self.$field, writer)?;
                })+
                $(if writer.dialect() >= $crate::Dialect::$compatible_since {
                    $($crate::pack::Pack::write(&self.$member, writer)?;)+
                })?
                Ok(())
            }
        }

        impl<'a, $($s: $crate::pack::WireString<'a>)?> $crate::pack::Unpack<'a> for $name $(<$s>)? {
            fn min_size(dialect: $crate::Dialect) -> usize {
                let mut size = 0;
                $(if dialect >= $crate::pack::layout!(@since $($since)?) {
                    size += $crate::pack::field_min_size(|value: &Self| &value.$field, dialect);
                })+
                size
            }

            fn read(
                reader: &mut $crate::pack::PackReader<'a>,
            ) -> Result<Self, $crate::pack::UnpackError> {
                Ok(Self { $(
                    $field: $crate::pack::layout!(@read reader $(since $since $(or $default)?)?),
                )+ $($($member: None,)+)? })
            }

            fn read_compatible(
                &mut self,
                reader: &mut $crate::pack::PackReader<'a>,
            ) -> Result<(), $crate::pack::UnpackError> {
                $(if reader.dialect() >= $crate::pack::layout!(@since $($since)?) {
                    $crate::pack::Unpack::read_compatible(&mut self.$field, reader)?;
                })+
                $(if reader.dialect() >= $crate::Dialect::$compatible_since {
                    $(self.$member = reader.compatible()?;)+
                })?
                Ok(())
            }
        }
    };
}

/// As [`layout!`], for the arguments of an RPC.
macro_rules! arguments {
    ($name:ident $(<$s:ident>)? { $($fields:tt)* }) => {
        $crate::pack::layout!(@impl arguments $name $(<$s>)? { $($fields)* });
    };
}

/// A number with names: an enum of Mooncake that preserves unknown numbers.
macro_rules! wire_code {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($integer:ty) { $($(#[$code_meta:meta])* $code:ident = $value:literal),+ $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $integer);

        impl $name {
            $($(#[$code_meta])* pub const $code: Self = Self($value);)+

            /// Mooncake's name of this number.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($code)),)+
                    _ => None,
                }
            }

            /// The number with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $(stringify!($code) => Some(Self::$code),)+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{name} ({})", self.0),
                    None => write!(f, "{}", self.0),
                }
            }
        }

        impl $crate::pack::Pack for $name {
            fn literal(dialect: $crate::Dialect, out: &mut Vec<u8>) {
                <$integer>::literal(dialect, out);
            }

            fn write(
                &self,
                writer: &mut $crate::pack::PackWriter<'_>,
            ) -> Result<(), $crate::pack::PackError> {
                $crate::pack::Pack::write(&self.0, writer)
            }
        }

        impl $crate::pack::Unpack<'_> for $name {
            fn min_size(dialect: $crate::Dialect) -> usize {
                <$integer as $crate::pack::Unpack<'_>>::min_size(dialect)
            }

            fn read(
                reader: &mut $crate::pack::PackReader<'_>,
            ) -> Result<Self, $crate::pack::UnpackError> {
                <$integer as $crate::pack::Unpack<'_>>::read(reader).map(Self)
            }
        }
    };
}

pub(crate) use {arguments, layout, wire_code};
