//! An opened device with the resources that its connections share: a protection domain and a completion queue.
#![expect(unsafe_code, reason = "libibverbs is a C library")]

use std::ffi::{CStr, CString, c_int};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::time::Duration;

use ibverbs_sys as sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum number of completions per poll.
const BATCH: usize = 32;

/// An owned libibverbs object, freed on drop.
pub(super) struct VerbsHandle<T> {
    pointer: NonNull<T>,
    free: unsafe extern "C" fn(*mut T) -> c_int,
    what: &'static str,
}

// SAFETY: libibverbs objects are not bound to a thread, and its functions may be called from several threads at once (documented in the
// manual pages of all functions used here).
unsafe impl<T> Send for VerbsHandle<T> {}
// SAFETY: as for Send. A handle only exposes the pointer.
unsafe impl<T> Sync for VerbsHandle<T> {}

impl<T> VerbsHandle<T> {
    /// Wraps a pointer returned by libibverbs; null is an OS error.
    ///
    /// # Safety
    /// `pointer` is null, or valid until `free` is called with it, which only this handle does.
    pub(super) unsafe fn new(
        pointer: *mut T,
        free: unsafe extern "C" fn(*mut T) -> c_int,
        what: &'static str,
    ) -> io::Result<Self> {
        let pointer = NonNull::new(pointer).ok_or_else(|| {
            let error = io::Error::last_os_error();
            io::Error::new(error.kind(), format!("cannot create {what}: {error}"))
        })?;
        Ok(Self { pointer, free, what })
    }

    pub(super) fn pointer(&self) -> *mut T {
        self.pointer.as_ptr()
    }
}

impl<T> fmt::Debug for VerbsHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }
}

impl<T> Drop for VerbsHandle<T> {
    fn drop(&mut self) {
        // SAFETY: see `new`. All users of the pointer borrow the handle or hold it in an `Arc`.
        let code = unsafe { (self.free)(self.pointer.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code.abs());
            tracing::error!("cannot release an RDMA {}: {error}", self.what);
        }
    }
}

/// An opened device. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct VerbsContext {
    queue: VerbsHandle<sys::ibv_cq>,
    channel: VerbsHandle<sys::ibv_comp_channel>,
    pub(super) domain: VerbsHandle<sys::ibv_pd>,
    pub(super) device: VerbsHandle<sys::ibv_context>,
    pub(super) mtu: u32,
}

/// Result of a work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkCompletion {
    pub(crate) id: u64,
    pub(crate) error: Option<WorkCompletionError>,
}

/// A work request completed with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} (status {status}, vendor code {vendor:#x})")]
pub struct WorkCompletionError {
    /// libibverbs' text for the status.
    pub text: String,
    pub status: u32,
    /// The device's own error code.
    pub vendor: u32,
}

impl VerbsContext {
    /// Opens the named device with a completion queue of `depth` entries.
    pub(crate) fn open(name: &str, port: u8, depth: u32) -> io::Result<Self> {
        let device = open(name)?;
        let mtu = active_mtu(&device, port)?;
        let context = device.pointer();
        // SAFETY: the context is open. The domain's field is dropped before the context's.
        let domain = unsafe {
            VerbsHandle::new(sys::ibv_alloc_pd(context), sys::ibv_dealloc_pd, "protection domain")?
        };
        // SAFETY: as for the domain.
        let channel = unsafe {
            let channel = sys::ibv_create_comp_channel(context);
            VerbsHandle::new(channel, sys::ibv_destroy_comp_channel, "completion channel")?
        };
        let depth = c_int::try_from(depth).unwrap_or(c_int::MAX);
        // SAFETY: as for the domain; the channel is dropped after the queue too. The null context pointer is never dereferenced.
        let queue = unsafe {
            let queue = sys::ibv_create_cq(context, depth, ptr::null_mut(), channel.pointer(), 0);
            VerbsHandle::new(queue, sys::ibv_destroy_cq, "completion queue")?
        };
        Ok(Self { queue, channel, domain, device, mtu })
    }

