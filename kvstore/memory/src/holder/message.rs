//! Messages between holder and client: one JSON packet each way, with an optional file descriptor. The two may be of different releases:
//! members may be added, and existing ones must stay.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::PageMode;

/// Maximum packet size in bytes: the names of all resources.
const MAX_PACKET: usize = 16 << 10;
/// Timeout of either side. Both run on one machine and respond at once.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderRequest {
    Memory { name: String, len: u64, pages: WirePageMode },
    Listener { name: String, address: SocketAddr },
    Give { name: String, len: u64 },
    Forget { name: String },
    Names,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WirePageMode {
    Normal,
    Transparent,
    Huge,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderResponse {
    Kept { fresh: bool },
    Length { kept: u64 },
    Done,
    Names { names: Vec<String> },
    Refused { why: String },
}

impl From<PageMode> for WirePageMode {
    fn from(pages: PageMode) -> Self {
        match pages {
            PageMode::Normal => Self::Normal,
            PageMode::Transparent => Self::Transparent,
            PageMode::Huge => Self::Huge,
        }
    }
}

impl From<WirePageMode> for PageMode {
    fn from(pages: WirePageMode) -> Self {
        match pages {
            WirePageMode::Normal => Self::Normal,
            WirePageMode::Transparent => Self::Transparent,
            WirePageMode::Huge => Self::Huge,
        }
    }
}

/// A connection between holder and client, both of the same user.
#[derive(Debug)]
pub(super) struct HolderSocket(OwnedFd);

/// A Unix socket that preserves packet boundaries.
pub(super) fn unix() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

impl HolderSocket {
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let socket = unix()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Self::new(socket)
    }

    /// Rejects a peer of another user: the memory's descriptor gives full read and write access.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        let (peer, own) = (socket_peercred(&socket)?.uid, rustix::process::geteuid());
        if peer != own {
            let why = format!("the peer runs as user {peer:?}, this process as {own:?}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT))?;
        set_socket_timeout(&socket, Timeout::Send, Some(LIMIT))?;
        Ok(Self(socket))
    }

    pub(super) fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
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

    pub(super) fn receive<T: DeserializeOwned>(&self) -> io::Result<(T, Option<OwnedFd>)> {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of the first release, which later releases must accept.
    #[test]
    fn the_wire_format_is_stable() {
        let messages = [
            (
                HolderRequest::Memory { name: "a".into(), len: 5, pages: WirePageMode::Huge },
                r#"{"memory":{"name":"a","len":5,"pages":"huge"}}"#,
            ),
            (
                HolderRequest::Listener { name: "a".into(), address: ([127, 0, 0, 1], 80).into() },
                r#"{"listener":{"name":"a","address":"127.0.0.1:80"}}"#,
            ),
            (HolderRequest::Give { name: "a".into(), len: 5 }, r#"{"give":{"name":"a","len":5}}"#),
            (HolderRequest::Forget { name: "a".into() }, r#"{"forget":{"name":"a"}}"#),
            (HolderRequest::Names, r#""names""#),
        ];
        for (request, text) in messages {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<HolderRequest>(text).unwrap(), request);
        }
        let messages = [
            (HolderResponse::Kept { fresh: true }, r#"{"kept":{"fresh":true}}"#),
            (HolderResponse::Length { kept: 7 }, r#"{"length":{"kept":7}}"#),
            (HolderResponse::Done, r#""done""#),
            (HolderResponse::Names { names: vec!["a".into()] }, r#"{"names":{"names":["a"]}}"#),
            (HolderResponse::Refused { why: "x".into() }, r#"{"refused":{"why":"x"}}"#),
        ];
        for (response, text) in messages {
            assert_eq!(serde_json::to_string(&response).unwrap(), text);
            assert_eq!(serde_json::from_str::<HolderResponse>(text).unwrap(), response);
        }
        // A later release may add members.
        let more = r#"{"kept":{"fresh":false,"since":"yesterday"}}"#;
        assert_eq!(
            serde_json::from_str::<HolderResponse>(more).unwrap(),
            HolderResponse::Kept { fresh: false }
        );
    }
}
