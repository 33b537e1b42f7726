//! `moongate store-holder`: memory and sockets that survive the process that uses them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use moongate_memory::holder::HolderClient;
use moongate_memory::{MappedRegion, PageMode};

/// Time limit for a start or an end, also on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A running holder, killed when dropped.
struct HolderProcess {
    child: Child,
    holder: HolderClient,
}

fn command(socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.arg("store-holder").arg("--socket").arg(socket);
    command
}

impl HolderProcess {
    fn start(socket: PathBuf) -> Self {
        let mut running =
            Self { child: command(&socket).spawn().unwrap(), holder: HolderClient::new(socket) };
        let started = Instant::now();
        while running.holder.names().is_err() {
            assert!(running.child.try_wait().unwrap().is_none(), "it ended");
            assert!(started.elapsed() < TEST_TIMEOUT, "it does not answer");
            thread::sleep(Duration::from_millis(5));
        }
        running
    }

    fn terminate(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for HolderProcess {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ended = self.child.kill();
        self.child.wait().unwrap();
    }
}

#[test]
fn keeps_memory_until_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("holder");
    let running = HolderProcess::start(socket.clone());
    let memory = running.holder.memory("a", 1 << 20, PageMode::Normal).unwrap();
    MappedRegion::from_fd(memory.fd, 1 << 20, None).unwrap().write_at(0, b"moon").unwrap();
    let again = running.holder.memory("a", 1 << 20, PageMode::Normal).unwrap();
    assert!(!again.is_new);
    let mut bytes = [0; 4];
    MappedRegion::from_fd(again.fd, 1 << 20, None).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");

    assert_eq!(command(&socket).status().unwrap().code(), Some(1), "a second one at the same socket");
    assert_eq!(running.terminate(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn a_killed_holder_can_be_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("holder");
    let running = HolderProcess::start(socket.clone());
    running.holder.memory("a", 1 << 20, PageMode::Normal).unwrap();
    drop(running);
    assert!(socket.exists());
    let running = HolderProcess::start(socket);
    assert!(running.holder.memory("a", 1 << 20, PageMode::Normal).unwrap().is_new, "its memory is lost");
}

#[test]
fn the_socket_is_required() {
    let status = Command::new(env!("CARGO_BIN_EXE_moongate")).arg("store-holder").status().unwrap();
    assert_eq!(status.code(), Some(2));
}
