//! The process that keeps.

use std::collections::BTreeMap;
use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{Shutdown, SocketAddrUnix, SocketFlags};

use super::message::{HolderRequest, HolderResponse, HolderSocket, unix};
use super::{HolderError, MAX_NAME, MAX_RESOURCES};
use crate::memfd;

/// Connections that wait to be answered.
const BACKLOG: i32 = 16;

/// Keeps memory and listening sockets until it ends.
#[derive(Debug)]
pub struct HolderServer {
    path: PathBuf,
    listener: Arc<OwnedFd>,
    stopped: Arc<AtomicBool>,
    resources: BTreeMap<String, HeldResource>,
    /// Most bytes of memory.
    limit: u64,
    /// Held until it ends, so that the socket's path is its own.
    _lock: File,
}

#[derive(Debug)]
enum HeldResource {
    Memory { fd: OwnedFd, len: u64 },
    Listener(TcpListener),
}

/// Ends a [`HolderServer`] from another thread.
#[derive(Debug, Clone)]
pub struct HolderStopHandle {
    listener: Arc<OwnedFd>,
    stopped: Arc<AtomicBool>,
}

impl HolderStopHandle {
    /// No more questions are answered, and what is kept is let go.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Wakes the thread that waits for a connection.
        if let Err(problem) = rustix::net::shutdown(&*self.listener, Shutdown::Both) {
            tracing::warn!("the holder cannot be woken: {problem}");
        }
    }
}

