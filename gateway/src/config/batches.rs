//! Settings of files and batches.

use std::time::Duration;

use clap::Args;
use moongate_batch::{BatchOptions, StoreLocation};

/// Time within which a batch ends, as in OpenAI's API.
const COMPLETION_WINDOW: Duration = Duration::from_secs(24 * 3600);
/// How long ended batches are listed.
const RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);
/// Bytes of a line around the body of its request.
const LINE_OVERHEAD: usize = 4 << 10;

/// Files and batches.
#[derive(Debug, Clone, Args)]
pub struct BatchApiOptions {
    /// Where the files and batches of OpenAI's Batch API are stored: a folder, which only one gateway may use, or s3://BUCKET/PREFIX, which
    /// one gateway at a time uses, with the settings of the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
    /// AWS_SECRET_ACCESS_KEY, ...). The API is off without it.
    #[arg(long, value_name = "DIR|URL", env = "MOONGATE_BATCH_STORE")]
    pub batch_store: Option<StoreLocation>,

    /// Most lines of batches that run at the same time.
    #[arg(long, value_name = "N", env = "MOONGATE_BATCH_CONCURRENCY", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch_concurrency: u32,

    /// Lines of batches start only if they hardly delay other requests, and while the engines' load is below this share of their
    /// capacity.
    #[arg(long, value_name = "SHARE", env = "MOONGATE_BATCH_MAX_LOAD", default_value_t = 0.5, value_parser = parse_share)]
    pub batch_max_load: f64,

    /// Largest file that clients may upload. It must fit into --body-memory.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_BATCH_MAX_FILE_BYTES", default_value_t = 100 << 20)]
    pub batch_max_file_bytes: u64,

    /// Size of all files together, beyond which uploads are rejected. Outputs of batches count, but are always written.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_BATCH_MAX_STORED_BYTES", default_value_t = 10 << 30)]
    pub batch_max_stored_bytes: u64,
}

impl BatchApiOptions {
    /// Limits of batches whose requests have bodies of up to `max_body_bytes`.
    pub(crate) fn limits(&self, max_body_bytes: usize) -> BatchOptions {
        BatchOptions {
            concurrency: self.batch_concurrency as usize,
            max_load: self.batch_max_load,
            max_file_bytes: self.batch_max_file_bytes,
            max_stored_bytes: self.batch_max_stored_bytes,
            max_line_bytes: max_body_bytes.saturating_add(LINE_OVERHEAD),
            window: COMPLETION_WINDOW,
            retention: RETENTION,
        }
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("{text:?} is not a number above 0 and up to 1")),
    }
}
