//! The Python module `moongate_store`: a client of a KV store in the process of an engine, compatible with `mooncake.store`.
//!
//! - [`InProcessStore`] has all calls of a set-up store. It is plain Rust and is tested without Python.
//! - [`StoreSettings`] are the arguments of `setup`.
//! - Each call runs on the calling thread: it takes a client from the [`session_pool`], which has a runtime of its own, and
//!   drives it until the result is there. So no byte changes threads between a registered buffer and a socket.
//! - [`registered_memory`] has the buffers that Python registers by address, and all unsafe code.
//! - [`embedded_node`] mounts a segment in this process, on threads of its own.
//! - [`return_code`] maps errors to the codes of Mooncake's module.
//! - `python` is the module itself, behind the feature `extension-module`: other builds of the workspace need no Python.

mod embedded_node;
mod in_process_store;
mod object_ranges;
#[cfg(feature = "extension-module")]
mod python;
mod registered_memory;
mod return_code;
mod session_pool;
mod settings;

pub use embedded_node::{EmbeddedNode, EmbeddedNodeError};
pub use in_process_store::{InProcessStore, StoreOpenError};
pub use registered_memory::{MemoryRange, RegisteredMemory, RegistrationError};
pub use return_code::{INVALID_PARAMS, ReturnCode};
pub use session_pool::{SessionError, SessionPool};
pub use settings::{StoreSettings, StoreSettingsError};
