//! Converts flags to the settings of a master's components.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mooncake_wire::Dialect;
use mooncake_wire::shards::{MAX_SHARDS, ShardIdentity};
use mooncake_wire::types::StorageConfig;
use moongate_master_core::{DynamicReplicationMode, MasterCoreOptions, PlacementStrategy, RetentionPolicy};
use moongate_telemetry::{LogFormat, LoggingArgs};

use super::disks::disks;
use super::flag::{self, FlagDefinition, FlagSupport};
use super::ha::HaFlags;
use super::{FlagError, FlagValues, store_tls, table};
use crate::clock;
use crate::durable::DataDirOptions;
use crate::events::KvEventLabels;
use crate::server::{MasterServerOptions, RECONNECT_TIME, RpcLimits};

/// A timeout that is never reached, for timeouts that can be disabled.
const NEVER_MS: u64 = u64::MAX / 4;
const FLAG_SECTION: &str = "settings";
/// Mooncake's switches for features that `--data_dir` provides.
const PERSISTENCE_FLAGS: [&str; 4] =
    ["enable_oplog", "enable_oplog_snapshot", "enable_snapshot", "enable_snapshot_restore"];

/// Settings of the transfer metadata service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataFlags {
    /// Listen address of the HTTP server.
    pub address: SocketAddr,
    /// Folder for entries; `None` stores them in memory only.
    pub folder: Option<PathBuf>,
    /// Whether to remove the entries of a node that has disconnected.
    pub cleanup: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventFlags {
    /// Endpoint for subscribers, such as `tcp://0.0.0.0:5557`.
    pub bind: String,
    /// Endpoint for replays of missed messages; `None` disables them.
    pub replay: Option<String>,
    /// Name of this store in its events.
    pub backend_id: String,
    /// What is stated in all events.
    pub labels: KvEventLabels,
    /// Whether to add the fields of engines' events.
    pub legacy: bool,
    /// Whether to include object keys.
    pub keys: bool,
    /// Maximum number of queued events; `None` for the default limit.
    pub queue: Option<usize>,
}

/// All settings of a master.
#[derive(Debug)]
pub struct MasterOptions {
    /// Settings of the RPC server and the state machine.
    pub server: MasterServerOptions,
    /// Listen address of the RPC port.
    pub rpc: SocketAddr,
    /// Listen address of the admin interface with the metrics.
    pub metrics: SocketAddr,
    /// Whether to log a summary of the metrics every ten seconds.
    pub log_summary: bool,
    /// Transfer metadata service; `None` disables it.
    pub metadata: Option<MetadataFlags>,
    /// KV event publisher; `None` disables it.
    pub events: Option<KvEventFlags>,
    /// File with the tenants' quotas.
    pub quotas: Option<String>,
    /// Persistent state; `None` keeps it in memory only.
    pub data: Option<DataDirOptions>,
    /// Size of the in-memory record buffer in bytes.
    pub journal_bytes: usize,
    /// Settings of HA mode; `None` for a standalone master.
    pub ha: Option<HaFlags>,
    /// Time for in-flight calls at shutdown.
    pub shutdown_grace: Duration,
    /// Log format and filter.
    pub logs: LoggingArgs,
    /// Given flags without effect, for a log message.
    pub ignored_flags: Vec<String>,
    /// Given flags that request unsupported features, each with what it would do and the alternative, for log messages.
    pub unsupported_flags: Vec<(String, &'static str)>,
}

impl FlagValues {
    /// An integer that [`flag::FlagDefinition::check`] has validated.
    pub(super) fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or_default()
    }

    pub(super) fn size(&self, name: &str) -> usize {
        usize::try_from(self.number(name)).unwrap_or(usize::MAX)
    }

    fn float(&self, name: &str) -> f64 {
        self.text(name).parse().unwrap_or_default()
    }

    pub(super) fn milliseconds(&self, name: &str) -> u64 {
        flag::parse_duration_ms(self.text(name)).unwrap_or_default()
    }

