//! HTTP in and out around the pure scheduler.
//!
//! A request flows one way: `ingress` reads and checks it, `prompt` takes from its body what routing needs, `predict` says how much of it each
//! engine has in a cache, `dispatch` decides
//! and drives the engines' protocols over `upstream` connections, `relay` brings the answer back, `feedback` learns from
//! it. `fleet` is the current set of engines.

mod access;
mod app;
mod config;
mod dispatch;
mod error;
mod feedback;
mod fleet;
mod guard;
mod ingress;
mod memory;
mod predict;
mod prompt;
mod relay;
mod upstream;

pub use access::AccessError;
#[doc(hidden)]
pub use access::{tenant_of_token, tenants_of_keys};
pub use app::{RunningGateway, StartError, start};
pub use config::{
    AccessOptions, DiscoverySource, EngineOptions, GatewayOptions, ListenerOptions, MemoryOptions,
    ModelFolderError, OpenPath, UpstreamOptions, check_model_folders,
};
pub use error::{ApiError, Code};
pub use feedback::{MetricAliases, all_metrics};
pub use guard::{GuardError, exposures};
pub use ingress::{CorsOrigin, InferencePath};
#[doc(hidden)]
pub use prompt::{Unsearchable, accepts, is_transfer_member, is_user_data, without_transfer_members};
#[doc(hidden)]
pub use relay::{SseFault, SseGate};
