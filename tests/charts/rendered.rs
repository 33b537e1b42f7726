//! A release as helm renders it, without a cluster.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::{CHART, SCRIPTS, script};

fn template(values: &[&str]) -> Vec<String> {
    let fixed = ["template", "release", CHART, "--namespace=here"];
    fixed.iter().chain(values).map(|&argument| argument.to_owned()).collect()
}

/// The objects of a release with these values.
pub(super) struct Rendered(Vec<Value>);

impl Rendered {
    pub(super) fn with(values: &[&str]) -> Self {
        let arguments = template(values);
        let text = script("helm", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let documents = text.split("---\n").filter(|document| document.contains("kind:"));
        Self(documents.map(|document| serde_saphyr::from_str(document).unwrap()).collect())
    }

    pub(super) fn find(&self, kind: &str, name: &str) -> Option<&Value> {
        self.0.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
    }

    pub(super) fn object(&self, kind: &str, name: &str) -> &Value {
        self.find(kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))
    }

    pub(super) fn roles(&self) -> &[Value] {
        self.object("RoleBasedGroup", "release")["spec"]["roles"].as_array().unwrap()
    }

    pub(super) fn role(&self, name: &str) -> &Value {
        self.roles().iter().find(|role| role["name"] == name).unwrap_or_else(|| panic!("no role {name}"))
    }

    pub(super) fn role_names(&self) -> Vec<&str> {
        self.roles().iter().map(|role| role["name"].as_str().unwrap()).collect()
    }

    pub(super) fn gateway_config(&self) -> &str {
        self.object("ConfigMap", "release-gateway")["data"]["gateway.toml"].as_str().unwrap()
    }
}

pub(super) fn pod(role: &Value) -> &Value {
    &role["standalonePattern"]["template"]
}

/// The last container is that of the program; a holder comes before it.
pub(super) fn container(role: &Value) -> &Value {
    pod(role)["spec"]["containers"].as_array().unwrap().last().unwrap()
}

/// What helm says about values that it must reject.
pub(super) fn rejected(values: &[&str]) -> String {
    let output =
        Command::new(format!("{SCRIPTS}/helm")).args(template(values)).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success(), "{values:?} are not rejected");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
