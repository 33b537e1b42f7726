//! A check of errors in OpenAI's format.

use serde_json::Value;

/// Checks that `body` is an error in OpenAI's format, and returns its `error` member.
pub(crate) fn openai_error(body: &[u8]) -> Value {
    let shown = String::from_utf8_lossy(body);
    let body: Value = serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {shown:?}"));
    let error = body["error"].clone();
    for member in ["message", "type", "code"] {
        assert!(error[member].is_string(), "error.{member} is no string: {shown}");
    }
    assert!(error["param"].is_string() || error["param"].is_null(), "error.param: {shown}");
    assert!(error.get("param").is_some(), "error.param is missing: {shown}");
    error
}