    /// The newer name of a flag if its value is not 0, otherwise the older one.
    pub(super) fn set_name(&self, newer: &'static str, older: &'static str) -> &'static str {
        if self.number(newer) == 0 { older } else { newer }
    }

    fn seconds_ms(&self, name: &str) -> u64 {
        self.number(name).saturating_mul(1000)
    }

    /// Seconds as milliseconds, with 0 for no limit.
    fn limit_ms(&self, name: &str) -> u64 {
        match self.seconds_ms(name) {
            0 => NEVER_MS,
            limit => limit,
        }
    }

    pub(super) fn optional(&self, name: &str) -> Option<String> {
        Some(self.text(name)).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    pub(super) fn invalid(&self, name: &'static str, expected: impl Into<String>) -> FlagError {
        let (source_name, value) = (FLAG_SECTION.to_owned(), self.text(name).to_owned());
        FlagError::Value { source_name, name, value, expected: expected.into() }
    }

    fn address(&self, host: &'static str, port: u16) -> Result<SocketAddr, FlagError> {
        let text = self.text(host);
        let text = if text == "localhost" { "127.0.0.1" } else { text };
        let ip: IpAddr =
            text.parse().map_err(|_| self.invalid(host, "an IP address, such as 0.0.0.0 or ::"))?;
        Ok(SocketAddr::new(ip, port))
    }

    pub(super) fn port(&self, name: &str) -> u16 {
        u16::try_from(self.number(name)).unwrap_or_default()
    }

    fn given_flags(&self, usage: FlagSupport) -> impl Iterator<Item = (&'static FlagDefinition, &str)> {
        let given = table::FLAGS.iter().filter(move |flag| flag.support == usage);
        given.filter_map(|flag| Some((flag, self.values.get(flag.name)?.0.as_str())))
    }
}

impl MasterOptions {
    pub(super) fn new(values: &FlagValues) -> Result<Self, FlagError> {
        let ignored =
            values.given_flags(FlagSupport::Ignored).map(|(flag, value)| format!("--{}={value}", flag.name));
        let is_off = |flag: &FlagDefinition, value: &str| {
            value == flag.default || flag::parse_bool(value) == Some(false)
        };
        let is_persistent = values.optional("data_dir").is_some();
        let is_provided = |flag: &FlagDefinition| is_persistent && PERSISTENCE_FLAGS.contains(&flag.name);
        let unsupported = values
            .given_flags(FlagSupport::Unsupported)
            .filter(|(flag, value)| !is_off(flag, value) && !is_provided(flag));
        Ok(Self {
            server: server(values)?,
            rpc: rpc(values)?,
            metrics: values.address("metrics_host", values.port("metrics_port"))?,
            log_summary: values.is_on("enable_metric_reporting"),
            metadata: metadata(values)?,
            events: values.is_on("enable_kv_events").then(|| events(values)),
            quotas: values.optional("tenant_quota_connector_uri"),
            data: data(values),
            ha: values.is_on("enable_ha").then(|| HaFlags::new(values)).transpose()?,
            journal_bytes: values.size("journal_memory_bytes"),
            shutdown_grace: Duration::from_secs(values.number("shutdown_grace_seconds")),
            logs: logs(values),
            ignored_flags: ignored.chain(values.without_effect.iter().cloned()).collect(),
            unsupported_flags: unsupported
                .map(|(flag, value)| (format!("--{}={value}", flag.name), flag.help))
                .collect(),
        })
    }
}

pub(super) fn rpc(values: &FlagValues) -> Result<SocketAddr, FlagError> {
    let port = match values.port("rpc_port") {
        0 if values.values.contains_key("rpc_port") && !values.values.contains_key("port") => 0,
        0 => values.port("port"),
        port => port,
    };
    if values.optional("rpc_interface").is_some() {
        return Err(
            values.invalid("rpc_interface", "no value; set --rpc_address to the interface's address instead")
        );
    }
    values.address("rpc_address", port)
}

