//! Mooncake's configuration of a store node: a JSON file or `MOONCAKE_*` variables, plus overrides.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use moongate_master_client::rpc::{CLUSTER_VARIABLE, MasterAddress, MasterAddressError};
use moongate_transfer::{MetadataSource, MetadataSourceError};
use serde_json::Value;

use crate::size::{self, SizeError};

/// Transfer protocol of a node without RDMA.
pub(crate) const TCP_PROTOCOL: &str = "tcp";

/// Each key with its environment variable and its default.
const KEYS: [(&str, &str, &str); 12] = [
    ("local_hostname", "MOONCAKE_LOCAL_HOSTNAME", "localhost"),
    ("metadata_server", "MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
    ("global_segment_size", "MOONCAKE_GLOBAL_SEGMENT_SIZE", "3355443200"),
    ("local_buffer_size", "MOONCAKE_LOCAL_BUFFER_SIZE", "1073741824"),
    ("protocol", "MOONCAKE_PROTOCOL", TCP_PROTOCOL),
    ("device_name", "MOONCAKE_DEVICE", ""),
    ("master_server_address", "MOONCAKE_MASTER", ""),
    ("enable_ssd_offload", "MOONCAKE_OFFLOAD_ENABLED", "false"),
    ("ssd_offload_path", "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", ""),
    ("tenant_id", "MOONCAKE_TENANT_ID", "default"),
    ("enable_client_http_server", "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "false"),
    ("client_http_port", "MOONCAKE_CLIENT_HTTP_PORT", "9300"),
];
/// Keys that a configuration file must set.
const REQUIRED: [&str; 3] = ["local_hostname", "metadata_server", "master_server_address"];
/// Variable with the cluster id that becomes part of metadata keys.
const CLUSTER: &str = "MC_METADATA_CLUSTER_ID";
/// Smallest segment in bytes that Mooncake's clients mount.
const MIN_SEGMENT: u64 = 16 << 20;

/// Parsed configuration of a store node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// Host under which peers reach this node; with a port to fix the port in the node's name.
    pub local_hostname: String,
    /// Where nodes publish their descriptors.
    pub metadata: MetadataSource,
    /// Size of the node's segment in bytes.
    pub segment_size: u64,
    /// Transfer protocol: `tcp` or `rdma`, not validated here.
    pub protocol: String,
    /// RDMA devices by name; all devices of the machine if empty.
    pub devices: Vec<String>,
    /// The master's address, as the text of a [`MasterAddress`].
    pub master: String,
    /// Tenant of the objects that the REST API puts and gets.
    pub tenant: String,
    /// Port of a second HTTP server that serves only health and metrics.
    pub client_http_port: Option<u16>,
    /// Whether objects are offloaded to a disk.
    pub ssd_offload: bool,
    /// Folder of the disk tier.
    pub ssd_path: Option<PathBuf>,
}

/// An invalid or unreadable configuration.
#[derive(Debug, thiserror::Error)]
pub enum NodeConfigError {
    /// The file cannot be read or is not JSON.
    #[error("cannot read {}: {source}", path.display())]
    File { path: PathBuf, source: NodeConfigFileError },
    /// A required key is missing.
    #[error("{place} does not set {key}; for example {example}")]
    Missing {
        /// The file, or "the environment".
        place: String,
        key: &'static str,
        /// How the key could be set.
        example: &'static str,
    },
    /// A value is invalid for its key.
    #[error("{key} cannot be `{value}`: {source}")]
    Value { key: &'static str, value: String, source: NodeConfigValueError },
    /// An override is not KEY=VALUE, or its key is unknown.
    #[error("-D {0}: write -D KEY=VALUE, where KEY is one of {known}", known = known_keys())]
    Define(String),
}

/// Why a configuration file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NodeConfigFileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    NotJson(#[from] serde_json::Error),
}

/// Why a value is invalid for its key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeConfigValueError {
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error("the minimum segment size is {MIN_SEGMENT} bytes")]
    SegmentTooSmall,
    #[error("write true or false")]
    NotBoolean,
    #[error("not a port number")]
    NotPort,
    #[error(transparent)]
    Metadata(#[from] MetadataSourceError),
    /// [`NodeConfigError::Value`] has the address already.
    #[error("{}", .0.reason)]
    Master(MasterAddressError),
}

fn known_keys() -> String {
    KEYS.map(|(key, ..)| key).join(", ")
}

