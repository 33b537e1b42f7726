//! UNIX sockets that carry one JSON packet each way, with an optional file descriptor. They give processes of one host memory to map.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum packet size in bytes.
const MAX_PACKET: usize = 16 << 10;
/// Timeout of either side. Both run on one machine and respond at once.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Number of connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A connection between two processes of one host that preserves packet boundaries.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

/// A listening socket for [`PacketSocket`]s.
#[derive(Debug)]
pub struct PacketListener(OwnedFd);

impl PacketListener {
    /// Listens at an address.
    ///
    /// # Errors
    /// When the address is in use, or its folder is missing or not writable.
    pub fn bind(address: &SocketAddrUnix) -> io::Result<Self> {
        let socket = unix_socket()?;
        bind(&socket, address)?;
        listen(&socket, BACKLOG)?;
        Ok(Self(socket))
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// When the process has no file descriptors left, or after [`PacketListener::shut_down`].
    pub fn accept(&self) -> io::Result<PacketSocket> {
        let socket = rustix::io::retry_on_intr(|| accept_with(&self.0, SocketFlags::CLOEXEC))?;
        PacketSocket::new(socket)
    }

    /// Ends [`PacketListener::accept`] on another thread.
    pub fn shut_down(&self) {
        // Fails only if it is not listening any more.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for PacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PacketSocket {
    /// Connects to a [`PacketListener`].
    ///
    /// # Errors
    /// When no process listens there.
    pub fn connect(address: &SocketAddrUnix) -> io::Result<Self> {
        let socket = unix_socket()?;
        connect(&socket, address)?;
        Self::new(socket)
    }

    fn new(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))?;
        set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Rejects a peer of another user. With `allow_root`, the superuser is accepted too.
    ///
    /// # Errors
    /// `PermissionDenied`, with both users.
    pub fn check_user(&self, allow_root: bool) -> io::Result<()> {
        let (peer, own) = (socket_peercred(&self.0)?.uid, rustix::process::geteuid());
        if peer == own || (allow_root && peer.is_root()) {
            return Ok(());
        }
        let why = format!("the peer runs as user {peer:?}, this process as {own:?}");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// When the peer has closed the connection, or reads nothing for ten seconds.
    pub fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds
            && !control.push(SendAncillaryMessage::ScmRights(fds))
        {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        rustix::io::retry_on_intr(|| {
            sendmsg(&self.0, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Receives a message.
    ///
    /// # Errors
    /// `InvalidData` if it is not one of type `T`; else when the peer has closed the connection, or sends nothing for ten seconds.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<(T, Option<OwnedFd>)> {
        let mut text = vec![0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fd = fds.next().and_then(|mut fds| fds.next());
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet larger than 16 KiB"));
        }
        Ok((serde_json::from_slice(text.get(..received.bytes).unwrap_or_default())?, fd))
    }

    /// Waits until the peer closes the connection, without limit or up to a time. False if it is still open then. A message from the peer
    /// counts as its end.
    ///
    /// # Errors
    /// When the socket does not accept the limit.
    pub fn wait_closed(&self, limit: Option<Duration>) -> io::Result<bool> {
        set_socket_timeout(&self.0, Timeout::Recv, limit)?;
        let received = rustix::io::retry_on_intr(|| rustix::net::recv(&self.0, &mut [0], RecvFlags::empty()));
        Ok(!matches!(received, Err(rustix::io::Errno::AGAIN)))
    }

    /// Closes the connection, also for a thread that waits.
    pub fn shut_down(&self) {
        // Fails only if the peer has closed it.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

fn unix_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
