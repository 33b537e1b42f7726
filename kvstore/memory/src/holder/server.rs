//! Server of the holder.

use std::collections::BTreeMap;
use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::SocketAddrUnix;

use super::message::{HolderRequest, HolderResponse};
use super::{HolderError, MAX_NAME, MAX_RESOURCES};
use crate::memfd;
use crate::packet_socket::{PacketListener, PacketSocket};

/// Keeps memory and listening sockets until it stops.
#[derive(Debug)]
pub struct HolderServer {
    path: PathBuf,
    listener: Arc<PacketListener>,
    stopped: Arc<AtomicBool>,
    resources: BTreeMap<String, HeldResource>,
    /// Maximum total bytes of memory.
    limit: u64,
    /// Lock on the socket's path, held until the server stops.
    _lock: File,
}

#[derive(Debug)]
enum HeldResource {
    Memory { fd: OwnedFd, len: u64 },
    Listener(TcpListener),
}

/// Why a request is rejected. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum HolderRequestError {
    #[error("{0} is a listening socket")]
    IsListener(String),
    #[error("{0} is memory")]
    IsMemory(String),
    #[error("{0} already exists")]
    Exists(String),
    #[error("a name must have 1 to {MAX_NAME} bytes without a zero byte")]
    InvalidName,
    #[error("the limit of {MAX_RESOURCES} resources is reached; release some")]
    TooManyResources,
    #[error("{len} more bytes exceed the limit: {used} of {limit} bytes are in use")]
    TooLarge { len: u64, used: u64, limit: u64 },
    #[error("{len} bytes: {source}")]
    Memory { len: u64, source: io::Error },
    #[error("{address}: {source}")]
    Bind { address: SocketAddr, source: io::Error },
    /// Memory is handed over with its file descriptor.
    #[error("the request has no file descriptor")]
    NoDescriptor,
}

/// Stops a [`HolderServer`] from another thread.
#[derive(Debug, Clone)]
pub struct HolderStopHandle {
    listener: Arc<PacketListener>,
    stopped: Arc<AtomicBool>,
}

impl HolderStopHandle {
    /// Stops serving requests and releases all resources.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.listener.shut_down();
    }
}