impl NodeConfig {
    /// Reads the file if given, else the environment, and then applies the overrides.
    ///
    /// # Errors
    /// [`NodeConfigError`] for the first missing or invalid key.
    pub fn read(
        file: Option<&Path>,
        define: &[String],
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, NodeConfigError> {
        let place = file.map_or("the environment".to_owned(), |path| path.display().to_string());
        let mut values = match file {
            Some(path) => from_file(path)?,
            None => from_environment(&environment),
        };
        for text in define {
            let (key, value) = text.split_once('=').ok_or_else(|| NodeConfigError::Define(text.clone()))?;
            let known = KEYS.iter().find(|(known, ..)| *known == key);
            let (key, ..) = known.ok_or_else(|| NodeConfigError::Define(text.clone()))?;
            values.insert(key, value.to_owned());
        }
        for key in REQUIRED {
            if values.get(key).is_none_or(|value| value.trim().is_empty()) {
                let example = match key {
                    "master_server_address" => "MOONCAKE_MASTER=10.0.0.1:50051",
                    "metadata_server" => "\"metadata_server\": \"P2PHANDSHAKE\"",
                    _ => "\"local_hostname\": \"10.0.0.7\"",
                };
                return Err(NodeConfigError::Missing { place, key, example });
            }
        }
        Self::from_values(&values, environment(CLUSTER), environment(CLUSTER_VARIABLE))
    }

    fn from_values(
        values: &BTreeMap<&'static str, String>,
        metadata_cluster: Option<String>,
        masters: Option<String>,
    ) -> Result<Self, NodeConfigError> {
        let text = |key: &'static str| values.get(key).map_or("", String::as_str).trim().to_owned();
        let invalid = |key: &'static str, source: NodeConfigValueError| NodeConfigError::Value {
            key,
            value: text(key),
            source,
        };
        let size = |key| size::parse(&text(key)).map_err(|error| invalid(key, error.into()));
        let flag = |key| boolean(&text(key)).ok_or_else(|| invalid(key, NodeConfigValueError::NotBoolean));
        let mut metadata: MetadataSource = text("metadata_server")
            .parse()
            .map_err(|error: MetadataSourceError| invalid("metadata_server", error.into()))?;
        if let MetadataSource::Http { cluster_id, .. } = &mut metadata {
            *cluster_id = metadata_cluster;
        }
        let master = MasterAddress::parse(&text("master_server_address"), masters.as_deref())
            .map_err(|error| invalid("master_server_address", NodeConfigValueError::Master(error)))?;
        let segment_size = size("global_segment_size")?;
        if segment_size < MIN_SEGMENT {
            return Err(invalid("global_segment_size", NodeConfigValueError::SegmentTooSmall));
        }
        // This node has no local buffer, but an invalid value is still reported.
        size("local_buffer_size")?;
        let port = text("client_http_port").parse::<u16>();
        let port = port.map_err(|_| invalid("client_http_port", NodeConfigValueError::NotPort))?;
        Ok(Self {
            local_hostname: text("local_hostname"),
            metadata,
            segment_size,
            protocol: text("protocol").to_ascii_lowercase(),
            devices: devices(&text("device_name")),
            master: master.to_string(),
            tenant: text("tenant_id"),
            client_http_port: flag("enable_client_http_server")?.then_some(port),
            ssd_offload: flag("enable_ssd_offload")?,
            ssd_path: Some(text("ssd_offload_path")).filter(|path| !path.is_empty()).map(PathBuf::from),
        })
    }
}

/// Splits a comma-separated list of device names.
fn devices(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn from_environment(environment: &impl Fn(&str) -> Option<String>) -> BTreeMap<&'static str, String> {
    let value = |variable: &str, default: &str| environment(variable).unwrap_or_else(|| default.to_owned());
    KEYS.iter().map(|(key, variable, default)| (*key, value(variable, default))).collect()
}

fn from_file(path: &Path) -> Result<BTreeMap<&'static str, String>, NodeConfigError> {
    let read = || -> Result<BTreeMap<String, Value>, NodeConfigFileError> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    };
    let file = read().map_err(|source| NodeConfigError::File { path: path.to_owned(), source })?;
    let unknown = file.keys().find(|key| KEYS.iter().all(|(known, ..)| known != key));
    if let Some(key) = unknown {
        // Not an error: other programs read the same file.
        tracing::debug!(%key, "unused configuration key");
    }
    let mut values = BTreeMap::new();
    for (key, _, default) in KEYS {
        let value = match file.get(key) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Null) | None if REQUIRED.contains(&key) => continue,
            Some(Value::Null) | None => default.to_owned(),
            Some(other) => other.to_string(),
        };
        values.insert(key, value);
    }
    Ok(values)
}

