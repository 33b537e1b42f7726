//! `/get_all_keys`: all keys, one per line, in no order.

use std::time::Duration;

use bytes::Bytes;

use super::client::failed;
use super::error::AdminError;
use super::lines::LineSplitter;

/// A stream of the keys of all objects. Ten million keys are 700 MB, of which this client buffers only a part; the master holds its
/// whole response in memory until it has been read. A key with a line break appears as two keys.
#[derive(Debug)]
pub struct KeyStream {
    /// None after the end of the response.
    response: Option<reqwest::Response>,
    url: String,
    timeout: Duration,
    lines: LineSplitter,
}

/// A batch of keys from the stream.
#[derive(Clone, Debug)]
pub struct KeyBatch(Bytes);

impl KeyStream {
    pub(super) fn new(response: reqwest::Response, url: String, timeout: Duration) -> Self {
        Self { response: Some(response), url, timeout, lines: LineSplitter::default() }
    }

    /// The next keys, or `None` at the end. A slow caller delays the master's response.
    ///
    /// # Errors
    /// When the response breaks off or stalls. The stream ends in that case.
    pub async fn next(&mut self) -> Result<Option<KeyBatch>, AdminError> {
        while let Some(response) = &mut self.response {
            // Only the server's time counts, not the caller's time between two calls.
            let part = match tokio::time::timeout(self.timeout, response.chunk()).await {
                Ok(part) => part.map_err(|error| failed(&self.url, error, self.timeout)),
                Err(_) => Err(AdminError::TimedOut { url: self.url.clone(), limit: self.timeout }),
            };
            let page = match part {
                Ok(Some(part)) => self.lines.push(&part),
                Ok(None) => {
                    self.response = None;
                    self.lines.finish()
                }
                Err(error) => {
                    self.response = None;
                    return Err(error);
                }
            };
            if !page.is_empty() {
                return Ok(Some(KeyBatch(page)));
            }
        }
        Ok(None)
    }

    /// Number of keys dropped so far because they exceed 16 KiB. No engine creates such keys.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lines.dropped
    }
}

impl KeyBatch {
    /// Iterates over the keys. Skips keys that are not UTF-8, which no engine creates.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let lines = self.0.split(|byte| *byte == b'\n');
        lines.filter_map(|line| std::str::from_utf8(line).ok()).filter(|line| !line.is_empty())
    }
}
