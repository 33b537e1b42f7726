//! Statically listed instances: by flags, or in a TOML file that is reloaded on change.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::endpoint::EngineEndpoint;
use crate::error::{InstanceError, TopologyFileError};
use crate::file_watch::TopologyFileWatcher;
use crate::kv_cache::{DeclaredKvFacts, MAX_RANKS, MAX_TEXT};
use crate::kv_transfer::KvConnector;
use crate::listing::{ListedHost, ListedInstance, SourceUpdate};
use crate::location::PhysicalLocation;
use crate::tcp_address::TcpAddress;
use crate::topology::{
    DeclaredFacts, EngineKind, EngineRole, InstanceId, InstanceSource, KubernetesWorkload, MAX_INSTANCES,
};

/// One statically listed engine. In the file: one `[[instance]]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StaticInstance {
    /// URL of the engine, `http://host:port` or `https://host:port`.
    pub url: String,
    /// Role of the engine: `prefill`, `decode` or `plain`.
    #[serde(alias = "worker_type")]
    pub role: EngineRole,
    /// Name in logs and metrics; default: the URL.
    #[serde(default)]
    pub id: Option<String>,
    /// Port of the prefill's bootstrap server; default: as SGLang reports, else 8998.
    #[serde(default)]
    pub bootstrap_port: Option<u16>,
    /// `sglang` or `vllm`; default: probed.
    #[serde(default)]
    pub engine: Option<EngineKind>,
    /// vLLM's `nixl`, `mooncake` or `store`; default: probed.
    #[serde(default)]
    pub connector: Option<KvConnector>,
    /// Served model names; default: probed.
    #[serde(default)]
    pub models: Vec<String>,
    /// Location of the engine; unknown levels are omitted.
    #[serde(default)]
    pub place: PhysicalLocation,
    /// Facts of its KV cache; default: probed.
    #[serde(default)]
    pub kv: DeclaredKvFacts,
}

impl StaticInstance {
    /// An instance with only a role and an address.
    #[must_use]
    pub fn new(role: EngineRole, url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            role,
            id: None,
            bootstrap_port: None,
            engine: None,
            connector: None,
            models: Vec::new(),
            place: PhysicalLocation::default(),
            kv: DeclaredKvFacts::default(),
        }
    }

    pub(crate) fn listed(&self) -> Result<ListedInstance, InstanceError> {
        let endpoint = EngineEndpoint::parse(&self.url)?;
        let id = self.id.clone().filter(|id| !id.is_empty()).unwrap_or_else(|| endpoint.url.clone());
        if self.engine == Some(EngineKind::Sglang) && self.connector.is_some() {
            return Err(InstanceError::ConnectorWithoutVllm(id));
        }
        let hash = self.kv.hash_algorithm.is_some() || self.kv.hash_seed.is_some();
        if self.engine == Some(EngineKind::Sglang) && hash {
            return Err(InstanceError::HashWithoutVllm(id));
        }
        if let Some((key, problem)) = find_kv_error(&self.kv) {
            return Err(InstanceError::Kv { id, key, problem });
        }
        let is_vllm = self.connector.is_some() || hash;
        Ok(ListedInstance {
            id: id.as_str().into(),
            role: self.role,
            url: endpoint.url,
            host: endpoint.host,
            source: InstanceSource::Static,
            location: self.place.clone(),
            workload: KubernetesWorkload::default(),
            declared: DeclaredFacts {
                // Only vLLM has a connector or these hash settings, so they imply the engine.
                engine: self.engine.or(is_vllm.then_some(EngineKind::Vllm)),
                connector: self.connector,
                bootstrap_port: self.bootstrap_port,
                models: self.models.clone(),
                kv: self.kv.clone(),
            },
            unavailable_reason: None,
        })
    }
}

