//! Doctor checks on a healthy cluster, and on one with each problem.

use kube::core::Status;
use serde_json::json;

use super::doctor::{CONVERTED, DEFINITIONS, DoctorGroup, DoctorSnapshot, findings_text};

fn healthy_snapshot() -> DoctorSnapshot {
    let service = json!({"service": {"namespace": "rbgs", "name": "webhooks"}});
    let definitions = DEFINITIONS.map(|plural| match CONVERTED.contains(&plural) {
        true => json!({
            "metadata": {"name": format!("{plural}.workloads.x-k8s.io")},
            "spec": {"versions": [{}, {}], "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": service}}},
        }),
        false => json!({"metadata": {"name": format!("{plural}.workloads.x-k8s.io")}, "spec": {"versions": [{}]}}),
    });
    let lease = json!({
        "metadata": {"namespace": "rbgs"},
        "spec": {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"},
    });
    let slice = json!({
        "metadata": {"namespace": "rbgs", "labels": {"kubernetes.io/service-name": "webhooks"}},
        "endpoints": [{"conditions": {"ready": true}}, {"conditions": {"ready": false}}],
    });
    DoctorSnapshot {
        definitions: Ok(definitions.into()),
        leases: Ok(vec![lease]),
        webhooks: Ok(vec![json!({"webhooks": [{"name": "v.kb.io", "clientConfig": service}]})]),
        endpoints: Ok(vec![slice]),
        groups: Ok(vec![DoctorGroup { name: "demo".to_owned(), ..DoctorGroup::default() }]),
    }
}

fn problems(snapshot: &DoctorSnapshot, now: &str) -> Vec<String> {
    let findings = snapshot.findings(now.parse().unwrap());
    let problems = findings.into_iter().filter(|finding| finding.is_problem);
    problems.map(|finding| format!("{}: {}", finding.check, finding.message)).collect()
}

const NOW: &str = "2026-01-01T00:00:10Z";

#[test]
fn a_healthy_cluster_has_no_problems() {
    assert_eq!(problems(&healthy_snapshot(), NOW), Vec::<String>::new());
    let text = findings_text(&healthy_snapshot().findings(NOW.parse().unwrap()));
    assert!(text.ends_with("\nNo problems found.\n"), "{text}");
    assert!(text.contains("  ok    conversion of rolebasedgroups: 1 endpoint of rbgs/webhooks\n"), "{text}");
}

#[test]
fn each_problem_is_found() {
    let late = problems(&healthy_snapshot(), "2026-01-01T00:01:00Z");
    assert_eq!(late.len(), 1, "{late:?}");
    assert!(late[0].starts_with("operator: the Lease has expired"), "{late:?}");

    let mut snapshot = healthy_snapshot();
    snapshot.endpoints = Ok(Vec::new());
    let without_endpoints = problems(&snapshot, NOW);
    assert_eq!(
        without_endpoints.len(),
        3,
        "two conversions and the validation of groups: {without_endpoints:?}"
    );

    let mut snapshot = healthy_snapshot();
    let all = snapshot.definitions.as_mut().unwrap();
    all.retain(|definition| definition["metadata"]["name"] != "instances.workloads.x-k8s.io");
    assert_eq!(problems(&snapshot, NOW), Vec::<String>::new(), "upstream does not have it");
    let all = snapshot.definitions.as_mut().unwrap();
    all.retain(|definition| definition["metadata"]["name"] != "roleinstances.workloads.x-k8s.io");
    assert_eq!(problems(&snapshot, NOW), ["definitions: missing: instances, roleinstances"]);

    let mut snapshot = healthy_snapshot();
    let groups = snapshot.definitions.as_mut().unwrap();
    groups[4]["spec"]["conversion"] = json!({"strategy": "None"});
    assert_eq!(
        problems(&snapshot, NOW),
        ["definitions: rolebasedgroups has 2 versions and no conversion webhook"]
    );

    let mut snapshot = healthy_snapshot();
    let leases = snapshot.leases.as_mut().unwrap();
    let mut other = leases[0].clone();
    other["metadata"]["namespace"] = json!("rbg-system");
    leases.push(other);
    assert!(problems(&snapshot, NOW)[0].starts_with("operator: 2 operators lead"));

    let mut snapshot = healthy_snapshot();
    let forbidden = Status::failure("forbidden", "Forbidden");
    snapshot.leases = Err(kube::Error::Api(Box::new(forbidden)).into());
    snapshot.groups = Ok(vec![DoctorGroup {
        name: "demo".to_owned(),
        waiting_for: vec!["role store: 1 of 3 ready".to_owned()],
        fault: Some("demo-a-0 failed".to_owned()),
    }]);
    let found = problems(&snapshot, NOW);
    assert_eq!(
        found,
        [
            "operator: cannot be listed: forbidden",
            "groups: demo has a fault: demo-a-0 failed",
            "groups: demo is not ready: role store: 1 of 3 ready"
        ]
    );
}
