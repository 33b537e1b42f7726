//! The memory that a node lends from its start, and under which ids.

use std::io;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_memory::holder::Holder;
use moongate_memory::ledger::Identity;
use moongate_memory::numa::Placement;
use moongate_memory::{Keep, Ledger, Pages, Segment, Wanted, segment};
use tokio::time::Instant;

use crate::config::Config;
use crate::error::StartError;
use crate::flags::{Flags, Keeping, PageSize};

/// Pause between two attempts to open memory that another process has.
const PAUSE: Duration = Duration::from_millis(500);

/// Opens the memory. A node that is being replaced may still have it.
pub(crate) async fn open_memory(
    flags: &Flags,
    config: &Config,
    deadline: Instant,
) -> Result<Segment, StartError> {
    let wanted = Wanted {
        keep: match &flags.memory {
            Keeping::Process => Keep::Process,
            Keeping::Holder(path) => Keep::Holder(Holder::at(path)),
            Keeping::Folder(folder) => Keep::Folder(folder.clone()),
        },
        label: flags.memory_label.clone(),
        size: config.segment_size,
        pages: match flags.pages {
            PageSize::Normal => Pages::Normal,
            PageSize::Transparent => Pages::Transparent,
            PageSize::Huge => Pages::Huge,
        },
        placement: Placement::default(),
    };
    loop {
        // Memory of a disk is checked after the machine was started anew, which takes a while.
        let opening = wanted.clone();
        let size = config.segment_size;
        match run_blocking(move || Segment::open(&opening, |base| new_identity(base, size))).await? {
            Ok(segment) => return Ok(segment),
            Err(error) if Instant::now() + PAUSE > deadline => return Err(error.into()),
            Err(
                error @ (segment::Error::Ledger(moongate_memory::ledger::Error::InUse)
                | segment::Error::Holder(_)),
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
pub(crate) fn settle(ledger: &Ledger, endpoint: &str, kept: bool) -> Result<Identity, StartError> {
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
        ledger.forget(0, identity.size);
        identity = Identity { base: identity.base, ..new_identity(identity.base, identity.size) };
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
pub(crate) fn new_identity(base: u64, size: u64) -> Identity {
    let number = || fastrand::u64(1..);
    #[cfg(feature = "simulation")]
    let base = simulated_base(base);
    Identity { segment: [number(), number()], client: [number(), number()], name: String::new(), base, size }
}

pub(crate) fn uuid([first, second]: [u64; 2]) -> Uuid {
    Uuid { first, second }
}
