//! Pods that bring images and files to a node in advance.

use rbg_api::v1alpha2::{RoleBasedGroupWarmup, WarmupActions};
use rbg_api::{conversion, keys};
use serde_json::{Value, json};

use crate::hash::sha1_hex;
use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::names::{truncate_with_hash, truncate_with_hash_to};
use crate::{RenderError, names};

/// Prefix of the names of containers that only pull an image.
pub const PRELOAD: &str = "image-preload-";
/// Number of hash digits in the name of a pod.
const NAME_HASH_DIGITS: usize = 10;

/// Label value for a node: names of nodes may be longer than label values.
#[must_use]
pub fn node_label(node: &str) -> String {
    truncate_with_hash(node)
}

/// Renders a warmup's pod for a node; `hostname` is the node's hostname label. Its name is derived from the node and from
/// `after`, the UID of the pod that failed there last, so that no attempt is made twice.
///
/// # Errors
/// [`RenderError::NoMetadata`].
pub fn pod(
    warmup: &RoleBasedGroupWarmup,
    (node, hostname): (&str, &str),
    after: &str,
    actions: &[WarmupActions],
) -> Result<Manifest, RenderError> {
    let spec = json!({
        "restartPolicy": "Never",
        "nodeSelector": { keys::HOSTNAME: hostname },
        "tolerations": warmup.spec.tolerations,
        "imagePullSecrets": pull_secrets(actions),
        "containers": containers(actions),
        "volumes": volumes(actions).0,
    });
    let metadata = &warmup.metadata;
    let owner = NodePodOwner {
        kind: "RoleBasedGroupWarmup",
        name: metadata.name.as_deref(),
        namespace: metadata.namespace.as_deref(),
        uid: metadata.uid.as_deref(),
    };
    owner.pod(node, ("-", after), spec)
}

/// The owner of a pod that prepares a node.
pub(crate) struct NodePodOwner<'a> {
    pub(crate) kind: &'static str,
    pub(crate) name: Option<&'a str>,
    pub(crate) namespace: Option<&'a str>,
    pub(crate) uid: Option<&'a str>,
}

impl NodePodOwner<'_> {
    /// Renders the pod. Its name contains the infix, and digits of a hash of the owner, the node and `what`.
    pub(crate) fn pod(
        self,
        node: &str,
        (infix, discriminator): (&str, &str),
        spec: Value,
    ) -> Result<Manifest, RenderError> {
        let own_name = self.name.ok_or(RenderError::NoMetadata("name"))?;
        let namespace = self.namespace.ok_or(RenderError::NoMetadata("namespace"))?;
        let uid = self.uid.ok_or(RenderError::NoMetadata("uid"))?;
        let digits = sha1_hex(&format!("{uid}/{node}/{discriminator}"));
        let prefix = truncate_with_hash_to(own_name, names::MAX_NAME - infix.len() - NAME_HASH_DIGITS);
        let name = format!("{prefix}{infix}{}", digits.get(..NAME_HASH_DIGITS).unwrap_or_default());
        let labels = StringMap::from([
            (keys::WARMUP_NAME.to_owned(), truncate_with_hash(own_name)),
            (keys::WARMUP_UID.to_owned(), uid.to_owned()),
            (keys::WARMUP_NODE.to_owned(), node_label(node)),
        ]);
        let owner = OwnerRef {
            api_version: conversion::ApiVersion::V1alpha2.api_version().to_owned(),
            kind: self.kind.to_owned(),
            name: own_name.to_owned(),
            uid: uid.to_owned(),
            controller: true,
        };
        let metadata = ManifestMetadata {
            name: &name,
            namespace,
            labels,
            annotations: StringMap::new(),
            owner: Some(&owner),
        };
        Ok(Manifest::new("v1", "Pod", metadata, json!({ "spec": spec })))
    }
}

/// Name of a volume that the actions define differently; the first definition is used.
#[must_use]
pub fn conflict(actions: &[WarmupActions]) -> Option<String> {
    volumes(actions).1
}

