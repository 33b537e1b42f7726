//! HTTP server and client around the pure scheduler.
//!
//! A request flows in one direction: `ingress` reads and checks it, `request_body` extracts the members that routing needs,
//! `predict` estimates each engine's cache hits, `dispatch` attempts one route after another, `decide` queues it until the scheduler
//! has chosen a route, `connector` sends the route's engines their requests over `upstream` connections, `legs` turn their responses
//! into one, `relay` returns it to the client, `feedback` records metrics and traces. `fleet` is the current set of engines.
//!
//! With [`start_picker`], another proxy sends the requests and relays the responses: `picker` passes the client's request through `ingress`,
//! `predict` and `decide`, and observes the response for `feedback`.
//!
//! A module refers only to modules after it: `app`, `config`, `picker`, `ingress`, `relay`, `dispatch`, `connector`, `legs`, `decide`,
//! `routed_request`, `model_aliases`, `predict`, `feedback`, `sessions`, `fleet`, `upstream`, and then `access`, `kv_index` (which blocks
//! are where), `lora_adapters` (which engines can load), `stored_responses`, `response` and `request_body` (formats), `reloadable_file`, `memory`, `error`.

mod access;
mod app;
mod config;
mod connector;
mod decide;
mod dispatch;
mod error;
mod feedback;
mod fleet;
mod ingress;
mod kv_index;
mod legs;
mod listener_security;
mod lora_adapters;
mod memory;
mod model_aliases;
mod picker;
mod predict;
mod relay;
mod reloadable_file;
mod request_body;
mod response;
mod routed_request;
mod sessions;
mod stored_responses;
#[cfg(test)]
mod test_fleet;
mod upstream;

pub use access::{AccessConfigError, AccessFileError, AccessOptions, ApiKeyError, JwksError, QuotaError};
#[doc(hidden)]
pub use access::{tenant_of_token, tenants_of_keys};
pub use app::{GatewayStartError, RunningGateway, start, start_picker};
pub use config::{
    BatchApiOptions, DiscoverySource, EngineOptions, GatewayOptions, ListenerOptions, MemoryOptions,
    ModelFolderError, SharedQueueError, SharedQueueOptions, UpstreamOptions, check_model_folders,
    check_shared_queue,
};
pub use decide::{QueuePeerAddress, QueuePeerAddressError, QueuePeersError};
pub use error::{ApiError, ApiErrorCode, ErrorFormat};
pub use feedback::{MetricAliases, all_metrics};
pub use fleet::{CompatibleVersions, VersionPairing};
pub use ingress::{
    CorsOrigin, CorsOriginError, InferencePath, InferencePathError, IngressOptions, UnauthenticatedPath,
};
#[doc(hidden)]
pub use kv_index::SpinRwLock;
pub use listener_security::{ListenerSecurityError, exposures};
pub use lora_adapters::{AdapterError, AdapterFileError, LoraAdapterFileError, LoraAdapterOptions};
pub use model_aliases::{AliasError, AliasFileError, ModelAliasFileError, ModelAliasOptions};
pub use picker::{EndpointPicker, HeaderChanges, ObservedResponse, PickOutcome, PickedRequest};
#[doc(hidden)]
pub use predict::{PredictionGap, prediction_gaps};
pub use reloadable_file::BoundedReadError;
pub use request_body::{
    MemberSearchError, StreamEnd, accepts, is_transfer_member, is_user_data, without_transfer_members,
};
pub use response::{SseError, SseFramer};
#[doc(hidden)]
pub use upstream::{NotHttp, ResponseParser};
