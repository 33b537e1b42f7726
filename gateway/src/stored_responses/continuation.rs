//! The input of a request that continues a stored response.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::store::StoredResponse;

/// The input of a request.
#[derive(Deserialize)]
struct RequestInput<'a> {
    #[serde(borrow)]
    input: &'a RawValue,
}

/// The items of a request's `input`, after those of the response that it continues: JSON values, separated by commas. A text is the message
/// of a user. `None` if the body has no input.
pub(crate) fn continued_input(body: &[u8], previous: Option<&StoredResponse>) -> Option<String> {
    let input = serde_json::from_slice::<RequestInput<'_>>(body).ok()?.input.get();
    let own = match input.as_bytes().first()? {
        b'[' => input.strip_prefix('[')?.strip_suffix(']')?.trim().to_owned(),
        b'"' => format!(r#"{{"type":"message","role":"user","content":{input}}}"#),
        _ => return None,
    };
    let mut items = previous.map(StoredResponse::conversation).unwrap_or_default();
    if !items.is_empty() && !own.is_empty() {
        items.push(',');
    }
    items.push_str(&own);
    Some(items)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn items_follow_those_of_the_stored_response() {
        let first = continued_input(br#"{"input":"hi \u00e4"}"#, None).unwrap();
        assert_eq!(first, r#"{"type":"message","role":"user","content":"hi \u00e4"}"#);
        let stored = StoredResponse {
            response: Bytes::from_static(br#"{"id":"resp_1","output":[{"type":"message","content":[ ]}]}"#),
            input_items: Bytes::from(first.clone()),
        };
        let second =
            continued_input(br#"{"input":[ {"role":"user"} , {"a":1.50} ]}"#, Some(&stored)).unwrap();
        assert_eq!(
            second,
            format!(r#"{first},{{"type":"message","content":[ ]}},{{"role":"user"}} , {{"a":1.50}}"#)
        );
        assert_eq!(continued_input(br#"{"input":[]}"#, None).as_deref(), Some(""));
        for body in ["{}", r#"{"input":7}"#, r#"{"input":null}"#] {
            assert_eq!(continued_input(body.as_bytes(), None), None, "{body}");
        }
    }
}
