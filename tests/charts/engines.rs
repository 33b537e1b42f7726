//! The drain of engines before their pods end or restart.

use serde_json::{Value, json};

use super::examples;
use super::rendered::{Rendered, container, pod, rejected};

const VLLM: &str = "--set=engines.worker.engine=vllm,engines.worker.model=m";
/// Roles that are not engines.
const OTHERS: [&str; 4] = ["gateway", "mooncake-master", "mooncake-router", "mooncake-store"];

fn named<'v>(list: &'v Value, name: &str) -> Option<&'v Value> {
    list.as_array()?.iter().find(|entry| entry["name"] == name)
}

fn sidecar(role: &Value) -> Option<&Value> {
    named(&pod(role)["spec"]["initContainers"], "moongate-sidecar")
}

/// Value of an environment variable of a role's sidecar.
fn variable<'v>(role: &'v Value, name: &str) -> Option<&'v Value> {
    named(&sidecar(role)?["env"], name).map(|variable| &variable["value"])
}

/// The script of the preStop hook, which runs in the engine's container.
fn script(role: &Value) -> &str {
    let command = &container(role)["lifecycle"]["preStop"]["exec"]["command"];
    assert_eq!([&command[0], &command[1]], ["python3", "-c"]);
    command[2].as_str().unwrap()
}

fn engines(rendered: &Rendered) -> impl Iterator<Item = &Value> {
    let is_other = |name: &str| OTHERS.iter().any(|other| name.starts_with(other));
    rendered.roles().iter().filter(move |role| !is_other(role["name"].as_str().unwrap()))
}

#[test]
fn every_engine_drains_within_its_grace_period() {
    let mut hooks = 0;
    for example in examples() {
        let rendered = Rendered::with(&[&format!("--values={}", example.display())]);
        for role in engines(&rendered) {
            let (name, spec) = (&role["name"], &pod(role)["spec"]);
            assert_eq!(spec["terminationGracePeriodSeconds"], 330, "{name} of {}", example.display());
            let sidecar = sidecar(role).unwrap_or_else(|| panic!("no sidecar of {name}"));
            assert_eq!(sidecar["restartPolicy"], "Always", "it ends after the engine");
            assert_eq!(sidecar["args"], json!(["sidecar"]));
            assert_eq!(sidecar["ports"][0]["containerPort"], 9400);
            assert!(named(&spec["volumes"], "moongate-pod").is_some());
            let mode = &pod(role)["metadata"]["annotations"]["moongate.io/role"];
            assert_eq!(variable(role, "MOONGATE_SIDECAR_ROLE"), Some(mode));
            assert_eq!(
                role["annotations"],
                json!({ "moongate.io/upgrade-hooks": "9400", "moongate.io/upgrade-timeout": "300s" })
            );
            let engine = container(role);
            assert_eq!(engine["livenessProbe"]["terminationGracePeriodSeconds"], 30, "it hangs");
            if engine["args"][0] == "loadtest" {
                let hook = &engine["lifecycle"]["preStop"]["exec"]["command"];
                let flags = ["--url=http://127.0.0.1:9400", "--notice=5s", "--limit=300s"];
                assert_eq!(*hook, json!(["/moongate", "sidecar", "drain", flags[0], flags[1], flags[2]]));
            } else {
                let script = script(role);
                for part in ["\"127.0.0.1\", 9400", "\"POST\", \"/drain\"", "- begin < 300 and", ">= 5:"] {
                    assert!(script.contains(part), "{part} in {script}");
                }
            }
            hooks += 1;
        }
    }
    assert!(hooks > 8, "{hooks}");
}

#[test]
fn limits_of_drains_are_values() {
    let values = "--set=engineDrain.limitSeconds=900,engineDrain.noticeSeconds=9,engineDrain.exitSeconds=60,\
                  engineDrain.sidecar.port=9500,engineDrain.sidecar.tag=v1";
    let rendered = Rendered::with(&[VLLM, values]);
    let role = rendered.role("worker");
    assert_eq!(pod(role)["spec"]["terminationGracePeriodSeconds"], 960);
    assert_eq!(container(role)["startupProbe"]["terminationGracePeriodSeconds"], 60);
    for part in ["\"127.0.0.1\", 9500", "- begin < 900 and", ">= 9:"] {
        assert!(script(role).contains(part), "{part}");
    }
    assert_eq!(variable(role, "MOONGATE_SIDECAR_LISTEN"), Some(&json!("0.0.0.0:9500")));
    assert_eq!(sidecar(role).unwrap()["image"], "moongate:v1");
    assert_eq!(
        role["annotations"],
        json!({ "moongate.io/upgrade-hooks": "9500", "moongate.io/upgrade-timeout": "900s" })
    );
}

