//! The memory that a node lends from its start, and under which ids.

use std::io;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_memory::holder::HolderClient;
use moongate_memory::ledger::SegmentIdentity;
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{Ledger, PageMode, SegmentBacking, SegmentMemory, SegmentOptions, segment};
use tokio::time::Instant;

use crate::args::{NodeArgs, PageModeArg, SegmentBackingArg};
use crate::config::NodeConfig;
use crate::error::NodeStartError;

/// Pause between two attempts to open memory that another process has.
const PAUSE: Duration = Duration::from_millis(500);

/// Opens the memory. A node that is being replaced may still have it.
pub(crate) async fn open_memory(
    flags: &NodeArgs,
    config: &NodeConfig,
    deadline: Instant,
) -> Result<SegmentMemory, NodeStartError> {
    let wanted = SegmentOptions {
        backing: match &flags.memory {
            SegmentBackingArg::Process => SegmentBacking::Process,
            SegmentBackingArg::Holder(path) => SegmentBacking::Holder(HolderClient::new(path)),
            SegmentBackingArg::Folder(folder) => SegmentBacking::Folder(folder.clone()),
        },
        label: flags.memory_label.clone(),
        size: config.segment_size,
        pages: match flags.pages {
            PageModeArg::Normal => PageMode::Normal,
            PageModeArg::Transparent => PageMode::Transparent,
            PageModeArg::Huge => PageMode::Huge,
        },
        placement: NumaPlacement::default(),
    };
    loop {
        // Memory of a disk is checked after the machine was started anew, which takes a while.
        let opening = wanted.clone();
        let size = config.segment_size;
        match run_blocking(move || SegmentMemory::open(&opening, |base| new_identity(base, size))).await? {
            Ok(segment) => return Ok(segment),
            Err(error) if Instant::now() + PAUSE > deadline => return Err(error.into()),
            Err(
                error @ (segment::SegmentError::Ledger(moongate_memory::ledger::LedgerError::InUse)
                | segment::SegmentError::Holder(_)),
            ) => {
                tracing::warn!(%error, "waiting for the memory");
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Under which ids the memory is lent. Memory that was lent under another name begins anew: nobody would find in it
/// what was there.
pub(crate) fn resolve_identity(
    ledger: &Ledger,
    endpoint: &str,
    kept: bool,
) -> Result<SegmentIdentity, NodeStartError> {
    let mut identity = ledger.identity();
    if identity.name == endpoint {
        return Ok(identity);
    }
    if kept {
        tracing::warn!(
            was = identity.name,
            is = endpoint,
            "this node has another name than before, so that what its memory holds cannot be found; it begins anew"
        );
        ledger.remove(0, identity.size);
        identity = SegmentIdentity { base: identity.base, ..new_identity(identity.base, identity.size) };
    }
    identity.name = endpoint.to_owned();
    ledger.set_identity(identity.clone())?;
    Ok(identity)
}

/// Runs what waits for a disk beside other tasks.
#[cfg(not(feature = "simulation"))]
async fn run_blocking<T: Send + 'static>(open: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(open).await.map_err(io::Error::other)
}

/// Runs it at once: a simulation has one thread.
#[cfg(feature = "simulation")]
async fn run_blocking<T>(open: impl FnOnce() -> T) -> io::Result<T> {
    std::future::ready(Ok(open())).await
}

/// Where the system maps memory differs from run to run, and what peers call its first byte must not.
#[cfg(feature = "simulation")]
fn simulated_base(_mapped: u64) -> u64 {
    fastrand::u64(1..1 << 16) << 32
}

/// New ids for a segment.
pub(crate) fn new_identity(base: u64, size: u64) -> SegmentIdentity {
    let number = || fastrand::u64(1..);
    #[cfg(feature = "simulation")]
    let base = simulated_base(base);
    SegmentIdentity {
        segment: [number(), number()],
        client: [number(), number()],
        name: String::new(),
        base,
        size,
    }
}

pub(crate) fn uuid([first, second]: [u64; 2]) -> Uuid {
    Uuid { first, second }
}
