//! Mirrors of pod templates: an edit at the path of either version takes effect, and is read through both.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use proptest::prelude::*;
use rbg_api::conversion::{ApiVersion, convert, fold_group, fold_mirrors, without_mirrors};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

const MIRROR: &str = "/spec/roles/0/template";
const STANDALONE: &str = "/spec/roles/0/standalonePattern/template";
const LEADER_WORKER: &str = "/spec/roles/0/leaderWorkerPattern/template";

fn template(image: &str) -> Value {
    json!({ "spec": { "containers": [{ "name": "c", "image": image }] } })
}

/// A group in v1alpha1 with one role.
fn older(mut role: Value) -> Value {
    role["name"] = "a".into();
    json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "g" }, "spec": { "roles": [role] } })
}

fn up(object: &Value) -> Value {
    convert(object, ApiVersion::V1alpha2).unwrap()
}

fn down(object: &Value) -> Value {
    convert(object, ApiVersion::V1alpha1).unwrap()
}

fn set(object: &mut Value, path: &str, value: Value) {
    *object.pointer_mut(path).unwrap() = value;
}

fn mirrored() -> Value {
    up(&older(json!({ "template": template("i:1") })))
}

#[test]
fn roles_written_as_v1alpha1_have_a_mirror() {
    let group = mirrored();
    assert_eq!(group.pointer(MIRROR), Some(&template("i:1")));
    assert_eq!(group.pointer(STANDALONE), Some(&template("i:1")));
    // Stored objects contain the hash: another value would make every stored mirror look edited.
    assert_eq!(group["spec"]["roles"][0]["mirroredTemplateHash"], "78e4620fa124e13d");
    let leader_worker = up(&older(json!({ "template": template("i:1"), "leaderWorkerSet": { "size": 2 } })));
    assert_eq!(leader_worker.pointer(MIRROR), leader_worker.pointer(LEADER_WORKER));
    let components = [json!({ "name": "x", "template": template("i:1") })];
    for other in [json!({ "templateRef": { "name": "t" } }), json!({ "components": components })] {
        assert_eq!(up(&older(other)).pointer(MIRROR), None);
    }
}

#[test]
fn an_edit_of_a_mirror_is_read_through_both_versions() {
    for (role, pattern) in [(json!({}), STANDALONE), (json!({ "leaderWorkerSet": {} }), LEADER_WORKER)] {
        let mut role = role;
        role["template"] = template("i:1");
        let mut group = up(&older(role));
        set(&mut group, "/spec/roles/0/template/spec/containers/0/image", "i:2".into());
        assert_eq!(down(&group).pointer(MIRROR), Some(&template("i:2")));
        assert_eq!(fold_mirrors(&mut group), [""; 0]);
        assert_eq!(group.pointer(pattern), Some(&template("i:2")));
        assert_eq!(up(&down(&group)), group);
    }
}

/// The loss that v1alpha1's object records must not bring back the template from before the edit.
#[test]
fn edits_of_a_mirror_and_through_v1alpha1_are_both_kept() {
    let mut group = mirrored();
    set(&mut group, "/spec/roles/0/template/spec/containers/0/image", "i:2".into());
    let mut read = down(&group);
    read["spec"]["roles"][0]["template"]["spec"]["hostNetwork"] = true.into();
    let written = up(&read);
    let mut expected = template("i:2");
    expected["spec"]["hostNetwork"] = true.into();
    assert_eq!(written.pointer(STANDALONE), Some(&expected));
    assert_eq!(written.pointer(MIRROR), Some(&expected));
}

#[test]
fn of_two_different_edits_the_patterns_is_kept() {
    let mut group = mirrored();
    set(&mut group, MIRROR, template("i:2"));
    set(&mut group, STANDALONE, template("i:3"));
    assert_eq!(down(&group).pointer(MIRROR), Some(&template("i:3")));
    assert_eq!(fold_mirrors(&mut group), ["a"]);
    assert_eq!(group.pointer(MIRROR), Some(&template("i:3")));
    assert_eq!(fold_mirrors(&mut group), [""; 0]);
}

#[test]
fn a_mirror_that_is_no_template_is_replaced() {
    let mut group = mirrored();
    set(&mut group, MIRROR, "text".into());
    assert_eq!(fold_mirrors(&mut group), ["a"]);
    assert_eq!(group, mirrored());
}

