//! Strategic merge of lists.

use serde_json::Value;

use super::fields::MergeSchema;
use super::{MergeError, PatchDirective, directive, merge_map, new_value};

/// A list whose items are identified by one of their fields.
pub(super) struct KeyedList<'a> {
    pub(super) name: &'a str,
    pub(super) key: &'static str,
    pub(super) item: MergeSchema,
    pub(super) depth: usize,
}

impl KeyedList<'_> {
    /// `base` with the patch's items merged into it; new items and order are as in Kubernetes.
    pub(super) fn merge(
        &self,
        base: Vec<Value>,
        patch: &[Value],
        order: Option<&[Value]>,
    ) -> Result<Vec<Value>, MergeError> {
        let mut merged = base.clone();
        let mut items = Vec::with_capacity(patch.len());
        let mut replace = false;
        for item in patch {
            match item.as_object().map(directive).transpose()?.flatten() {
                // Other fields of the item are ignored: the directive applies to the whole list.
                Some(PatchDirective::Replace) => replace = true,
                Some(PatchDirective::Delete) => {
                    let deleted = self.key_of(item)?;
                    merged.retain(|item| item.get(self.key) != Some(deleted));
                }
                Some(PatchDirective::Merge) | None => items.push(item),
            }
        }
        if replace {
            return items.into_iter().map(|item| new_value(item, self.depth + 1)).collect();
        }
        for item in &items {
            self.merge_item(&mut merged, item)?;
        }
        let by_patch: Vec<Value> = match order {
            Some(order) => order.to_vec(),
            None => items.into_iter().cloned().collect(),
        };
        Ok(in_order(merged, &by_patch, &base, |a, b| {
            a.get(self.key).is_some() && a.get(self.key) == b.get(self.key)
        }))
    }

    fn merge_item(&self, merged: &mut Vec<Value>, item: &Value) -> Result<(), MergeError> {
        let key = self.key_of(item)?;
        let found = merged.iter_mut().find(|existing| existing.get(self.key) == Some(key));
        match (found, item) {
            (Some(Value::Object(existing)), Value::Object(item)) => {
                *existing = merge_map(std::mem::take(existing), item, self.item, self.depth + 1)?;
            }
            _ => merged.push(new_value(item, self.depth + 1)?),
        }
        Ok(())
    }

    fn key_of<'a>(&self, item: &'a Value) -> Result<&'a Value, MergeError> {
        item.get(self.key).ok_or_else(|| MergeError::NoKey { list: self.name.to_owned(), key: self.key })
    }
}

/// `base` with the strings of the patch that it lacks.
pub(super) fn merge_scalars(base: &[Value], patch: &[Value], order: Option<&[Value]>) -> Vec<Value> {
    let mut merged: Vec<Value> = Vec::with_capacity(base.len() + patch.len());
    for item in base.iter().chain(patch) {
        if !merged.contains(item) {
            merged.push(item.clone());
        }
    }
    in_order(merged, order.unwrap_or(patch), base, |a, b| a == b)
}

/// Sorts a list as `$setElementOrder` specifies: entries of the order are strings, or objects with the key field.
pub(super) fn ordered(list: Vec<Value>, order: &[Value]) -> Vec<Value> {
    let base = list.clone();
    in_order(list, order, &base, |item, wanted| match wanted {
        Value::Object(wanted) => wanted.iter().all(|(key, value)| item.get(key) == Some(value)),
        wanted => item == wanted,
    })
}

/// Items of the patch keep the patch's order, others that of the previous list; the two are interleaved by the previous
/// list where it contains both; otherwise the patch's item comes first.
fn in_order(
    merged: Vec<Value>,
    patch: &[Value],
    before: &[Value],
    same: impl Fn(&Value, &Value) -> bool,
) -> Vec<Value> {
    let position = |list: &[Value], item: &Value| list.iter().position(|other| same(item, other));
    let (mut by_patch, mut others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|item| position(patch, item).is_some());
    by_patch.sort_by_key(|item| position(patch, item));
    others.sort_by_key(|item| position(before, item));
    let mut result = Vec::with_capacity(by_patch.len() + others.len());
    let (mut by_patch, mut others) = (by_patch.into_iter().peekable(), others.into_iter().peekable());
    while let (Some(left), Some(right)) = (others.peek(), by_patch.peek()) {
        let left_first = match (position(before, left), position(before, right)) {
            (Some(left), Some(right)) => left < right,
            _ => false,
        };
        result.extend(if left_first { others.next() } else { by_patch.next() });
    }
    result.extend(by_patch);
    result.extend(others);
    result
}
