//! Flags of traces, and the standard environment variables as fallback.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Uri};
use percent_encoding::percent_decode_str;

use crate::export::{CollectorTlsError, OtlpProtocol, OtlpTarget};

/// Prefixes of the standard variables, in order of precedence: for traces only, then for all signals.
const STANDARD_VARIABLE_PREFIXES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"];

/// Command-line flags of the traces.
#[derive(Debug, Clone, Args)]
pub struct TelemetryArgs {
    /// Base URL of an OTLP collector, `http://HOST:4318`, or `:4317` for gRPC; traces are off without one
    ///
    /// Default: the standard variables `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT`.
    #[arg(
        long,
        env = "MOONGATE_OTLP_ENDPOINT",
        value_parser = endpoint,
        value_name = "URL",
        help_heading = "Traces"
    )]
    pub otlp_endpoint: Option<String>,
    /// Export protocol; default: `OTEL_EXPORTER_OTLP_PROTOCOL`, else http
    #[arg(
        long,
        env = "MOONGATE_OTLP_PROTOCOL",
        value_enum,
        value_name = "PROTOCOL",
        help_heading = "Traces"
    )]
    pub otlp_protocol: Option<OtlpProtocol>,
    /// Headers of each export, such as keys, as `NAME=VALUE,NAME=VALUE` with values percent-encoded; added to `OTEL_EXPORTER_OTLP_HEADERS`
    #[arg(
        long,
        env = "MOONGATE_OTLP_HEADERS",
        value_name = "HEADERS",
        value_parser = headers,
        hide_env_values = true,
        help_heading = "Traces"
    )]
    pub otlp_headers: Option<HeaderMap>,
    /// CA certificates (PEM) for a collector at https://; default: `OTEL_EXPORTER_OTLP_CERTIFICATE`, else the system store
    #[arg(long, env = "MOONGATE_OTLP_CA", value_name = "FILE", help_heading = "Traces")]
    pub otlp_ca: Option<PathBuf>,
    /// Share of traces to export, 0 to 1; a caller's traceparent takes precedence for its trace
    ///
    /// Failed, slow and mispredicted requests are always exported, up to 50 traces a second.
    #[arg(
        long,
        env = "MOONGATE_TRACE_SAMPLE_RATIO",
        value_parser = ratio,
        default_value = "1",
        value_name = "RATIO",
        help_heading = "Traces"
    )]
    pub trace_sample_ratio: f64,
    /// Requests whose first token takes longer are always exported; 0s disables this
    #[arg(
        long,
        env = "MOONGATE_TRACE_SLOW",
        value_parser = humantime::parse_duration,
        default_value = "10s",
        value_name = "TIME",
        help_heading = "Traces"
    )]
    pub trace_slow: Duration,
    /// Service name in traces; default: `OTEL_SERVICE_NAME`, else moongate-gateway or moongate-operator
    #[arg(long, env = "MOONGATE_SERVICE_NAME", value_name = "NAME", help_heading = "Traces")]
    pub service_name: Option<String>,
}

impl Default for TelemetryArgs {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_protocol: None,
            otlp_headers: None,
            otlp_ca: None,
            trace_sample_ratio: 1.0,
            trace_slow: Duration::from_secs(10),
            service_name: None,
        }
    }
}

