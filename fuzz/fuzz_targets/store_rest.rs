//! A store node's REST API responds to every request, with valid JSON where the content type is JSON. No task of the node panics, a new
//! object is read back unchanged, and mounted segments can be unmounted.
//!
//! The first line of the input is method and path, the rest is the body.

#![no_main]

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::LazyLock;
use std::time::Duration;

use clap::Parser as _;
use libfuzzer_sys::fuzz_target;
use moongate_master::RunningMaster;
use moongate_master::flags::{MasterInvocation, read};
use moongate_runtime::{Supervisor, task_panics};
use moongate_store_node::{NodeArgs, NodeConfig, RunningNode};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

struct StoreRestNode {
    http: SocketAddr,
    _running: (RunningMaster, RunningNode, Supervisor, Runtime),
}

async fn start(supervisor: &Supervisor) -> (RunningMaster, RunningNode) {
    let Ok(MasterInvocation::Serve(mut options)) = read([], |_| None) else {
        panic!("a master has no required flags")
    };
    (options.rpc, options.metrics) = (([127, 0, 0, 1], 0).into(), ([127, 0, 0, 1], 0).into());
    options.metadata = None;
    let master = moongate_master::start(*options, supervisor).await.expect("ports are free");
    let address = master.rpc_address().to_string();
    let variable = |name: &str| match name {
        "MOONCAKE_MASTER" => Some(address.clone()),
        "MOONCAKE_LOCAL_HOSTNAME" => Some("127.0.0.1".to_owned()),
        "MOONCAKE_GLOBAL_SEGMENT_SIZE" => Some("16mb".to_owned()),
        _ => None,
    };
    let flags = NodeArgs::parse_from(["moongate store", "--port=0"]);
    let config = NodeConfig::read(None, &[], variable).expect("all required settings are present");
    (master, moongate_store_node::start(flags, config, supervisor).await.expect("ports are free"))
}

static NODE: LazyLock<StoreRestNode> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let supervisor = Supervisor::new();
    let (master, store) = runtime.block_on(start(&supervisor));
    StoreRestNode {
        http: store.http().expect("it serves HTTP"),
        _running: (master, store, supervisor, runtime),
    }
});

struct StoreRestResponse {
    status: u16,
    is_json: bool,
    body: Vec<u8>,
}

/// Sends a request on a new connection and reads the response.
fn call(method: &str, path: &str, body: &[u8]) -> io::Result<StoreRestResponse> {
    let mut stream = TcpStream::connect(NODE.http)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat())?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
    let mut is_json = false;
    while line.len() > 2 {
        line.clear();
        reader.read_line(&mut line)?;
        is_json |= line.to_lowercase().starts_with("content-type: application/json");
    }
    let mut body = Vec::new();
    reader.read_to_end(&mut body)?;
    Ok(StoreRestResponse { status, is_json, body })
}

fn members(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_default()
}

fn object_path(action: &str, body: &Value) -> Option<String> {
    let escaped: String = body["key"].as_str()?.bytes().map(|byte| format!("%{byte:02X}")).collect();
    Some(format!("/api/{action}/{escaped}"))
}

/// Puts an object. If its key is new, reads it back and compares the bytes.
fn put(body: &[u8]) -> StoreRestResponse {
    let object = members(body);
    let exist = object_path("exist", &object).and_then(|path| call("GET", &path, b"").ok());
    let is_new = exist.is_some_and(|response| members(&response.body)["exists"] == false);
    let response = call("PUT", "/api/put", body).expect("every request gets a response");
    let (path, value) = (object_path("get", &object), object["value"].as_str());
    if let (Some(path), Some(value), 200, true) = (path, value, response.status, is_new) {
        let stored = call("GET", &path, b"").expect("every request gets a response");
        assert_eq!((stored.status, stored.body), (200, value.as_bytes().to_vec()), "{path}");
    }
    response
}

/// Whether a request names an existing file in `/dev/shm`, which may be the memory of another process.
fn names_foreign_memory(body: &[u8]) -> bool {
    let body = String::from_utf8_lossy(body);
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| body.contains(&*name.to_string_lossy()))
}

fuzz_target!(|input: &[u8]| {
    let (line, body) = input.split_at(input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len()));
    let body = body.get(1..).unwrap_or_default();
    let Some((method, path)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(' ')) else {
        return;
    };
    let is_path = path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if !matches!(method, "GET" | "PUT" | "POST" | "DELETE") || !is_path || names_foreign_memory(body) {
        return;
    }
    let response = match (method, path) {
        ("PUT", "/api/put") => put(body),
        _ => call(method, path, body).expect("every request gets a response"),
    };
    assert!((200..600).contains(&response.status), "{}", response.status);
    assert!(!response.is_json || serde_json::from_slice::<Value>(&response.body).is_ok());
    if path.starts_with("/api/mount") && response.status == 200 {
        let ids = json!({ "segment_ids": members(&response.body)["segment_ids"] });
        let unmounted =
            call("POST", "/api/unmount", ids.to_string().as_bytes()).expect("every request gets a response");
        assert_eq!(unmounted.status, 200, "{}", String::from_utf8_lossy(&unmounted.body));
    }
    assert_eq!(task_panics(), 0);
});
