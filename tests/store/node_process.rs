//! `moongate store` as a process: its command line, and memory that survives restarts, with Mooncake's own master and client.

use std::path::Path;
use std::process::Stdio;

use crate::harness::polling::poll_until;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};
use moongate_testkit::free_port;
use tokio::process::{Child, Command};

fn moongate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.args(arguments).env_clear().stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// A node with its memory in a holder.
struct StoreNodeProcess {
    child: Child,
}

impl StoreNodeProcess {
    async fn start(master: &RealMaster, socket: &Path, port: u16) -> Self {
        let memory = format!("--memory=holder:{}", socket.display());
        let mut command =
            moongate(&["store", "--port", &port.to_string(), &memory, "-Dglobal_segment_size=64mb"]);
        command.env("MOONCAKE_MASTER", &master.rpc).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
        let child = command.spawn().unwrap();
        let url = format!("http://127.0.0.1:{port}/health");
        poll_until("the node is healthy", async || {
            reqwest::get(&url).await.is_ok_and(|response| response.status().is_success())
        })
        .await;
        Self { child }
    }

    async fn signal(mut self, name: &str) -> Option<i32> {
        let id = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([name, &id]).status().await.unwrap().success());
        tokio::time::timeout(LIMIT, self.child.wait()).await.expect("it ends in time").unwrap().code()
    }
}

#[tokio::test]
async fn objects_survive_their_node() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("holder");
    let _holder = moongate(&["store-holder", "--socket", socket.to_str().unwrap()]).spawn().unwrap();
    poll_until("the holder is there", async || socket.exists()).await;
    let (master, port) = (RealMaster::start(NEWEST_WITHOUT_CUDA).await, free_port());
    let node = StoreNodeProcess::start(&master, &socket, port).await;
    let mut client = RealNode::start(&master, HANDSHAKE, 0).await;
    let keys: Vec<String> = (0..30).map(|number| format!("object-{number}")).collect();
    for (number, key) in keys.iter().enumerate() {
        client.put(key, 1 + number * 25_000).await;
    }
    let read = format!("read {}", keys.join(" "));
    assert_eq!(client.send_command(&read).await, "30");

    // First with SIGKILL, then with SIGTERM as in an upgrade.
    assert_eq!(node.signal("-KILL").await, None);
    let node = StoreNodeProcess::start(&master, &socket, port).await;
    poll_until("all are there after a kill", async || client.send_command(&read).await == "30").await;
    assert_eq!(node.signal("-TERM").await, Some(0));
    let node = StoreNodeProcess::start(&master, &socket, port).await;
    poll_until("all are there after a replacement", async || client.send_command(&read).await == "30").await;
    client.put("another", 100_000).await;
    assert_eq!(client.get("another").await, 100_000);
    assert_eq!(node.signal("-TERM").await, Some(0));
}

#[tokio::test]
async fn configuration_errors_are_explained() {
    for (arguments, expected) in [
        (&["store"][..], "error: the environment does not set master_server_address"),
        (&["store", "--config", "/no/such.json"], "error: cannot read /no/such.json"),
        (&["store", "--memory=disk"], "write process, holder:SOCKET or folder:PATH"),
        (&["store", "--allow-peers=me"], "neither an address nor a network"),
    ] {
        let ran = moongate(arguments).output().await.unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    for address in ["--listen=0.0.0.0", "-Dlocal_hostname=192.0.2.1"] {
        let mut open = moongate(&["store", "--port=0", address]);
        let ran = open.env("MOONCAKE_MASTER", "127.0.0.1:1").output().await.unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{address}: {said}");
        assert!(said.contains("set --allow-peers (MOONGATE_STORE_ALLOW_PEERS)"), "{address}: {said}");
    }
    let mut unreachable = moongate(&["store", "--port=0", "--max-wait-time=0"]);
    let ran = unreachable.env("MOONCAKE_MASTER", "127.0.0.1:1").output().await.unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(said.contains("127.0.0.1:1") && said.contains("MOONCAKE_MASTER"), "{said}");
}
