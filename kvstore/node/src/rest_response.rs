//! Bodies of the REST API: how requests are parsed and responses written.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value};

pub(crate) fn plain(status: StatusCode, text: &'static str) -> Response {
    (status, text).into_response()
}

/// A JSON body as Python's `json.dumps` writes it, with a space after each colon and comma.
pub(crate) fn json(status: StatusCode, members: &[(&str, Value)]) -> Response {
    let members: Vec<String> =
        members.iter().map(|(name, value)| format!("\"{name}\": {}", spaced(value))).collect();
    let body = format!("{{{}}}", members.join(", "));
    (status, [(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}

fn spaced(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(spaced).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

pub(crate) fn error(status: StatusCode, text: impl Into<String>) -> Response {
    json(status, &[("error", Value::String(text.into()))])
}

pub(crate) fn failed(text: impl Into<String>) -> Response {
    error(StatusCode::INTERNAL_SERVER_ERROR, text)
}

pub(crate) fn success() -> Response {
    json(StatusCode::OK, &[("status", "success".into())])
}

/// Parses a JSON body. A parse error is answered with 500, as upstream does.
pub(crate) fn members(body: &[u8]) -> Result<Map<String, Value>, Box<Response>> {
    serde_json::from_slice(body).map_err(|problem| Box::new(failed(problem.to_string())))
}

/// Ids in `segment_ids`, which is a string or a list.
pub(crate) fn segment_ids(data: &Map<String, Value>) -> Vec<&str> {
    match data.get("segment_ids") {
        Some(Value::String(id)) => vec![id],
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn text(response: Response) -> String {
        let body = axum::body::to_bytes(response.into_body(), 1 << 10).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn json_bodies_have_the_spacing_of_upstream() {
        assert_eq!(text(success()).await, r#"{"status": "success"}"#);
        let many = [("ids", Value::from(vec!["a", "b"])), ("n", 1.into()), ("exists", true.into())];
        assert_eq!(text(json(StatusCode::OK, &many)).await, r#"{"ids": ["a", "b"], "n": 1, "exists": true}"#);
        assert_eq!(text(failed("it said \"no\"")).await, r#"{"error": "it said \"no\""}"#);
    }
}
