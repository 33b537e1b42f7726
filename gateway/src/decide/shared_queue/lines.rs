//! Lines of JSON in a byte stream.

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest line. A ticket with hits on a thousand engines takes 200 KB.
const MAX_LINE_BYTES: usize = 1 << 20;

/// A stream that is not a sequence of messages.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    #[error("a line is longer than {MAX_LINE_BYTES} bytes")]
    TooLong,
    #[error("a line is not a message: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Splits received bytes into messages.
#[derive(Debug, Default)]
pub(crate) struct LineReader {
    /// Start of an incomplete line.
    partial: BytesMut,
}

impl LineReader {
    /// The messages that are complete with `bytes`.
    ///
    /// # Errors
    /// [`LineError`] if a line is too long or no message.
    pub(crate) fn push<T: DeserializeOwned>(&mut self, bytes: &[u8]) -> Result<Vec<T>, LineError> {
        let mut messages = Vec::new();
        // Only new bytes can contain a line end.
        let mut searched = self.partial.len();
        self.partial.extend_from_slice(bytes);
        while let Some(at) = memchr::memchr(b'\n', &self.partial[searched..]) {
            let line = self.partial.split_to(searched + at + 1);
            messages.push(serde_json::from_slice(&line)?);
            searched = 0;
        }
        if self.partial.len() > MAX_LINE_BYTES {
            return Err(LineError::TooLong);
        }
        Ok(messages)
    }
}

/// A message as a line.
pub(crate) fn line(message: &impl Serialize) -> Bytes {
    // Only maps with keys that are not strings cannot be serialized; there are none.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_survive_any_chunking(values in prop::collection::vec(any::<(u64, String)>(), 0..20), chunk in 1_usize..40) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| line(value).to_vec()).collect();
            let mut reader = LineReader::default();
            let mut read: Vec<(u64, String)> = Vec::new();
            for part in bytes.chunks(chunk) {
                read.extend(reader.push::<(u64, String)>(part).unwrap());
            }
            prop_assert_eq!(read, values);
        }
    }

    #[test]
    fn long_and_malformed_lines_are_errors() {
        let mut reader = LineReader::default();
        assert!(matches!(reader.push::<u64>(b"1\nx\n"), Err(LineError::Malformed(_))));
        let mut reader = LineReader::default();
        let long = vec![b'1'; MAX_LINE_BYTES / 2 + 1];
        assert!(reader.push::<u64>(&long).unwrap().is_empty());
        assert!(matches!(reader.push::<u64>(&long), Err(LineError::TooLong)));
    }
}
