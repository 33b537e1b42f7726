//! Preview of a change of a group.

use std::path::Path;

use moongate_render::{GangPolicy, GangScheduler};
use rbg_api::conversion::{fold_mirrors, without_mirrors};
use rbg_api::v1alpha2::{CoordinatedPolicySpec, RoleBasedGroup};
use serde::{Deserialize as _, Serialize};
use serde_json::Value;

use super::cluster::{ClusterClient, GroupSnapshot, current};
use super::differences::{FieldDifference, differences, summary};
use super::edit::text;
use super::error::{KubectlError, ManifestFileError};
use super::output_format::{count, indented, table};
use crate::forecast::{ForecastStep, RolloutForecast, SimulatedApiServer, StepEffect, forecast};
use crate::{ResourceKind, SizeLimits, validation};

/// Preview of a change: differences and rollout forecast.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    pub namespace: String,
    pub group: String,
    /// Whether the group exists already.
    pub exists: bool,
    /// Differences from the present spec.
    pub changes: Vec<FieldDifference>,
    /// Forecast of the resulting rollout.
    #[serde(flatten)]
    pub forecast: RolloutForecast,
    /// Reasons for which the group will not fully match its spec at the end of the rollout.
    pub remaining: Vec<String>,
}

/// Reads groups and policies from YAML or JSON files, groups as v1alpha2; `-` is the standard input. The second list names
/// skipped objects of other kinds.
///
/// # Errors
/// [`KubectlError::File`].
pub fn read_files(files: &[impl AsRef<Path>]) -> Result<(Vec<Value>, Vec<String>), KubectlError> {
    let mut found = Vec::new();
    let mut skipped = Vec::new();
    for path in files.iter().map(AsRef::as_ref) {
        let failed =
            |source: ManifestFileError| KubectlError::File { file: path.display().to_string(), source };
        let text = match path.as_os_str() == "-" {
            true => std::io::read_to_string(std::io::stdin()),
            false => std::fs::read_to_string(path),
        };
        let text = text.map_err(|error| failed(error.into()))?;
        let documents: Vec<Option<Value>> =
            serde_saphyr::from_multiple(&text).map_err(|error| failed(Box::new(error).into()))?;
        for object in documents.into_iter().flatten() {
            match object["kind"].as_str().and_then(ResourceKind::parse) {
                Some(ResourceKind::Group) => {
                    found.push(current(&object).map_err(|error| failed(error.into()))?);
                }
                Some(ResourceKind::Policy) => found.push(object),
                _ => skipped.push(format!("{} {}", self::text(&object["kind"]), name(&object))),
            }
        }
    }
    Ok((found, skipped))
}

fn name(object: &Value) -> String {
    text(&object["metadata"]["name"])
}

/// Previews a change of a group. `change` gets the present group, if it exists; `policies` replace existing ones. Writes
/// nothing.
///
/// # Errors
/// The error of `change`, [`KubectlError::Refused`], or an error of reading the cluster.
pub async fn plan(
    cluster: &ClusterClient,
    group: &str,
    policies: &[Value],
    change: impl FnOnce(Option<Value>) -> Result<Value, KubectlError>,
) -> Result<PlanReport, KubectlError> {
    let live = cluster.find(group).await?;
    let mut wanted = change(live.clone())?;
    wanted["metadata"]["namespace"] = cluster.namespace.as_str().into();
    fold_mirrors(&mut wanted);
    check(&wanted, live.as_ref())?;
    Ok(plan_report(cluster.group_snapshot(group).await?, live.as_ref(), wanted, policies))
}

/// Preview of changing a group from `live` to `wanted`.
fn plan_report(
    snapshot: GroupSnapshot,
    live: Option<&Value>,
    wanted: Value,
    policies: &[Value],
) -> PlanReport {
    let (group, namespace) = (name(&wanted), text(&wanted["metadata"]["namespace"]));
    let mut server = snapshot.server;
    put(&mut server, ResourceKind::Group, wanted);
    for policy in policies.iter().filter(|policy| name(policy) == group) {
        let mut policy = policy.clone();
        policy["metadata"]["namespace"] = namespace.as_str().into();
        put(&mut server, ResourceKind::Policy, policy);
    }
    let after = server.get(ResourceKind::Group, &group).map(without_mirrors).unwrap_or_default();
    let changes = live.map(|live| differences(&without_mirrors(live)["spec"], &after["spec"]));
    let scheduler = gang_scheduler(&server, &group, &snapshot.absent);
    let forecast = forecast(&mut server, scheduler, &snapshot.absent);
    let remaining = server.get(ResourceKind::Group, &group).map(pending_conditions).unwrap_or_default();
    let (exists, changes) = (live.is_some(), changes.unwrap_or_default());
    PlanReport { namespace, group, exists, changes, forecast, remaining }
}