impl HolderServer {
    /// Listens at `path` for processes of the same user. `limit` is the maximum of kept memory in bytes.
    ///
    /// # Errors
    /// [`HolderError::InUse`] or [`HolderError::Bind`].
    pub fn bind(path: &Path, limit: u64) -> Result<Self, HolderError> {
        let bind = |problem| HolderError::Bind { path: path.to_owned(), problem };
        // The socket file remains when its process is killed: the lock shows whether it is in use.
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.with_added_extension("lock"))
            .map_err(bind)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(HolderError::InUse(path.to_owned())),
            Err(TryLockError::Error(problem)) => return Err(bind(problem)),
        }
        let listener = listen(path).map_err(bind)?;
        Ok(Self {
            path: path.to_owned(),
            listener: Arc::new(listener),
            stopped: Arc::default(),
            resources: BTreeMap::new(),
            limit,
            _lock: lock,
        })
    }

    /// Returns a handle that stops the server.
    #[must_use]
    pub fn stopper(&self) -> HolderStopHandle {
        HolderStopHandle { listener: Arc::clone(&self.listener), stopped: Arc::clone(&self.stopped) }
    }

    /// Serves one request after another until stopped.
    pub fn run(mut self) {
        loop {
            let accepted = self.listener.accept();
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok(socket) => {
                    if let Err(problem) = self.serve(&socket) {
                        tracing::warn!("a request to the holder failed: {problem}");
                    }
                }
                Err(problem) if problem.kind() == io::ErrorKind::ConnectionAborted => {}
                // Keep running: exiting would free all memory, and the store can retry.
                Err(problem) => {
                    tracing::error!("the holder cannot accept a connection: {problem}");
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            }
        }
    }

    fn serve(&mut self, socket: &PacketSocket) -> io::Result<()> {
        // The memory's descriptor gives full read and write access.
        socket.check_user(false)?;
        let (request, fd) = match socket.receive() {
            Ok(received) => received,
            Err(problem) if problem.kind() == io::ErrorKind::InvalidData => {
                let why = format!("not a request that this release supports: {problem}");
                return socket.send(&HolderResponse::Refused { why }, None);
            }
            Err(problem) => return Err(problem),
        };
        tracing::debug!("holder request: {request:?}");
        let (response, name) = self
            .respond(request, fd)
            .unwrap_or_else(|error| (HolderResponse::Refused { why: error.to_string() }, None));
        let fd = name.and_then(|name| self.resources.get(&name)).map(|resource| match resource {
            HeldResource::Memory { fd, .. } => fd.as_fd(),
            HeldResource::Listener(listener) => listener.as_fd(),
        });
        socket.send(&response, fd)
    }

    /// Returns the response, and the name of the resource whose descriptor is sent with it.
    fn respond(
        &mut self,
        request: HolderRequest,
        fd: Option<OwnedFd>,
    ) -> Result<(HolderResponse, Option<String>), HolderRequestError> {
        match request {
            HolderRequest::Memory { name, len, pages } => {
                match self.resources.get(&name) {
                    Some(HeldResource::Memory { len: kept, .. }) if *kept == len => {
                        return Ok((HolderResponse::Kept { fresh: false }, Some(name)));
                    }
                    Some(HeldResource::Memory { len, .. }) => {
                        return Ok((HolderResponse::Length { kept: *len }, None));
                    }
                    Some(HeldResource::Listener(_)) => return Err(HolderRequestError::IsListener(name)),
                    None => self.check_limits(&name, len)?,
                }
                let (fd, _) = memfd(&name, len, pages.into())
                    .map_err(|source| HolderRequestError::Memory { len, source })?;
                tracing::info!("created {len} bytes of memory as {name}");
                self.resources.insert(name.clone(), HeldResource::Memory { fd, len });
                Ok((HolderResponse::Kept { fresh: true }, Some(name)))
            }
            HolderRequest::Listener { name, address } => {
                match self.resources.get(&name) {
                    Some(HeldResource::Listener(kept))
                        if kept.local_addr().is_ok_and(|kept| matches_address(kept, address)) =>
                    {
                        return Ok((HolderResponse::Kept { fresh: false }, Some(name)));
                    }
                    Some(HeldResource::Memory { .. }) => return Err(HolderRequestError::IsMemory(name)),
                    // At another address: close the old socket first, as the port may be the same.
                    Some(HeldResource::Listener(_)) => drop(self.resources.remove(&name)),
                    None => self.check_limits(&name, 0)?,
                }
                let listener = TcpListener::bind(address)
                    .map_err(|source| HolderRequestError::Bind { address, source })?;
                tracing::info!("created a listening socket at {address} as {name}");
                self.resources.insert(name.clone(), HeldResource::Listener(listener));
                Ok((HolderResponse::Kept { fresh: true }, Some(name)))
            }
            HolderRequest::Give { name, len } => {
                if self.resources.contains_key(&name) {
                    return Err(HolderRequestError::Exists(name));
                }
                self.check_limits(&name, len)?;
                let fd = fd.ok_or(HolderRequestError::NoDescriptor)?;
                tracing::info!("received {len} bytes of memory as {name} from the store");
                self.resources.insert(name, HeldResource::Memory { fd, len });
                Ok((HolderResponse::Done, None))
            }
            HolderRequest::Forget { name } => {
                if self.resources.remove(&name).is_some() {
                    tracing::info!("released {name}");
                }
                Ok((HolderResponse::Done, None))
            }
            HolderRequest::Names => {
                Ok((HolderResponse::Names { names: self.resources.keys().cloned().collect() }, None))
            }
        }
    }

    /// Checks the name and the limits for another resource.
    fn check_limits(&self, name: &str, len: u64) -> Result<(), HolderRequestError> {
        if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
            return Err(HolderRequestError::InvalidName);
        }
        if self.resources.len() >= MAX_RESOURCES {
            return Err(HolderRequestError::TooManyResources);
        }
        let used = self.resources.values().map(|resource| match resource {
            HeldResource::Memory { len, .. } => *len,
            HeldResource::Listener(_) => 0,
        });
        let used = used.fold(0, u64::saturating_add);
        if used.saturating_add(len) > self.limit {
            return Err(HolderRequestError::TooLarge { len, used, limit: self.limit });
        }
        Ok(())
    }
}

impl Drop for HolderServer {
    fn drop(&mut self) {
        // Remove the socket, so that clients fail at once. The lock file stays: another holder may wait for it.
        if let Err(problem) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {problem}", self.path.display());
        }
    }
}

fn listen(path: &Path) -> io::Result<PacketListener> {
    match std::fs::remove_file(path) {
        Err(problem) if problem.kind() != io::ErrorKind::NotFound => return Err(problem),
        _ => {}
    }
    let listener = PacketListener::bind(&SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Whether an existing socket at `kept` satisfies a request for `requested`.
fn matches_address(kept: SocketAddr, requested: SocketAddr) -> bool {
    kept.ip() == requested.ip() && (requested.port() == 0 || kept.port() == requested.port())
}
