//! What a change of a group would do.

use std::path::Path;

use moongate_render::GangScheduler;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde::Serialize;
use serde_json::Value;

use super::KubectlError;
use super::cluster::{ClusterClient, GroupSnapshot, current};
use super::differences::{FieldDifference, differences, summary};
use super::edit::text;
use super::output_format::{count, indented, table};
use crate::forecast::{ForecastStep, RolloutForecast, SimulatedApiServer, StepEffect, forecast};
use crate::{ResourceKind, validation};

/// What a change would do.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    /// The group's namespace.
    pub namespace: String,
    /// The group.
    pub group: String,
    /// Whether it is there already.
    pub exists: bool,
    /// What of its spec would change.
    pub changes: Vec<FieldDifference>,
    /// What the operator would do about it.
    #[serde(flatten)]
    pub forecast: RolloutForecast,
    /// What would still be other than the spec says when nothing is left to do, and why.
    pub left: Vec<String>,
}

/// Groups and policies of YAML or JSON files, groups as v1alpha2; `-` is the standard input. Also what was left out: other
/// objects, of which this says nothing.
///
/// # Errors
/// [`KubectlError::File`].
pub fn read_files(files: &[impl AsRef<Path>]) -> Result<(Vec<Value>, Vec<String>), KubectlError> {
    let mut found = Vec::new();
    let mut left_out = Vec::new();
    for path in files.iter().map(AsRef::as_ref) {
        let failed = |problem: &dyn std::fmt::Display| KubectlError::File {
            file: path.display().to_string(),
            problem: problem.to_string(),
        };
        let text = match path.as_os_str() == "-" {
            true => std::io::read_to_string(std::io::stdin()),
            false => std::fs::read_to_string(path),
        };
        let text = text.map_err(|error| failed(&error))?;
        let documents: Vec<Option<Value>> =
            serde_saphyr::from_multiple(&text).map_err(|error| failed(&error))?;
        for object in documents.into_iter().flatten() {
            match object["kind"].as_str().and_then(ResourceKind::parse) {
                Some(ResourceKind::Group) => found.push(current(object).map_err(|error| failed(&error))?),
                Some(ResourceKind::Policy) => found.push(object),
                _ => left_out.push(format!("{} {}", self::text(&object["kind"]), name(&object))),
            }
        }
    }
    Ok((found, left_out))
}

fn name(object: &Value) -> String {
    text(&object["metadata"]["name"])
}

/// What comes of a change of a group. `change` is given the group as it is, if it is; `policies` take the place of those that
/// are there. Nothing is written.
///
/// # Errors
/// What `change` says, [`KubectlError::Refused`], or why the cluster cannot be read.
pub async fn plan(
    cluster: &ClusterClient,
    group: &str,
    policies: &[Value],
    change: impl FnOnce(Option<Value>) -> Result<Value, KubectlError>,
) -> Result<PlanReport, KubectlError> {
    let live = cluster.find(group).await?;
    let mut wanted = change(live.clone())?;
    wanted["metadata"]["namespace"] = cluster.namespace.as_str().into();
    check(&wanted, live.as_ref())?;
    Ok(plan_report(cluster.group_snapshot(group).await?, live.as_ref(), wanted, policies))
}

/// What comes of it that a group, `live` until now, becomes `wanted`.
fn plan_report(family: GroupSnapshot, live: Option<&Value>, wanted: Value, policies: &[Value]) -> PlanReport {
    let (group, namespace) = (name(&wanted), text(&wanted["metadata"]["namespace"]));
    let mut server = family.server;
    put(&mut server, ResourceKind::Group, wanted);
    for policy in policies.iter().filter(|policy| name(policy) == group) {
        let mut policy = policy.clone();
        policy["metadata"]["namespace"] = namespace.as_str().into();
        put(&mut server, ResourceKind::Policy, policy);
    }
    let spec = |server: &SimulatedApiServer| {
        server.get(ResourceKind::Group, &group).map(|group| group["spec"].clone())
    };
    let changes = live.map(|live| differences(&live["spec"], &spec(&server).unwrap_or_default()));
    let forecast = forecast(&mut server, GangScheduler::default(), &family.absent);
    let left = server.get(ResourceKind::Group, &group).map(pending_conditions).unwrap_or_default();
    let (exists, changes) = (live.is_some(), changes.unwrap_or_default());
    PlanReport { namespace, group, exists, changes, forecast, left }
}

