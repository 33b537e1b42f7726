//! An opened device: its work requests in flight, and the thread that polls their completions.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use moongate_memory::MappedRegion;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::device::RdmaDevice;
use crate::verbs::{RegisteredRegion, VerbsContext, WorkCompletionError};

/// Maximum number of work requests in flight per device, over all queue pairs: the depth of the completion queue.
const DEPTH: u32 = 4096;
/// How often the completion thread checks whether to stop.
const STOP_CHECK_PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Nic {
    device: RdmaDevice,
    pub(crate) context: Arc<VerbsContext>,
    work_requests: Arc<WorkRequestTable>,
    stop: Arc<AtomicBool>,
}

/// A work request in flight. It owns the resources that the request needs until its completion.
#[derive(Debug)]
pub(crate) struct InFlightWorkRequest {
    pub(crate) link: u64,
    pub(crate) completion: mpsc::UnboundedSender<Result<(), WorkCompletionError>>,
    pub(crate) queue_slot: OwnedSemaphorePermit,
    pub(crate) memory: Arc<dyn std::any::Any + Send + Sync>,
    /// Reserved slot in the completion queue.
    pub(crate) completion_slot: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct WorkRequestTable {
    in_flight: Mutex<HashMap<u64, InFlightWorkRequest>>,
    numbers: AtomicU64,
    completion_slots: Arc<Semaphore>,
}

impl Nic {
    /// Opens a device and starts its completion thread, which ends after the device is dropped.
    ///
    /// # Errors
    /// Errors of libibverbs.
    pub fn open(device: RdmaDevice) -> io::Result<Arc<Self>> {
        let context = Arc::new(VerbsContext::open(&device.name, device.port, DEPTH)?);
        let work_requests = Arc::new(WorkRequestTable {
            in_flight: Mutex::default(),
            numbers: AtomicU64::new(1),
            completion_slots: Arc::new(Semaphore::new(DEPTH as usize)),
        });
        let stop = Arc::new(AtomicBool::new(false));
        let (polled_context, table, stop_flag) =
            (Arc::clone(&context), Arc::downgrade(&work_requests), Arc::clone(&stop));
        let name = device.name.clone();
        thread::Builder::new().name(format!("rdma-{name}")).spawn(move || {
            if let Err(error) = run_completions(&polled_context, &table, &stop_flag) {
                tracing::error!(device = name, %error, "cannot poll completions of an RDMA device; its transfers will time out");
            }
        })?;
        Ok(Arc::new(Self { device, context, work_requests, stop }))
    }

    /// The device's description from sysfs.
    #[must_use]
    pub fn device(&self) -> &RdmaDevice {
        &self.device
    }

    /// Registers memory with this device, so that peers can read and write it.
    ///
    /// # Errors
    /// Errors of libibverbs; the locked memory limit (`ulimit -l`) must cover the region.
    pub fn register(&self, region: Arc<MappedRegion>) -> io::Result<Arc<RegisteredRegion>> {
        RegisteredRegion::new(&self.context, region).map(Arc::new)
    }

    /// Reserves a slot in the completion queue; waits while it is full.
    pub(crate) async fn reserve_completion(&self) -> OwnedSemaphorePermit {
        loop {
            // The semaphore is never closed.
            if let Ok(permit) = Arc::clone(&self.work_requests.completion_slots).acquire_owned().await {
                return permit;
            }
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.work_requests.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn begin(&self, id: u64, request: InFlightWorkRequest) {
        self.work_requests.in_flight.lock().insert(id, request);
    }

    pub(crate) fn cancel(&self, id: u64) {
        self.work_requests.in_flight.lock().remove(&id);
    }

    /// Removes the requests of a link whose queue pairs are destroyed.
    pub(crate) fn remove_link(&self, link: u64) {
        self.work_requests.in_flight.lock().retain(|_, request| request.link != link);
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn run_completions(
    context: &VerbsContext,
    table: &Weak<WorkRequestTable>,
    stop: &AtomicBool,
) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        context.arm()?;
        loop {
            let completions = context.poll()?;
            let (Some(table), false) = (table.upgrade(), completions.is_empty()) else { break };
            for completion in completions {
                let Some(request) = table.in_flight.lock().remove(&completion.id) else { continue };
                let InFlightWorkRequest { completion: sender, queue_slot, memory, completion_slot, link: _ } =
                    request;
                drop((memory, queue_slot, completion_slot));
                // The waiting transfer may have timed out.
                let _ = sender.send(completion.error.map_or(Ok(()), Err));
            }
        }
        context.wait(STOP_CHECK_PERIOD)?;
    }
    Ok(())
}
