//! A small process that keeps memory and listening sockets for another one, which may be killed or replaced meanwhile.
//!
//! The kernel frees memory when the last process lets go of it. So one process that does nothing else, and needs no upgrade, holds a
//! descriptor of each segment ([`Keeper`]); the store asks it for them over a Unix socket ([`Holder`]). A listening socket is kept the
//! same way: those who connect while the store is away wait for it instead of being refused.

mod keeper;
mod message;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::Pages;
pub use keeper::{Keeper, Stopper};
use message::{Answer, Request, Socket};

/// Most things that are kept.
pub const MAX_KEPT: usize = 64;
/// Longest name of a thing in bytes.
pub const MAX_NAME: usize = 128;

/// Why nothing was handed over.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The holder cannot be reached.
    #[error("no holder answers at {path}: {problem}; start `moongate store-holder --socket {path}`", path = path.display())]
    Away {
        /// Its socket.
        path: PathBuf,
        /// What the system says.
        problem: io::Error,
    },
    /// It says no.
    #[error("the holder at {path} says: {answer}", path = path.display())]
    Refused {
        /// Its socket.
        path: PathBuf,
        /// Why.
        answer: String,
    },
    /// What is kept under the name has another size. [`Holder::forget`] it first, if it is of no more use.
    #[error("the holder keeps {kept} bytes under this name, and {asked} are asked for")]
    Length {
        /// Bytes kept.
        kept: u64,
        /// Bytes asked for.
        asked: u64,
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
pub struct Memory {
    /// What to map.
    pub fd: OwnedFd,
    /// Whether it was made just now, and is all zero.
    pub fresh: bool,
}

/// Where a holder listens. Each question has a connection of its own.
#[derive(Debug, Clone)]
pub struct Holder {
    path: PathBuf,
}

impl Holder {
    /// The one whose socket is at `path`.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
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
    /// [`Error::Length`] when it is there with another size, or any other.
    pub fn memory(&self, name: &str, len: u64, pages: Pages) -> Result<Memory, Error> {
        match self.ask(&Request::Memory { name: name.to_owned(), len, pages: pages.into() }, None)? {
            (Answer::Kept { fresh, .. }, Some(fd)) => Ok(Memory { fd, fresh }),
            (Answer::Length { kept }, _) => Err(Error::Length { kept, asked: len }),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// The listening socket kept under a name, made if there is none at this address. With port 0 the system chooses one when it is
    /// made, and it stays.
    ///
    /// # Errors
    /// When the holder is away, or cannot listen there.
    pub fn listener(&self, name: &str, address: SocketAddr) -> Result<TcpListener, Error> {
        match self.ask(&Request::Listener { name: name.to_owned(), address }, None)? {
            (Answer::Kept { .. }, Some(fd)) => Ok(TcpListener::from(fd)),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// Hands it memory to keep: to a holder that has been started anew, while the store still has the memory.
    ///
    /// # Errors
    /// When it keeps something under the name already, or cannot be reached.
    pub fn give(&self, name: &str, len: u64, fd: impl AsFd) -> Result<(), Error> {
        match self.ask(&Request::Give { name: name.to_owned(), len }, Some(fd.as_fd()))? {
            (Answer::Done, _) => Ok(()),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// Lets go of what is kept under a name. Those who have it mapped keep it until they let go too.
    ///
    /// # Errors
    /// When the holder is away.
    pub fn forget(&self, name: &str) -> Result<(), Error> {
        match self.ask(&Request::Forget { name: name.to_owned() }, None)? {
            (Answer::Done, _) => Ok(()),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    /// The names of all that is kept, in order.
    ///
    /// # Errors
    /// When the holder is away.
    pub fn names(&self) -> Result<Vec<String>, Error> {
        match self.ask(&Request::Names, None)? {
            (Answer::Names { names }, _) => Ok(names),
            (answer, _) => Err(self.refused(answer)),
        }
    }

    fn ask(&self, request: &Request, fd: Option<BorrowedFd<'_>>) -> Result<(Answer, Option<OwnedFd>), Error> {
        let exchange = || {
            let socket = Socket::connect(&self.path)?;
            socket.send(request, fd)?;
            socket.receive()
        };
        exchange().map_err(|problem| Error::Away { path: self.path.clone(), problem })
    }

    fn refused(&self, answer: Answer) -> Error {
        let answer = match answer {
            Answer::Refused { why } => why,
            other => format!("{other:?}, which this release does not understand"),
        };
        Error::Refused { path: self.path.clone(), answer }
    }
}
