//! Shares the node's memory with clients on its host, if the configuration allows it.

use std::sync::Arc;

use moongate_transfer::shared::{SharedMemory, SharedMemoryServer, SharedMemoryUsers};

use crate::args::SharedMemoryArg;
use crate::error::NodeStartError;
use crate::segment_pool::SegmentPool;

/// Opens the socket from which clients get the memory. `None` if it is not shared.
///
/// # Errors
/// [`NodeStartError::SharedMemory`] if the configured path cannot be used.
pub(crate) fn serve(
    socket: &SharedMemoryArg,
    pool: &Arc<SegmentPool>,
) -> Result<Option<SharedMemoryServer>, NodeStartError> {
    let memory: Arc<dyn SharedMemory> = Arc::<SegmentPool>::clone(pool);
    match socket {
        // Simulations have one thread.
        SharedMemoryArg::Auto if cfg!(feature = "simulation") => Ok(None),
        SharedMemoryArg::Off => Ok(None),
        SharedMemoryArg::Auto => {
            let name = format!("@moongate-store-{:016x}", fastrand::u64(..));
            match SharedMemoryServer::start(&name, SharedMemoryUsers::OwnAndRoot, memory) {
                Ok(server) => Ok(Some(server)),
                Err(error) => {
                    tracing::warn!(%error, "programs on this host cannot map this node's memory and use TCP");
                    Ok(None)
                }
            }
        }
        SharedMemoryArg::Path(path) => {
            let name = path.to_string_lossy();
            SharedMemoryServer::start(&name, SharedMemoryUsers::ByFilePermissions, memory)
                .map(Some)
                .map_err(|source| NodeStartError::SharedMemory { path: path.clone(), source })
        }
    }
}