fn metadata(values: &FlagValues) -> Result<Option<MetadataFlags>, FlagError> {
    if !values.is_on("enable_http_metadata_server") {
        return Ok(None);
    }
    let address = values.address("http_metadata_server_host", values.port("http_metadata_server_port"))?;
    Ok(Some(MetadataFlags {
        address,
        folder: values.optional("data_dir").map(|folder| PathBuf::from(folder).join("metadata")),
        cleanup: values.is_on("enable_metadata_cleanup_on_timeout"),
    }))
}

fn data(values: &FlagValues) -> Option<DataDirOptions> {
    let folder = values.optional("data_dir")?.into();
    let snapshot_every = Duration::from_secs(values.number("snapshot_interval_seconds"));
    Some(DataDirOptions { folder, flush_always: values.is_on("data_flush_always"), snapshot_every })
}

fn events(values: &FlagValues) -> KvEventFlags {
    KvEventFlags {
        bind: values.text("kv_events_bind_endpoint").to_owned(),
        replay: values.optional("kv_events_replay_endpoint"),
        backend_id: values.text("kv_events_backend_id").to_owned(),
        labels: KvEventLabels {
            model: values.optional("kv_events_model_name"),
            block_size: Some(values.number("kv_events_block_size")).filter(|size| *size > 0),
            salt: values.optional("kv_events_additional_salt"),
            lora: values.optional("kv_events_lora_name"),
            dp_rank: values
                .values
                .contains_key("kv_events_dp_rank")
                .then(|| values.number("kv_events_dp_rank")),
        },
        legacy: values.is_on("kv_events_emit_legacy_compat"),
        keys: values.is_on("kv_events_emit_object_key"),
        queue: Some(values.size("kv_events_queue_capacity")).filter(|queue| *queue > 0),
    }
}

fn logs(values: &FlagValues) -> LoggingArgs {
    let filter = match (values.values.get("log_filter"), values.number("v"), values.number("minloglevel")) {
        (Some((filter, _)), _, _) => filter,
        (None, 0, 0) => "info",
        (None, 0, 1) => "warn",
        (None, 0, _) => "error",
        (None, _, _) => "debug",
    };
    let format = if values.text("log_format") == "json" { LogFormat::Json } else { LogFormat::Text };
    LoggingArgs { format, filter: filter.to_owned() }
}

fn server(values: &FlagValues) -> Result<MasterServerOptions, FlagError> {
    let dialect = values.text("default_dialect");
    let releases = || Dialect::ALL.map(Dialect::release).join(", ");
    let default_dialect = Dialect::ALL.into_iter().find(|candidate| candidate.release() == dialect);
    let default_dialect =
        default_dialect.ok_or_else(|| values.invalid("default_dialect", format!("one of {}", releases())))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match values.size("rpc_thread_num") {
        0 => values.size("max_threads").clamp(1, cores),
        threads => threads,
    };
    Ok(MasterServerOptions {
        tls: store_tls::load(values)?,
        core: core(values)?,
        threads,
        default_dialect,
        storage: StorageConfig {
            fsdir: match values.text("root_fs_dir") {
                "" => String::new(),
                root => format!("{root}/{}", values.text("cluster_id")),
            },
            enable_disk_eviction: values.is_on("enable_disk_eviction"),
            quota_bytes: values.number("quota_bytes"),
        },
        shard: shard(values)?,
        lost_on_disconnect: values.is_on("client_lost_on_disconnect"),
        reconnect_time: RECONNECT_TIME,
        limits: RpcLimits {
            connections: values.size("rpc_max_connections"),
            frame_bytes: values.size("rpc_max_frame_bytes"),
            buffer_bytes: values.size("rpc_buffer_bytes"),
            stall_timeout: Duration::from_secs(values.number("rpc_stall_timeout_seconds")),
            idle_timeout: Some(values.number("rpc_conn_timeout_seconds"))
                .filter(|seconds| *seconds > 0)
                .map(Duration::from_secs),
            no_delay: values.is_on("rpc_enable_tcp_no_delay"),
            busy_poll: Duration::from_micros(values.number("rpc_busy_poll_microseconds")),
            commits_wait: values.is_on("enable_ha") || values.is_on("data_flush_always"),
        },
    })
}

