//! Removes the members that steer KV transfer from a body. Everything else stays byte for byte as the client sent it.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::transfer_members::{is_transfer_member, is_user_data};

/// Most nested arrays and objects: serde_json's own limit, which bodies have passed before.
const MAX_DEPTH: u32 = 128;

/// Why a text cannot be searched for members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberSearchError {
    /// The text is not one JSON value for any parser.
    NotJson,
    /// It nests deeper than `MAX_DEPTH`.
    TooDeep,
}

/// Removes the members that steer KV transfer from `body`, a JSON value, including repeated ones and those with escaped names.
/// Returns `body` itself if there are none, otherwise a copy unless the bytes have no other owner.
///
/// # Errors
///
/// [`MemberSearchError`]. Python's extensions of JSON (`NaN`, control characters in strings) are accepted.
pub fn without_transfer_members(body: Bytes) -> Result<Bytes, MemberSearchError> {
    let cuts = TransferMemberSearch::cuts(&body)?;
    if cuts.is_empty() {
        return Ok(body);
    }
    let mut stripped_body = body.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
    let (mut write, mut read) = (0, 0);
    for cut in cuts.into_iter().chain(std::iter::once(stripped_body.len()..stripped_body.len())) {
        stripped_body.copy_within(read..cut.start, write);
        write += cut.start - read;
        read = cut.end;
    }
    stripped_body.truncate(write);
    Ok(stripped_body.freeze())
}

/// Walks over one JSON value and records the byte ranges to remove.
struct TransferMemberSearch<'a> {
    bytes: &'a [u8],
    position: usize,
    cuts: Vec<Range<usize>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SearchScope {
    /// Members of the body itself.
    Top,
    /// Inside a member that an engine may parse for parameters.
    Parameters,
    /// Inside user data, or inside a member that is removed anyway.
    Skipped,
}

impl<'a> TransferMemberSearch<'a> {
    /// Byte ranges in ascending order, without overlaps.
    fn cuts(bytes: &'a [u8]) -> Result<Vec<Range<usize>>, MemberSearchError> {
        let mut search = Self { bytes, position: 0, cuts: Vec::new() };
        search.skip_whitespace();
        search.value(SearchScope::Top, 0)?;
        search.skip_whitespace();
        if search.position == bytes.len() { Ok(search.cuts) } else { Err(MemberSearchError::NotJson) }
    }

    fn peek(&self) -> Result<u8, MemberSearchError> {
        self.bytes.get(self.position).copied().ok_or(MemberSearchError::NotJson)
    }

    fn consume(&mut self, expected: u8) -> bool {
        let found = self.bytes.get(self.position) == Some(&expected);
        self.position += usize::from(found);
        found
    }

    fn expect(&mut self, expected: u8) -> Result<(), MemberSearchError> {
        if self.consume(expected) { Ok(()) } else { Err(MemberSearchError::NotJson) }
    }

    fn skip_whitespace(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.bytes.get(self.position) {
            self.position += 1;
        }
    }

    fn value(&mut self, scope: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        if depth > MAX_DEPTH {
            return Err(MemberSearchError::TooDeep);
        }
        match self.peek()? {
            b'{' => self.object(scope, depth),
            b'[' => self.array(scope, depth),
            b'"' => self.string().map(drop),
            _ => self.literal(),
        }
    }

    fn array(&mut self, scope: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        self.position += 1;
        self.skip_whitespace();
        if self.consume(b']') {
            return Ok(());
        }
        loop {
            self.skip_whitespace();
            self.value(scope, depth + 1)?;
            self.skip_whitespace();
            if !self.consume(b',') {
                return self.expect(b']');
            }
        }
    }

    fn object(&mut self, scope: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        self.position += 1;
        self.skip_whitespace();
        if self.consume(b'}') {
            return Ok(());
        }
        // Position of the comma before the member, if an earlier member stays.
        let mut comma_to_cut = None;
        let mut any_remains = false;
        loop {
            self.skip_whitespace();
            let start = self.position;
            let key = self.key()?;
            let is_removed = scope != SearchScope::Skipped && is_transfer_member(&key);
            let inside = match scope {
                _ if is_removed => SearchScope::Skipped,
                SearchScope::Top if is_user_data(&key) => SearchScope::Skipped,
                SearchScope::Top => SearchScope::Parameters,
                scope => scope,
            };
            self.value(inside, depth + 1)?;
            let end = self.position;
            self.skip_whitespace();
            let comma = self.position;
            let last = !self.consume(b',');
            if is_removed {
                self.skip_whitespace();
                self.cuts.push(match comma_to_cut {
                    Some(before) => before..end,
                    None if last => start..end,
                    None => start..self.position,
                });
            } else {
                any_remains = true;
            }
            if last {
                return self.expect(b'}');
            }
            comma_to_cut = any_remains.then_some(comma);
        }
    }

