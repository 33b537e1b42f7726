//! Strategic merge of pod templates, as Kubernetes' API machinery defines it.
//!
//! A patch is merged into objects field by field. Lists are replaced, except those in [`fields`]: there, items with the
//! same key are merged and others added. Directives in the patch change that: `$patch` (`replace`, `delete`, `merge`),
//! `$retainKeys`, `$setElementOrder/<list>` and `$deleteFromPrimitiveList/<list>`. `null` removes a field.
//! <https://github.com/kubernetes/community/blob/master/contributors/devel/sig-api-machinery/strategic-merge-patch.md>

mod fields;
mod lists;

use serde_json::{Map, Value};

use crate::PodTemplate;
use fields::{ListMergeRule, MergeSchema, POD_TEMPLATE};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_FROM_LIST: &str = "$deleteFromPrimitiveList/";

/// Maximum nesting of a patch; a pod template needs a tenth of it.
const MAX_DEPTH: usize = 64;

/// Error in a patch that prevents the merge.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The patch is neither a map nor empty.
    #[error("the patch must be a map with the fields to change, like `spec`; it is {0}")]
    NotAMap(&'static str),
    /// An item lacks its key field.
    #[error("an item of the patch's list `{list}` has no `{key}`, by which items are matched")]
    NoKey { list: String, key: &'static str },
    /// The `$patch` directive has an unknown value.
    #[error("`$patch: {0}` is not replace, delete or merge")]
    Directive(String),
    /// The value of a directive is not a list.
    #[error("`{0}` must be a list")]
    DirectiveIsNoList(String),
    /// The patch is nested too deeply.
    #[error("the patch is nested more than {MAX_DEPTH} levels deep")]
    TooDeep,
}

/// Returns `base` with `patch` merged into it. An absent or `null` patch changes nothing.
///
/// # Errors
/// See [`MergeError`].
pub fn pod_template(base: &PodTemplate, patch: Option<&Value>) -> Result<PodTemplate, MergeError> {
    match patch {
        None | Some(Value::Null) => Ok(base.clone()),
        Some(Value::Object(patch)) => Ok(PodTemplate(merge_map(base.0.clone(), patch, POD_TEMPLATE, 0)?)),
        Some(other) => Err(MergeError::NotAMap(name_of_type(other))),
    }
}

fn name_of_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

type JsonObject = Map<String, Value>;

fn merge_map(
    mut base: JsonObject,
    patch: &JsonObject,
    fields: MergeSchema,
    depth: usize,
) -> Result<JsonObject, MergeError> {
    if depth > MAX_DEPTH {
        return Err(MergeError::TooDeep);
    }
    match directive(patch)? {
        Some(PatchDirective::Replace) => return without_directives(patch, depth),
        Some(PatchDirective::Delete) => return Ok(JsonObject::new()),
        Some(PatchDirective::Merge) | None => {}
    }
    for (name, value) in patch.iter().filter(|(name, _)| !name.starts_with('$')) {
        let Some(current) = base.get_mut(name) else {
            if !value.is_null() {
                base.insert(name.clone(), new_value(value, depth)?);
            }
            continue;
        };
        let field = fields.get(name);
        match (current, value) {
            (_, Value::Null) => drop(base.remove(name)),
            (Value::Object(current), Value::Object(patch)) => {
                *current = merge_map(std::mem::take(current), patch, field.fields(), depth + 1)?;
            }
            (Value::Array(current), Value::Array(items)) => {
                let order = list_directive(patch, ELEMENT_ORDER, name)?;
                *current = match field.list() {
                    ListMergeRule::Replace => items.clone(),
                    ListMergeRule::Set => lists::merge_scalars(current, items, order),
                    ListMergeRule::ByKey { key, item } => {
                        let list = lists::KeyedList { name, key, item, depth };
                        list.merge(std::mem::take(current), items, order)?
                    }
                };
            }
            (current, value) => *current = new_value(value, depth)?,
        }
    }
    only_order(&mut base, patch)?;
    delete_from_lists(&mut base, patch)?;
    if let Some(retained) = patch.get(RETAIN_KEYS) {
        let retained =
            retained.as_array().ok_or_else(|| MergeError::DirectiveIsNoList(RETAIN_KEYS.to_owned()))?;
        base.retain(|name, _| retained.iter().any(|retained| retained == name));
    }
    Ok(base)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PatchDirective {
    Replace,
    Delete,
    Merge,
}

fn directive(patch: &JsonObject) -> Result<Option<PatchDirective>, MergeError> {
    let Some(value) = patch.get(PATCH) else { return Ok(None) };
    match value.as_str() {
        Some("replace") => Ok(Some(PatchDirective::Replace)),
        Some("delete") => Ok(Some(PatchDirective::Delete)),
        Some("merge") => Ok(Some(PatchDirective::Merge)),
        _ => Err(MergeError::Directive(value.to_string())),
    }
}

fn list_directive<'a>(
    patch: &'a JsonObject,
    prefix: &str,
    name: &str,
) -> Result<Option<&'a [Value]>, MergeError> {
    let directive = format!("{prefix}{name}");
    match patch.get(&directive) {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(_) => Err(MergeError::DirectiveIsNoList(directive)),
    }
}

/// Sorts lists that the patch only orders.
fn only_order(base: &mut JsonObject, patch: &JsonObject) -> Result<(), MergeError> {
    for name in patch.keys().filter_map(|name| name.strip_prefix(ELEMENT_ORDER)) {
        let order = list_directive(patch, ELEMENT_ORDER, name)?;
        if let (Some(Value::Array(list)), Some(order), false) =
            (base.get_mut(name), order, patch.contains_key(name))
        {
            *list = lists::ordered(std::mem::take(list), order);
        }
    }
    Ok(())
}

fn delete_from_lists(base: &mut JsonObject, patch: &JsonObject) -> Result<(), MergeError> {
    for name in patch.keys().filter_map(|name| name.strip_prefix(DELETE_FROM_LIST)) {
        let deleted = list_directive(patch, DELETE_FROM_LIST, name)?.unwrap_or_default();
        if let Some(Value::Array(list)) = base.get_mut(name) {
            list.retain(|item| !deleted.contains(item));
        }
    }
    Ok(())
}

/// A new value from a patch, without directives, nulls and items to delete.
fn new_value(value: &Value, depth: usize) -> Result<Value, MergeError> {
    if depth > MAX_DEPTH {
        return Err(MergeError::TooDeep);
    }
    match value {
        Value::Object(object) if directive(object)? == Some(PatchDirective::Delete) => {
            Ok(Value::Object(JsonObject::new()))
        }
        Value::Object(object) => without_directives(object, depth).map(Value::Object),
        Value::Array(items) => {
            let retained = items
                .iter()
                .filter(|item| item.get(PATCH).is_none() || item.get(PATCH) == Some(&"merge".into()));
            retained.map(|item| new_value(item, depth + 1)).collect::<Result<_, _>>().map(Value::Array)
        }
        _ => Ok(value.clone()),
    }
}

fn without_directives(object: &JsonObject, depth: usize) -> Result<JsonObject, MergeError> {
    let members = object.iter().filter(|(name, value)| !name.starts_with('$') && !value.is_null());
    members.map(|(name, value)| Ok((name.clone(), new_value(value, depth + 1)?))).collect()
}
