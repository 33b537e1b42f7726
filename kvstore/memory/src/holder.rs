//! The holder: a small process that keeps memory and listening sockets for a store that may be killed or replaced.
//!
//! The kernel frees memory when no process references it any more. So a process that does nothing else, and needs no upgrades, keeps a
//! descriptor of each segment ([`HolderServer`]); the store requests them over a Unix socket ([`HolderClient`]). Listening sockets are kept
//! the same way: clients that connect while the store is down wait instead of being refused.

mod message;
mod server;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::SocketAddrUnix;

use crate::PageMode;
use crate::packet_socket::PacketSocket;
use message::{HolderRequest, HolderResponse};
pub use server::{HolderServer, HolderStopHandle};

/// Maximum number of kept resources.
pub const MAX_RESOURCES: usize = 64;
/// Maximum length of a resource name in bytes.
pub const MAX_NAME: usize = 128;

/// Errors of the holder and its client.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// The holder cannot be reached.
    #[error("no holder is listening at {path}: {problem}; start `moongate store-holder --socket {path}`", path = path.display())]
    Unreachable {
        /// Path of the holder's socket.
        path: PathBuf,
        /// Error of the operating system.
        problem: io::Error,
    },
    /// The holder rejected the request.
    #[error("the holder at {path} rejected the request: {reason}", path = path.display())]
    Refused {
        /// Path of the holder's socket.
        path: PathBuf,
        /// Reason sent by the holder.
        reason: String,
    },
    /// The resource has another size. [`HolderClient::release`] it first if it is no longer needed.
    #[error("the holder keeps {held} bytes under this name, but {requested} were requested")]
    Length {
        /// Size of the kept memory in bytes.
        held: u64,
        /// Size of the request in bytes.
        requested: u64,
    },
    /// The socket cannot be bound.
    #[error("cannot listen at {path}: {problem}", path = path.display())]
    Bind {
        path: PathBuf,
        /// Error of the operating system.
        problem: io::Error,
    },
    /// Another holder uses the socket.
    #[error("another holder already uses {path}; run only one per path", path = .0.display())]
    InUse(PathBuf),
}

/// Memory received from the holder.
#[derive(Debug)]
pub struct HolderMemory {
    pub fd: OwnedFd,
    /// Whether it was just created, and is all zero.
    pub is_new: bool,
}

/// Client of a holder. Each request uses its own connection.
#[derive(Debug, Clone)]
pub struct HolderClient {
    path: PathBuf,
}

impl HolderClient {
    /// Creates a client of the holder at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Path of the holder's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the memory kept under a name, created if missing.
    ///
    /// # Errors
    /// [`HolderError::Length`] when it exists with another size, or any other.
    pub fn memory(&self, name: &str, len: u64, pages: PageMode) -> Result<HolderMemory, HolderError> {
        match self
            .request(&HolderRequest::Memory { name: name.to_owned(), len, pages: pages.into() }, None)?
        {
            (HolderResponse::Kept { fresh, .. }, Some(fd)) => Ok(HolderMemory { fd, is_new: fresh }),
            (HolderResponse::Length { kept }, _) => Err(HolderError::Length { held: kept, requested: len }),
            (response, _) => Err(self.refused(response)),
        }
    }

    /// Returns the listening socket kept under a name, created if there is none at this address. With port 0 the system chooses a port on
    /// creation, which is then kept.
    ///
    /// # Errors
    /// When the holder is unreachable, or cannot bind the address.
    pub fn listener(&self, name: &str, address: SocketAddr) -> Result<TcpListener, HolderError> {
        match self.request(&HolderRequest::Listener { name: name.to_owned(), address }, None)? {
            (HolderResponse::Kept { .. }, Some(fd)) => Ok(TcpListener::from(fd)),
            (response, _) => Err(self.refused(response)),
        }
    }

    /// Hands memory to a restarted holder while the store still has it.
    ///
    /// # Errors
    /// When the holder already keeps something under the name, or is unreachable.
    pub fn hand_over(&self, name: &str, len: u64, fd: impl AsFd) -> Result<(), HolderError> {
        match self.request(&HolderRequest::Give { name: name.to_owned(), len }, Some(fd.as_fd()))? {
            (HolderResponse::Done, _) => Ok(()),
            (response, _) => Err(self.refused(response)),
        }
    }

    /// Releases the resource kept under a name. Processes that have mapped it keep it.
    ///
    /// # Errors
    /// When the holder is unreachable.
    pub fn release(&self, name: &str) -> Result<(), HolderError> {
        match self.request(&HolderRequest::Forget { name: name.to_owned() }, None)? {
            (HolderResponse::Done, _) => Ok(()),
            (response, _) => Err(self.refused(response)),
        }
    }

    /// Returns the names of all kept resources, sorted.
    ///
    /// # Errors
    /// When the holder is unreachable.
    pub fn names(&self) -> Result<Vec<String>, HolderError> {
        match self.request(&HolderRequest::Names, None)? {
            (HolderResponse::Names { names }, _) => Ok(names),
            (response, _) => Err(self.refused(response)),
        }
    }

    fn request(
        &self,
        request: &HolderRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(HolderResponse, Option<OwnedFd>), HolderError> {
        let exchange = || {
            let socket = PacketSocket::connect(&SocketAddrUnix::new(&self.path)?)?;
            // The memory's descriptor gives full read and write access.
            socket.check_user(false)?;
            socket.send(request, fd)?;
            socket.receive()
        };
        exchange().map_err(|problem| HolderError::Unreachable { path: self.path.clone(), problem })
    }

    fn refused(&self, response: HolderResponse) -> HolderError {
        let reason = match response {
            HolderResponse::Refused { why } => why,
            other => format!("{other:?}, which this release does not support"),
        };
        HolderError::Refused { path: self.path.clone(), reason }
    }
}