/// The scheduler of gangs that the operator uses: that of the group's PodGroup, or the only one that can form the gang of its policy, or
/// the only one whose PodGroups the cluster serves.
fn gang_scheduler(server: &SimulatedApiServer, group: &str, absent: &[ResourceKind]) -> GangScheduler {
    let has_minimums = || {
        let spec = &server.get(ResourceKind::Policy, group)?["spec"];
        let policy = CoordinatedPolicySpec::deserialize(spec).ok()?;
        Some(GangPolicy::resolve(&policy).ok()??.has_minimums())
    };
    let is_only_kind =
        absent.contains(&ResourceKind::PodGroup) && !absent.contains(&ResourceKind::VolcanoPodGroup);
    let exists = |kind| server.get(kind, group).is_some();
    if exists(ResourceKind::PodGroup) {
        GangScheduler::SchedulerPlugins
    } else if exists(ResourceKind::VolcanoPodGroup) || is_only_kind || has_minimums() == Some(true) {
        GangScheduler::Volcano
    } else {
        GangScheduler::default()
    }
}

/// Merges a file into the group as `kubectl apply` does: other labels and annotations stay, the spec is replaced.
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

/// Runs the checks of the validating webhook.
fn check(wanted: &Value, live: Option<&Value>) -> Result<(), KubectlError> {
    let read = |object: &Value| {
        serde_json::from_value::<RoleBasedGroup>(object.clone()).map_err(KubectlError::InvalidGroup)
    };
    let (wanted, live) = (read(wanted)?, live.map(read).transpose()?);
    let errors = validation::validate_group(&wanted, live.as_ref(), SizeLimits::default());
    if errors.is_empty() { Ok(()) } else { Err(KubectlError::Refused(errors)) }
}

/// Reasons in the group's status for which it does not fully match its spec.
fn pending_conditions(group: &Value) -> Vec<String> {
    let mut remaining = Vec::new();
    let statuses = group["status"]["roleStatuses"].as_array().into_iter().flatten();
    for status in statuses {
        let roles = group["spec"]["roles"].as_array().into_iter().flatten();
        let Some(role) = roles.into_iter().find(|role| role["name"] == status["name"]) else { continue };
        let number = |member: &str| status[member].as_i64().unwrap_or(0);
        let old = number("replicas") - number("updatedReplicas");
        let rolling = &role["rolloutStrategy"]["rollingUpdate"];
        let reason = if rolling["paused"] == true {
            "the role is paused"
        } else {
            "a partition keeps them at their revision"
        };
        if old > 0 {
            let instances = count(usize::try_from(old).unwrap_or(0), "instance");
            remaining.push(format!(
                "{}: {instances} of {} not updated: {reason}",
                text(&status["name"]),
                number("replicas")
            ));
        }
    }
    let conditions = group["status"]["conditions"].as_array().into_iter().flatten();
    for condition in conditions.filter(|one| one["type"] == "Ready" && one["status"] != "True") {
        remaining.push(text(&condition["message"]));
    }
    remaining
}

