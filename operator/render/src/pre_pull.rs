//! Pods that pull images to a node before pods there restart with them.

use rbg_api::v1alpha2::RoleInstance;
use serde_json::{Value, json};

use crate::error::RenderError;
use crate::manifest::Manifest;
use crate::warmup::{NodePodOwner, PRELOAD};

/// Part of the pod's name between the instance's name and the hash.
const POD_NAME_INFIX: &str = "-pull-";

/// An image of a container, with its pull policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerImage {
    pub name: String,
    /// `imagePullPolicy` of the container, if set.
    pub policy: Option<String>,
}

/// Renders a pod that runs a trivial command in each of the images on a node; `secrets` are its `imagePullSecrets`. Its
/// name is derived from the node and the images. Its small resources and restricted security context fit the quotas and
/// policies of most namespaces.
///
/// # Errors
/// [`RenderError::NoMetadata`].
pub fn pod(
    instance: &RoleInstance,
    node: &str,
    images: &[ContainerImage],
    secrets: &Value,
) -> Result<Manifest, RenderError> {
    let names: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
    let spec = json!({
        "restartPolicy": "Never",
        "nodeName": node,
        "tolerations": [{ "operator": "Exists" }],
        "imagePullSecrets": secrets,
        "automountServiceAccountToken": false,
        "securityContext": { "runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": { "type": "RuntimeDefault" } },
        "containers": images.iter().enumerate().map(container).collect::<Vec<_>>(),
    });
    let metadata = &instance.metadata;
    let owner = NodePodOwner {
        kind: "RoleInstance",
        name: metadata.name.as_deref(),
        namespace: metadata.namespace.as_deref(),
        uid: metadata.uid.as_deref(),
    };
    owner.pod(node, (POD_NAME_INFIX, &names.join("/")), spec)
}

fn container((index, image): (usize, &ContainerImage)) -> Value {
    let resources = json!({ "cpu": "50m", "memory": "64Mi" });
    let mut container = json!({
        "name": format!("{PRELOAD}{index}"),
        "image": image.name,
        "command": ["sh", "-c", "exit 0"],
        "resources": { "requests": resources, "limits": resources },
        "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
    });
    if let Some(policy) = &image.policy {
        container["imagePullPolicy"] = policy.as_str().into();
    }
    container
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_set_of_images_has_a_pod_on_the_node() {
        let instance: RoleInstance = serde_json::from_value(json!({
            "metadata": { "name": "i".repeat(63), "namespace": "n", "uid": "u" }, "spec": { "components": [] } }))
        .unwrap();
        let secrets = json!([{ "name": "s" }]);
        let image = |name: &str, policy: Option<&str>| ContainerImage {
            name: name.to_owned(),
            policy: policy.map(str::to_owned),
        };
        let of = |images: &[ContainerImage]| pod(&instance, "node.example.com", images, &secrets).unwrap();
        let rendered = of(&[image("a:1", None), image("b", Some("Always"))]);
        let spec = &rendered.0["spec"];
        assert_eq!(spec["nodeName"], "node.example.com");
        assert_eq!(spec["imagePullSecrets"], secrets);
        assert_eq!(spec["containers"][0]["image"], "a:1");
        assert_eq!(spec["containers"][0].get("imagePullPolicy"), None);
        assert_eq!(spec["containers"][1]["imagePullPolicy"], "Always");
        assert!(rendered.name().len() <= 63 && rendered.name().contains("-pull-"), "{}", rendered.name());
        assert_eq!(of(&[image("a:1", None)]).name(), of(&[image("a:1", None)]).name());
        assert_ne!(of(&[image("a:1", None)]).name(), of(&[image("a:2", None)]).name());
    }
}
