//! Gives the memory of a node to clients on its host.

use std::fmt;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use moongate_memory::packet_socket::{PacketListener, PacketSocket};
use parking_lot::Mutex;

use super::message::{SharedMemoryRequest, SharedMemoryResponse};
use super::socket_address;
use crate::descriptor::SharedMemoryAddress;
use crate::plane::MappingId;

/// Pause after a failed accept, which mostly means that the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often it is checked whether a segment that others have mapped is still mounted.
const MOUNT_CHECK: Duration = Duration::from_secs(10);
/// Permissions of a socket in the file system: the user and the group of the node.
const SOCKET_MODE: u32 = 0o660;

/// A segment that other processes may map.
#[derive(Clone, Debug)]
pub struct SharedSegment {
    /// Id of its memory, new in each process.
    pub id: MappingId,
    /// Address of the first byte in transfers.
    pub base: u64,
    /// Length in bytes.
    pub size: u64,
    /// Its memory, whose length is sealed.
    pub fd: Arc<OwnedFd>,
}

/// The segments of a node.
pub trait SharedMemory: Send + Sync + 'static {
    /// The segment that has the byte at `address`, if it can be shared.
    fn shared_segment(&self, address: u64) -> Option<SharedSegment>;
}

/// Which users of the host may map the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedMemoryUsers {
    /// The node's own, and the superuser.
    OwnAndRoot,
    /// Those that may open the socket's file.
    ByFilePermissions,
}

/// A listening socket. On drop, it and all connections are closed, so that clients unmap the memory.
pub struct SharedMemoryServer {
    listener: Arc<PacketListener>,
    provider: Arc<MemoryProvider>,
    address: SharedMemoryAddress,
}

impl fmt::Debug for SharedMemoryServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemoryServer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// What the threads of a server share.
struct MemoryProvider {
    memory: Arc<dyn SharedMemory>,
    users: SharedMemoryUsers,
    process: String,
    is_stopped: AtomicBool,
    /// Connections of processes that have mapped a segment.
    open: Mutex<Vec<Weak<PacketSocket>>>,
}

impl SharedMemoryServer {
    /// Listens at `socket`, a path or `@` and an abstract name. A file at the path is replaced.
    ///
    /// # Errors
    /// When the name is in use, the path cannot be written, or no thread can be started.
    pub fn start(socket: &str, users: SharedMemoryUsers, memory: Arc<dyn SharedMemory>) -> io::Result<Self> {
        let address = socket_address(socket)?;
        let path = (!socket.starts_with('@')).then(|| Path::new(socket));
        if let Some(path) = path {
            remove_socket(path)?;
        }
        let listener = Arc::new(PacketListener::bind(&address)?);
        if let Some(path) = path {
            std::fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
        }
        let process = format!("{:016x}", fastrand::u64(..));
        let provider = Arc::new(MemoryProvider {
            memory,
            users,
            process: process.clone(),
            is_stopped: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let (accepting, accepted) = (Arc::clone(&listener), Arc::clone(&provider));
        thread::Builder::new().name("shared-memory".to_owned()).spawn(move || {
            while !accepted.is_stopped() {
                accepted.accept(&accepting);
            }
        })?;
        let address = SharedMemoryAddress { socket: socket.to_owned(), process };
        Ok(Self { listener, provider, address })
    }

    /// The address for the node's descriptor.
    #[must_use]
    pub fn address(&self) -> &SharedMemoryAddress {
        &self.address
    }
}

impl Drop for SharedMemoryServer {
    fn drop(&mut self) {
        self.provider.is_stopped.store(true, Ordering::SeqCst);
        self.listener.shut_down();
        self.provider.open.lock().iter().filter_map(Weak::upgrade).for_each(|socket| socket.shut_down());
    }
}

impl MemoryProvider {
    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::SeqCst)
    }

    fn accept(self: &Arc<Self>, listener: &PacketListener) {
        match listener.accept() {
            Ok(socket) => {
                let provider = Arc::clone(self);
                let serve = move || {
                    if let Err(error) = provider.serve(&Arc::new(socket)) {
                        tracing::warn!(%error, "a process of this host gets no shared memory; it can use TCP");
                    }
                };
                // A process that sends nothing must not delay others.
                if let Err(error) = thread::Builder::new().name("shared-memory".to_owned()).spawn(serve) {
                    tracing::warn!(%error, "cannot start a thread for a request of shared memory");
                }
            }
            Err(_) if self.is_stopped() => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a request for shared memory");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    fn serve(&self, socket: &Arc<PacketSocket>) -> io::Result<()> {
        let refuse = |why: &str| socket.send(&SharedMemoryResponse::Refused { why: why.to_owned() }, None);
        if self.users == SharedMemoryUsers::OwnAndRoot
            && let Err(error) = socket.check_user(true)
        {
            return refuse(&error.to_string());
        }
        let (SharedMemoryRequest::Map { process, address }, _) = socket.receive()?;
        if process != self.process {
            return refuse("the address is of another process");
        }
        let Some(segment) = self.memory.shared_segment(address) else {
            return refuse("no segment with this address can be shared");
        };
        let SharedSegment { id, base, size, fd } = segment;
        tracing::debug!(%id, base, size, "a process of this host maps a segment");
        self.add(socket);
        socket.send(&SharedMemoryResponse::Segment { id, base, size }, Some(fd.as_fd()))?;
        drop(fd);
        self.wait_unmapped(socket, id, base)
    }

    fn add(&self, socket: &Arc<PacketSocket>) {
        let mut open = self.open.lock();
        open.retain(|socket| socket.strong_count() > 0);
        open.push(Arc::downgrade(socket));
    }

    /// Keeps the connection open until the client closes it, the segment is unmounted, or the server is dropped.
    fn wait_unmapped(&self, socket: &PacketSocket, id: MappingId, base: u64) -> io::Result<()> {
        loop {
            let is_mounted = || self.memory.shared_segment(base).is_some_and(|segment| segment.id == id);
            if self.is_stopped() || socket.wait_closed(Some(MOUNT_CHECK))? || !is_mounted() {
                return Ok(());
            }
        }
    }
}

/// Removes the socket of a process that was killed. Another kind of file stays.
fn remove_socket(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
