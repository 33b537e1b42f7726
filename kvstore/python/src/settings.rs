//! Arguments of `setup`, in both of its forms.

use std::collections::BTreeMap;

use clap::Parser as _;
use moongate_master_client::rpc::{CLUSTER_VARIABLE, MasterAddress, MasterAddressError};
use moongate_store_client::{KvClientOptions, Locality, MetadataSource};
use moongate_store_node::{NodeArgs, NodeConfig, NodeConfigError};

/// Smallest segment in bytes, as for Mooncake's clients.
const MIN_SEGMENT: u64 = 16 << 20;
/// Size of the segment in bytes if a dictionary does not set it.
const DEFAULT_SEGMENT: &str = "16777216";
/// Seconds that `setup` waits for the master, unless the variable says otherwise: engines treat a failed `setup` as final.
const MASTER_WAIT: &str = "5";
const MASTER_WAIT_VARIABLE: &str = "MOONGATE_STORE_MAX_WAIT_TIME";
/// `off` copies all objects through sockets. It is also a variable of the node, which shares its memory unless it is `off`.
const SHARED_MEMORY_VARIABLE: &str = "MOONGATE_STORE_SHARED_MEMORY";
/// Transfer protocols that `setup` accepts.
const PROTOCOLS: [&str; 2] = ["tcp", "rdma"];

/// An argument of `setup` is missing or invalid.
#[derive(Debug, thiserror::Error)]
pub enum StoreSettingsError {
    #[error("setup needs {0}")]
    Missing(&'static str),
    #[error("{name} cannot be `{value}`: write {expected}")]
    Value { name: &'static str, value: String, expected: &'static str },
    #[error("unknown protocol `{0}`: write tcp or rdma")]
    Protocol(String),
    #[error("a segment has at least {MIN_SEGMENT} bytes, or 0 for none; global_segment_size is {0}")]
    SegmentTooSmall(u64),
    #[error("{}", .0.reason)]
    Master(MasterAddressError),
    #[error(transparent)]
    Node(#[from] NodeConfigError),
    /// A variable of the environment is invalid.
    #[error("{0}")]
    Environment(#[from] clap::Error),
}

/// Parsed arguments of `setup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// Host under which peers reach this process, optionally with a port.
    pub hostname: String,
    /// The master's address, as the text of a [`MasterAddress`].
    pub master: String,
    /// Where nodes publish their descriptors.
    pub metadata: MetadataSource,
    /// Size of the mounted segment in bytes; 0 for none.
    pub segment_size: u64,
    /// `tcp` or `rdma`.
    pub protocol: String,
    /// RDMA devices by name; all devices of the machine if empty.
    pub devices: Vec<String>,
    pub tenant: String,
    /// Whether objects are offloaded to a disk.
    pub ssd_offload: bool,
    /// Folder of the disk tier.
    pub ssd_path: String,
}

impl StoreSettings {
    /// Parses a dictionary of texts. Unknown keys are ignored, as by Mooncake.
    ///
    /// # Errors
    /// [`StoreSettingsError`] for the first missing or invalid key.
    pub fn from_dictionary(values: &BTreeMap<String, String>) -> Result<Self, StoreSettingsError> {
        let text = |names: &[&str]| {
            let found = names.iter().find_map(|name| values.get(*name)).map(|value| value.trim());
            found.filter(|value| !value.is_empty())
        };
        let required = |name: &'static str| text(&[name]).ok_or(StoreSettingsError::Missing(name));
        let hostname = required("local_hostname")?.to_owned();
        let metadata = required("metadata_server")?;
        // LMCache passes on the names of its own configuration.
        let master = text(&["master_server_addr", "master_server_address"]);
        let master = master.ok_or(StoreSettingsError::Missing("master_server_addr"))?;
        let protocol = text(&["protocol"]).unwrap_or("tcp").to_ascii_lowercase();
        if !PROTOCOLS.contains(&protocol.as_str()) {
            return Err(StoreSettingsError::Protocol(protocol));
        }
        let segment_size =
            size("global_segment_size", text(&["global_segment_size"]).unwrap_or(DEFAULT_SEGMENT))?;
        if segment_size > 0 && segment_size < MIN_SEGMENT {
            return Err(StoreSettingsError::SegmentTooSmall(segment_size));
        }
        // Objects are transferred without a buffer in between, but an invalid value is still reported.
        size("local_buffer_size", text(&["local_buffer_size"]).unwrap_or("0"))?;
        let masters = std::env::var(CLUSTER_VARIABLE).ok();
        let master = MasterAddress::parse(master, masters.as_deref()).map_err(StoreSettingsError::Master)?;
        let devices = text(&["rdma_devices", "device_name"]).unwrap_or_default().split(',');
        Ok(Self {
            hostname,
            master: master.to_string(),
            metadata: parse_metadata(metadata)?,
            segment_size,
            protocol,
            devices: devices.map(str::trim).filter(|it| !it.is_empty()).map(str::to_owned).collect(),
            tenant: text(&["tenant_id"]).unwrap_or("default").to_owned(),
            ssd_offload: flag(text(&["enable_ssd_offload"]).unwrap_or("false"))?,
            ssd_path: text(&["ssd_offload_path"]).unwrap_or_default().to_owned(),
        })
    }

    /// Options of the clients.
    #[must_use]
    pub fn client_options(&self) -> KvClientOptions {
        let host = self.hostname.rsplit_once(':').map_or(self.hostname.as_str(), |(host, _)| host);
        let mut options = KvClientOptions {
            tenant: self.tenant.clone(),
            metadata: self.metadata.clone(),
            rdma_devices: self.devices.clone(),
            locality: Locality::default().with_own(host),
            // Engines handle a full store, and wait for each call.
            allocation_attempts: 1,
            ..KvClientOptions::default()
        };
        if std::env::var_os(SHARED_MEMORY_VARIABLE).is_some_and(|value| value == "off") {
            options.shared_memory = None;
        }
        options.master.connections = 1;
        options
    }

    /// Configuration of the node that mounts the segment. Its flags come from the variables of `moongate store`.
    ///
    /// # Errors
    /// [`StoreSettingsError::Environment`] if such a variable is invalid.
    pub fn node(&self) -> Result<(NodeArgs, NodeConfig), StoreSettingsError> {
        let mut flags = vec!["moongate_store"];
        if std::env::var_os(MASTER_WAIT_VARIABLE).is_none() {
            flags.extend(["--max-wait-time", MASTER_WAIT]);
        }
        let config = NodeConfig {
            local_hostname: self.hostname.clone(),
            metadata: self.metadata.clone(),
            segment_size: self.segment_size,
            protocol: self.protocol.clone(),
            devices: self.devices.clone(),
            master: self.master.clone(),
            tenant: self.tenant.clone(),
            client_http_port: None,
            ssd_offload: self.ssd_offload,
            ssd_path: (!self.ssd_path.is_empty()).then(|| self.ssd_path.clone().into()),
        };
        Ok((NodeArgs::try_parse_from(flags)?, config))
    }
}

fn size(name: &'static str, value: &str) -> Result<u64, StoreSettingsError> {
    let expected = "a number of bytes, or one with kb, mb or gb";
    moongate_store_node::size::parse(value).map_err(|_| StoreSettingsError::Value {
        name,
        value: value.to_owned(),
        expected,
    })
}

fn flag(value: &str) -> Result<bool, StoreSettingsError> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(StoreSettingsError::Value {
            name: "enable_ssd_offload",
            value: value.to_owned(),
            expected: "true or false",
        }),
    }
}

