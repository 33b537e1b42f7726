//! Parses an object member by member, so that members without a consumer are detected.

use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::error::Untranslatable;

/// An object's members, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Members<'a>(pub(crate) Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;
        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry::<String, &'de RawValue>()? {
                    members.push(member);
                }
                let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                    return Err(A::Error::custom(format_args!("the member `{}` is given twice", pair[0])));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(MembersVisitor)
    }
}

impl Serialize for Members<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// An object of a request that is being translated, and where it is.
#[derive(Debug)]
pub(crate) struct JsonObject<'a> {
    path: String,
    members: Members<'a>,
}

impl<'a> JsonObject<'a> {
    /// `path` is the object's place in the body, empty for the body itself.
    pub(crate) fn read(raw: &'a RawValue, path: String) -> Result<Self, Untranslatable> {
        let members = parse(raw, &path)?;
        Ok(Self { path, members })
    }

    /// Reads the body of a request.
    pub(crate) fn body(body: &'a [u8]) -> Result<Self, Untranslatable> {
        let members = serde_json::from_slice(body)
            .map_err(|problem| Untranslatable::Json { member: "body".to_owned(), problem })?;
        Ok(Self { path: String::new(), members })
    }

    /// Where this object is.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Where a member of this object is.
    pub(crate) fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Removes a member. `null` counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.members.0.iter().position(|(member, _)| member == name)?;
        let (_, value) = self.members.0.remove(at);
        (value.get() != "null").then_some(value)
    }

    pub(crate) fn required(&mut self, name: &str) -> Result<&'a RawValue, Untranslatable> {
        self.take(name).ok_or_else(|| Untranslatable::Missing { member: self.path_of(name) })
    }

    pub(crate) fn parsed<T: Deserialize<'a>>(&mut self, name: &str) -> Result<Option<T>, Untranslatable> {
        self.take(name).map(|raw| parse(raw, &self.path_of(name))).transpose()
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Untranslatable> {
        self.parsed(name)
    }

    pub(crate) fn required_text(&mut self, name: &str) -> Result<String, Untranslatable> {
        parse(self.required(name)?, &self.path_of(name))
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<JsonObject<'a>>, Untranslatable> {
        self.take(name).map(|raw| JsonObject::read(raw, self.path_of(name))).transpose()
    }

    /// Drops a member that has no effect on the response.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        self.members.0.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    /// Fails if one of these members, each with the reason, is present.
    pub(crate) fn reject(&mut self, members: &[(&str, &str)]) -> Result<(), Untranslatable> {
        for (name, reason) in members {
            if self.take(name).is_some() {
                return Err(Untranslatable::unsupported(self.path_of(name), *reason));
            }
        }
        Ok(())
    }

    /// Fails if a member is left that nothing has read.
    pub(crate) fn reject_rest(self) -> Result<(), Untranslatable> {
        match self.members.0.iter().find(|(_, value)| value.get() != "null") {
            None => Ok(()),
            Some((name, _)) => Err(Untranslatable::unsupported(
                self.path_of(name),
                "chat completions have no such member; remove it",
            )),
        }
    }

    /// The members that are left, without `null`.
    pub(crate) fn into_rest(mut self) -> Members<'a> {
        self.members.0.retain(|(_, value)| value.get() != "null");
        self.members
    }
}

fn parse<'a, T: Deserialize<'a>>(raw: &'a RawValue, path: &str) -> Result<T, Untranslatable> {
    serde_json::from_str(raw.get())
        .map_err(|problem| Untranslatable::Json { member: path.to_owned(), problem })
}

/// The items of an array.
pub(crate) fn array<'a>(raw: &'a RawValue, path: &str) -> Result<Vec<&'a RawValue>, Untranslatable> {
    parse(raw, path)
}

/// The text of a value that is a string; `None` for another value, which the caller reads as an array.
pub(crate) fn text(raw: &RawValue, path: &str) -> Result<Option<String>, Untranslatable> {
    if raw.get().starts_with('"') { parse(raw, path).map(Some) } else { Ok(None) }
}
