//! Validation of edited mirrors. The API server validates a template in its pattern by the schema, but not the mirror of it.

use std::collections::BTreeSet;

use rbg_api::conversion::FoldedGroup;
use rbg_api::v1alpha2::RoleSpec;
use serde_json::{Map, Value};

use super::ValidationError;

/// Errors of the templates that an edit of mirrors changes, which the API server would report for the patterns.
pub(super) fn edited_template_errors(folded: &FoldedGroup) -> Vec<ValidationError> {
    let edited = |role: &&RoleSpec| folded.roles.contains(&role.name);
    let error = |role: &RoleSpec| {
        let (standalone, leader_worker) = (&role.standalone_pattern, &role.leader_worker_pattern);
        let standalone = standalone.as_ref().and_then(|pattern| pattern.template.as_ref());
        let leader_worker = leader_worker.as_ref().and_then(|pattern| pattern.template.as_ref());
        let problem = template_problem(&leader_worker.or(standalone)?.0)?;
        Some(ValidationError::MirroredTemplate { role: role.name.clone(), problem })
    };
    folded.group.spec.roles.iter().filter(edited).filter_map(error).collect()
}

/// The first violation of the schema of pod templates.
fn template_problem(template: &Map<String, Value>) -> Option<String> {
    for part in ["metadata", "spec"] {
        if template.get(part).is_some_and(|part| !part.is_object()) {
            return Some(format!("template.{part} must be a map"));
        }
    }
    for part in ["labels", "annotations"] {
        let texts = template.get("metadata").and_then(|metadata| metadata.get(part));
        let is_text_map =
            |texts: &Value| texts.as_object().is_some_and(|all| all.values().all(Value::is_string));
        if texts.is_some_and(|texts| !is_text_map(texts)) {
            return Some(format!("template.metadata.{part} must be a map of strings"));
        }
    }
    let containers = template.get("spec")?.get("containers")?;
    let Some(containers) = containers.as_array() else {
        return Some("template.spec.containers must be a list".to_owned());
    };
    let mut names = BTreeSet::new();
    for (index, container) in containers.iter().enumerate() {
        let name = container.get("name").and_then(Value::as_str);
        if name.is_none_or(|name| !names.insert(name)) {
            return Some(format!("template.spec.containers[{index}] needs a name of its own"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use rbg_api::conversion::{ApiVersion, convert};
    use rbg_api::v1alpha2::RoleBasedGroup;
    use serde_json::json;

    use super::*;
    use crate::SizeLimits;
    use crate::validation::validate_group;

    /// A group as stored, and the same with another mirror.
    fn edited(role: &Value, mirror: &Value) -> [RoleBasedGroup; 2] {
        let older = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
            "metadata": { "name": "g" }, "spec": { "roles": [role] } });
        let stored = convert(&older, ApiVersion::V1alpha2).unwrap();
        let mut new = stored.clone();
        new["spec"]["roles"][0]["template"] = mirror.clone();
        [stored, new].map(|group| serde_json::from_value(group).unwrap())
    }

    #[test]
    fn edited_mirrors_are_validated_like_patterns() {
        let template = json!({ "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        for leader_worker in [Value::Null, json!({ "size": 2 })] {
            let mut role = json!({ "name": "a", "template": template });
            if !leader_worker.is_null() {
                role["leaderWorkerSet"] = leader_worker;
            }
            for (mirror, expected) in [
                (json!({ "spec": { "containers": [{ "name": "c", "image": "i:2" }] } }), None),
                (json!({ "metadata": { "labels": { "a": "b" } } }), None),
                (json!({ "spec": [] }), Some("spec must be a map")),
                (json!({ "metadata": { "labels": { "a": 1 } } }), Some("labels must be a map of strings")),
                (json!({ "metadata": { "annotations": [] } }), Some("annotations must be a map of strings")),
                (json!({ "spec": { "containers": {} } }), Some("containers must be a list")),
                (json!({ "spec": { "containers": [{}] } }), Some("containers[0] needs a name")),
                (
                    json!({ "spec": { "containers": [{ "name": "c" }, { "name": "c" }] } }),
                    Some("containers[1] needs a name"),
                ),
            ] {
                let [stored, new] = edited(&role, &mirror);
                let errors = validate_group(&new, Some(&stored), SizeLimits::default());
                match expected {
                    None => assert_eq!(errors, [], "{mirror}"),
                    Some(text) => assert!(errors[0].to_string().contains(text), "{mirror}: {errors:?}"),
                }
            }
        }
    }
}
