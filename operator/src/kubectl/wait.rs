//! Waits for a rollout to complete.

use std::time::Duration;

use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::Value;
use tokio::time::Instant;

use super::KubectlError;
use super::cluster::ClusterClient;
use super::edit::text;
use crate::status;

/// Interval between two reads of the group.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Progress of a group's rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolloutProgress {
    /// The group matches its spec.
    Done,
    /// Unfinished roles, one line each.
    InProgress(Vec<String>),
    /// The rollout cannot proceed without a change by the user.
    Stuck(String),
}

impl RolloutProgress {
    /// Progress according to the status of a v1alpha2 group.
    #[must_use]
    pub fn for_group(group: &Value) -> Self {
        let typed: Option<RoleBasedGroup> = serde_json::from_value(group.clone()).ok();
        let conditions = || group["status"]["conditions"].as_array().into_iter().flatten();
        let is_observed = group["status"]["observedGeneration"] == group["metadata"]["generation"];
        let refused = conditions().find(|one| {
            let reasons = [status::INVALID_SPEC, status::LIMIT_EXCEEDED, status::INCOMPATIBLE_GANG];
            reasons.iter().any(|reason| one["reason"] == *reason) && one["type"] == "Ready"
        });
        if let Some(refused) = refused.filter(|_| is_observed) {
            return Self::Stuck(text(&refused["message"]));
        }
        if !is_observed {
            return Self::InProgress(vec!["the operator has not observed the change yet".to_owned()]);
        }
        let roles: Vec<(bool, String)> = unfinished_roles(group);
        if roles.is_empty() && typed.as_ref().is_some_and(status::is_group_settled) {
            return Self::Done;
        }
        if !roles.is_empty() && roles.iter().all(|(is_paused, _)| *is_paused) {
            let lines: Vec<String> = roles.into_iter().map(|(_, line)| line).collect();
            return Self::Stuck(format!("{}; resume with `rollout resume`", lines.join("; ")));
        }
        Self::InProgress(roles.into_iter().map(|(_, line)| line).collect())
    }
}

/// Unfinished roles: whether a pause is the only cause, and a text line.
fn unfinished_roles(group: &Value) -> Vec<(bool, String)> {
    let mut unfinished = Vec::new();
    for role in group["spec"]["roles"].as_array().into_iter().flatten() {
        let statuses = group["status"]["roleStatuses"].as_array().into_iter().flatten();
        let status = statuses.into_iter().find(|status| status["name"] == role["name"]);
        let number = |member: &str| status.and_then(|status| status[member].as_i64()).unwrap_or(0);
        let wanted = role["replicas"].as_i64().unwrap_or(1);
        let rolling = &role["rolloutStrategy"]["rollingUpdate"];
        let partitioned = match &rolling["partition"] {
            Value::Number(partition) => partition.as_i64().unwrap_or(0).min(wanted),
            Value::String(_) => wanted,
            _ => 0,
        };
        let is_old = number("updatedReplicas") < wanted - partitioned;
        if number("readyReplicas") >= wanted && number("replicas") == wanted && !is_old {
            continue;
        }
        let is_paused = rolling["paused"] == true && is_old;
        let surplus = match number("replicas") - wanted {
            more @ 1.. => format!(", {more} to be removed"),
            _ => String::new(),
        };
        let line = format!(
            "{}: {} of {wanted} updated, {} ready{surplus}{}",
            text(&role["name"]),
            number("updatedReplicas"),
            number("readyReplicas"),
            if is_paused { ", paused" } else { "" }
        );
        unfinished.push((is_paused, line));
    }
    unfinished
}

/// Waits until the group matches its spec, and calls `report` on each change of the progress.
///
/// # Errors
/// [`KubectlError::TimedOut`], also if the rollout cannot proceed; or an error of reading the cluster.
pub async fn wait(
    cluster: &ClusterClient,
    group: &str,
    limit: Duration,
    mut report: impl FnMut(&[String]),
) -> Result<(), KubectlError> {
    let started = Instant::now();
    let mut reported = Vec::new();
    loop {
        match RolloutProgress::for_group(&cluster.group(group).await?) {
            RolloutProgress::Done => return Ok(()),
            RolloutProgress::Stuck(why) => return Err(KubectlError::TimedOut(why)),
            RolloutProgress::InProgress(lines) => {
                if lines != reported {
                    report(&lines);
                    reported = lines;
                }
            }
        }
        if started.elapsed() >= limit {
            return Err(KubectlError::TimedOut(reported.join("; ")));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn group(updated: i32, paused: bool) -> Value {
        let rolling_update = if updated < 3 { "True" } else { "False" };
        json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
            "metadata": { "name": "g", "generation": 2 },
            "spec": { "roles": [{ "name": "a", "replicas": 3,
                "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "paused": paused } } }] },
            "status": { "observedGeneration": 2,
                "roleStatuses": [{ "name": "a", "replicas": 3, "readyReplicas": 3, "updatedReplicas": updated }],
                "conditions": [{ "type": "Ready", "status": "True" },
                    { "type": "RollingUpdateInProgress", "status": rolling_update }] } })
    }

    #[test]
    fn a_group_is_done_when_all_roles_are() {
        assert_eq!(RolloutProgress::for_group(&group(3, false)), RolloutProgress::Done);
        let unfinished = RolloutProgress::for_group(&group(1, false));
        assert_eq!(unfinished, RolloutProgress::InProgress(vec!["a: 1 of 3 updated, 3 ready".to_owned()]));
        let RolloutProgress::Stuck(why) = RolloutProgress::for_group(&group(1, true)) else {
            unreachable!("{unfinished:?}")
        };
        assert!(why.contains("paused"), "{why}");
        let mut shrinking = group(3, false);
        shrinking["spec"]["roles"][0]["replicas"] = 1.into();
        let lines =
            RolloutProgress::InProgress(vec!["a: 3 of 1 updated, 3 ready, 2 to be removed".to_owned()]);
        assert_eq!(RolloutProgress::for_group(&shrinking), lines);
        let mut unobserved = group(3, false);
        unobserved["metadata"]["generation"] = 3.into();
        assert!(matches!(RolloutProgress::for_group(&unobserved), RolloutProgress::InProgress(_)));
    }
}
