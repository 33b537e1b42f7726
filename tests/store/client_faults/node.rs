//! A node in this process that can be made to behave badly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_wire::rpc::{ClientArguments, MountArguments, MountSegment, Ping};
use mooncake_wire::types::{Segment, Uuid};
use moongate_master_client::rpc::{self, MasterClient};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const BASE: u64 = 1 << 44;
const STATUS_OK: u64 = 0x4D43_5456 << 32;
const STATUS_REJECTED: u64 = STATUS_OK | 1;
/// What a slow node sends at once.
const PIECE: usize = 64 << 10;

/// The behaviour of the node towards requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultyNodeMode {
    Good,
    /// It accepts requests and never responds.
    Silent,
    /// It pauses after every 64 KiB that it sends.
    Slow(Duration),
    /// It responds to every range with an error.
    Refusing,
    /// It closes the connection after half of the bytes.
    Breaking,
}

#[derive(Clone)]
pub(crate) struct FaultyNode {
    shared: Arc<FaultyNodeState>,
    pub(crate) name: String,
}

struct FaultyNodeState {
    memory: Mutex<Vec<u8>>,
    mode: Mutex<FaultyNodeMode>,
    version: u32,
    requests: AtomicU64,
}

impl FaultyNode {
    /// Mounts `size` bytes at the master.
    pub(crate) async fn start(
        master: &str,
        size: usize,
        version: u32,
        protocol: &str,
        supervisor: &Supervisor,
    ) -> Self {
        let [handshakes, data] = [listener().await, listener().await];
        let name = handshakes.local_addr().unwrap().to_string();
        let port = data.local_addr().unwrap().port();
        let memory = Mutex::new(vec![0; size]);
        let (manner, requests) = (Mutex::new(FaultyNodeMode::Good), AtomicU64::new(0));
        let node = Self {
            shared: Arc::new(FaultyNodeState { memory, mode: manner, version, requests }),
            name: name.clone(),
        };
        let descriptor = serde_json::json!({
            "buffers": [{ "addr": BASE, "length": size, "name": name }], "name": name, "protocol": protocol,
            "rdma_server_name": "", "tcp_data_host": "127.0.0.1", "tcp_data_port": port, "tcp_proto_version": version,
            "timestamp": "2026-11-21 00:00:00.000000",
        });
        let (token, nested) = (supervisor.token(), supervisor.clone());
        supervisor.spawn("handshakes", async move {
            let serve = async {
                loop {
                    let (stream, _) = handshakes.accept().await.unwrap();
                    answer_handshake(stream, &descriptor.to_string()).await;
                }
            };
            token.run_until_cancelled(serve).await;
        });
        let (token, shared) = (supervisor.token(), Arc::clone(&node.shared));
        supervisor.spawn("data", async move {
            let serve = async {
                loop {
                    let (stream, _) = data.accept().await.unwrap();
                    let shared = Arc::clone(&shared);
                    // A connection that breaks off is the other side's business.
                    nested.spawn("transfers", async move { _ = shared.serve(stream).await });
                }
            };
            token.run_until_cancelled(serve).await;
        });
        let client_id = Uuid { first: 7, second: u64::from(port) };
        let (host_id, te_endpoint) = ("", name.as_str());
        let segment = Segment {
            id: client_id,
            name: te_endpoint,
            base: BASE,
            size: size as u64,
            te_endpoint,
            protocol,
            host_id,
            locality: None,
        };
        let master = MasterClient::new(master, rpc::MasterClientOptions::default(), supervisor);
        let mounted = master.call::<MountSegment, &str>(&MountArguments { segment, client_id }).await;
        assert_eq!(mounted.unwrap(), Ok(()));
        // A master forgets whom it does not hear of.
        let token = supervisor.token();
        supervisor.spawn("heartbeat", async move {
            let beat = async {
                loop {
                    master.call::<Ping, &str>(&ClientArguments { client_id }).await.unwrap().unwrap();
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            };
            token.run_until_cancelled(beat).await;
        });
        node
    }

    /// Flips a bit somewhere in all that has been written.
    pub(crate) fn damage(&self) {
        let mut memory = self.shared.memory.lock();
        let written = memory.iter().position(|byte| *byte != 0).unwrap();
        memory[written] ^= 1;
    }

    pub(crate) fn set_mode(&self, manner: FaultyNodeMode) {
        *self.shared.mode.lock() = manner;
    }

    /// How many requests for transfers it has had.
    pub(crate) fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

async fn answer_handshake(mut stream: TcpStream, descriptor: &str) {
    let size = stream.read_u64_le().await.unwrap_or(1);
    let mut asked = vec![0; size as usize];
    if stream.read_exact(&mut asked).await.is_ok() {
        let mut answer = (descriptor.len() as u64 + 1).to_le_bytes().to_vec();
        answer.push(1);
        answer.extend_from_slice(descriptor.as_bytes());
        _ = stream.write_all(&answer).await;
    }
}

impl FaultyNodeState {
    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let (size, address, opcode) =
                (stream.read_u64_le().await?, stream.read_u64_le().await?, stream.read_u64_le().await?);
            self.requests.fetch_add(1, Ordering::Relaxed);
            let (start, size) = ((address - BASE) as usize, size as usize);
            let (writes, told) = (opcode & 0x7f == 1, opcode & 0x80 != 0);
            assert!(!told || self.version == 2, "version 2 was not offered");
            let manner = *self.mode.lock();
            match manner {
                FaultyNodeMode::Silent => std::future::pending().await,
                FaultyNodeMode::Refusing if told => return stream.write_u64_le(STATUS_REJECTED).await,
                FaultyNodeMode::Refusing => return Ok(()),
                _ => {}
            }
            let moved = if manner == FaultyNodeMode::Breaking { size / 2 } else { size };
            if writes {
                let mut bytes = vec![0; moved];
                stream.read_exact(&mut bytes).await?;
                self.memory.lock()[start..start + moved].copy_from_slice(&bytes);
            }
            if told && !(writes && manner == FaultyNodeMode::Breaking) {
                stream.write_u64_le(STATUS_OK).await?;
            }
            if !writes {
                let bytes = self.memory.lock()[start..start + moved].to_vec();
                for piece in bytes.chunks(PIECE) {
                    stream.write_all(piece).await?;
                    if let FaultyNodeMode::Slow(pause) = manner {
                        tokio::time::sleep(pause).await;
                    }
                }
            }
            if manner == FaultyNodeMode::Breaking {
                return Ok(());
            }
        }
    }
}
