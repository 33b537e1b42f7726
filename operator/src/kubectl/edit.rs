//! Changes of a group's roles, in the version in which the group is stored.

use serde_json::{Map, Value};

use super::KubectlError;
use super::images::reference;
use crate::plan::RESTARTED_AT;

/// Paths of a role's pod templates and their patches: first those of v1alpha2, then those of v1alpha1.
const TEMPLATES: [&str; 10] = [
    "/standalonePattern/template",
    "/standalonePattern/templateRef/patch",
    "/leaderWorkerPattern/template",
    "/leaderWorkerPattern/templateRef/patch",
    "/leaderWorkerPattern/leaderTemplatePatch",
    "/leaderWorkerPattern/workerTemplatePatch",
    "/template",
    "/templatePatch",
    "/leaderWorkerSet/patchLeaderTemplate",
    "/leaderWorkerSet/patchWorkerTemplate",
];
/// Paths of a role's components, each of which has a template.
const COMPONENTS: [&str; 2] = ["/customComponentsPattern/components", "/components"];
/// Patches among them that concern only some pods of an instance.
const PARTIAL: [&str; 4] =
    ["leaderTemplatePatch", "workerTemplatePatch", "patchLeaderTemplate", "patchWorkerTemplate"];

pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// JSON pointers of the role's templates and patches.
pub(super) fn template_paths(role: &Value) -> Vec<String> {
    let mut paths: Vec<String> = TEMPLATES.iter().map(|path| (*path).to_owned()).collect();
    for components in COMPONENTS {
        let count = role.pointer(components).and_then(Value::as_array).map_or(0, Vec::len);
        paths.extend((0..count).map(|index| format!("{components}/{index}/template")));
    }
    paths.retain(|path| role.pointer(path).is_some_and(Value::is_object));
    paths
}

/// The roles of those names; all roles if no name is given.
///
/// # Errors
/// [`KubectlError::NoRole`].
pub(super) fn roles_mut<'a>(
    group: &'a mut Value,
    names: &[String],
) -> Result<Vec<&'a mut Value>, KubectlError> {
    let all: Vec<String> =
        group["spec"]["roles"].as_array().into_iter().flatten().map(|role| text(&role["name"])).collect();
    if let Some(role) = names.iter().find(|name| !all.contains(name)) {
        return Err(KubectlError::NoRole { role: role.clone(), existing: all });
    }
    let roles = group["spec"]["roles"].as_array_mut().into_iter().flatten();
    Ok(roles.filter(|role| names.is_empty() || names.contains(&text(&role["name"]))).collect())
}

/// The object at a JSON pointer of field names; missing objects are created.
pub(super) fn value_at_mut<'a>(value: &'a mut Value, path: &str) -> &'a mut Value {
    path.split('/').filter(|name| !name.is_empty()).fold(value, |value, name| {
        if !value.is_object() {
            *value = Value::Object(Map::new());
        }
        &mut value[name]
    })
}

/// Pauses or resumes updates of these roles. All roles if no name is given.
///
/// # Errors
/// [`KubectlError::NoRole`].
pub fn set_paused(group: &mut Value, roles: &[String], is_paused: bool) -> Result<(), KubectlError> {
    for role in roles_mut(group, roles)? {
        if is_paused {
            let strategy = value_at_mut(role, "/rolloutStrategy");
            if strategy["type"].is_null() {
                strategy["type"] = "RollingUpdate".into();
            }
            value_at_mut(strategy, "/rollingUpdate/paused").clone_from(&Value::Bool(true));
        } else if let Some(Value::Object(rolling)) = role.pointer_mut("/rolloutStrategy/rollingUpdate") {
            rolling.remove("paused");
        }
    }
    Ok(())
}

/// Requests that all pods of these roles are recreated within the rolling-update limits. All roles if no name is given.
///
/// # Errors
/// [`KubectlError::NoRole`].
pub fn restart_pods(group: &mut Value, roles: &[String], now: &str) -> Result<(), KubectlError> {
    for role in roles_mut(group, roles)? {
        let mut paths = template_paths(role);
        paths.retain(|path| !PARTIAL.iter().any(|partial| path.ends_with(partial)));
        paths.extend(reference(role).map(|(patch, _)| patch));
        paths.dedup();
        for path in paths {
            let template = match role.pointer_mut(&path) {
                Some(template) => template,
                None => value_at_mut(role, &path),
            };
            value_at_mut(template, "/metadata/annotations")[RESTARTED_AT] = now.into();
        }
    }
    Ok(())
}