/// The first invalid key of the table `kv`, and the problem with it.
fn find_kv_error(kv: &DeclaredKvFacts) -> Option<(&'static str, &'static str)> {
    for (key, address) in [("events", &kv.events), ("replay", &kv.replay)] {
        if address.as_deref().is_some_and(|text| TcpAddress::parse(text).is_none()) {
            return Some((
                key,
                "is not a ZeroMQ address over TCP; write tcp://HOST:PORT with the port of rank 0",
            ));
        }
    }
    if kv.tp_size.is_some_and(|size| !(1..=MAX_RANKS).contains(&size)) {
        return Some(("tp_size", "is not between 1 and 4096; write the engine's tensor-parallel size"));
    }
    for (key, text) in [("hash_seed", &kv.hash_seed), ("store_key_prefix", &kv.store_key_prefix)] {
        if text.as_deref().is_some_and(|text| text.len() > MAX_TEXT || text.chars().any(char::is_control)) {
            return Some((
                key,
                "is longer than 255 bytes or has a control character; write the engine's own value",
            ));
        }
    }
    None
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InstancesFile {
    #[serde(default, rename = "instance")]
    instances: Vec<StaticInstance>,
    #[serde(default, rename = "host")]
    hosts: Vec<StaticHost>,
}

/// A host without an engine, such as that of a store node.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StaticHost {
    names: Vec<String>,
    place: PhysicalLocation,
}

/// Validates a whole list. One invalid instance rejects it, since half a fleet is worse than the last valid list.
pub(crate) fn listing(instances: &[StaticInstance]) -> Result<Vec<ListedInstance>, InstanceError> {
    if instances.len() > MAX_INSTANCES {
        return Err(InstanceError::TooMany { listed: instances.len(), max: MAX_INSTANCES });
    }
    let listed = instances.iter().map(StaticInstance::listed).collect::<Result<Vec<_>, _>>()?;
    let mut ids = BTreeSet::new();
    match listed.iter().find(|instance| !ids.insert(&instance.id)) {
        Some(duplicate) => Err(InstanceError::Duplicate(duplicate.id.to_string())),
        None => Ok(listed),
    }
}

/// Parses the file's text into instances and hosts.
pub(crate) fn parse(text: &str, slot: usize) -> Result<SourceUpdate, TopologyFileError> {
    let document: InstancesFile =
        toml::from_str(text).map_err(|error| TopologyFileError::Syntax(error.to_string()))?;
    let hosts =
        document.hosts.into_iter().map(|StaticHost { names, place }| ListedHost { names, location: place });
    Ok(SourceUpdate { slot, instances: listing(&document.instances)?, hosts: hosts.collect() })
}

/// Reads and validates the file, and returns the number of its instances.
///
/// # Errors
/// [`TopologyFileError`]
pub async fn count_instances(path: &Path) -> Result<usize, TopologyFileError> {
    Ok(instance_ids(&TopologyFileWatcher::new(path).read().await?)?.len())
}

/// The ids of the instances that the file's text lists.
///
/// # Errors
/// [`TopologyFileError`]
pub fn instance_ids(text: &str) -> Result<Vec<InstanceId>, TopologyFileError> {
    Ok(parse(text, 0)?.instances.into_iter().map(|listed| listed.id).collect())
}