#[test]
fn a_pattern_without_a_template_has_no_mirror() {
    let mut group = mirrored();
    set(&mut group, "/spec/roles/0/standalonePattern", json!({ "templateRef": { "name": "t" } }));
    let role = &down(&group)["spec"]["roles"][0];
    assert_eq!((role.get("template"), &role["templateRef"]["name"]), (None, &json!("t")));
    let typed = fold_group(&serde_json::from_value(group.clone()).unwrap()).unwrap();
    assert!(typed.group.spec.roles[0].other.is_empty());
    fold_mirrors(&mut group);
    assert_eq!(group.pointer(MIRROR), None);
    assert_eq!(group.pointer("/spec/roles/0/mirroredTemplateHash"), None);
}

#[test]
fn only_groups_written_as_v1alpha1_have_mirrors() {
    let native = without_mirrors(&mirrored());
    let mut native = native;
    native["metadata"]["annotations"] = json!({ "other": "x" });
    assert_eq!(up(&down(&native)), native);
    // A field of another meaning stays.
    native["spec"]["roles"][0]["template"] = "x".into();
    native["spec"]["roles"][0]["mirroredTemplateHash"] = "x".into();
    let before = native.clone();
    assert_eq!(fold_mirrors(&mut native), [""; 0]);
    assert_eq!(native, before);
    assert!(fold_group(&serde_json::from_value(native).unwrap()).is_none());
}

#[test]
fn null_members_are_no_edit() {
    let mut group = mirrored();
    group["spec"]["roles"][0]["template"]["metadata"] = Value::Null;
    let before = group.clone();
    fold_mirrors(&mut group);
    assert_eq!(group, before);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    /// Mirror and pattern get any templates; `base` is what both were.
    #[test]
    fn mirrors_and_patterns_are_equal_after_any_edits(
        edits in prop::collection::vec((0..3u8, 0..3u8, 0..3u8, any::<bool>()), 1..4),
    ) {
        let image = |number: u8| template(&format!("i:{number}"));
        let roles = edits.iter().enumerate().map(|(index, (base, _, _, is_leader_worker))| {
            let mut role = json!({ "name": format!("r{index}"), "template": image(*base) });
            if *is_leader_worker {
                role["leaderWorkerSet"] = json!({ "size": 2 });
            }
            role
        });
        let mut object = older(json!({}));
        object["spec"]["roles"] = roles.collect();
        let mut group = up(&object);
        let mut expected = Vec::new();
        let mut conflicts = Vec::new();
        for (index, (base, mirror, pattern, is_leader_worker)) in edits.iter().enumerate() {
            let role = &mut group["spec"]["roles"][index];
            role["template"] = image(*mirror);
            let name = if *is_leader_worker { "leaderWorkerPattern" } else { "standalonePattern" };
            role[name]["template"] = image(*pattern);
            expected.push(image(if pattern == base { *mirror } else { *pattern }));
            if mirror != base && pattern != base && mirror != pattern {
                conflicts.push(format!("r{index}"));
            }
        }
        let typed: RoleBasedGroup = serde_json::from_value(group.clone()).unwrap();
        let as_v1alpha1 = down(&group);
        let mut folded = group.clone();
        prop_assert_eq!(fold_mirrors(&mut folded), conflicts);
        for (index, expected) in expected.iter().enumerate() {
            let role = &folded["spec"]["roles"][index];
            prop_assert_eq!(&role["template"], expected);
            let pattern = role.get("standalonePattern").or(role.get("leaderWorkerPattern")).unwrap();
            prop_assert_eq!(&pattern["template"], expected);
            prop_assert_eq!(&as_v1alpha1["spec"]["roles"][index]["template"], expected);
        }
        prop_assert_eq!(&up(&as_v1alpha1), &folded);
        let from_typed = fold_group(&typed).map_or(typed, |folded| folded.group);
        let again: RoleBasedGroup = serde_json::from_value(folded.clone()).unwrap();
        prop_assert_eq!(&from_typed, &again);
        prop_assert!(fold_group(&again).is_none());
        let before = folded.clone();
        fold_mirrors(&mut folded);
        prop_assert_eq!(folded, before);
    }
}
