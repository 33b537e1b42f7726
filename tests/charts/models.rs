//! Where the engines' models come from: Hugging Face with a token and a cache, or a volume.

use serde_json::{Value, json};

use super::rendered::{Rendered, container, pod, rejected};

const WORKER: &str =
    "--set=engines.worker.engine=vllm,engines.worker.model=/models/m,engines.sim.engine=simulated";

fn named<'v>(list: &'v Value, name: &str) -> Option<&'v Value> {
    list.as_array()?.iter().find(|entry| entry["name"] == name)
}

/// The volume of that name, and its mount in the engine's container.
fn mounted<'r>(role: &'r Value, name: &str) -> Option<(&'r Value, &'r Value)> {
    let mount = named(&container(role)["volumeMounts"], name);
    Some((
        named(&pod(role)["spec"]["volumes"], name)?,
        mount.unwrap_or_else(|| panic!("{name} is not mounted")),
    ))
}

#[test]
fn engines_share_a_cache_of_models_and_a_token() {
    let values =
        "--set=models.huggingFaceTokenSecret=hf,models.cache.volume.persistentVolumeClaim.claimName=cache";
    let rendered = Rendered::with(&[WORKER, values]);
    let role = rendered.role("worker");
    let env = &container(role)["env"];
    let token = named(env, "HF_TOKEN").unwrap();
    assert_eq!(token["valueFrom"]["secretKeyRef"], json!({ "name": "hf", "key": "token" }));
    let (volume, mount) = mounted(role, "model-cache").unwrap();
    assert_eq!(volume["persistentVolumeClaim"]["claimName"], "cache");
    assert_eq!(mount["mountPath"], named(env, "HF_HOME").unwrap()["value"]);
    assert!(mounted(rendered.role("sim"), "model-cache").is_none());
    assert!(named(&container(rendered.role("sim"))["env"], "HF_TOKEN").is_none());
    let rendered = Rendered::with(&[WORKER]);
    let env = &container(rendered.role("worker"))["env"];
    assert!(named(env, "HF_HOME").is_none() && named(env, "HF_TOKEN").is_none());
}

#[test]
fn a_volume_with_the_model_is_mounted_at_its_path() {
    for volume in [
        json!({ "persistentVolumeClaim": { "claimName": "m" } }),
        json!({ "hostPath": { "path": "/data/m" } }),
        json!({ "image": { "reference": "registry/m:1", "pullPolicy": "IfNotPresent" } }),
    ] {
        let value = format!("--set-json=engines.worker.modelVolume={volume}");
        let rendered = Rendered::with(&[WORKER, &value]);
        let (found, mount) = mounted(rendered.role("worker"), "model").unwrap();
        let kind = volume.as_object().unwrap().keys().next().unwrap();
        assert_eq!(found[kind], volume[kind]);
        assert_eq!(*mount, json!({ "name": "model", "mountPath": "/models/m", "readOnly": true }));
        let message = rejected(&[WORKER, &value, "--set=engines.worker.model=m"]);
        assert!(message.contains("must be an absolute path"), "{message}");
    }
}