/// Sends the new list after every change of the file. An invalid file is logged and ignored.
pub(crate) async fn watch(
    mut file: TopologyFileWatcher,
    slot: usize,
    out: mpsc::Sender<SourceUpdate>,
    stop: CancellationToken,
) {
    loop {
        let read = tokio::select! {
            () = stop.cancelled() => return,
            read = file.changed() => read,
        };
        match read.and_then(|text| parse(&text, slot)) {
            Ok(update) => {
                tracing::info!(file = %file.path().display(), instances = update.instances.len(), "instances file reloaded");
                if out.send(update).await.is_err() {
                    return;
                }
            }
            Err(error) => file.log_rejected(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::VllmHashAlgorithm;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Vec<ListedInstance>, TopologyFileError> {
        super::parse(text, 0).map(|update| update.instances)
    }

    #[test]
    fn hosts_of_store_nodes_have_locations() {
        let text = "[[host]]\nnames = [\"10.0.0.7\", \"store-0\"]\nplace = { rack = \"r1\" }\n";
        let location = PhysicalLocation { rack: Some("r1".into()), ..PhysicalLocation::default() };
        let host = ListedHost { names: vec!["10.0.0.7".into(), "store-0".into()], location };
        assert_eq!(super::parse(text, 0).unwrap().hosts, [host]);
        assert!(parse("[[host]]\nnames = [\"a\"]\n").is_err(), "a host without a place");
    }

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

            [instance.kv]
            hash_algorithm = "sha256_cbor"
            hash_seed = "0"
            events = "tcp://10.0.0.1:5557"
            replay = "tcp://*:5657"
            tp_size = 2
            store_key_prefix = ""
            prefetch_threshold = 0

            [[instance]]
            url = "http://10.0.0.2:8000"
            role = "decode"
            "#,
        )
        .unwrap();
        assert_eq!(listed[0].id, "p0".into());
        assert_eq!(listed[0].declared.engine, Some(EngineKind::Vllm), "implied by the connector");
        assert_eq!(listed[0].location.nvlink_domain.as_deref(), Some("d1"));
        let kv = &listed[0].declared.kv;
        assert_eq!(kv.hash_algorithm, Some(VllmHashAlgorithm::Sha256Cbor));
        assert_eq!((kv.tp_size, kv.prefetch_threshold), (Some(2), Some(0)));
        assert_eq!(kv.store_key_prefix.as_deref(), Some(""), "declared as empty");
        assert_eq!(listed[1].id, "http://10.0.0.2:8000".into());
        assert_eq!(listed[1].declared.kv, DeclaredKvFacts::default());
    }

    #[test]
    fn an_invalid_kv_table_is_reported_with_instance_and_key() {
        let error = |kv: &str| {
            let text = format!(
                "[[instance]]\nid = \"e7\"\nurl = \"http://a:1\"\nrole = \"plain\"\nkv = {{ {kv} }}\n"
            );
            parse(&text).unwrap_err().to_string()
        };
        for (kv, key) in [
            (r#"events = "10.0.0.1:5557""#, "kv.events"),
            (r#"events = "ipc:///tmp/kv""#, "kv.events"),
            (r#"replay = "tcp://*""#, "kv.replay"),
            ("tp_size = 0", "kv.tp_size"),
            ("tp_size = 4097", "kv.tp_size"),
            (r#"store_key_prefix = "a\tb""#, "kv.store_key_prefix"),
        ] {
            let message = error(kv);
            assert!(
                message.contains(key) && message.contains("`e7`") && message.contains("write"),
                "{message}"
            );
        }
        let unknown = error(r#"hash_algorithm = "xxhash""#);
        assert!(unknown.contains("line 5") && unknown.contains("sha256_cbor"), "{unknown}");
        let sglang = "[[instance]]\nurl=\"a:1\"\nrole=\"plain\"\nengine=\"sglang\"\nkv={hash_seed=\"0\"}\n";
        assert!(matches!(parse(sglang), Err(TopologyFileError::Instance(InstanceError::HashWithoutVllm(_)))));
        let implied = parse("[[instance]]\nurl=\"a:1\"\nrole=\"plain\"\nkv={hash_seed=\"0\"}\n").unwrap();
        assert_eq!(implied[0].declared.engine, Some(EngineKind::Vllm));
    }

    #[test]
    fn errors_name_the_line_or_the_instance() {
        let unknown_key =
            parse("[[instance]]\nurl = \"http://a:1\"\nrole = \"decode\"\nbootstrapport = 1\n").unwrap_err();
        assert!(unknown_key.to_string().contains("line 4"), "{unknown_key}");
        let role = parse("[[instance]]\nurl = \"http://a:1\"\nrole = \"both\"\n").unwrap_err();
        assert!(role.to_string().contains("prefill"), "{role}");
        let twice = "[[instance]]\nurl = \"http://a:1\"\nrole = \"decode\"\n".repeat(2);
        assert_eq!(
            parse(&twice),
            Err(TopologyFileError::Instance(InstanceError::Duplicate("http://a:1".into())))
        );
        let mixed =
            parse("[[instance]]\nurl=\"a:1\"\nrole=\"decode\"\nengine=\"sglang\"\nconnector=\"nixl\"\n");
        assert!(matches!(mixed, Err(TopologyFileError::Instance(InstanceError::ConnectorWithoutVllm(_)))));
        assert_eq!(parse(""), Ok(Vec::new()), "an empty file is valid");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn arbitrary_values_never_panic(url in "\\PC{0,40}", id in "\\PC{0,10}") {
            let instance = StaticInstance { id: Some(id), ..StaticInstance::new(EngineRole::Plain, url) };
            let _ = instance.listed();
        }
    }
}
