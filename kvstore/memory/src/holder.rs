//! A small process that keeps memory and listening sockets for another one, which may be killed or replaced meanwhile.
//!
//! The kernel frees memory when the last process lets go of it. So one process that does nothing else, and needs no upgrade, holds a
//! descriptor of each segment ([`HolderServer`]); the store asks it for them over a Unix socket ([`HolderClient`]). A listening socket is kept the
//! same way: those who connect while the store is away wait for it instead of being refused.

mod message;
mod server;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::PageMode;
use message::{HolderRequest, HolderResponse, HolderSocket};
pub use server::{HolderServer, HolderStopHandle};

/// Most things that are kept.
pub const MAX_RESOURCES: usize = 64;
/// Longest name of a thing in bytes.
pub const MAX_NAME: usize = 128;

/// Why nothing was handed over.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// The holder cannot be reached.
    #[error("no holder answers at {path}: {problem}; start `moongate store-holder --socket {path}`", path = path.display())]
    Unreachable {
        /// Its socket.
        path: PathBuf,
        /// What the system says.
        problem: io::Error,
    },
    /// It says no.
    #[error("the holder at {path} says: {reason}", path = path.display())]
    Refused {
        /// Its socket.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// What is kept under the name has another size. [`HolderClient::release`] it first, if it is of no more use.
    #[error("the holder keeps {held} bytes under this name, and {requested} are asked for")]
    Length {
        /// Bytes kept.
        held: u64,
        /// Bytes asked for.
        requested: u64,
    },
    /// The socket's path cannot be used.
    #[error("cannot listen at {path}: {problem}", path = path.display())]
    Bind {
        /// The path.
        path: PathBuf,
        /// What the system says.
        problem: io::Error,
    },
    /// Another holder is there.
    #[error("another holder uses {path}; one is enough", path = .0.display())]
    InUse(PathBuf),
}

/// Memory that was handed over.
#[derive(Debug)]
pub struct HolderMemory {
    /// What to map.
    pub fd: OwnedFd,
    /// Whether it was made just now, and is all zero.
    pub is_new: bool,
}

/// Where a holder listens. Each question has a connection of its own.
#[derive(Debug, Clone)]
pub struct HolderClient {
    path: PathBuf,
}

impl HolderClient {
    /// The one whose socket is at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Its socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The memory kept under a name, made if there is none.
    ///
    /// # Errors
    /// [`HolderError::Length`] when it is there with another size, or any other.
    pub fn memory(&self, name: &str, len: u64, pages: PageMode) -> Result<HolderMemory, HolderError> {
        match self
            .request(&HolderRequest::Memory { name: name.to_owned(), len, pages: pages.into() }, None)?
        {
            (HolderResponse::Kept { fresh, .. }, Some(fd)) => Ok(HolderMemory { fd, is_new: fresh }),
            (HolderResponse::Length { kept }, _) => Err(HolderError::Length { held: kept, requested: len }),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// The listening socket kept under a name, made if there is none at this address. With port 0 the system chooses one when it is
    /// made, and it stays.
    ///
    /// # Errors
    /// When the holder is away, or cannot listen there.
    pub fn listener(&self, name: &str, address: SocketAddr) -> Result<TcpListener, HolderError> {
        match self.request(&HolderRequest::Listener { name: name.to_owned(), address }, None)? {
            (HolderResponse::Kept { .. }, Some(fd)) => Ok(TcpListener::from(fd)),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// Hands it memory to keep: to a holder that has been started anew, while the store still has the memory.
    ///
    /// # Errors
    /// When it keeps something under the name already, or cannot be reached.
    pub fn hand_over(&self, name: &str, len: u64, fd: impl AsFd) -> Result<(), HolderError> {
        match self.request(&HolderRequest::Give { name: name.to_owned(), len }, Some(fd.as_fd()))? {
            (HolderResponse::Done, _) => Ok(()),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// Lets go of what is kept under a name. Those who have it mapped keep it until they let go too.
    ///
    /// # Errors
    /// When the holder is away.
    pub fn release(&self, name: &str) -> Result<(), HolderError> {
        match self.request(&HolderRequest::Forget { name: name.to_owned() }, None)? {
            (HolderResponse::Done, _) => Ok(()),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// The names of all that is kept, in order.
    ///
    /// # Errors
    /// When the holder is away.
    pub fn names(&self) -> Result<Vec<String>, HolderError> {
        match self.request(&HolderRequest::Names, None)? {
            (HolderResponse::Names { names }, _) => Ok(names),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    fn request(
        &self,
        request: &HolderRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(HolderResponse, Option<OwnedFd>), HolderError> {
        let exchange = || {
            let socket = HolderSocket::connect(&self.path)?;
            socket.send(request, fd)?;
            socket.receive()
        };
        exchange().map_err(|problem| HolderError::Unreachable { path: self.path.clone(), problem })
    }

    fn refused(&self, answer: HolderResponse) -> HolderError {
        let answer = match answer {
            HolderResponse::Refused { why } => why,
            other => format!("{other:?}, which this release does not understand"),
        };
        HolderError::Refused { path: self.path.clone(), reason: answer }
    }
}