impl HolderServer {
    /// Listens at `path`, for processes of the same user, and keeps at most `limit` bytes of memory.
    ///
    /// # Errors
    /// [`HolderError::InUse`] or [`HolderError::Bind`].
    pub fn bind(path: &Path, limit: u64) -> Result<Self, HolderError> {
        let bind = |problem| HolderError::Bind { path: path.to_owned(), problem };
        // A socket's file stays when its process is killed: the lock tells whether it is in use.
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

    /// What ends it.
    #[must_use]
    pub fn stopper(&self) -> HolderStopHandle {
        HolderStopHandle { listener: Arc::clone(&self.listener), stopped: Arc::clone(&self.stopped) }
    }

    /// Answers one question after the other until it is stopped.
    pub fn run(mut self) {
        loop {
            let accepted = rustix::net::accept_with(&*self.listener, SocketFlags::CLOEXEC);
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok(socket) => {
                    if let Err(problem) = self.serve(socket) {
                        tracing::warn!("a question to the holder came to nothing: {problem}");
                    }
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                // Whatever is wrong with the listener: ending would free all memory. The store is still there to ask again.
                Err(problem) => {
                    tracing::error!("the holder cannot accept a connection: {problem}");
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            }
        }
    }

    fn serve(&mut self, socket: OwnedFd) -> io::Result<()> {
        let socket = HolderSocket::new(socket)?;
        let (request, fd) = match socket.receive() {
            Ok(asked) => asked,
            Err(problem) if problem.kind() == io::ErrorKind::InvalidData => {
                let why = format!("not a question that this release understands: {problem}");
                return socket.send(&HolderResponse::Refused { why }, None);
            }
            Err(problem) => return Err(problem),
        };
        tracing::debug!("the holder is asked: {request:?}");
        let (answer, name) =
            self.respond(request, fd).unwrap_or_else(|why| (HolderResponse::Refused { why }, None));
        let fd = name.and_then(|name| self.resources.get(&name)).map(|kept| match kept {
            HeldResource::Memory { fd, .. } => fd.as_fd(),
            HeldResource::Listener(listener) => listener.as_fd(),
        });
        socket.send(&answer, fd)
    }

    /// The answer, and whose descriptor goes with it.
    fn respond(
        &mut self,
        request: HolderRequest,
        fd: Option<OwnedFd>,
    ) -> Result<(HolderResponse, Option<String>), String> {
        match request {
            HolderRequest::Memory { name, len, pages } => {
                match self.resources.get(&name) {
                    Some(HeldResource::Memory { len: kept, .. }) if *kept == len => {
                        return Ok((HolderResponse::Kept { fresh: false }, Some(name)));
                    }
                    Some(HeldResource::Memory { len, .. }) => {
                        return Ok((HolderResponse::Length { kept: *len }, None));
                    }
                    Some(HeldResource::Listener(_)) => return Err(format!("{name} is a listening socket")),
                    None => self.check_limits(&name, len)?,
                }
                let (fd, _) =
                    memfd(&name, len, pages.into()).map_err(|problem| format!("{len} bytes: {problem}"))?;
                tracing::info!("keeping {len} bytes of new memory as {name}");
                self.resources.insert(name.clone(), HeldResource::Memory { fd, len });
                Ok((HolderResponse::Kept { fresh: true }, Some(name)))
            }
            HolderRequest::Listener { name, address } => {
                match self.resources.get(&name) {
                    Some(HeldResource::Listener(kept))
                        if kept.local_addr().is_ok_and(|kept| fits(kept, address)) =>
                    {
                        return Ok((HolderResponse::Kept { fresh: false }, Some(name)));
                    }
                    Some(HeldResource::Memory { .. }) => return Err(format!("{name} is memory")),
                    // At another address: the old one is closed before, as the port may be the same.
                    Some(HeldResource::Listener(_)) => drop(self.resources.remove(&name)),
                    None => self.check_limits(&name, 0)?,
                }
                let listener =
                    TcpListener::bind(address).map_err(|problem| format!("{address}: {problem}"))?;
                tracing::info!("keeping a socket that listens at {address} as {name}");
                self.resources.insert(name.clone(), HeldResource::Listener(listener));
                Ok((HolderResponse::Kept { fresh: true }, Some(name)))
            }
            HolderRequest::Give { name, len } => {
                if self.resources.contains_key(&name) {
                    return Err(format!("{name} is kept already"));
                }
                self.check_limits(&name, len)?;
                let fd = fd.ok_or("no descriptor came with the memory")?;
                tracing::info!("keeping {len} bytes of memory as {name}, handed over by its user");
                self.resources.insert(name, HeldResource::Memory { fd, len });
                Ok((HolderResponse::Done, None))
            }
            HolderRequest::Forget { name } => {
                if self.resources.remove(&name).is_some() {
                    tracing::info!("{name} is kept no longer");
                }
                Ok((HolderResponse::Done, None))
            }
            HolderRequest::Names => {
                Ok((HolderResponse::Names { names: self.resources.keys().cloned().collect() }, None))
            }
        }
    }

    /// Whether one more can be kept.
    fn check_limits(&self, name: &str, len: u64) -> Result<(), String> {
        if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
            return Err(format!("a name has 1 to {MAX_NAME} bytes, and no 0 byte"));
        }
        if self.resources.len() >= MAX_RESOURCES {
            return Err(format!("{MAX_RESOURCES} things are kept already; forget some"));
        }
        let taken = self.resources.values().map(|kept| match kept {
            HeldResource::Memory { len, .. } => *len,
            HeldResource::Listener(_) => 0,
        });
        let taken = taken.fold(0, u64::saturating_add);
        if taken.saturating_add(len) > self.limit {
            return Err(format!(
                "{taken} of at most {} bytes are kept already; {len} more are too many",
                self.limit
            ));
        }
        Ok(())
    }
}

impl Drop for HolderServer {
    fn drop(&mut self) {
        // So that who connects is told at once that nobody is there. The lock's file stays: another may wait for it.
        if let Err(problem) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {problem}", self.path.display());
        }
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(problem) if problem.kind() != io::ErrorKind::NotFound => return Err(problem),
        _ => {}
    }
    let socket = unix()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Whether a socket that listens at `kept` is what is asked for.
fn fits(kept: SocketAddr, asked: SocketAddr) -> bool {
    kept.ip() == asked.ip() && (asked.port() == 0 || kept.port() == asked.port())
}