impl PlanReport {
    /// Whether the change has no effect.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.forecast.steps.is_empty() && self.forecast.problems.is_empty()
    }

    /// Text format of the preview.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{} in {}: {}\n", self.group, self.namespace, self.headline());
        let mut section = |head: &str, lines: String| {
            if !lines.is_empty() {
                text.push_str(&format!("\n{head}\n{}", indented(&lines)));
            }
        };
        section("Changes", summary(&self.changes).join("\n"));
        section("Steps", self.steps());
        section("Roles", self.roles());
        section("Ready pods with old + new images", self.version_mixes());
        section("Remaining", self.remaining.join("\n"));
        section("Problems", self.forecast.problems.join("\n"));
        text
    }

    fn headline(&self) -> String {
        let count_pods = |effect: StepEffect| {
            let pods = self.forecast.steps.iter().filter(|step| step.kind == ResourceKind::Pod.name());
            pods.filter(|step| step.effect == effect).count()
        };
        let (restarted, created, deleted) = (
            count_pods(StepEffect::RestartInPlace),
            count_pods(StepEffect::Create),
            count_pods(StepEffect::Delete),
        );
        // The pods of StatefulSets are counted one by one.
        let is_replaced = |step: &&ForecastStep| {
            step.effect == StepEffect::ReplacePods && step.kind != ResourceKind::StatefulSet.name()
        };
        let replaced = self.forecast.steps.iter().filter(is_replaced).count();
        let mut parts = Vec::new();
        for (number, words) in [(restarted, "restarted in place"), (created, "created"), (deleted, "deleted")]
        {
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
            let reason = images.fold(step.reason.clone(), |reason, image| format!("{reason}; {image}"));
            let delay =
                if step.delay_seconds > 0 { format!("+{}s", step.delay_seconds) } else { String::new() };
            vec![
                (index + 1).to_string(),
                delay,
                step.effect.as_str().to_owned(),
                step.kind.to_owned(),
                step.name.clone(),
                step.role.clone(),
                reason,
            ]
        };
        let rows: Vec<Vec<String>> = self.forecast.steps.iter().enumerate().map(row).collect();
        table(&["#", "DELAY", "EFFECT", "KIND", "NAME", "ROLE", "REASON"], &rows)
    }

    fn roles(&self) -> String {
        let rows = self.forecast.roles.iter().map(|role| {
            let numbers = [role.pods, role.restarted, role.created, role.deleted, role.out_of_service];
            std::iter::once(role.name.clone()).chain(numbers.map(|number| number.to_string())).collect()
        });
        let rows: Vec<Vec<String>> = rows.collect();
        if rows.is_empty() {
            return String::new();
        }
        table(&["ROLE", "PODS", "RESTARTED", "CREATED", "DELETED", "MAX OUT OF SERVICE"], &rows)
    }

    fn version_mixes(&self) -> String {
        let Some(first) = self.forecast.version_mixes.first() else { return String::new() };
        let delay = |seconds: i64| if seconds > 0 { format!("+{seconds}s") } else { String::new() };
        let rows: Vec<Vec<String>> = self
            .forecast
            .version_mixes
            .iter()
            .map(|mix| {
                let counts = mix.ready.values().map(|ready| format!("{} + {}", ready.old, ready.new));
                std::iter::once(delay(mix.delay_seconds)).chain(counts).collect()
            })
            .collect();
        let roles: Vec<String> = first.ready.keys().map(|role| role.to_uppercase()).collect();
        let header: Vec<&str> = std::iter::once("DELAY").chain(roles.iter().map(String::as_str)).collect();
        table(&header, &rows)
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
    fn text_lists_restarts_in_order_with_reasons() {
        let mut server = SimulatedApiServer::new(Timestamp::from_second(1_790_000_000).unwrap());
        server.create(ResourceKind::Group, group("s:1", &[]));
        assert!(forecast(&mut server, GangScheduler::default(), &[]).problems.is_empty());
        let live = server.get(ResourceKind::Group, "g").unwrap().clone();
        let snapshot = GroupSnapshot { server, absent: Vec::new() };
        let text = plan_report(snapshot.clone(), Some(&live), group("s:2", &[]), &[]).text();
        let expected = "\
g in n: 2 pods restarted in place

Changes
  store: s:1 -> s:2

Steps
  #  DELAY  EFFECT            KIND  NAME       ROLE   REASON
  1  -      restart in place  Pod   g-store-1  store  only images differ; store: s:1 -> s:2
  2  -      restart in place  Pod   g-store-0  store  only images differ; store: s:1 -> s:2

Roles
  ROLE    PODS  RESTARTED  CREATED  DELETED  MAX OUT OF SERVICE
  router  2     0          0        0        0
  store   2     2          0        0        1
";
        assert_eq!(text, expected);
        let nothing = plan_report(snapshot.clone(), Some(&live), live.clone(), &[]);
        assert!(nothing.is_nothing() && nothing.text().starts_with("g in n: nothing to do\n"));
        let other = plan_report(snapshot, Some(&live), group("s:1", &["-v"]), &[]).text();
        assert!(other.starts_with("g in n: 2 pods created, 2 pods deleted\n"), "{other}");
        assert!(other.contains("router: 1 field"), "{other}");
    }

    #[test]
    fn the_forecast_is_for_the_clusters_scheduler_of_gangs() {
        let (plugins, volcano) = (ResourceKind::PodGroup, ResourceKind::VolcanoPodGroup);
        let server = |kind: ResourceKind, spec: Value| {
            let mut server = SimulatedApiServer::new(Timestamp::from_second(1_790_000_000).unwrap());
            server.create(kind, json!({ "metadata": { "name": "g", "namespace": "n" }, "spec": spec }));
            server
        };
        let policy = |gang: Value| {
            let rule =
                json!({ "name": "p", "roles": ["store"], "strategy": { "scheduling": { "gang": gang } } });
            server(ResourceKind::Policy, json!({ "policies": [rule] }))
        };
        let minimums = json!({ "minReplicas": { "store": 1 } });
        for (server, absent, expected) in [
            (policy(json!({})), vec![], GangScheduler::SchedulerPlugins),
            (policy(json!({})), vec![plugins], GangScheduler::Volcano),
            (policy(json!({})), vec![plugins, volcano], GangScheduler::SchedulerPlugins),
            (policy(minimums), vec![], GangScheduler::Volcano),
            (server(volcano, json!({})), vec![], GangScheduler::Volcano),
            (server(plugins, json!({})), vec![plugins], GangScheduler::SchedulerPlugins),
        ] {
            assert_eq!(gang_scheduler(&server, "g", &absent), expected, "{absent:?}");
        }
    }

    #[test]
    fn file_replaces_spec_and_keeps_fields_of_other_managers() {
        let mut live = group("s:1", &[]);
        live["metadata"]["labels"] = json!({ "other": "x" });
        let mut file = group("s:2", &[]);
        file["metadata"]["labels"] = json!({ "own": "y" });
        let applied = apply_file(Some(live), &file);
        assert_eq!(applied["metadata"]["labels"], json!({ "other": "x", "own": "y" }));
        assert_eq!(applied["spec"], file["spec"]);
    }
}
