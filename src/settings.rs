//! Invalid settings: their exit code, and warnings about unknown environment variables.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;

use clap::CommandFactory as _;
use moongate_runtime::config;

/// Exit code for invalid settings, the same as clap's.
pub(crate) const INVALID_SETTINGS: u8 = 2;
/// Prefix of the environment variables of all commands.
const PREFIX: &str = "MOONGATE_";
/// Prefix of variables that only the project's own tests read.
const TEST_PREFIX: &str = "MOONGATE_TEST_";
/// Minimum similarity (Jaro, 0 to 1) of a name that is suggested as a correction.
const SIMILAR: f64 = 0.75;

/// A setting, or a file that it names, is invalid.
#[derive(Debug)]
pub(crate) struct InvalidSettingsError(anyhow::Error);

impl fmt::Display for InvalidSettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for InvalidSettingsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Marks an error so that the command ends with [`INVALID_SETTINGS`].
pub(crate) fn invalid_settings(error: impl Into<anyhow::Error>) -> anyhow::Error {
    InvalidSettingsError(error.into()).into()
}

/// Marks the error with [`invalid_settings`] if `is_invalid`.
pub(crate) fn start_error(error: impl Into<anyhow::Error>, is_invalid: bool) -> anyhow::Error {
    if is_invalid { invalid_settings(error) } else { error.into() }
}

/// Logs a warning for each variable with our prefix that no command defines: it has no effect.
pub(crate) fn warn_of_unknown_variables() {
    let known = known_variables();
    for (name, value) in std::env::vars_os() {
        let (Some(name), value) = (name.to_str(), value.to_string_lossy()) else { continue };
        if is_unknown(name, &value, &known) {
            match closest_name(name, &known) {
                Some(nearest) => tracing::warn!(
                    "the environment variable {name} is unknown and has no effect; did you mean {nearest}?"
                ),
                None => tracing::warn!(
                    "the environment variable {name} is unknown and has no effect; remove it, or see --help"
                ),
            }
        }
    }
}

/// Variables of all commands: one environment may be shared by several.
fn known_variables() -> BTreeSet<String> {
    let mut known = config::environment_variables(crate::MoongateArgs::command());
    known.extend(config::environment_variables(moongate_store_node::NodeArgs::command()));
    known.extend(moongate_master::flags::variables());
    known
}

fn is_unknown(name: &str, value: &str, known: &BTreeSet<String>) -> bool {
    name.starts_with(PREFIX)
        && !name.starts_with(TEST_PREFIX)
        && !known.contains(name)
        && !is_service_link(name, value)
}

/// Whether Kubernetes set the variable for a Service whose name begins with `moongate`, such as `MOONGATE_GATEWAY_SERVICE_HOST` or
/// `MOONGATE_GATEWAY_PORT_8000_TCP_ADDR`.
fn is_service_link(name: &str, value: &str) -> bool {
    let is_port = |text: &str| text.parse::<u16>().is_ok();
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    if name.ends_with("_SERVICE_HOST") {
        return true;
    }
    if let Some((_, port_name)) = name.rsplit_once("_SERVICE_PORT")
        && (port_name.is_empty() || port_name.starts_with('_'))
    {
        return is_port(value);
    }
    if name.ends_with("_PORT") && is_url {
        return true;
    }
    let Some((_, rest)) = name.rsplit_once("_PORT_") else { return false };
    let mut parts = rest.split('_');
    parts.next().is_some_and(is_port)
        && parts.next().is_some_and(|protocol| ["TCP", "UDP", "SCTP"].contains(&protocol))
        && parts.next().is_none_or(|last| ["PROTO", "PORT", "ADDR"].contains(&last))
        && parts.next().is_none()
}

fn closest_name<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    // Compare without the common prefix, which would make all names similar.
    let rest = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    let unknown = rest(name);
    let candidates = known.iter().filter(|known| known.starts_with(PREFIX));
    let candidates = candidates.map(|known| (strsim::jaro(&rest(known), &unknown), known.as_str()));
    let candidates = candidates.filter(|(similarity, _)| *similarity >= SIMILAR);
    candidates.max_by(|left, right| left.0.total_cmp(&right.0)).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_unknown_and_a_correction_is_suggested() {
        let known = known_variables();
        for (name, expected) in [
            ("MOONGATE_LISTN", Some("MOONGATE_LISTEN")),
            ("MOONGATE_POLICYY", Some("MOONGATE_POLICY")),
            ("MOONGATE_RPC_PROT", Some("MOONGATE_RPC_PORT")),
            ("MOONGATE_ZZZ", None),
        ] {
            assert!(is_unknown(name, "1", &known), "{name}");
            assert_eq!(closest_name(name, &known), expected, "{name}");
        }
    }

    #[test]
    fn settings_test_variables_and_service_links_are_known() {
        let known = known_variables();
        for (name, value) in [
            ("MOONGATE_CONFIG", "x"),
            ("MOONGATE_LISTEN", "x"),
            ("MOONGATE_STORE_PORT", "8080"),
            ("MOONGATE_RPC_PORT", "50051"),
            ("MOONGATE_WEBHOOK_SERVICE_PORT", "443"),
            ("MOONGATE_TEST_SILENCE", "5"),
            ("MOONCAKE_MASTER", "x"),
            ("MOONGATE_GATEWAY_SERVICE_HOST", "10.0.0.1"),
            ("MOONGATE_GATEWAY_SERVICE_PORT", "8000"),
            ("MOONGATE_GATEWAY_SERVICE_PORT_HTTP", "8000"),
            ("MOONGATE_GATEWAY_PORT", "tcp://10.0.0.1:8000"),
            ("MOONGATE_GATEWAY_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
            ("MOONGATE_GATEWAY_PORT_8000_TCP_PROTO", "tcp"),
            ("MOONGATE_GATEWAY_PORT_8000_TCP_PORT", "8000"),
            ("MOONGATE_GATEWAY_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ] {
            assert!(!is_unknown(name, value, &known), "{name}");
        }
        assert!(
            is_unknown("MOONGATE_ADMIN_PORT", "9000", &known),
            "the value is no URL, so it is no service link"
        );
    }
}
