//! Mooncake's identifiers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::dialect::Dialect;
use crate::pack::{Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, type_marker};

/// Id of a client, a segment or a task: two numbers, in text form `first-second` in decimal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "std::borrow::Cow<'_, str>", into = "String")]
pub struct Uuid {
    pub first: u64,
    pub second: u64,
}

/// The text is not two decimal numbers separated by a dash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id of the form 123-456")]
pub struct ParseUuidError;

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.second)
    }
}

impl FromStr for Uuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, ParseUuidError> {
        let (first, second) = text.split_once('-').ok_or(ParseUuidError)?;
        // The standard library's parser also accepts a plus sign.
        let number = |text: &str| match text.as_bytes() {
            [b'0'..=b'9', ..] => text.parse().map_err(|_| ParseUuidError),
            _ => Err(ParseUuidError),
        };
        Ok(Self { first: number(first)?, second: number(second)? })
    }
}

impl TryFrom<std::borrow::Cow<'_, str>> for Uuid {
    type Error = ParseUuidError;

    fn try_from(text: std::borrow::Cow<'_, str>) -> Result<Self, ParseUuidError> {
        text.parse()
    }
}

impl From<Uuid> for String {
    fn from(id: Uuid) -> Self {
        id.to_string()
    }
}

impl Pack for Uuid {
    fn literal(_: Dialect, out: &mut Vec<u8>) {
        // Two u64. Unlike most of Mooncake's structs, a plain pair ends with its packing and alignment.
        let aligned = type_marker::ALIGNED_8;
        out.extend([type_marker::STRUCT, 0x04, 0x04, aligned, aligned, type_marker::END]);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.first.write(writer)?;
        self.second.write(writer)
    }
}

impl Unpack<'_> for Uuid {
    fn min_size(_: Dialect) -> usize {
        16
    }

    fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        Ok(Self { first: reader.read()?, second: reader.read()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips_and_rejects_other_text() {
        let id = Uuid { first: 10_971_182_955_859_533_512, second: 8_331_388_694_551_532_694 };
        assert_eq!(id.to_string(), "10971182955859533512-8331388694551532694");
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in
            ["", "-", "1", "1-", "-1", "1-2-3", "1--2", "+1-2", "1-+2", "18446744073709551616-0", "a-b"]
        {
            assert_eq!(wrong.parse::<Uuid>(), Err(ParseUuidError), "{wrong}");
        }
    }
}
