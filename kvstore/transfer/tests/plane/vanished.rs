//! A peer whose machine vanishes: no packet arrives from it any more, not even a FIN. The peer runs in a network namespace.

use std::io::{BufRead as _, BufReader, Lines, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use moongate_transfer::TransferProtocol;
use moongate_transfer::plane::{STATUS, TransferHeader, TransferOperation};
use moongate_transfer::serve::TransferServerOptions;

use crate::node::{BASE, SIZE, TestTransferNode, wait_until};

/// Environment variable of the peer process: address of the node.
const NODE_VARIABLE: &str = "MOONGATE_TEST_NODE";
const READY: &str = "all connections are open";
const REQUESTED: &str = "the last request is sent";

fn run(line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let ran = Command::new(words.next().unwrap()).args(words).stderr(Stdio::null()).status();
    if ran.is_ok_and(|status| status.success()) { Ok(()) } else { Err(line.to_owned()) }
}

/// A network namespace that acts as another machine. Removed on drop.
struct NetworkNamespace {
    name: String,
    net: String,
}

impl NetworkNamespace {
    /// On failure, the command that failed.
    fn new() -> Result<Self, String> {
        let id = std::process::id() % 10_000;
        let net = format!("10.{}.{}", 192 + id / 250, id % 250);
        let machine = Self { name: format!("mgtp{id}"), net };
        let (name, net) = (&machine.name, &machine.net);
        run(&format!("ip netns add {name}"))?;
        run(&format!("ip link add {name}v type veth peer name eth0 netns {name}"))?;
        run(&format!("ip addr add {net}.1/30 dev {name}v"))?;
        run(&format!("ip link set {name}v up"))?;
        machine.run("addr add ADDRESS/30 dev eth0")?;
        machine.run("link set eth0 up")?;
        Ok(machine)
    }

    fn run(&self, line: &str) -> Result<(), String> {
        let line = line.replace("ADDRESS", &format!("{}.2", self.net));
        run(&format!("ip netns exec {} ip {line}", self.name))
    }

    /// Drops all packets to the namespace.
    fn drop_packets(&self) {
        run(&format!("ip route add blackhole {}.2/32", self.net)).unwrap();
    }

    /// Drops all packets from the namespace.
    fn vanish(&self) {
        self.run(&format!("route add blackhole {}.1/32", self.net)).unwrap();
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        // Some of these may not exist.
        let _ = run(&format!("ip route del blackhole {}.2/32", self.net));
        let _ = run(&format!("ip link del {}v", self.name));
        let _ = run(&format!("ip netns del {}", self.name));
    }
}

/// The peer process, killed on drop.
struct PeerProcess {
    child: Child,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl PeerProcess {
    /// Starts the peer and waits until all its connections are open.
    fn start(machine: &NetworkNamespace, port: u16) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &machine.name]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "vanished::peer", "--ignored", "--nocapture"]);
        command.env(NODE_VARIABLE, format!("{}.1:{port}", machine.net));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut peer = Self { child, stdout };
        peer.expect_line(READY);
        peer
    }

    fn expect_line(&mut self, what: &str) {
        assert!(self.stdout.by_ref().any(|line| line.unwrap().contains(what)), "the peer has failed");
    }

    fn send_request(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        self.expect_line(REQUESTED);
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "run by the other test as the vanishing process"]
fn peer() {
    let node = std::env::var(NODE_VARIABLE).unwrap();
    let send_header = |stream: &mut TcpStream, operation, size| {
        let header =
            TransferHeader { size, address: BASE, operation, protocol: TransferProtocol::V2 }.encode();
        stream.write_all(&header).unwrap();
    };
    let open = |operation, size| {
        let mut stream = TcpStream::connect(&node).unwrap();
        send_header(&mut stream, operation, size);
        stream
    };
    let mut idle = open(TransferOperation::Write, 5);
    idle.write_all(b"bytes").unwrap();
    idle.read_exact(&mut [0; STATUS]).unwrap();
    let mut silent = open(TransferOperation::Write, 5);
    silent.write_all(b"bytes").unwrap();
    silent.read_exact(&mut [0; STATUS]).unwrap();
    let mut half = open(TransferOperation::Write, 1000);
    half.write_all(&[1; 999]).unwrap();
    let unread = open(TransferOperation::Read, SIZE as u64);
    println!("{READY}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    send_header(&mut idle, TransferOperation::Read, 5);
    println!("{REQUESTED}");
    std::thread::sleep(Duration::from_secs(3600));
    drop((idle, half, unread, silent));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vanished_peer_is_closed_without_effect_on_others() {
    let machine = match NetworkNamespace::new() {
        Ok(machine) => machine,
        Err(line) => {
            eprintln!("SKIPPED: cannot create network namespaces here: `{line}` failed");
            return;
        }
    };
    let second = Duration::from_secs(1);
    let options = TransferServerOptions {
        stall: 2 * second,
        keepalive: 3 * second,
        ..TransferServerOptions::default()
    };
    let node = TestTransferNode::start_at("0.0.0.0", options).await;
    let mut neighbour = node.connect(TransferProtocol::Checked).await;
    let mut peer = PeerProcess::start(&machine, node.port);
    neighbour.write(BASE + 5000, b"before").await.unwrap();
    machine.drop_packets();
    peer.send_request();
    // The response stays in this kernel's send buffer.
    wait_until(|| node.server.counts().snapshot().reads == 1).await;
    machine.vanish();
    // Its kernel tries to close the connections, but its packets are dropped.
    drop(peer);
    wait_until(|| node.server.open() == 1).await;
    neighbour.write(BASE + 5000, b"after").await.unwrap();
    let mut read = [0; 5];
    neighbour.read(BASE + 5000, &mut read).await.unwrap();
    assert_eq!(&read, b"after");
}
