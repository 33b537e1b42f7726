//! Ports for programs that listen some time after their port was chosen, or again after they were killed.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Below the range from which the kernel takes ports for connections and for listeners on port 0 (`ip_local_port_range`), and above the
/// ports that Mooncake's clients choose: no other socket is given one of these between two lives of a program.
const FIRST: u16 = 18_000;
const COUNT: u32 = 14_000;
/// Ports between the first ones of two processes with consecutive ids, so that tests that run at once choose different ones.
const PER_PROCESS: u32 = 64;

static CHOSEN: AtomicU32 = AtomicU32::new(0);

/// A port on which no program listens, and that this process has not used before.
#[must_use]
pub fn free_port() -> u16 {
    loop {
        let number = std::process::id().wrapping_mul(PER_PROCESS).wrapping_add(CHOSEN.fetch_add(1, Relaxed));
        let port = FIRST + (number % COUNT) as u16;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}