fn shard(values: &FlagValues) -> Result<Option<ShardIdentity>, FlagError> {
    let text = values.text("shard");
    if text.is_empty() {
        return Ok(None);
    }
    let parsed =
        text.split_once('/').and_then(|(index, count)| Some((index.parse().ok()?, count.parse().ok()?)));
    match parsed {
        Some((index, count)) if index < count && count <= MAX_SHARDS => {
            Ok(Some(ShardIdentity { index, count }))
        }
        _ => Err(values.invalid(
            "shard",
            format!("INDEX/COUNT, with an index below the count and at most {MAX_SHARDS} shards"),
        )),
    }
}

fn core(values: &FlagValues) -> Result<MasterCoreOptions, FlagError> {
    let ratio = |name: &'static str| match values.float(name) {
        ratio if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err(values.invalid(name, "a number from 0 to 1")),
    };
    let placement = match values.text("allocation_strategy") {
        "free_ratio_first" | "ssd_free_ratio_first" => PlacementStrategy::FreeRatioFirst,
        "local_first" => PlacementStrategy::LocalFirst,
        "cxl" => {
            return Err(
                values.invalid("allocation_strategy", "another strategy; CXL memory is not supported")
            );
        }
        _ => PlacementStrategy::Random,
    };
    let hot_reads_per_second = match values.float("dynamic_replication_admission_qps_threshold") {
        reads if reads > 0.0 => reads,
        _ => return Err(values.invalid("dynamic_replication_admission_qps_threshold", "a number above 0")),
    };
    let tasks = ["max_total_pending_tasks", "max_total_processing_tasks", "max_total_finished_tasks"];
    let timeouts = ["pending_task_timeout_sec", "processing_task_timeout_sec"];
    Ok(MasterCoreOptions {
        seed: clock::entropy(),
        lease_ttl_ms: values.milliseconds("default_kv_lease_ttl"),
        soft_pin_ttl_ms: values.milliseconds("default_kv_soft_pin_ttl"),
        max_soft_pin_ttl_ms: values.milliseconds("max_kv_soft_pin_ttl"),
        evict_soft_pinned: values.is_on("allow_evict_soft_pinned_objects"),
        high_watermark: ratio("eviction_high_watermark_ratio")?,
        eviction_ratio: ratio("eviction_ratio")?,
        retention: match values.text("retention_policy") {
            "lru" => RetentionPolicy::Lru,
            _ => RetentionPolicy::Learned,
        },
        put_discard_ms: values.seconds_ms("put_start_discard_timeout_sec"),
        put_release_ms: values.seconds_ms("put_start_release_timeout_sec"),
        client_ttl_ms: values.seconds_ms(values.set_name("client_active_ttl_sec", "client_ttl")),
        client_grace_ms: values.seconds_ms(values.set_name("client_suspicion_ttl_sec", "client_grace")),
        placement,
        ramp_ms: values.milliseconds("segment_ramp"),
        multi_tenant: values.is_on("enable_multi_tenants"),
        dynamic_replication: match values.text("dynamic_replication_mode") {
            "observe" => DynamicReplicationMode::Observe,
            "enforce" => DynamicReplicationMode::Enforce,
            _ => DynamicReplicationMode::Off,
        },
        hot_reads_per_second,
        heat_window_ms: values.seconds_ms("dynamic_replication_heat_window_seconds").max(1000),
        max_hot_replicas: values.size("dynamic_replication_max_memory_replicas").max(1),
        disks: values
            .is_on("enable_offload")
            .then(|| disks(values, ratio("offload_cap_ratio")))
            .transpose()?,
        max_tasks: tasks.into_iter().map(|name| values.size(name)).max().unwrap_or_default(),
        task_timeout_ms: timeouts.into_iter().map(|name| values.limit_ms(name)).max().unwrap_or(NEVER_MS),
        task_retries: u32::try_from(values.number("max_retry_attempts")).unwrap_or(u32::MAX),
        ..MasterCoreOptions::default()
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::flags::{MasterInvocation, read};

    pub(in crate::flags) fn options(line: &str) -> Result<MasterOptions, FlagError> {
        let words = line.split(' ').filter(|word| !word.is_empty()).map(Into::into);
        match read(words, |_| None)? {
            MasterInvocation::Serve(options) => Ok(*options),
            MasterInvocation::PrintText(text) => panic!("{text}"),
        }
    }

    #[test]
    fn defaults_are_those_of_mooncakes_master() {
        let options = options("").unwrap();
        assert_eq!(options.rpc.to_string(), "0.0.0.0:50051");
        assert_eq!(options.metrics.to_string(), "0.0.0.0:9003");
        assert_eq!((options.metadata, options.events, options.log_summary), (None, None, true));
        let defaults = MasterCoreOptions { seed: options.server.core.seed, ..MasterCoreOptions::default() };
        assert_eq!(options.server.core, defaults);
        assert_eq!(options.server.default_dialect, Dialect::NEWEST);
        assert!(options.server.storage.enable_disk_eviction && options.server.storage.fsdir.is_empty());
        assert!(options.ignored_flags.is_empty() && options.unsupported_flags.is_empty());
    }

    #[test]
    fn flags_set_the_options() {
        let line = "--rpc_port=0 --metrics_host=:: --default_kv_lease_ttl=5s --rpc_conn_timeout_seconds=3 --v=1 \
                    --enable_http_metadata_server --root_fs_dir=/mnt --default_dialect=0.3.11 --rpc_thread_num=3 --shard=3/4 \
                    --noenable_ha --enable_oplog --snapshot_object_store_type=s3 --logtostderr=true stray";
        let options = options(line).unwrap();
        assert_eq!(options.rpc.port(), 0);
        assert_eq!(options.metrics.to_string(), "[::]:9003");
        assert_eq!(options.metadata.unwrap().address.to_string(), "0.0.0.0:8080");
        assert_eq!(options.server.core.lease_ttl_ms, 5000);
        assert_eq!(options.server.limits.idle_timeout, Some(Duration::from_secs(3)));
        assert_eq!(options.server.storage.fsdir, "/mnt/mooncake_cluster");
        assert_eq!((options.server.default_dialect, options.server.threads), (Dialect::V0_3_11, 3));
        assert_eq!(options.server.shard, Some(ShardIdentity { index: 3, count: 4 }));
        assert_eq!(options.logs.filter, "debug");
        let unsupported: Vec<&str> =
            options.unsupported_flags.iter().map(|(flag, _)| flag.as_str()).collect();
        assert_eq!(unsupported, ["--enable_oplog=true", "--snapshot_object_store_type=s3"]);
        assert!(options.unsupported_flags.iter().all(|(_, help)| help.contains("use --data_dir")));
        assert_eq!(options.ignored_flags, ["--logtostderr=true", "stray"]);
    }

    #[test]
    fn newer_names_of_durations_take_precedence() {
        let durations = |line: &str| {
            let core = options(line).unwrap().server.core;
            (core.client_ttl_ms, core.client_grace_ms)
        };
        assert_eq!(durations("--client_ttl=5 --client_grace=7"), (5000, 7000));
        assert_eq!(durations("--client_ttl=5 --client_active_ttl_sec=3"), (3000, 60_000));
        assert_eq!(durations("--client_suspicion_ttl_sec=20 --client_grace=7"), (10_000, 20_000));
    }

    #[test]
    fn invalid_values_are_rejected() {
        for (line, expected) in [
            ("--eviction_ratio=2", "invalid value `2` for --eviction_ratio; expected a number from 0 to 1"),
            ("--rpc_address=nowhere", "invalid value `nowhere` for --rpc_address; expected an IP address"),
            ("--default_dialect=0.2", "one of 0.3.9, 0.3.10"),
            ("--shard=4/4", "INDEX/COUNT"),
            ("--shard=2", "INDEX/COUNT"),
            ("--allocation_strategy=cxl", "CXL memory is not supported"),
            ("--rpc_interface=eth0", "--rpc_address"),
            ("--dynamic_replication_admission_qps_threshold=0", "a number above 0"),
            ("--enable_offload --offload_cap_ratio=2", "a number from 0 to 1"),
        ] {
            let error = options(line).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
