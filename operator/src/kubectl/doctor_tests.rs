//! A cluster in which all is well, and what is said when something is not.

use serde_json::json;

use super::doctor::{CONVERTED, DEFINITIONS, DoctorSnapshot, findings_text};

/// A cluster in which all is well.
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
        groups: Ok(vec![("demo".to_owned(), Vec::new())]),
    }
}

fn faults(seen: &DoctorSnapshot, now: &str) -> Vec<String> {
    let findings = seen.findings(now.parse().unwrap());
    let faults = findings.into_iter().filter(|finding| finding.is_fault);
    faults.map(|fault| format!("{}: {}", fault.about, fault.what)).collect()
}

const NOW: &str = "2026-01-01T00:00:10Z";

#[test]
fn a_cluster_that_is_well_has_no_fault() {
    assert_eq!(faults(&healthy_snapshot(), NOW), Vec::<String>::new());
    let text = findings_text(&healthy_snapshot().findings(NOW.parse().unwrap()));
    assert!(text.ends_with("\nNothing is wrong.\n"), "{text}");
    assert!(text.contains("  ok    conversion of rolebasedgroups: 1 endpoint of rbgs/webhooks\n"), "{text}");
}

#[test]
fn each_fault_is_found() {
    let late = faults(&healthy_snapshot(), "2026-01-01T00:01:00Z");
    assert_eq!(late.len(), 1, "{late:?}");
    assert!(late[0].starts_with("operator: the Lease has run out"), "{late:?}");

    let mut seen = healthy_snapshot();
    seen.endpoints = Ok(Vec::new());
    let unheard = faults(&seen, NOW);
    assert_eq!(unheard.len(), 3, "two conversions and a check of groups: {unheard:?}");

    let mut seen = healthy_snapshot();
    let all = seen.definitions.as_mut().unwrap();
    all.retain(|definition| definition["metadata"]["name"] != "instances.workloads.x-k8s.io");
    assert_eq!(faults(&seen, NOW), Vec::<String>::new(), "upstream does not have it");
    let all = seen.definitions.as_mut().unwrap();
    all.retain(|definition| definition["metadata"]["name"] != "roleinstances.workloads.x-k8s.io");
    assert_eq!(faults(&seen, NOW), ["definitions: missing: instances, roleinstances"]);

    let mut seen = healthy_snapshot();
    let groups = seen.definitions.as_mut().unwrap();
    groups[4]["spec"]["conversion"] = json!({"strategy": "None"});
    assert_eq!(faults(&seen, NOW), ["definitions: rolebasedgroups has 2 versions and nobody converts them"]);

    let mut seen = healthy_snapshot();
    let leases = seen.leases.as_mut().unwrap();
    let mut other = leases[0].clone();
    other["metadata"]["namespace"] = json!("rbg-system");
    leases.push(other);
    assert!(faults(&seen, NOW)[0].starts_with("operator: 2 operators work"));

    let mut seen = healthy_snapshot();
    seen.leases = Err("forbidden".to_owned());
    seen.groups = Ok(vec![("demo".to_owned(), vec!["role store: 1 of 3 ready".to_owned()])]);
    let both = faults(&seen, NOW);
    assert_eq!(
        both,
        ["operator: cannot be looked at: forbidden", "groups: demo is not ready: role store: 1 of 3 ready"]
    );
}