fn boolean(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" | "enable" => Some(true),
        "" | "false" | "0" | "no" | "off" | "disable" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_variables(variables: &[(&str, &str)], define: &[&str]) -> Result<NodeConfig, NodeConfigError> {
        let define: Vec<String> = define.iter().map(|&text| text.to_owned()).collect();
        NodeConfig::read(None, &define, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn environment_is_read_as_by_mooncake() {
        let config = from_variables(&[("MOONCAKE_MASTER", "m:50051")], &[]).unwrap();
        assert_eq!((config.local_hostname.as_str(), config.master.as_str()), ("localhost", "m:50051"));
        assert_eq!(
            (config.segment_size, config.metadata.clone()),
            (3_355_443_200, MetadataSource::Handshake)
        );
        assert_eq!((config.protocol.as_str(), config.client_http_port), ("tcp", None));
        assert!(config.devices.is_empty());
        let variables = [
            ("MOONCAKE_MASTER", "m:50051"),
            ("MOONCAKE_TE_META_DATA_SERVER", "http://m:8080/metadata"),
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb"),
            ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "Yes"),
            ("MOONCAKE_PROTOCOL", "RDMA"),
            ("MOONCAKE_DEVICE", "mlx5_0, mlx5_1"),
            ("MC_METADATA_CLUSTER_ID", "blue"),
            ("MC_STORE_CLUSTER_ID", "red"),
        ];
        let config = from_variables(&variables, &["client_http_port=9301"]).unwrap();
        assert_eq!((config.segment_size, config.client_http_port), (4 << 30, Some(9301)));
        let url = "http://m:8080/metadata".to_owned();
        assert_eq!(config.metadata, MetadataSource::Http { url, cluster_id: Some("blue".to_owned()) });
        assert_eq!(
            (config.protocol.as_str(), config.devices),
            ("rdma", vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()])
        );
    }

    #[test]
    fn etcd_master_address_includes_the_cluster_id() {
        let etcd = ("MOONCAKE_MASTER", "etcd://a:2379;b:2379");
        let config = from_variables(&[etcd], &[]).unwrap();
        assert_eq!(config.master, "etcd://a:2379;b:2379/mooncake_cluster");
        let config = from_variables(&[etcd, ("MC_STORE_CLUSTER_ID", "red")], &[]).unwrap();
        assert_eq!(config.master, "etcd://a:2379;b:2379/red");
    }

    #[test]
    fn file_is_read_as_by_mooncake_and_without_the_environment() {
        let path = std::env::temp_dir().join(format!("moongate-store-{}.json", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            // With a file, the environment is not read.
            NodeConfig::read(Some(&path), &[], |_| Some("1".to_owned()))
        };
        let full = r#"{"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1",
            "global_segment_size": 16777216, "enable_ssd_offload": true, "device_name": null, "more": [1]}"#;
        let config = read(full).unwrap();
        assert_eq!((config.segment_size, config.ssd_offload), (16 << 20, true));
        let error = read(r#"{"local_hostname": "a", "metadata_server": "P2PHANDSHAKE"}"#).unwrap_err();
        assert!(error.to_string().contains("does not set master_server_address"), "{error}");
        let error = read("{").unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn invalid_settings_are_explained() {
        let master = ("MOONCAKE_MASTER", "m:1");
        for (variables, define, expected) in [
            (&[][..], &[][..], "the environment does not set master_server_address"),
            (&[master], &["nothing"], "write -D KEY=VALUE"),
            (&[master], &["some=1"], "where KEY is one of local_hostname, metadata_server"),
            (&[master], &["metadata_server=m:8080"], "write P2PHANDSHAKE or http://HOST:PORT/metadata"),
            (&[master], &["master_server_address=redis://m:1"], "write HOST:PORT, or etcd://"),
            (&[master], &["global_segment_size=lots"], "global_segment_size cannot be `lots`"),
            (&[master], &["global_segment_size=1"], "the minimum segment size is 16777216 bytes"),
            (&[master], &["enable_ssd_offload=perhaps"], "write true or false"),
            (&[master], &["client_http_port=70000"], "not a port number"),
        ] {
            let error = from_variables(variables, define).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
