//! Instances that a person lists: by flags, or in a TOML file that is read again when it changes.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::endpoint::Endpoint;
use crate::error::{FileError, InstanceError};
use crate::file_watch::FileWatch;
use crate::listing::{Listed, MAX_INSTANCES, Update};
use crate::topology::{Declared, Engine, KvConnector, Place, Role, Source};

/// One engine as a person names it. In the file: one `[[instance]]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticInstance {
    /// `http://host:port`.
    pub url: String,
    /// `prefill`, `decode` or `plain`.
    pub role: Role,
    /// Name in logs and metrics; default: the URL.
    #[serde(default)]
    pub id: Option<String>,
    /// Port of the prefill's bootstrap server; default: what SGLang says, else 8998.
    #[serde(default)]
    pub bootstrap_port: Option<u16>,
    /// `sglang` or `vllm`; default: asked.
    #[serde(default)]
    pub engine: Option<Engine>,
    /// vLLM's `nixl`, `mooncake` or `store`; default: asked.
    #[serde(default)]
    pub connector: Option<KvConnector>,
    /// Served model names; default: asked.
    #[serde(default)]
    pub models: Vec<String>,
    /// Where it runs.
    #[serde(default)]
    pub place: Place,
}

impl StaticInstance {
    /// An instance of which only role and address are known.
    #[must_use]
    pub fn new(role: Role, url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            role,
            id: None,
            bootstrap_port: None,
            engine: None,
            connector: None,
            models: Vec::new(),
            place: Place::default(),
        }
    }

    pub(crate) fn listed(&self) -> Result<Listed, InstanceError> {
        let endpoint = Endpoint::parse(&self.url)?;
        let id = self.id.clone().filter(|id| !id.is_empty()).unwrap_or_else(|| endpoint.url.clone());
        if self.engine == Some(Engine::Sglang) && self.connector.is_some() {
            return Err(InstanceError::ConnectorWithoutVllm(id));
        }
        Ok(Listed {
            id: id.as_str().into(),
            role: self.role,
            url: endpoint.url,
            host: endpoint.host,
            source: Source::Static,
            place: self.place.clone(),
            declared: Declared {
                // A connector is vLLM's, so naming one says the engine too.
                engine: self.engine.or_else(|| self.connector.map(|_| Engine::Vllm)),
                connector: self.connector,
                bootstrap_port: self.bootstrap_port,
                models: self.models.clone(),
            },
            held: None,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default, rename = "instance")]
    instances: Vec<StaticInstance>,
}

/// Checks a whole list: one wrong instance refuses it, since half a fleet is worse than the last good one.
pub(crate) fn listing(instances: &[StaticInstance]) -> Result<Vec<Listed>, InstanceError> {
    if instances.len() > MAX_INSTANCES {
        return Err(InstanceError::TooMany(instances.len()));
    }
    let listed = instances.iter().map(StaticInstance::listed).collect::<Result<Vec<_>, _>>()?;
    let mut seen = BTreeSet::new();
    match listed.iter().find(|instance| !seen.insert(&instance.id)) {
        Some(twice) => Err(InstanceError::Duplicate(twice.id.to_string())),
        None => Ok(listed),
    }
}

/// Reads the file's text.
pub(crate) fn parse(text: &str) -> Result<Vec<Listed>, FileError> {
    let document: Document = toml::from_str(text).map_err(|error| FileError::Syntax(error.to_string()))?;
    Ok(listing(&document.instances)?)
}

/// Sends the new list after every change of the file; a bad file is logged and changes nothing.
pub(crate) async fn follow(
    mut file: FileWatch,
    slot: usize,
    out: mpsc::Sender<Update>,
    stop: CancellationToken,
) {
    loop {
        let read = tokio::select! {
            () = stop.cancelled() => return,
            read = file.changed() => read,
        };
        match read.and_then(|text| parse(&text)) {
            Ok(instances) => {
                tracing::info!(file = %file.path().display(), instances = instances.len(), "instances file read again");
                if out.send(Update { slot, instances }).await.is_err() {
                    return;
                }
            }
            Err(error) => log_refused(file.path(), &error),
        }
    }
}

pub(crate) fn log_refused(path: &Path, error: &FileError) {
    tracing::error!(
        file = %path.display(),
        %error,
        "topology file refused, the last good one stays in force; mend the file and it is read again by itself"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_full_entry_and_a_minimal_one() {
        let listed = parse(
            r#"
            [[instance]]
            url = "http://10.0.0.1:8000/"
            role = "prefill"
            bootstrap_port = 8998
            connector = "mooncake"
            models = ["m"]
            id = "p0"
            place = { zone = "z1", rack = "r1", node = "n1", nvlink_domain = "d1" }

            [[instance]]
            url = "http://10.0.0.2:8000"
            role = "decode"
            "#,
        )
        .unwrap();
        assert_eq!(listed[0].id, "p0".into());
        assert_eq!(listed[0].declared.engine, Some(Engine::Vllm), "implied by the connector");
        assert_eq!(listed[0].place.nvlink_domain.as_deref(), Some("d1"));
        assert_eq!(listed[1].id, "http://10.0.0.2:8000".into());
    }

    #[test]
    fn errors_name_the_place_or_the_instance() {
        let unknown_key =
            parse("[[instance]]\nurl = \"http://a:1\"\nrole = \"decode\"\nbootstrapport = 1\n").unwrap_err();
        assert!(unknown_key.to_string().contains("line 4"), "{unknown_key}");
        let role = parse("[[instance]]\nurl = \"http://a:1\"\nrole = \"both\"\n").unwrap_err();
        assert!(role.to_string().contains("prefill"), "{role}");
        let twice = "[[instance]]\nurl = \"http://a:1\"\nrole = \"decode\"\n".repeat(2);
        assert_eq!(parse(&twice), Err(FileError::Instance(InstanceError::Duplicate("http://a:1".into()))));
        let mixed =
            parse("[[instance]]\nurl=\"a:1\"\nrole=\"decode\"\nengine=\"sglang\"\nconnector=\"nixl\"\n");
        assert!(matches!(mixed, Err(FileError::Instance(InstanceError::ConnectorWithoutVllm(_)))));
        assert_eq!(parse(""), Ok(Vec::new()), "an empty fleet is a fleet");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn arbitrary_values_never_panic(url in "\\PC{0,40}", id in "\\PC{0,10}") {
            let instance = StaticInstance { id: Some(id), ..StaticInstance::new(Role::Plain, url) };
            let _ = instance.listed();
        }
    }
}
