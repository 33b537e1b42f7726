//! Reads from a request body only the members that routing needs, and splices in only what the engines' protocols need. Everything
//! else stays byte for byte as the client sent it.

mod agent_apis;
mod body_member;
mod fast_reader;
mod image_size;
mod inference_api;
mod json_shape;
mod media_parts;
mod routing_fields;
mod serde_reader;
mod splice;
mod string_scan;
mod strip;
mod transfer_members;

pub(crate) use body_member::BodyMember;
pub(crate) use inference_api::InferenceApi;
pub use inference_api::StreamEnd;
pub(crate) use media_parts::{MediaKind, MediaPart, MediaParts};
#[doc(hidden)]
pub use routing_fields::accepts;
pub(crate) use routing_fields::{RoutingFields, session_hash};
pub(crate) use splice::{MemberEdit, SplicedBody};
pub use strip::{MemberSearchError, without_transfer_members};
pub use transfer_members::{is_transfer_member, is_user_data};
#[cfg(test)]
mod fast_reader_tests;
#[cfg(test)]
mod tests;