/// As `kubectl apply` does: labels and annotations of others stay, the spec is what the file says.
#[must_use]
pub fn apply_file(live: Option<Value>, file: &Value) -> Value {
    let Some(mut live) = live else { return file.clone() };
    for member in ["labels", "annotations"] {
        for (key, value) in file["metadata"][member].as_object().into_iter().flatten() {
            live["metadata"][member][key] = value.clone();
        }
    }
    live["spec"] = file["spec"].clone();
    live
}

fn put(server: &mut SimulatedApiServer, kind: ResourceKind, object: Value) {
    match server.get(kind, &name(&object)) {
        Some(live) => {
            let mut wanted = object;
            for member in ["uid", "generation", "resourceVersion", "creationTimestamp"] {
                wanted["metadata"][member] = live["metadata"][member].clone();
            }
            server.put(kind, wanted);
        }
        None => drop(server.create(kind, object)),
    }
}

/// What the operator's webhook would say.
fn check(wanted: &Value, live: Option<&Value>) -> Result<(), KubectlError> {
    let read = |object: &Value| {
        serde_json::from_value::<RoleBasedGroup>(object.clone())
            .map_err(|error| KubectlError::Unreadable(format!("the group cannot be read: {error}")))
    };
    let (wanted, live) = (read(wanted)?, live.map(read).transpose()?);
    let objections = validation::validate_group(&wanted, live.as_ref());
    match objections.is_empty() {
        true => Ok(()),
        false => {
            let texts: Vec<String> = objections.iter().map(ToString::to_string).collect();
            Err(KubectlError::Refused(texts.join("; ")))
        }
    }
}

/// What a group says at the end of what is still to come.
fn pending_conditions(group: &Value) -> Vec<String> {
    let mut left = Vec::new();
    let statuses = group["status"]["roleStatuses"].as_array().into_iter().flatten();
    for status in statuses {
        let roles = group["spec"]["roles"].as_array().into_iter().flatten();
        let Some(role) = roles.into_iter().find(|role| role["name"] == status["name"]) else { continue };
        let number = |member: &str| status[member].as_i64().unwrap_or(0);
        let old = number("replicas") - number("updatedReplicas");
        let rolling = &role["rolloutStrategy"]["rollingUpdate"];
        let why =
            if rolling["paused"] == true { "the role is paused" } else { "a partition holds them back" };
        if old > 0 {
            let kept = count(usize::try_from(old).unwrap_or(0), "instance");
            left.push(format!(
                "{}: {kept} of {} not updated: {why}",
                text(&status["name"]),
                number("replicas")
            ));
        }
    }
    let conditions = group["status"]["conditions"].as_array().into_iter().flatten();
    for condition in conditions.filter(|one| one["type"] == "Ready" && one["status"] != "True") {
        left.push(text(&condition["message"]));
    }
    left
}

