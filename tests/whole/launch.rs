//! From a pod's spec to the command lines of its processes.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, Pod, Secret};
use kube::{Api, Client};

/// The image's only program.
const ENTRYPOINT: &str = "/moongate";

/// What a container is to run.
pub(crate) struct ContainerLaunch {
    pub(crate) arguments: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
}

impl ContainerLaunch {
    /// Resolves the variables of a container, and its arguments with them.
    pub(crate) async fn from_spec(client: &Client, pod: &Pod, container: &Container, address: &str) -> Self {
        let mut known = HashMap::new();
        let mut env = Vec::new();
        // Where the API server is stands in every container.
        for (name, value) in [("KUBERNETES_SERVICE_HOST", "10.96.0.1"), ("KUBERNETES_SERVICE_PORT", "443")] {
            env.push((name.to_owned(), value.to_owned()));
        }
        for variable in container.env.iter().flatten() {
            let value = match &variable.value {
                Some(value) => expanded(value, &known),
                None => source(client, pod, variable, address).await,
            };
            known.insert(variable.name.clone(), value.clone());
            env.push((variable.name.clone(), value));
        }
        let command = container.command.iter().flatten().map(String::as_str);
        let mut arguments: Vec<String> = command
            .chain(container.args.iter().flatten().map(String::as_str))
            .map(|argument| expanded(argument, &known))
            .collect();
        if arguments.first().is_some_and(|first| first == ENTRYPOINT) {
            arguments.remove(0);
        }
        assert!(container.env_from.is_none(), "{}: envFrom", container.name);
        Self { arguments, env }
    }
}

/// What a variable is that has no value of its own.
async fn source(client: &Client, pod: &Pod, variable: &EnvVar, address: &str) -> String {
    let Some(from) = &variable.value_from else { return String::new() };
    if let Some(field) = &from.field_ref {
        return self::field(pod, &field.field_path, address);
    }
    if let Some(key) = &from.secret_key_ref {
        let secret = Api::<Secret>::default_namespaced(client.clone()).get(&key.name).await.unwrap();
        return String::from_utf8(secret.data.unwrap().remove(&key.key).unwrap().0).unwrap();
    }
    if let Some(key) = &from.config_map_key_ref {
        let map = Api::<ConfigMap>::default_namespaced(client.clone()).get(&key.name).await.unwrap();
        return map.data.unwrap().remove(&key.key).unwrap();
    }
    panic!("{}: {from:?}", variable.name)
}

/// What a field's path leads to.
pub(crate) fn field(pod: &Pod, path: &str, address: &str) -> String {
    let keyed = |prefix: &str| path.strip_prefix(prefix)?.strip_prefix("['")?.strip_suffix("']");
    let metadata = &pod.metadata;
    let spec = pod.spec.as_ref().unwrap();
    let value = match path {
        "metadata.name" => metadata.name.clone(),
        "metadata.namespace" => metadata.namespace.clone(),
        "metadata.uid" => metadata.uid.clone(),
        "metadata.labels" => Some(lines(metadata.labels.iter().flatten())),
        "metadata.annotations" => Some(lines(metadata.annotations.iter().flatten())),
        "spec.nodeName" => spec.node_name.clone(),
        "spec.serviceAccountName" => spec.service_account_name.clone(),
        "status.podIP" | "status.podIPs" => Some(address.to_owned()),
        _ => match (keyed("metadata.labels"), keyed("metadata.annotations")) {
            (Some(key), _) => Some(
                metadata
                    .labels
                    .iter()
                    .flatten()
                    .find(|(one, _)| *one == key)
                    .map(|(_, value)| value.clone())
                    .unwrap_or_default(),
            ),
            (_, Some(key)) => Some(
                metadata
                    .annotations
                    .iter()
                    .flatten()
                    .find(|(one, _)| *one == key)
                    .map(|(_, value)| value.clone())
                    .unwrap_or_default(),
            ),
            _ => panic!("no field {path}"),
        },
    };
    value.unwrap_or_default()
}

/// Labels or annotations in the format of the downward API's files.
fn lines<'a>(pairs: impl Iterator<Item = (&'a String, &'a String)>) -> String {
    pairs.map(|(key, value)| format!("{key}={value:?}\n")).collect()
}

/// `$(NAME)` becomes the variable of this name if there is one, `$$` becomes `$`.
fn expanded(text: &str, known: &HashMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let name = after.strip_prefix('(').and_then(|after| after.split_once(')'));
        rest = match (after.strip_prefix('$'), name) {
            (Some(after), _) => {
                out.push('$');
                after
            }
            (None, Some((name, after))) if known.contains_key(name) => {
                out.push_str(&known[name]);
                after
            }
            _ => {
                out.push('$');
                after
            }
        };
    }
    out + rest
}

#[test]
fn variables_are_put_in_and_dollars_stay() {
    let known = HashMap::from([("A".to_owned(), "1".to_owned())]);
    assert_eq!(expanded("x$(A):$(B) $$(A) 5$", &known), "x1:$(B) $(A) 5$");
}
