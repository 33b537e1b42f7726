//! The discovery file; with the feature `objects`, the object types, their CRDs, conversion and role templates.

#[cfg(feature = "objects")]
mod apiserver;
mod cluster;
#[cfg(feature = "objects")]
mod conversion;
#[cfg(feature = "objects")]
mod crds;
#[cfg(feature = "objects")]
mod examples;
#[cfg(feature = "objects")]
mod merge;
mod mirror;