    /// A key, up to its value.
    fn key(&mut self) -> Result<Cow<'a, str>, MemberSearchError> {
        if self.peek()? != b'"' {
            return Err(MemberSearchError::NotJson);
        }
        let quoted = self.string()?;
        self.skip_whitespace();
        self.expect(b':')?;
        self.skip_whitespace();
        let plain = quoted.get(1..quoted.len() - 1).unwrap_or_default();
        if !plain.contains(&b'\\') {
            return Ok(String::from_utf8_lossy(plain));
        }
        // A key that serde_json rejects has a lone surrogate, and cannot be one of the names.
        Ok(serde_json::from_slice::<String>(quoted).map_or(Cow::Borrowed(""), Cow::Owned))
    }

    /// A string with its quotes.
    fn string(&mut self) -> Result<&'a [u8], MemberSearchError> {
        let start = self.position;
        self.position += 1;
        loop {
            let rest = self.bytes.get(self.position..).unwrap_or_default();
            let end = memchr::memchr2(b'"', b'\\', rest).ok_or(MemberSearchError::NotJson)?;
            self.position += end;
            if self.consume(b'"') {
                return Ok(&self.bytes[start..self.position]);
            }
            self.position += 2;
        }
    }

    /// A number, `true`, `null`, or any other text up to a separator.
    fn literal(&mut self) -> Result<(), MemberSearchError> {
        let start = self.position;
        while let Some(byte) = self.bytes.get(self.position) {
            if !byte.is_ascii_alphanumeric() && !matches!(byte, b'+' | b'-' | b'.') {
                break;
            }
            self.position += 1;
        }
        if self.position > start { Ok(()) } else { Err(MemberSearchError::NotJson) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn stripped(body: &str) -> String {
        String::from_utf8(without_transfer_members(Bytes::copy_from_slice(body.as_bytes())).unwrap().to_vec())
            .unwrap()
    }

    #[test]
    fn members_are_removed_with_one_comma() {
        for (body, expected) in [
            (r#"{"model":"a"}"#, r#"{"model":"a"}"#),
            (r#"{"kv_transfer_params":{"a":[1,{"b":"}"}]}}"#, "{}"),
            (r#"{ "bootstrap_host" : "x" , "a" : 1.50 }"#, r#"{ "a" : 1.50 }"#),
            (r#"{ "a" : 1 , "bootstrap_host" : "x" , "b" : 2 }"#, r#"{ "a" : 1  , "b" : 2 }"#),
            (r#"{"a":1, "bootstrap_room":[1,2] }"#, r#"{"a":1 }"#),
            (r#"{"bootstrap_port":1,"bootstrap_room":2}"#, "{}"),
            (r#"{"kv_hints":1,"a":1,"kv_hints":2,"b":2,"kv_hints":3}"#, r#"{"a":1,"b":2}"#),
            (
                r#"{"kv_transfer\u005fparams":1,"\u006bv_hints":2,"a":"\"kv_hints\":1"}"#,
                r#"{"a":"\"kv_hints\":1"}"#,
            ),
            (
                r#"{"vllm_xargs":{"a":1,"kv_transfer_params":"x"},"b":[{"routed_dp_rank":1}]}"#,
                r#"{"vllm_xargs":{"a":1},"b":[{}]}"#,
            ),
            (
                r#"{"messages":[{"kv_hints":1}],"tools":[{"parameters":{"bootstrap_host":{}}}]}"#,
                r#"{"messages":[{"kv_hints":1}],"tools":[{"parameters":{"bootstrap_host":{}}}]}"#,
            ),
            (r#"{"x":{"messages":{"kv_hints":1}}}"#, r#"{"x":{"messages":{}}}"#),
            (r#"{"a":NaN,"kv_hints":-Infinity,"b":1E+5}"#, r#"{"a":NaN,"b":1E+5}"#),
            ("{\"\\ud800\":1,\"kv_hints\":1}", "{\"\\ud800\":1}"),
        ] {
            assert_eq!(stripped(body), expected, "{body}");
        }
    }

    #[test]
    fn invalid_json_is_rejected() {
        for body in
            ["", "{", "{\"a\"", "{\"a\":}", "[1,]", "{\"a\":1}}", "{,}", "\"a", "{\"a\":\"\\", "{a:1}"]
        {
            let result = without_transfer_members(Bytes::copy_from_slice(body.as_bytes()));
            assert_eq!(result, Err(MemberSearchError::NotJson), "{body}");
        }
        let deep = Bytes::from("[".repeat(100_000));
        assert_eq!(without_transfer_members(deep), Err(MemberSearchError::TooDeep));
    }

    fn reference(value: &Value, scope: SearchScope) -> Value {
        match value {
            Value::Array(items) => items.iter().map(|item| reference(item, scope)).collect(),
            Value::Object(members) if scope != SearchScope::Skipped => {
                let remaining = members.iter().filter(|(key, _)| !is_transfer_member(key));
                let members = remaining.map(|(key, value)| {
                    let inside = match scope {
                        SearchScope::Top if is_user_data(key) => SearchScope::Skipped,
                        _ => SearchScope::Parameters,
                    };
                    (key.clone(), reference(value, inside))
                });
                Value::Object(members.collect::<Map<_, _>>())
            }
            other => other.clone(),
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let keys = prop::sample::select(vec![
            "kv_hints",
            "bootstrap_room",
            "messages",
            "vllm_xargs",
            "a",
            "",
            "\"}",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i32>().prop_map(Value::from),
            "[\\PC]{0,6}".prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            let members = prop::collection::vec((keys.clone(), inner.clone()), 0..5);
            prop_oneof![
                prop::collection::vec(inner, 0..4).prop_map(Value::from),
                members.prop_map(|members| Value::Object(
                    members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
                )),
            ]
        })
    }

    proptest! {
        #[test]
        fn only_transfer_members_are_removed(value in values(), pretty in any::<bool>()) {
            let value = json!({"a": value, "kv_hints": 1});
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let result: Value = serde_json::from_str(&stripped(&text)).unwrap();
            prop_assert_eq!(result, reference(&value, SearchScope::Top));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(prop::sample::select(b"{}[]\",:\\ua1kv_hints ".to_vec()), 0..60)) {
            drop(without_transfer_members(Bytes::from(bytes)));
        }
    }
}
