//! No member of a client's body that controls KV transfer reaches an engine. Every body that `serde_json` parses is searched, and only
//! those members are removed.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use moongate_gateway::{is_transfer_member, is_user_data, without_transfer_members};
use serde_json::{Map, Value};

/// Path of a value in the body.
#[derive(Clone, Copy, PartialEq)]
enum JsonMemberScope {
    Top,
    Parameters,
    UserData,
}

fn expected(value: Value, scope: JsonMemberScope) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(|item| expected(item, scope)).collect(),
        Value::Object(members) if scope != JsonMemberScope::UserData => {
            let stays = members.into_iter().filter(|(key, _)| !is_transfer_member(key));
            let members = stays.map(|(key, value)| {
                let is_user_data = scope == JsonMemberScope::Top && is_user_data(&key);
                let inner =
                    if is_user_data { JsonMemberScope::UserData } else { JsonMemberScope::Parameters };
                (key, expected(value, inner))
            });
            Value::Object(members.collect::<Map<_, _>>())
        }
        other => other,
    }
}

fuzz_target!(|body: &[u8]| {
    let stripped = without_transfer_members(Bytes::copy_from_slice(body));
    if let Ok(value) = serde_json::from_slice::<Value>(body) {
        let stripped = stripped.as_ref().expect("what is JSON can be searched");
        assert_eq!(serde_json::from_slice::<Value>(stripped).unwrap(), expected(value, JsonMemberScope::Top));
    }
    if let Ok(stripped) = stripped {
        assert!(stripped.len() <= body.len());
        assert_eq!(without_transfer_members(stripped.clone()), Ok(stripped), "nothing is left to remove");
    }
});
