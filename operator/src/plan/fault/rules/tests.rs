//! Validation of fault recovery, and what it makes instances watch.

use serde_json::{Value, json};

use super::*;

fn policy(recoveries: Value) -> CoordinatedPolicySpec {
    let recoveries = recoveries.as_array().unwrap().iter().enumerate();
    let rules: Vec<Value> = recoveries
        .map(|(index, recovery)| {
            json!({ "name": format!("p{index}"), "roles": ["prefill", "decode"],
                "strategy": { "faultRecovery": recovery } })
        })
        .collect();
    serde_json::from_value(json!({ "policies": rules })).unwrap()
}

fn link(from: &str, to: &str, action: &str, extra: Value) -> Value {
    let mut link =
        json!({ "when": { "role": from }, "scope": "Ordinal", "then": [{ "role": to, "action": action }] });
    link.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    link
}

fn error(recoveries: Value) -> String {
    FaultRules::resolve(&policy(recoveries), Some(&[])).unwrap_err().to_string()
}

fn group(annotations: Value) -> RoleBasedGroup {
    let role = |name: &str, annotations: &Value| json!({ "name": name, "annotations": annotations, "standalonePattern": { "template": {} } });
    let roles = json!([role("prefill", &json!({})), role("decode", &annotations)]);
    serde_json::from_value(json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } })).unwrap()
}

#[test]
fn roles_may_be_linked_both_ways() {
    let both = json!([{ "links": [
        link("prefill", "decode", "Restart", json!({})),
        link("decode", "prefill", "Replace", json!({ "when": { "role": "decode", "conditions": ["Failed"] } })),
    ], "unreadySeconds": 90, "nodeLostSeconds": 20 }]);
    let rules = FaultRules::for_group(&policy(both), &group(json!({})), Some(&[])).unwrap();
    let prefill = rules.watched("prefill").unwrap();
    assert_eq!(prefill.conditions, FaultCondition::ALL.into());
    assert_eq!(prefill.node_lost_after, Some(Duration::from_secs(20)));
    let decode = rules.watched("decode").unwrap();
    assert_eq!(decode.conditions, [FaultCondition::Failed].into());
    assert_eq!((decode.node_lost_after, decode.unready_after), (None, Some(Duration::from_secs(90))));
    assert_eq!(rules.watched("router"), None);
}

#[test]
fn domains_are_levels_or_labels() {
    let of = |domain: &str, levels: &[TopologyKey]| {
        FaultRules::resolve(&policy(json!([{ "replacementDomain": domain }])), Some(levels))
            .map(|rules| rules.0[0].replacement.clone().unwrap())
    };
    assert_eq!(of("nvlink-domain", &[]).unwrap(), "nvidia.com/gpu.clique");
    assert_eq!(of("example.com/chassis", &[]).unwrap(), "example.com/chassis");
    let rack = TopologyKey { level: TopologyLevel::Rack, label: "example.com/rack".to_owned() };
    assert_eq!(of("rack", &[rack]).unwrap(), "example.com/rack");
    let unlabelled = of("rack", &[]).unwrap_err().to_string();
    assert!(unlabelled.contains("the level `rack` has no node label"), "{unlabelled}");
    let scoped = json!([{ "replacementDomain": "zone", "links": [link("prefill", "decode", "Drain", json!({ "scope": "Domain" }))] }]);
    let rules = FaultRules::resolve(&policy(scoped), Some(&[])).unwrap();
    assert_eq!(rules.0[0].links[0].scope, LinkScope::Domain("topology.kubernetes.io/zone".to_owned()));
}

#[test]
fn each_mistake_in_a_policy_has_an_error() {
    let restart = |extra: Value| link("prefill", "decode", "Restart", extra);
    for (recoveries, text) in [
        (json!([{}]), "has neither links nor a replacementDomain"),
        (
            json!([{ "links": [link("router", "decode", "Restart", json!({}))] }]),
            "`router`, which is not in the rule's roles",
        ),
        (
            json!([{ "links": [link("prefill", "store", "Restart", json!({}))] }]),
            "`store`, which is not in the rule's roles",
        ),
        (
            json!([{ "links": [link("prefill", "prefill", "Restart", json!({}))] }]),
            "cannot act on the same role",
        ),
        (
            json!([{ "links": [link("prefill", "decode", "Reboot", json!({}))] }]),
            "`Reboot` is no action; use one of Restart, Drain and Replace",
        ),
        (json!([{ "links": [restart(json!({ "scope": "Zone" }))] }]), "`Zone` is no scope"),
        (json!([{ "links": [restart(json!({ "scope": "Domain" }))] }]), "set its `domain`"),
        (json!([{ "links": [restart(json!({ "then": [] }))] }]), "has no actions"),
        (
            json!([{ "links": [restart(json!({ "when": { "role": "prefill", "conditions": ["Slow"] } }))] }]),
            "`Slow` is no condition",
        ),
        (
            json!([{ "links": [restart(json!({}))], "maxPerHour": 61 }]),
            "maxPerHour must be from 1 to 60, not 61",
        ),
        (
            json!([{ "links": [restart(json!({}))], "nodeLostSeconds": -1 }]),
            "nodeLostSeconds must be from 0 to 86400",
        ),
        (
            json!([{ "links": [restart(json!({}))] }, { "links": [link("prefill", "decode", "Replace", json!({}))] }]),
            "policy `p1`: the same fault of role `prefill` both restarts and replaces role `decode`",
        ),
    ] {
        let error = error(recoveries.clone());
        assert!(error.contains(text), "{recoveries}: {error}");
    }
    let of_other_faults = json!([
        { "links": [restart(json!({ "when": { "role": "prefill", "conditions": ["Restarted"] } }))] },
        { "links": [link("prefill", "decode", "Replace", json!({ "when": { "role": "prefill", "conditions": ["NodeLost"] } }))] },
    ]);
    FaultRules::resolve(&policy(of_other_faults), Some(&[])).unwrap();
}

#[test]
fn roles_must_be_of_the_group_and_have_instances() {
    let rules = json!([{ "links": [link("prefill", "decode", "Restart", json!({}))] }]);
    let error = |annotations: Value| {
        FaultRules::for_group(&policy(rules.clone()), &group(annotations), Some(&[])).unwrap_err().to_string()
    };
    let foreign = error(json!({ keys::ROLE_WORKLOAD_TYPE: "apps/v1/StatefulSet" }));
    assert!(foreign.contains("role `decode` runs as StatefulSet"), "{foreign}");
    let unordered = error(json!({ keys::ROLE_INSTANCE_PATTERN: "Stateless" }));
    assert!(unordered.contains("have no ordinals"), "{unordered}");
    let mut smaller = group(json!({}));
    smaller.spec.roles.truncate(1);
    let missing = FaultRules::for_group(&policy(rules), &smaller, Some(&[])).unwrap_err().to_string();
    assert!(missing.contains("role `decode` is no role of the group"), "{missing}");
}