#[test]
fn drains_of_engines_can_be_disabled() {
    let rendered = Rendered::with(&[VLLM, "--set=engineDrain.enabled=false"]);
    let role = rendered.role("worker");
    assert!(sidecar(role).is_none() && role.get("annotations").is_none());
    assert!(pod(role)["spec"].get("terminationGracePeriodSeconds").is_none());
    assert!(container(role).get("lifecycle").is_none());
    assert!(container(role)["livenessProbe"].get("terminationGracePeriodSeconds").is_none());
}

#[test]
fn a_grace_period_shorter_than_the_drain_is_rejected() {
    let short = "--set=engines.worker.pod.terminationGracePeriodSeconds=300";
    let message = rejected(&[VLLM, short]);
    assert!(message.contains("must be greater than engineDrain.limitSeconds (300)"), "{message}");
    let own = "--set=engines.worker.pod.terminationGracePeriodSeconds=301";
    let rendered = Rendered::with(&[VLLM, own]);
    assert_eq!(pod(rendered.role("worker"))["spec"]["terminationGracePeriodSeconds"], 301);
    let message = rejected(&[VLLM, "--set=engineDrain.limitSeconds=10,engineDrain.noticeSeconds=10"]);
    assert!(message.contains("must be greater than engineDrain.noticeSeconds (10)"), "{message}");
}

#[test]
fn own_init_containers_and_variables_remain() {
    let own = "--set=engines.worker.pod.initContainers[0].name=load,engineDrain.sidecar.env[0].name=\
               MOONGATE_SIDECAR_ENGINE_URL,engineDrain.sidecar.env[0].value=https://localhost:8000";
    let rendered = Rendered::with(&[VLLM, own]);
    let role = rendered.role("worker");
    let names: Vec<_> =
        pod(role)["spec"]["initContainers"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["moongate-sidecar", "load"]);
    assert_eq!(variable(role, "MOONGATE_SIDECAR_ENGINE_URL"), Some(&json!("https://localhost:8000")));
}

#[test]
fn sidecars_register_engines_if_there_is_a_token() {
    let token = "--set=engineDrain.registrationTokenSecret=registration";
    let name = "MOONGATE_REGISTRATION_TOKEN";
    for (tls, address) in [
        ("", "release-gateway-registration:9000"),
        (",gateway.adminTls.secret=admin-tls", "https://release-gateway-registration:9000"),
    ] {
        let rendered = Rendered::with(&[VLLM, &format!("{token}{tls}")]);
        let role = rendered.role("worker");
        let gateway = container_of_gateway(&rendered);
        for container in [gateway, sidecar(role).unwrap()] {
            let secret = &named(&container["env"], name).unwrap()["valueFrom"]["secretKeyRef"];
            assert_eq!(*secret, json!({ "name": "registration", "key": "token" }));
        }
        assert_eq!(variable(role, "MOONGATE_SIDECAR_GATEWAY"), Some(&json!(address)));
        assert!(rendered.gateway_config().contains("registration = true"));
        let service = &rendered.object("Service", "release-gateway-registration")["spec"];
        assert_eq!([&service["clusterIP"], &service["ports"][0]["targetPort"]], ["None", "admin"]);
        let authority = named(&pod(role)["spec"]["volumes"], "gateway-ca");
        let items = authority.map(|volume| &volume["secret"]["items"]);
        let expected = (!tls.is_empty()).then(|| json!([{ "key": "ca.crt", "path": "ca.crt" }]));
        assert_eq!(items, expected.as_ref(), "no private key");
    }
    let open = Rendered::with(&[VLLM]);
    assert!(!open.gateway_config().contains("registration"), "any pod could redirect prompts");
    assert!(open.find("Service", "release-gateway-registration").is_none());
    assert!(variable(open.role("worker"), "MOONGATE_SIDECAR_GATEWAY").is_none());
}

fn container_of_gateway(rendered: &Rendered) -> &Value {
    &rendered.object("Deployment", "release-gateway")["spec"]["template"]["spec"]["containers"][0]
}
