//! Settings of the paths and origins that are open.

use clap::{Args, ValueEnum};

use super::cross_origin::CorsOrigin;
use super::inference_paths::InferencePath;

/// Paths of the admin listener that may be open without authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UnauthenticatedPath {
    /// `/health`
    Health,
    /// `/ready`
    Ready,
    /// `/metrics`
    Metrics,
    /// No path at all.
    None,
}

impl UnauthenticatedPath {
    /// The path; `None` for [`UnauthenticatedPath::None`].
    pub(crate) fn path(self) -> Option<&'static str> {
        match self {
            UnauthenticatedPath::Health => Some("/health"),
            UnauthenticatedPath::Ready => Some("/ready"),
            UnauthenticatedPath::Metrics => Some("/metrics"),
            UnauthenticatedPath::None => None,
        }
    }
}

/// Paths and origins that are open at the listeners.
#[derive(Debug, Clone, Args)]
pub struct IngressOptions {
    /// Origin whose pages may send requests to the public listener (CORS), such as `https://chat.example`; `*`: all. Repeatable.
    /// Default: none, so that no web page can reach the gateway through a visitor's browser.
    #[arg(long, value_name = "ORIGIN", env = "MOONGATE_CORS_ORIGIN", value_delimiter = ' ')]
    pub cors_origin: Vec<CorsOrigin>,

    /// Additional engine path open to clients, such as /invocations; a trailing /* includes everything below it. Repeatable. Paths
    /// that administer engines are rejected. Default: none besides the inference paths of vLLM and SGLang.
    #[arg(long, value_name = "PATH", env = "MOONGATE_INFERENCE_PATH", value_delimiter = ' ')]
    pub inference_path: Vec<InferencePath>,

    /// Paths of a protected admin listener that need no authentication: health, ready, metrics, none. Default: the paths that a
    /// kubelet probes.
    #[arg(
        long,
        value_name = "PATHS",
        env = "MOONGATE_ADMIN_OPEN",
        value_enum,
        value_delimiter = ',',
        default_value = "health,ready",
        hide_possible_values = true
    )]
    pub admin_open: Vec<UnauthenticatedPath>,
}
