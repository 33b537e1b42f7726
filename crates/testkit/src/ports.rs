//! Ports for programs that listen some time after their port was chosen, or again after they were killed.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use parking_lot::Mutex;

/// Below the range from which the kernel takes ports for connections and for listeners on port 0 (`ip_local_port_range`), and above the
/// ports that Mooncake's clients choose: no other socket is given one of these between two lives of a program.
const FIRST: u16 = 18_000;
const COUNT: u32 = 14_000;
/// Ports between the first ones of two processes with consecutive ids, so that tests that run at once choose different ones.
const PER_PROCESS: u32 = 64;

static CHOSEN: AtomicU32 = AtomicU32::new(0);
/// Locked files of this process' ports. The kernel unlocks them when the process ends.
static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port on which no program listens, and that no test process on this machine has chosen: a program that was killed gets its port back.
///
/// # Panics
/// If the folder of the reservations cannot be written.
#[must_use]
pub fn free_port() -> u16 {
    loop {
        let number = std::process::id().wrapping_mul(PER_PROCESS).wrapping_add(CHOSEN.fetch_add(1, Relaxed));
        let port = FIRST + (number % COUNT) as u16;
        if reserve(port) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

/// Reserves the port for this process; false if another one has it.
#[expect(clippy::unwrap_used, reason = "for tests only: without reservations they fail by chance")]
fn reserve(port: u16) -> bool {
    let folder = std::env::temp_dir().join("moongate-test-ports");
    std::fs::create_dir_all(&folder).unwrap();
    let file = File::create(folder.join(port.to_string())).unwrap();
    let is_locked = file.try_lock().is_ok();
    if is_locked {
        RESERVED.lock().push(file);
    }
    is_locked
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process cannot take a port between two lives of a program that listens on it.
    #[test]
    fn a_chosen_port_stays_reserved() {
        let port = free_port();
        assert!(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok(), "no program listens on it");
        assert!(!reserve(port), "and it is reserved");
        assert_ne!(free_port(), port);
    }
}
