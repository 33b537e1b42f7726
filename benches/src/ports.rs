//! Ports for the measured programs.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

/// A port that was free a moment ago.
pub(crate) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
