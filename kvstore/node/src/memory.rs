//! The node's first segment: its memory, and the ids under which it is mounted.

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
use crate::rdma;

/// Pause between attempts to open memory that another process still uses.
const PAUSE: Duration = Duration::from_millis(500);

/// Opens the memory, with retries until the deadline: the process that is being replaced may still use it.
pub(crate) async fn open_memory(
    flags: &NodeArgs,
    config: &NodeConfig,
    deadline: Instant,
) -> Result<SegmentMemory, NodeStartError> {
    let options = SegmentOptions {
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
        direct_writes: rdma::is_configured(config, &flags.memory),
    };
    loop {
        // Opening blocks for a while after a reboot, because memory in a file on a disk is verified then.
        let attempt = options.clone();
        let size = config.segment_size;
        match run_blocking(move || SegmentMemory::open(&attempt, |base| new_identity(base, size))).await? {
            Ok(segment) => return Ok(segment),
            Err(error) if Instant::now() + PAUSE > deadline => return Err(error.into()),
            Err(
                error @ (segment::SegmentError::Ledger(moongate_memory::ledger::LedgerError::InUse)
                | segment::SegmentError::Holder(_)),
            ) => {
                tracing::warn!(%error, "the segment's memory is not available yet; retrying");
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The ids under which the memory is mounted. If the node's name changed, the content is discarded and the ids are new, because
/// the master refers to objects by the node's name.
pub(crate) fn resolve_identity(
    ledger: &Ledger,
    endpoint: &str,
    is_restored: bool,
) -> Result<SegmentIdentity, NodeStartError> {
    let mut identity = ledger.identity();
    if identity.name == endpoint {
        return Ok(identity);
    }
    if is_restored {
        tracing::warn!(
            previous_name = identity.name,
            name = endpoint,
            "this node's name has changed, so the objects in its memory cannot be found; they are discarded"
        );
        ledger.remove(0, identity.size);
        identity = SegmentIdentity { base: identity.base, ..new_identity(identity.base, identity.size) };
    }
    identity.name = endpoint.to_owned();
    ledger.set_identity(identity.clone())?;
    Ok(identity)
}

/// Runs blocking file access off the runtime's threads.
#[cfg(not(feature = "simulation"))]
async fn run_blocking<T: Send + 'static>(open: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(open).await.map_err(io::Error::other)
}

/// Runs it inline, because a simulation has one thread.
#[cfg(feature = "simulation")]
async fn run_blocking<T>(open: impl FnOnce() -> T) -> io::Result<T> {
    std::future::ready(Ok(open())).await
}

/// A reproducible base address: the address of the mapping differs between runs of a simulation.
#[cfg(feature = "simulation")]
fn simulated_base(_mapped: u64) -> u64 {
    fastrand::u64(1..1 << 16) << 32
}

/// Random ids for a new segment.
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
