//! `moongate master` as a process: its command line, a call, and its shutdown.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader, RpcFrame};
use mooncake_wire::rpc::{NoArguments, ServiceReady, decode_reply, encode_request};

fn master(flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.arg("master").args(flags).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ran(flags: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = master(flags).output().unwrap();
    (status.code(), format!("{}{}", String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap()))
}

#[test]
fn help_is_printed_and_invalid_flags_are_rejected() {
    let (code, text) = ran(&["--help"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("--default_dialect") && text.contains("--eviction_high_watermark_ratio"), "{text}");
    let (code, text) = ran(&["--rpc_prot=1"]);
    assert_eq!(
        (code, text.trim()),
        (Some(2), "error: command line: unknown flag --rpc_prot; did you mean --rpc_port?")
    );
    let (code, text) = ran(&["-client_ttl", "soon"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("invalid value `soon` for --client_ttl"), "{text}");
}

#[test]
fn a_port_in_use_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--rpc_port={}", taken.local_addr().unwrap().port());
    let (code, text) =
        ran(&["--rpc_address=127.0.0.1", &port, "--metrics_host=127.0.0.1", "--metrics_port=0"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("cannot listen on 127.0.0.1:"), "{text}");
}

/// A child process that is killed when dropped, also in a failing test.
struct MasterProcess(Child);

impl Drop for MasterProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

fn send(stream: &mut TcpStream) -> RpcFrame<ResponseHeader, bytes::Bytes> {
    let mut bytes = BytesMut::new();
    encode_request::<ServiceReady, &str>(4, Dialect::NEWEST, &NoArguments, &mut bytes).unwrap();
    stream.write_all(&bytes).unwrap();
    bytes.clear();
    let mut piece = [0; 512];
    loop {
        if let FrameParseResult::Frame(response) = frame::take(&mut bytes, 1 << 20).unwrap() {
            return response;
        }
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "the connection has ended");
        bytes.extend_from_slice(&piece[..read]);
    }
}

#[test]
fn it_serves_calls_and_metrics_and_shuts_down() {
    let flags = [
        "--rpc_address=127.0.0.1",
        "--rpc_port",
        "0",
        "-metrics_host=127.0.0.1",
        "--metrics_port=0",
        "--logtostderr",
    ];
    let mut running = MasterProcess(master(&flags).spawn().unwrap());
    let mut log = BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let (mut address, mut reported) = (None, false);
    while address.is_none() || !reported {
        let line = log.next().expect("it says where it serves");
        reported |= line.contains(
            "Master Admin Metrics: role=leader, state=serving, service_ready=true, master={Mem Storage: ",
        );
        let serving = line.contains("serving Mooncake clients").then(|| line.split_once(" rpc=")).flatten();
        if let Some((_, rest)) = serving {
            address = rest.split(' ').next().map(str::to_owned);
        }
    }
    let mut stream = TcpStream::connect(address.unwrap()).unwrap();
    let response = send(&mut stream);
    assert_eq!((response.header.sequence, response.header.error), (4, 0));
    assert_eq!(decode_reply::<ServiceReady, &str>(&response.body).unwrap().0, Ok("2.0.0"));
    let id = running.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0);
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}
