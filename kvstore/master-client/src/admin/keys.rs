//! `/get_all_keys`: all keys, one at a line, in no order.

use std::time::Duration;

use bytes::Bytes;

use super::client::failed;
use super::error::AdminError;
use super::lines::LineSplitter;

/// The keys of all objects, as they arrive. Ten million of them are 700 MB, of which only a part is in memory here;
/// the master holds all of its answer until it has been read. A key with a line break in it looks like two.
#[derive(Debug)]
pub struct KeyStream {
    /// None when all has been read.
    response: Option<reqwest::Response>,
    url: String,
    timeout: Duration,
    lines: LineSplitter,
}

/// Some keys.
#[derive(Clone, Debug)]
pub struct KeyBatch(Bytes);

impl KeyStream {
    pub(super) fn new(response: reqwest::Response, url: String, timeout: Duration) -> Self {
        Self { response: Some(response), url, timeout, lines: LineSplitter::default() }
    }

    /// The next keys, or `None` when there are no more. Whoever is slow to ask keeps the master's answer waiting.
    ///
    /// # Errors
    /// When the answer breaks off. Then there are no more keys.
    pub async fn next(&mut self) -> Result<Option<KeyBatch>, AdminError> {
        while let Some(response) = &mut self.response {
            // Counted from now: the time before is the caller's.
            let part = match tokio::time::timeout(self.timeout, response.chunk()).await {
                Ok(part) => part.map_err(|error| failed(&self.url, &error, self.timeout)),
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

    /// Keys that were dropped so far because they are too long to be held: no engine makes such keys.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lines.dropped
    }
}

impl KeyBatch {
    /// The keys. Those that are not UTF-8, which no engine makes, are left out.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let lines = self.0.split(|byte| *byte == b'\n');
        lines.filter_map(|line| std::str::from_utf8(line).ok()).filter(|line| !line.is_empty())
    }
}
