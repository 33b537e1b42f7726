//! What every exchange over HTTP needs: bounded answers, and errors in words.

use std::error::Error;

use moongate_runtime::tls_error_hint;

/// Longest answer that is read: an engine's metrics.
const MAX_BODY: usize = 4 << 20;

/// A whole answer.
pub(crate) async fn read_bounded_body(mut response: reqwest::Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|error| root_cause(&error))? {
        if body.len() + piece.len() > MAX_BODY {
            return Err(format!("an answer of more than {MAX_BODY} bytes"));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The innermost cause, for "Connection refused" says more than "error sending request"; and what to do about it, if TLS was the
/// trouble.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    match tls_error_hint(error) {
        Some(remedy) => format!("{cause}; {remedy}"),
        None => cause.to_string(),
    }
}