    pub(super) fn queue(&self) -> *mut sys::ibv_cq {
        self.queue.pointer()
    }

    /// Requests a notification for the next completion. Earlier completions must be polled afterwards.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the device is open, and its function table does not change.
        let notify = unsafe { (*self.device.pointer()).ops.req_notify_cq };
        let notify = notify.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the queue belongs to this device.
        checked(unsafe { notify(self.queue.pointer(), 0) })
    }

    /// Waits up to `limit` for a notification. Only one thread may wait.
    pub(crate) fn wait(&self, limit: Duration) -> io::Result<bool> {
        // SAFETY: the channel and its file descriptor stay open as long as `self`.
        let fd = unsafe { BorrowedFd::borrow_raw((*self.channel.pointer()).fd) };
        let limit = Timespec::try_from(limit).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let (mut queue, mut cq_context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is open, and both pointers are written before they are read.
        checked(unsafe {
            sys::ibv_get_cq_event(self.channel.pointer(), &raw mut queue, &raw mut cq_context)
        })?;
        // SAFETY: the notification is for this queue, the only one of the channel, and is acknowledged once.
        unsafe { sys::ibv_ack_cq_events(self.queue.pointer(), 1) };
        Ok(true)
    }

    /// Removes up to [`BATCH`] completions from the queue.
    pub(crate) fn poll(&self) -> io::Result<Vec<WorkCompletion>> {
        // SAFETY: as for `arm`.
        let poll_cq = unsafe { (*self.device.pointer()).ops.poll_cq }.ok_or(io::ErrorKind::Unsupported)?;
        let mut found = [sys::ibv_wc::default(); BATCH];
        // SAFETY: the queue belongs to this device, and `found` has room for the requested number.
        let count = unsafe { poll_cq(self.queue.pointer(), BATCH as c_int, found.as_mut_ptr()) };
        let count =
            usize::try_from(count).map_err(|_| io::Error::other("polling the completion queue failed"))?;
        Ok(found.iter().take(count).map(completion).collect())
    }
}

fn completion(found: &sys::ibv_wc) -> WorkCompletion {
    let error = found.error().map(|(status, vendor)| {
        // SAFETY: the function accepts any status and returns a static string.
        let text = unsafe { CStr::from_ptr(sys::ibv_wc_status_str(status)) };
        WorkCompletionError { text: text.to_string_lossy().into_owned(), status, vendor }
    });
    WorkCompletion { id: found.wr_id(), error }
}

fn open(name: &str) -> io::Result<VerbsHandle<sys::ibv_context>> {
    let device_name = CString::new(name)?;
    let mut count = 0;
    // SAFETY: the function writes the count.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(io::Error::last_os_error());
    }
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the list has `count` devices, which are valid until it is freed.
    let found = unsafe { std::slice::from_raw_parts(list, count) }.iter().copied().find(|device| {
        // SAFETY: as above; the name is a C string.
        unsafe { CStr::from_ptr(sys::ibv_get_device_name(*device)) == device_name.as_c_str() }
    });
    let opened = match found {
        // SAFETY: the device is in the list. An opened device stays valid after the list is freed.
        Some(device) => unsafe {
            VerbsHandle::new(sys::ibv_open_device(device), sys::ibv_close_device, "device context")
        },
        None => Err(io::Error::new(io::ErrorKind::NotFound, "libibverbs has no driver for the device")),
    };
    // SAFETY: the list was returned above and is freed once.
    unsafe { sys::ibv_free_device_list(list) };
    opened
}

fn active_mtu(device: &VerbsHandle<sys::ibv_context>, port: u8) -> io::Result<u32> {
    let mut attributes = sys::ibv_port_attr::default();
    // SAFETY: the function writes at most one whole structure; the type name in its signature is an older prefix of it.
    checked(unsafe { sys::ibv_query_port(device.pointer(), port, (&raw mut attributes).cast()) })?;
    Ok(attributes.active_mtu)
}

/// Libibverbs functions return 0, an error number, or -1 with `errno` set.
pub(super) fn checked(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