/// Parses the metadata server, and adds the cluster id that becomes part of its keys.
fn parse_metadata(text: &str) -> Result<MetadataSource, StoreSettingsError> {
    let invalid = |_| StoreSettingsError::Value {
        name: "metadata_server",
        value: text.to_owned(),
        expected: "P2PHANDSHAKE, or a URL as http://10.0.0.1:8080/metadata",
    };
    let mut metadata: MetadataSource = text.parse().map_err(invalid)?;
    if let MetadataSource::Http { cluster_id, .. } = &mut metadata {
        *cluster_id = std::env::var("MC_METADATA_CLUSTER_ID").ok();
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(changes: &[(&str, &str)]) -> Result<StoreSettings, StoreSettingsError> {
        let right = [
            ("local_hostname", "10.0.0.7"),
            ("metadata_server", "P2PHANDSHAKE"),
            ("master_server_addr", "10.0.0.1:50051"),
        ];
        let values =
            right.iter().chain(changes).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        StoreSettings::from_dictionary(&values.collect())
    }

    #[test]
    fn a_dictionary_has_defaults_and_ignores_unknown_keys() {
        let settings = parse(&[("unknown", "1"), ("rdma_devices", "mlx5_0, mlx5_1")]).unwrap();
        assert_eq!((settings.segment_size, settings.protocol.as_str()), (16 << 20, "tcp"));
        assert_eq!(
            (settings.tenant.as_str(), settings.devices),
            ("default", vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()])
        );
    }

    #[test]
    fn names_of_lmcache_are_accepted() {
        let values = [
            ("local_hostname", "h"),
            ("metadata_server", "P2PHANDSHAKE"),
            ("master_server_address", "10.0.0.2:1"),
            ("device_name", "mlx5_3"),
            ("global_segment_size", "1gb"),
        ];
        let values = values.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let settings = StoreSettings::from_dictionary(&values.into()).unwrap();
        assert_eq!((settings.master.as_str(), settings.segment_size), ("10.0.0.2:1", 1 << 30));
        assert_eq!(settings.devices, ["mlx5_3"]);
    }

    #[test]
    fn wrong_values_are_rejected() {
        for wrong in [
            ("local_hostname", ""),
            ("metadata_server", ""),
            ("metadata_server", "ftp://x"),
            ("master_server_addr", ""),
            ("global_segment_size", "much"),
            ("global_segment_size", "1048576"),
            ("local_buffer_size", "x"),
            ("protocol", "pigeon"),
            ("enable_ssd_offload", "maybe"),
        ] {
            assert!(parse(&[wrong]).is_err(), "{wrong:?}");
        }
        assert_eq!(parse(&[("global_segment_size", "0")]).unwrap().segment_size, 0);
    }

    #[test]
    fn a_node_is_configured_without_http() {
        let (flags, config) = parse(&[("ssd_offload_path", "/d")]).unwrap().node().unwrap();
        assert_eq!((config.client_http_port, config.local_hostname.as_str()), (None, "10.0.0.7"));
        assert_eq!((config.ssd_path, flags.max_wait_time), (Some("/d".into()), 5.0));
    }
}
