//! JSON objects as they are on the wire: members in their order, values as their bytes.

use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Top-level members of an object: key and the value's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JsonMembers(pub(crate) Vec<(String, String)>);

impl JsonMembers {
    /// The members of a JSON object.
    pub(crate) fn of(json: &[u8]) -> Self {
        let read = serde_json::from_slice(json);
        read.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(json)))
    }

    /// The text of a member's value.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// All members except those with these names.
    pub(crate) fn without(&self, keys: &[&str]) -> Self {
        Self(self.0.iter().filter(|(name, _)| !keys.contains(&name.as_str())).cloned().collect())
    }
}

impl<'de> Deserialize<'de> for JsonMembers {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonMembersVisitor;

        impl<'de> Visitor<'de> for JsonMembersVisitor {
            type Value = JsonMembers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonMembers, A::Error> {
                let mut members = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                    members.push((key, value.get().to_owned()));
                }
                Ok(JsonMembers(members))
            }
        }

        deserializer.deserialize_map(JsonMembersVisitor)
    }
}