impl PlanReport {
    /// Whether nothing would be done.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.forecast.steps.is_empty() && self.forecast.problems.is_empty()
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{} in {}: {}\n", self.group, self.namespace, self.headline());
        let mut part = |head: &str, lines: String| {
            if !lines.is_empty() {
                text.push_str(&format!("\n{head}\n{}", indented(&lines)));
            }
        };
        part("Changes", summary(&self.changes).join("\n"));
        part("Steps", self.steps());
        part("Roles", self.roles());
        part("Still to come", self.left.join("\n"));
        part("Problems", self.forecast.problems.join("\n"));
        text
    }

    fn headline(&self) -> String {
        let of = |what: StepEffect| {
            let pods = self.forecast.steps.iter().filter(|step| step.kind == ResourceKind::Pod.name());
            pods.filter(|step| step.what == what).count()
        };
        let (restarted, made, ended) =
            (of(StepEffect::RestartInPlace), of(StepEffect::Create), of(StepEffect::Delete));
        let replaced = self.forecast.steps.iter().filter(|step| step.what == StepEffect::ReplacePods).count();
        let mut parts = Vec::new();
        for (number, words) in [(restarted, "restarted in place"), (made, "made"), (ended, "ended")] {
            if number > 0 {
                parts.push(format!("{} {words}", count(number, "pod")));
            }
        }
        if replaced > 0 {
            parts.push(format!("pods of {} replaced by their own controllers", count(replaced, "workload")));
        }
        match (self.is_nothing(), parts.is_empty()) {
            (true, _) => "nothing to do".to_owned(),
            (false, true) => "no pod restarts".to_owned(),
            (false, false) => parts.join(", "),
        }
    }

    fn steps(&self) -> String {
        if self.forecast.steps.is_empty() {
            return String::new();
        }
        let row = |(index, step): (usize, &ForecastStep)| {
            let images =
                step.images.iter().map(|one| format!("{}: {} -> {}", one.container, one.from, one.to));
            let why = images.fold(step.reason.clone(), |why, image| format!("{why}; {image}"));
            let later =
                if step.waited_seconds > 0 { format!("+{}s", step.waited_seconds) } else { String::new() };
            vec![
                (index + 1).to_string(),
                later,
                step.what.as_str().to_owned(),
                step.kind.to_owned(),
                step.name.clone(),
                step.role.clone(),
                why,
            ]
        };
        let rows: Vec<Vec<String>> = self.forecast.steps.iter().enumerate().map(row).collect();
        table(&["#", "WAITED", "WHAT", "KIND", "NAME", "ROLE", "WHY"], &rows)
    }

    fn roles(&self) -> String {
        let rows = self.forecast.roles.iter().map(|role| {
            let numbers = [role.pods, role.restarted, role.made, role.ended, role.out_of_service];
            std::iter::once(role.name.clone()).chain(numbers.map(|number| number.to_string())).collect()
        });
        let rows: Vec<Vec<String>> = rows.collect();
        if rows.is_empty() {
            return String::new();
        }
        table(&["ROLE", "PODS", "RESTARTED", "MADE", "ENDED", "OUT OF SERVICE AT A TIME"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    fn group(image: &str, args: &[&str]) -> Value {
        let role = |name: &str, container: Value| {
            json!({ "name": name, "replicas": 2, "standalonePattern": { "template": { "spec": {
                "containers": [container] } } } })
        };
        let store = json!({ "name": "store", "image": image });
        let router = json!({ "name": "router", "image": "r:1", "args": args });
        json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
            "metadata": { "name": "g", "namespace": "n" },
            "spec": { "roles": [role("store", store), role("router", router)] } })
    }

    #[test]
    fn people_are_told_what_restarts_in_which_order_and_why() {
        let mut server = SimulatedApiServer::new(Timestamp::from_second(1_790_000_000).unwrap());
        server.create(ResourceKind::Group, group("s:1", &[]));
        assert!(forecast(&mut server, GangScheduler::default(), &[]).problems.is_empty());
        let live = server.get(ResourceKind::Group, "g").unwrap().clone();
        let family = GroupSnapshot { server, absent: Vec::new() };
        let text = plan_report(family.clone(), Some(&live), group("s:2", &[]), &[]).text();
        let expected = "\
g in n: 2 pods restarted in place

Changes
  store: s:1 -> s:2

Steps
  #  WAITED  WHAT              KIND  NAME       ROLE   WHY
  1  -       restart in place  Pod   g-store-1  store  only images differ; store: s:1 -> s:2
  2  -       restart in place  Pod   g-store-0  store  only images differ; store: s:1 -> s:2

Roles
  ROLE    PODS  RESTARTED  MADE  ENDED  OUT OF SERVICE AT A TIME
  router  2     0          0     0      0
  store   2     2          0     0      1
";
        assert_eq!(text, expected);
        let nothing = plan_report(family.clone(), Some(&live), live.clone(), &[]);
        assert!(nothing.is_nothing() && nothing.text().starts_with("g in n: nothing to do\n"));
        let other = plan_report(family, Some(&live), group("s:1", &["-v"]), &[]).text();
        assert!(other.starts_with("g in n: 2 pods made, 2 pods ended\n"), "{other}");
        assert!(other.contains("router: 1 member"), "{other}");
    }

    #[test]
    fn file_replaces_spec_and_keeps_fields_of_other_managers() {
        let mut live = group("s:1", &[]);
        live["metadata"]["labels"] = json!({ "theirs": "x" });
        let mut file = group("s:2", &[]);
        file["metadata"]["labels"] = json!({ "ours": "y" });
        let applied = apply_file(Some(live), &file);
        assert_eq!(applied["metadata"]["labels"], json!({ "theirs": "x", "ours": "y" }));
        assert_eq!(applied["spec"], file["spec"]);
    }
}
