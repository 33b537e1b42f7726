//! One line of a batch: its attempts, and its result.

use std::time::Duration;

use moongate_backoff::{Backoff, BackoffPolicy};
use tokio::time::sleep;

use super::gate::AdmissionGate;
use super::{BackendFailure, BackendResponse, InferenceBackend, LineRequest, STORAGE_BACKOFF};
use crate::batch::BatchRecord;
use crate::file::new_id;
use crate::input::{LineSpan, parse_line};
use crate::line_reader::LineReader;
use crate::progress::{LineOutcome, RunProgress};
use crate::results::{LineResult, error_line, response_line};
use crate::storage::StorageError;

/// Attempts of a line that an engine fails. Rejections for lack of capacity do not count.
const MAX_ATTEMPTS: u32 = 3;
/// Pauses between the attempts of a line.
const LINE_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(500), max: Duration::from_secs(60) };

/// What follows from a response.
enum AttemptResult {
    Ended,
    /// Another attempt after at least this time.
    Retry {
        after: Duration,
        counts: bool,
    },
}

impl AttemptResult {
    fn of(response: &Result<BackendResponse, BackendFailure>) -> Self {
        let after = response.as_ref().ok().and_then(|response| response.retry_after).unwrap_or_default();
        match response {
            Ok(BackendResponse { status: 429 | 503, .. }) => Self::Retry { after, counts: false },
            Ok(BackendResponse { status: 500 | 502 | 504, .. }) | Err(_) => {
                Self::Retry { after, counts: true }
            }
            Ok(_) => Self::Ended,
        }
    }
}

/// Runs a line until it has a result.
pub(super) async fn run_line<B: InferenceBackend>(
    input: &LineReader<'_>,
    progress: &RunProgress,
    gate: &AdmissionGate<'_, B>,
    batch: &BatchRecord,
    (line, span): (u32, LineSpan),
) -> LineResult {
    let (mut backoff, mut attempts) = (Backoff::new(LINE_BACKOFF), 0);
    let result = loop {
        let slot = gate.slot().await;
        let text = read_until_available(input, batch, span).await;
        let parsed = match text.as_deref().map(|text| parse_line(text, batch.endpoint)) {
            Ok(Ok(parsed)) => parsed,
            Ok(Err(error)) => break failed_line(line, "", "invalid_line", &error.to_string()),
            Err(error) => break failed_line(line, "", "storage_damaged", &error.to_string()),
        };
        let request = LineRequest {
            tenant: batch.tenant.clone(),
            endpoint: batch.endpoint,
            request_id: new_id("batch-line-"),
            body: parsed.body.to_owned().into(),
        };
        let request_id = request.request_id.clone();
        let response = gate.send(slot, request).await;
        if let AttemptResult::Retry { after, counts } = AttemptResult::of(&response) {
            attempts += u32::from(counts);
            if attempts < MAX_ATTEMPTS {
                progress.count(LineOutcome::Retried, 1);
                backoff.record_failure();
                sleep(backoff.jittered_pause().max(after)).await;
                continue;
            }
        }
        break match response {
            Ok(response) => {
                response_line((line, &parsed.custom_id), &request_id, response.status, &response.body)
                    .unwrap_or_else(|error| {
                        let text = format!("the response is not JSON: {error}");
                        failed_line(line, &parsed.custom_id, "invalid_response", &text)
                    })
            }
            Err(failure) => failed_line(line, &parsed.custom_id, "request_failed", &failure.to_string()),
        };
    };
    let outcome = if result.is_success { LineOutcome::Completed } else { LineOutcome::Failed };
    progress.count(outcome, 1);
    result
}

fn failed_line(line: u32, custom_id: &str, code: &str, message: &str) -> LineResult {
    // Texts can always be encoded.
    let result = error_line((line, custom_id), code, message);
    result.unwrap_or_else(|error| LineResult {
        line,
        is_success: false,
        text: format!("{{\"error\":\"{error}\"}}"),
    })
}

/// Reads a line. Waits while the storage does not work.
async fn read_until_available(
    input: &LineReader<'_>,
    batch: &BatchRecord,
    span: LineSpan,
) -> Result<bytes::Bytes, StorageError> {
    let mut backoff = Backoff::new(STORAGE_BACKOFF);
    loop {
        match input.read(span).await {
            Err(error) if error.is_transient() => {
                tracing::warn!(batch = %batch.id, %error, "the storage of batches does not work; retrying");
                backoff.record_failure();
                sleep(backoff.jittered_pause()).await;
            }
            read => return read,
        }
    }
}
