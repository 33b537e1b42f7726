//! Envoy in front of simulated engines, with an endpoint picker.

use std::net::SocketAddr;
use std::path::Path;

use moongate_loadtest::engine::SimEngine;
use moongate_testkit::free_port;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::harness::process::MoongateProcess;
use crate::harness::{client, wait_until};

const SETUP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/epp/setup");

/// Envoy as its documentation configures it for the endpoint picker protocol.
pub(crate) struct EnvoyOptions<'a> {
    /// The picker's address.
    pub(crate) picker: &'a str,
    pub(crate) engines: Vec<SocketAddr>,
    /// Whether requests are sent to any engine when the picker cannot be used.
    pub(crate) fails_open: bool,
    /// The engines that the picker may choose from.
    pub(crate) subset: Option<Vec<String>>,
}

impl<'a> EnvoyOptions<'a> {
    pub(crate) fn new(picker: &'a str, engines: &[SimEngine]) -> Self {
        let engines = engines.iter().map(SimEngine::addr).collect();
        Self { picker, engines, fails_open: false, subset: None }
    }
}

/// A running Envoy.
pub(crate) struct EnvoyProxy {
    _process: MoongateProcess,
    port: u16,
}

impl EnvoyProxy {
    pub(crate) async fn start(options: &EnvoyOptions<'_>) -> Self {
        let setup = std::process::Command::new(SETUP).output().unwrap();
        assert!(setup.status.success(), "{}", String::from_utf8_lossy(&setup.stderr));
        let program = String::from_utf8(setup.stdout).unwrap();
        let port = free_port();
        let config = config(options, port).to_string();
        let mut command = Command::new(Path::new(program.trim()));
        let flags =
            ["--use-dynamic-base-id", "--concurrency", "2", "--log-level", "warning", "--config-yaml"];
        let process = MoongateProcess::spawn(command.args(flags).arg(config));
        let address: SocketAddr = ([127, 0, 0, 1], port).into();
        wait_until("Envoy listens", || std::net::TcpStream::connect(address).is_ok()).await;
        Self { _process: process, port }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        client().post(self.url(path)).json(body).send().await.unwrap()
    }
}

fn config(options: &EnvoyOptions<'_>, port: u16) -> Value {
    let typed = |name: &str, mut config: Value| {
        config["@type"] = format!("type.googleapis.com/{name}").into();
        config
    };
    let filter = |name: &str, config: Value| json!({"name": name, "typed_config": config});
    let endpoint = |address: SocketAddr| {
        let socket = json!({"address": address.ip().to_string(), "port_value": address.port()});
        json!({"endpoint": {"address": {"socket_address": socket}}})
    };
    let http2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    let picker_protocol =
        json!({http2: typed(http2, json!({"explicit_http_config": {"http2_protocol_options": {}}}))});
    let round_robin = "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin";
    let round_robin = filter("envoy.load_balancing_policies.round_robin", typed(round_robin, json!({})));
    let destination = json!({"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]});
    let served = json!({"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]});
    let override_host = json!({
        "override_host_sources": [{"metadata": destination}],
        "selected_host_key": served,
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    });
    let override_host =
        typed("envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost", override_host);
    let override_host = filter("envoy.load_balancing_policies.override_host", override_host);
    let ext_proc = json!({
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": options.fails_open,
        "processing_mode": {
            "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
            "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
        },
        "message_timeout": "60s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    });
    let ext_proc = typed("envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor", ext_proc);
    let mut filters = vec![
        filter("envoy.filters.http.ext_proc", ext_proc),
        filter(
            "envoy.filters.http.router",
            typed("envoy.extensions.filters.http.router.v3.Router", json!({})),
        ),
    ];
    if let Some(subset) = &options.subset {
        let value = json!({"x-gateway-destination-endpoint-subset": subset});
        let metadata = json!({"metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]});
        let metadata = typed("envoy.extensions.filters.http.set_metadata.v3.Config", metadata);
        filters.insert(0, filter("envoy.filters.http.set_metadata", metadata));
    }
    let retry = json!({"retry_on": "connect-failure,refused-stream,reset", "num_retries": 3});
    let route = json!({"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s", "retry_policy": retry}});
    let manager = json!({
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    });
    let manager =
        typed("envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager", manager);
    let manager = filter("envoy.filters.network.http_connection_manager", manager);
    let pool: Vec<_> = options.engines.iter().copied().map(endpoint).collect();
    let picker = [endpoint(options.picker.parse().unwrap())];
    let health_check = json!({
        "timeout": "1s", "interval": "0.1s", "no_traffic_interval": "0.1s", "unhealthy_threshold": 1, "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
    });
    json!({"static_resources": {
        "listeners": [{
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
            "filter_chains": [{"filters": [manager]}],
        }],
        "clusters": [
            {
                "name": "pool", "type": "STATIC",
                // By default only three requests at a time are retried.
                "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
                "load_balancing_policy": {"policies": [{"typed_extension_config": override_host}]},
                "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": pool}]},
            },
            {
                "name": "picker", "type": "STATIC", "connect_timeout": "1s",
                // Requests fail open only while Envoy does not even try to reach the picker.
                "health_checks": [health_check], "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
                "typed_extension_protocol_options": picker_protocol,
                "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": picker}]},
            },
        ],
    }})
}