/// Trace export could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The collector's URL is invalid.
    #[error("`{endpoint}` is not a collector URL: {problem}")]
    Endpoint {
        endpoint: String,
        /// What is wrong and how to fix it.
        problem: &'static str,
    },
    /// An export header is invalid.
    #[error(
        "`{0}` is not an export header; write NAME=VALUE, several separated by commas (--otlp-headers, OTEL_EXPORTER_OTLP_HEADERS)"
    )]
    Header(String),
    /// The OTLP protocol is not supported.
    #[error("OTLP over `{0}` is not supported; set grpc or http/protobuf")]
    Protocol(String),
    /// Called outside a tokio runtime.
    #[error("trace export needs a running tokio runtime: {0}; start it inside one")]
    NoRuntime(#[from] tokio::runtime::TryCurrentError),
    /// TLS cannot be set up.
    #[error("TLS to the trace collector: {0}")]
    Tls(#[from] CollectorTlsError),
}

impl TelemetryArgs {
    /// The collector from flags, else from the standard variables. `None` without an endpoint.
    pub(crate) fn target(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<OtlpTarget>, TelemetryError> {
        let value = |name: String| variable(&name).filter(|value| !value.is_empty());
        let standard = |name: &str| {
            STANDARD_VARIABLE_PREFIXES.iter().find_map(|prefix| value(format!("{prefix}{name}")))
        };
        let protocol = match (self.otlp_protocol, standard("PROTOCOL").as_deref()) {
            (Some(protocol), _) => protocol,
            (None, None | Some("http/protobuf")) => OtlpProtocol::Http,
            (None, Some("grpc")) => OtlpProtocol::Grpc,
            (None, Some(other)) => return Err(TelemetryError::Protocol(other.to_owned())),
        };
        let with_path = |base: String| protocol.traces_url(&base);
        let given = self.otlp_endpoint.clone().filter(|endpoint| !endpoint.is_empty()).map(with_path);
        // Over HTTP the traces variable is the complete URL, without a path to append.
        let traces_endpoint = value(format!("{}ENDPOINT", STANDARD_VARIABLE_PREFIXES[0]));
        let traces_endpoint =
            || traces_endpoint.map(|url| if protocol == OtlpProtocol::Grpc { with_path(url) } else { url });
        let base_endpoint = || value(format!("{}ENDPOINT", STANDARD_VARIABLE_PREFIXES[1])).map(with_path);
        let Some(address) = given.or_else(traces_endpoint).or_else(base_endpoint) else { return Ok(None) };
        let mut all = standard("HEADERS").map_or_else(|| Ok(HeaderMap::new()), |given| headers(&given))?;
        all.extend(self.otlp_headers.clone().unwrap_or_default());
        let ca = self.otlp_ca.clone().or_else(|| standard("CERTIFICATE").map(PathBuf::from));
        Ok(Some(OtlpTarget { protocol, uri: uri(&address)?, headers: all, ca }))
    }

    /// Service name of this process in traces, if set.
    pub(crate) fn service(&self, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
        let standard = || variable("OTEL_SERVICE_NAME").filter(|name| !name.is_empty());
        self.service_name.clone().or_else(standard)
    }
}

fn uri(endpoint: &str) -> Result<Uri, TelemetryError> {
    let invalid = |problem| TelemetryError::Endpoint { endpoint: endpoint.to_owned(), problem };
    let uri: Uri = endpoint.parse().map_err(|_| invalid("it is not a URL; write http://HOST:4318"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http" | "https"), Some(_)) => Ok(uri),
        _ => Err(invalid("it needs a scheme and a host; write http://HOST:4318")),
    }
}

fn endpoint(text: &str) -> Result<String, TelemetryError> {
    uri(text).map(|_| text.to_owned())
}

fn headers(text: &str) -> Result<HeaderMap, TelemetryError> {
    let mut headers = HeaderMap::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        // The value may be a secret, so it is not shown.
        let invalid = || TelemetryError::Header(pair.split('=').next().unwrap_or_default().to_owned());
        let (name, value) = pair.split_once('=').ok_or_else(invalid)?;
        let name = HeaderName::try_from(name.trim()).map_err(|_| invalid())?;
        let value = percent_decode_str(value.trim()).collect::<Vec<u8>>();
        let mut value = HeaderValue::from_bytes(&value).map_err(|_| invalid())?;
        value.set_sensitive(true);
        headers.try_append(name, value).map_err(|_| invalid())?;
    }
    Ok(headers)
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("write a number from 0 (nothing) to 1 (everything)".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn target(options: &TelemetryArgs, set: &[(&str, &str)]) -> Result<Option<OtlpTarget>, TelemetryError> {
        options.target(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    fn with_endpoint(flag: Option<&str>) -> TelemetryArgs {
        TelemetryArgs { otlp_endpoint: flag.map(str::to_owned), ..TelemetryArgs::default() }
    }

    #[test]
    fn endpoint_flag_wins_over_standard_variables() {
        let with = |flag, set: &[(&str, &str)]| {
            target(&with_endpoint(flag), set).unwrap().map(|target| target.uri.to_string())
        };
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://base:4318/");
        let whole = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://whole:4318/spans");
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        assert_eq!(with(None, &[]), None);
        assert_eq!(with(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]), None);
        assert_eq!(with(None, &[base]).as_deref(), Some("http://base:4318/v1/traces"));
        assert_eq!(with(None, &[base, whole]).as_deref(), Some("http://whole:4318/spans"));
        assert_eq!(with(Some("http://flag:1"), &[base, whole]).as_deref(), Some("http://flag:1/v1/traces"));
        let call = |base: &str| Some(OtlpProtocol::Grpc.traces_url(base));
        assert_eq!(with(Some("http://flag:1"), &[grpc]), call("http://flag:1"));
        assert_eq!(with(None, &[base, grpc]), call("http://base:4318"));
        assert_eq!(with(None, &[base, whole, grpc]), call("http://whole:4318/spans"));
    }

    #[test]
    fn other_flags_win_over_standard_variables() {
        let set = [
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=of-all,x-tenant=d"),
        ];
        let options = TelemetryArgs {
            otlp_headers: Some(headers("api-key=a%20b, x-scope = c").unwrap()),
            ..with_endpoint(Some("https://collector"))
        };
        let found = target(&options, &set).unwrap().unwrap();
        assert_eq!(found.protocol, OtlpProtocol::Grpc);
        assert_eq!(
            (&found.headers["api-key"], &found.headers["x-scope"]),
            (&"a b".parse().unwrap(), &"c".parse().unwrap())
        );
        assert!(found.headers["api-key"].is_sensitive());
        assert_eq!(
            (&found.headers["x-tenant"], found.headers.get_all("api-key").iter().count()),
            (&"d".parse().unwrap(), 1)
        );
        assert_eq!(found.ca, Some("/ca.pem".into()));
        let options = TelemetryArgs { otlp_protocol: Some(OtlpProtocol::Http), ..options };
        assert_eq!(target(&options, &set).unwrap().unwrap().protocol, OtlpProtocol::Http);

        let error =
            target(&with_endpoint(Some("http://collector")), &[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]);
        assert!(error.unwrap_err().to_string().contains("`http/json`"));
    }

    #[test]
    fn too_many_headers_are_rejected() {
        let many: String = (0..40_000).map(|number| format!("h{number}=1,")).collect();
        assert!(matches!(headers(&many), Err(TelemetryError::Header(_))));
    }

    #[test]
    fn invalid_flags_are_rejected() {
        #[derive(Parser, Debug)]
        struct TelemetryTestArgs {
            #[command(flatten)]
            traces: TelemetryArgs,
            #[command(flatten)]
            logs: crate::LoggingArgs,
        }
        let parse = |args: &[&str]| {
            TelemetryTestArgs::try_parse_from([&["test"], args].concat()).map_err(|error| error.to_string())
        };
        let parsed =
            parse(&["--otlp-endpoint", "https://collector:4318", "--trace-sample-ratio", "0.25"]).unwrap();
        assert_eq!(parsed.traces.otlp_endpoint.as_deref(), Some("https://collector:4318"));
        assert_eq!(parsed.traces.trace_sample_ratio, 0.25);
        assert_eq!(parsed.traces.trace_slow, TelemetryArgs::default().trace_slow);
        assert_eq!(parsed.logs.filter, "info");
        for (flag, value, expected) in [
            ("--otlp-endpoint", "collector:4318", "needs a scheme and a host"),
            ("--otlp-endpoint", "not a url", "not a URL"),
            ("--otlp-headers", "secret", "`secret` is not an export header"),
            ("--otlp-headers", "good=1,b d=secret", "`b d` is not an export header"),
            ("--trace-sample-ratio", "1.5", "from 0 (nothing) to 1"),
            ("--trace-sample-ratio", "nan", "from 0 (nothing) to 1"),
            ("--log-filter", "a=b", "is not a log filter"),
        ] {
            let error = parse(&[flag, value]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
