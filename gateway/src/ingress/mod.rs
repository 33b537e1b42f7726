//! From the client's connection to a checked [`crate::routed_request::RoutedRequest`], and from an engine's response to the client's.

mod admin;
mod authenticate;
mod batch_backend;
mod batches;
mod body;
mod body_buffer;
mod console;
mod content;
mod cross_origin;
mod engine_administration;
mod engine_error;
mod fleet;
mod form_data;
mod handler;
mod headers;
mod inference_paths;
mod media_type;
mod options;
mod predict;
mod request_checks;
mod request_target;
mod return_hint;
mod router;
mod shared_queue;
mod tenant_priority;
mod workers;

pub(crate) use admin::admin_router;
pub(crate) use batch_backend::GatewayBackend;
pub(crate) use body::{BodyLimits, BodyReader};
pub use cross_origin::{CorsOrigin, CorsOriginError};
pub(crate) use fleet::FleetStatusCache;
pub(crate) use handler::GatewayContext;
pub use inference_paths::{InferencePath, InferencePathError};
pub use options::{IngressOptions, UnauthenticatedPath};
pub(crate) use router::public_router;
pub(crate) use tenant_priority::TenantPriorityHeaders;
