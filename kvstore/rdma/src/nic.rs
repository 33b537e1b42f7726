//! A device at work: what is under way over it, and the thread that learns how it ends.

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
use crate::verbs::{RegisteredRegion, VerbsContext};

/// Work requests of one device that are under way at most, over all of its queue pairs: as many as fit into its
/// completion queue.
const DEPTH: u32 = 4096;
/// How often the thread looks whether it is still wanted.
const STOP_CHECK_PERIOD: Duration = Duration::from_millis(100);

/// A device that is used.
#[derive(Debug)]
pub struct Nic {
    device: RdmaDevice,
    pub(crate) context: Arc<VerbsContext>,
    work_requests: Arc<WorkRequestTable>,
    stop: Arc<AtomicBool>,
}

/// A work request that is under way. What it needs is kept until it has ended.
#[derive(Debug)]
pub(crate) struct InFlightWorkRequest {
    pub(crate) link: u64,
    pub(crate) completion: mpsc::UnboundedSender<Result<(), String>>,
    pub(crate) queue_slot: OwnedSemaphorePermit,
    pub(crate) memory: Arc<dyn std::any::Any + Send + Sync>,
    /// Room in the completion queue.
    pub(crate) completion_slot: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct WorkRequestTable {
    in_flight: Mutex<HashMap<u64, InFlightWorkRequest>>,
    numbers: AtomicU64,
    completion_slots: Arc<Semaphore>,
}

impl Nic {
    /// Opens a device, and starts its thread, which ends after the device is dropped.
    ///
    /// # Errors
    /// As the system says.
    pub fn open(device: RdmaDevice) -> io::Result<Arc<Self>> {
        let context = Arc::new(VerbsContext::open(&device.name, device.port, DEPTH)?);
        let flights = Arc::new(WorkRequestTable {
            in_flight: Mutex::default(),
            numbers: AtomicU64::new(1),
            completion_slots: Arc::new(Semaphore::new(DEPTH as usize)),
        });
        let stop = Arc::new(AtomicBool::new(false));
        let (polled, ended, wanted) = (Arc::clone(&context), Arc::downgrade(&flights), Arc::clone(&stop));
        let name = device.name.clone();
        thread::Builder::new().name(format!("rdma-{name}")).spawn(move || {
            if let Err(error) = complete(&polled, &ended, &wanted) {
                tracing::error!(device = name, %error, "completions of an RDMA device cannot be read any more");
            }
        })?;
        Ok(Arc::new(Self { device, context, work_requests: flights, stop }))
    }

    /// What the system tells about it.
    #[must_use]
    pub fn device(&self) -> &RdmaDevice {
        &self.device
    }

    /// Lets peers read and write memory through this device.
    ///
    /// # Errors
    /// As the system says; the limit of locked memory (`ulimit -l`) must be as large.
    pub fn register(&self, region: Arc<MappedRegion>) -> io::Result<Arc<RegisteredRegion>> {
        RegisteredRegion::new(&self.context, region).map(Arc::new)
    }

    /// Waits until there is room for a further completion.
    pub(crate) async fn space(&self) -> OwnedSemaphorePermit {
        loop {
            // Never closed.
            if let Ok(permit) = Arc::clone(&self.work_requests.completion_slots).acquire_owned().await {
                return permit;
            }
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.work_requests.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn begin(&self, id: u64, flight: InFlightWorkRequest) {
        self.work_requests.in_flight.lock().insert(id, flight);
    }

    pub(crate) fn cancel(&self, id: u64) {
        self.work_requests.in_flight.lock().remove(&id);
    }

    /// Forgets all that was under way on a link whose queue pairs are gone.
    pub(crate) fn remove_link(&self, link: u64) {
        self.work_requests.in_flight.lock().retain(|_, flight| flight.link != link);
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn complete(context: &VerbsContext, flights: &Weak<WorkRequestTable>, stop: &AtomicBool) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        context.arm()?;
        loop {
            let completions = context.poll()?;
            let (Some(flights), false) = (flights.upgrade(), completions.is_empty()) else { break };
            for completion in completions {
                let Some(flight) = flights.in_flight.lock().remove(&completion.id) else { continue };
                let InFlightWorkRequest {
                    completion: told,
                    queue_slot: room,
                    memory,
                    completion_slot: space,
                    link: _,
                } = flight;
                drop((memory, room, space));
                // Whoever waited may have gone.
                let _ = told.send(completion.error.map_or(Ok(()), Err));
            }
        }
        context.wait(STOP_CHECK_PERIOD)?;
    }
    Ok(())
}
