//! Takes the members that steer KV transfer out of a body. Everything else stays byte for byte as the client wrote it.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::transfer_members::{is_transfer_member, is_user_data};

/// Arrays and objects inside one another: serde_json's own limit, which bodies have passed before.
const MAX_DEPTH: u32 = 128;

/// Why a text cannot be searched for members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberSearchError {
    /// No parser takes it for one JSON value.
    NotJson,
    /// It nests deeper than `MAX_DEPTH`.
    TooDeep,
}

/// `body`, a JSON value, without the members that steer KV transfer, whatever their names' escapes and however often they come. Without
/// such members `body` itself, otherwise a copy unless the bytes have no other owner.
///
/// # Errors
/// [`MemberSearchError`]. What Python's parser takes beyond JSON (`NaN`, control characters in strings) is searched too.
pub fn without_transfer_members(body: Bytes) -> Result<Bytes, MemberSearchError> {
    let cuts = TransferMemberSearch::cuts(&body)?;
    if cuts.is_empty() {
        return Ok(body);
    }
    let mut kept = body.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
    let (mut write, mut read) = (0, 0);
    for cut in cuts.into_iter().chain(std::iter::once(kept.len()..kept.len())) {
        kept.copy_within(read..cut.start, write);
        write += cut.start - read;
        read = cut.end;
    }
    kept.truncate(write);
    Ok(kept.freeze())
}

/// A walk over one JSON value that notes which byte ranges are to go.
struct TransferMemberSearch<'a> {
    bytes: &'a [u8],
    at: usize,
    cuts: Vec<Range<usize>>,
}

/// Which members are searched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SearchScope {
    /// The body itself.
    Top,
    /// Inside a member that an engine may read parameters from.
    Parameters,
    /// Inside what a user wrote, or inside what goes anyway.
    Skipped,
}

impl<'a> TransferMemberSearch<'a> {
    /// In ascending order, none within another.
    fn cuts(bytes: &'a [u8]) -> Result<Vec<Range<usize>>, MemberSearchError> {
        let mut search = Self { bytes, at: 0, cuts: Vec::new() };
        search.skip_whitespace();
        search.value(SearchScope::Top, 0)?;
        search.skip_whitespace();
        if search.at == bytes.len() { Ok(search.cuts) } else { Err(MemberSearchError::NotJson) }
    }

    fn peek(&self) -> Result<u8, MemberSearchError> {
        self.bytes.get(self.at).copied().ok_or(MemberSearchError::NotJson)
    }

    fn consume(&mut self, wanted: u8) -> bool {
        let found = self.bytes.get(self.at) == Some(&wanted);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, wanted: u8) -> Result<(), MemberSearchError> {
        if self.consume(wanted) { Ok(()) } else { Err(MemberSearchError::NotJson) }
    }

    fn skip_whitespace(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    fn value(&mut self, place: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        if depth > MAX_DEPTH {
            return Err(MemberSearchError::TooDeep);
        }
        match self.peek()? {
            b'{' => self.object(place, depth),
            b'[' => self.array(place, depth),
            b'"' => self.string().map(drop),
            _ => self.literal(),
        }
    }

    fn array(&mut self, place: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        self.at += 1;
        self.skip_whitespace();
        if self.consume(b']') {
            return Ok(());
        }
        loop {
            self.skip_whitespace();
            self.value(place, depth + 1)?;
            self.skip_whitespace();
            if !self.consume(b',') {
                return self.expect(b']');
            }
        }
    }

    fn object(&mut self, place: SearchScope, depth: u32) -> Result<(), MemberSearchError> {
        self.at += 1;
        self.skip_whitespace();
        if self.consume(b'}') {
            return Ok(());
        }
        // Where the comma before the member is, if a member before it stays.
        let mut comma_to_cut = None;
        let mut any_stays = false;
        loop {
            self.skip_whitespace();
            let start = self.at;
            let key = self.key()?;
            let goes = place != SearchScope::Skipped && is_transfer_member(&key);
            let inside = match place {
                _ if goes => SearchScope::Skipped,
                SearchScope::Top if is_user_data(&key) => SearchScope::Skipped,
                SearchScope::Top => SearchScope::Parameters,
                place => place,
            };
            self.value(inside, depth + 1)?;
            let end = self.at;
            self.skip_whitespace();
            let comma = self.at;
            let last = !self.consume(b',');
            if goes {
                self.skip_whitespace();
                self.cuts.push(match comma_to_cut {
                    Some(before) => before..end,
                    None if last => start..end,
                    None => start..self.at,
                });
            } else {
                any_stays = true;
            }
            if last {
                return self.expect(b'}');
            }
            comma_to_cut = any_stays.then_some(comma);
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
        // What serde_json cannot read has a lone surrogate in it, and is no name that matters.
        Ok(serde_json::from_slice::<String>(quoted).map_or(Cow::Borrowed(""), Cow::Owned))
    }

    /// A string with its quotes.
    fn string(&mut self) -> Result<&'a [u8], MemberSearchError> {
        let start = self.at;
        self.at += 1;
        loop {
            let rest = self.bytes.get(self.at..).unwrap_or_default();
            let end = memchr::memchr2(b'"', b'\\', rest).ok_or(MemberSearchError::NotJson)?;
            self.at += end;
            if self.consume(b'"') {
                return Ok(&self.bytes[start..self.at]);
            }
            self.at += 2;
        }
    }

    /// A number, `true`, `null`, or whatever else ends at a separator.
    fn literal(&mut self) -> Result<(), MemberSearchError> {
        let start = self.at;
        while let Some(byte) = self.bytes.get(self.at) {
            if !byte.is_ascii_alphanumeric() && !matches!(byte, b'+' | b'-' | b'.') {
                break;
            }
            self.at += 1;
        }
        if self.at > start { Ok(()) } else { Err(MemberSearchError::NotJson) }
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
    fn members_go_with_one_comma_and_the_rest_stays() {
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
    fn what_is_no_json_is_named() {
        for body in
            ["", "{", "{\"a\"", "{\"a\":}", "[1,]", "{\"a\":1}}", "{,}", "\"a", "{\"a\":\"\\", "{a:1}"]
        {
            let result = without_transfer_members(Bytes::copy_from_slice(body.as_bytes()));
            assert_eq!(result, Err(MemberSearchError::NotJson), "{body}");
        }
        let deep = Bytes::from("[".repeat(100_000));
        assert_eq!(without_transfer_members(deep), Err(MemberSearchError::TooDeep));
    }

    fn reference(value: &Value, place: SearchScope) -> Value {
        match value {
            Value::Array(items) => items.iter().map(|item| reference(item, place)).collect(),
            Value::Object(members) if place != SearchScope::Skipped => {
                let stays = members.iter().filter(|(key, _)| !is_transfer_member(key));
                let members = stays.map(|(key, value)| {
                    let inside = match place {
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
        fn the_value_is_the_same_but_for_the_members(value in values(), pretty in any::<bool>()) {
            let value = json!({"a": value, "kv_hints": 1});
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let got: Value = serde_json::from_str(&stripped(&text)).unwrap();
            prop_assert_eq!(got, reference(&value, SearchScope::Top));
        }

        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(prop::sample::select(b"{}[]\",:\\ua1kv_hints ".to_vec()), 0..60)) {
            drop(without_transfer_members(Bytes::from(bytes)));
        }
    }
}