/// Each image and each container once, regardless of the containers' names.
fn containers(actions: &[WarmupActions]) -> Vec<Value> {
    let mut images: Vec<&String> = Vec::new();
    for image in
        actions.iter().filter_map(|action| action.image_preload.as_ref()).flat_map(|action| &action.images)
    {
        if !images.contains(&image) {
            images.push(image);
        }
    }
    let preload = |(index, image): (usize, &&String)| {
        json!({ "name": format!("{PRELOAD}{index}"), "image": image, "command": ["sh", "-c", "exit 0"],
            "imagePullPolicy": "IfNotPresent" })
    };
    let mut all: Vec<Value> = images.iter().enumerate().map(preload).collect();
    let mut custom: Vec<Value> = Vec::new();
    for container in customized(actions).flat_map(|action| &action.containers) {
        let mut container = container.clone();
        container["name"] = Value::Null;
        if !custom.contains(&container) {
            custom.push(container);
        }
    }
    for mut container in custom {
        container["name"] = format!("custom-{}", all.len()).into();
        all.push(container);
    }
    all
}

fn pull_secrets(actions: &[WarmupActions]) -> Vec<Value> {
    let mut secrets = Vec::new();
    for secret in actions
        .iter()
        .filter_map(|action| action.image_preload.as_ref())
        .flat_map(|action| &action.pull_secrets)
    {
        let secret = json!({ "name": secret.name });
        if !secrets.contains(&secret) {
            secrets.push(secret);
        }
    }
    secrets
}

/// Volumes by name, and the name of one with conflicting definitions.
fn volumes(actions: &[WarmupActions]) -> (Vec<Value>, Option<String>) {
    let (mut volumes, mut conflict): (Vec<Value>, _) = (Vec::new(), None);
    for volume in customized(actions).flat_map(|action| &action.volumes) {
        match volumes.iter().find(|other| other["name"] == volume["name"]) {
            Some(other) if other != volume => conflict = volume["name"].as_str().map(str::to_owned),
            Some(_) => {}
            None => volumes.push(volume.clone()),
        }
    }
    (volumes, conflict)
}

fn customized(actions: &[WarmupActions]) -> impl Iterator<Item = &rbg_api::v1alpha2::CustomizedAction> {
    actions.iter().filter_map(|action| action.customized_action.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actions(value: Value) -> Vec<WarmupActions> {
        serde_json::from_value(value).unwrap()
    }

    fn warmup() -> RoleBasedGroupWarmup {
        serde_json::from_value(json!({
            "metadata": { "name": "w".repeat(80), "namespace": "n", "uid": "u" },
            "spec": { "tolerations": [{ "operator": "Exists" }] },
        }))
        .unwrap()
    }

    #[test]
    fn actions_of_several_roles_on_a_node_share_one_pod() {
        let actions = actions(json!([
            { "imagePreload": { "images": ["a", "b"], "pullSecrets": [{ "name": "s" }] },
              "customizedAction": { "containers": [{ "name": "x", "image": "c" }],
                  "volumes": [{ "name": "v", "emptyDir": {} }] } },
            { "imagePreload": { "images": ["b"], "pullSecrets": [{ "name": "s" }] },
              "customizedAction": { "containers": [{ "name": "y", "image": "c" }, { "name": "x", "image": "d" }],
                  "volumes": [{ "name": "v", "hostPath": { "path": "/v" } }] } },
        ]));
        assert_eq!(conflict(&actions).as_deref(), Some("v"));
        let node = "node.".repeat(20);
        let pod = pod(&warmup(), (&node, "host"), "", &actions).unwrap();
        let spec = &pod.0["spec"];
        let named = |list: &str| -> Vec<(String, String)> {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let list = spec[list].as_array().unwrap();
            list.iter().map(|action| (text(&action["name"]), text(&action["image"]))).collect()
        };
        let expected =
            [("image-preload-0", "a"), ("image-preload-1", "b"), ("custom-2", "c"), ("custom-3", "d")];
        assert_eq!(named("containers"), expected.map(|(name, image)| (name.to_owned(), image.to_owned())));
        assert_eq!(spec["volumes"], json!([{ "name": "v", "emptyDir": {} }]));
        assert_eq!(spec["imagePullSecrets"], json!([{ "name": "s" }]));
        assert_eq!(spec["nodeSelector"], json!({ "kubernetes.io/hostname": "host" }));
        assert_eq!(spec["tolerations"], json!([{ "operator": "Exists" }]));
        let labels = pod.0["metadata"]["labels"].as_object().unwrap();
        assert!(labels.values().all(|value| value.as_str().unwrap().len() <= 63));
        assert!(pod.name().len() <= 63);
    }

    #[test]
    fn pod_names_differ_by_node_and_attempt() {
        let name =
            |node: &str, after: &str| pod(&warmup(), (node, node), after, &[]).unwrap().name().to_owned();
        assert_eq!(name("a", ""), name("a", ""));
        assert_ne!(name("a", ""), name("b", ""));
        assert_ne!(name("a", ""), name("a", "failed"));
    }
}
