//! Framing of stored state with a checksum, so that a damaged record is noticed and never taken for an empty one.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Format and version, before the checksum.
const MAGIC: &str = "moongate-batch-1";
/// Length of the first line: magic, space, eight digits, line feed.
const HEAD_LEN: usize = MAGIC.len() + 10;

/// A stored record that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordDamage {
    #[error("it does not begin with {MAGIC} and a checksum")]
    Head,
    #[error("its content does not match its checksum")]
    Checksum,
    #[error("its content is not understood: {0}")]
    Content(#[from] serde_json::Error),
}

/// `content` behind its checksum.
pub(crate) fn frame(content: &[u8]) -> Bytes {
    let head = format!("{MAGIC} {:08x}\n", crc32fast::hash(content));
    [head.as_bytes(), content].concat().into()
}

/// The content of a framed record.
pub(crate) fn unframe(framed: &Bytes) -> Result<Bytes, RecordDamage> {
    let (head, content) = framed.split_at_checked(HEAD_LEN).ok_or(RecordDamage::Head)?;
    let digits = head.strip_prefix(MAGIC.as_bytes()).and_then(|rest| rest.strip_prefix(b" "));
    let digits = digits.and_then(|rest| rest.strip_suffix(b"\n")).ok_or(RecordDamage::Head)?;
    let digits = std::str::from_utf8(digits).map_err(|_| RecordDamage::Head)?;
    let checksum = u32::from_str_radix(digits, 16).map_err(|_| RecordDamage::Head)?;
    if crc32fast::hash(content) != checksum {
        return Err(RecordDamage::Checksum);
    }
    Ok(framed.slice(HEAD_LEN..))
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Bytes, serde_json::Error> {
    serde_json::to_vec(record).map(|content| frame(&content))
}

pub(crate) fn decode<T: DeserializeOwned>(framed: &Bytes) -> Result<T, RecordDamage> {
    Ok(serde_json::from_slice(&unframe(framed)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_truncation_is_noticed() {
        let framed = encode(&vec!["some", "content"]).unwrap();
        assert_eq!(decode::<Vec<String>>(&framed).unwrap(), ["some", "content"]);
        for length in 0..framed.len() {
            assert!(decode::<Vec<String>>(&framed.slice(..length)).is_err(), "{length}");
        }
        for bit in 0..framed.len() * 8 {
            let mut flipped = framed.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let decoded = decode::<Vec<String>>(&flipped.into());
            // A digit of the checksum may be in either case.
            let is_case = bit % 8 == 5 && (MAGIC.len()..HEAD_LEN).contains(&(bit / 8));
            assert!(decoded.is_err() || is_case, "{bit}");
        }
    }
}
