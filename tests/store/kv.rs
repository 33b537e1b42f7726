//! `moongate kv` as a process, with Mooncake's own master and node.

use std::path::Path;
use std::process::{Output, Stdio};

use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};
use moongate_testkit::free_port;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

struct KvFixture {
    master: RealMaster,
    node: RealNode,
    _folder: tempfile::TempDir,
}

impl KvFixture {
    async fn new() -> (Self, std::path::PathBuf) {
        let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
        let node = RealNode::start(&master, HANDSHAKE, 64).await;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        (Self { master, node, _folder: folder }, path)
    }

    async fn run(&self, arguments: &[&str], stdin: &[u8]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command.arg("kv").args(arguments).args(["--master", &self.master.rpc]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(stdin).await.unwrap();
        drop(input);
        tokio::time::timeout(LIMIT, child.wait_with_output()).await.expect("kv ends in time").unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    async fn expect_success(&self, arguments: &[&str], stdin: &[u8]) -> Vec<u8> {
        let ran = self.run(arguments, stdin).await;
        assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
        ran.stdout
    }

    /// Runs a command that must fail, and returns the message.
    async fn expect_failure(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments, b"").await;
        assert_eq!(ran.status.code(), Some(1), "{arguments:?}");
        String::from_utf8_lossy(&ran.stderr).into_owned()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json(printed: &[u8]) -> Value {
    serde_json::from_slice(printed).unwrap()
}

#[tokio::test]
async fn objects_go_from_files_to_the_store_and_back() {
    let (mut world, folder) = KvFixture::new().await;
    let bytes: Vec<u8> = (0..9_000_000_u32).map(|at| (at % 253) as u8).collect();
    let [from, to] = ["from", "to"].map(|name| folder.join(name));
    std::fs::write(&from, &bytes).unwrap();

    let printed = json(&world.expect_success(&["put", "a/file", text(&from), "--json"], b"").await);
    assert_eq!((&printed["bytes"], &printed["stored"]), (&Value::from(9_000_000), &Value::from(true)));
    assert_eq!(world.node.get("a/file").await, bytes.len(), "Mooncake's own client gets it");
    world.expect_success(&["get", "a/file", text(&to)], b"").await;
    assert!(std::fs::read(&to).unwrap() == bytes);

    world.expect_success(&["put", "stream"], b"from stdin").await;
    assert_eq!(world.expect_success(&["get", "stream"], b"").await, b"from stdin");
    let again = world.expect_failure(&["put", "stream", text(&from)]).await;
    assert!(again.contains("--upsert"), "{again}");
    world.expect_success(&["put", "stream", "-", "--upsert"], b"other").await;
    assert_eq!(world.expect_success(&["get", "stream", "-"], b"").await, b"other");

    let stat = json(&world.expect_success(&["stat", "stream", "--json"], b"").await);
    assert_eq!((&stat["bytes"], &stat["replicas"][0]["medium"]), (&Value::from(5), &Value::from("memory")));
    assert!(stat["checksum"].is_u64(), "{stat}");
    let admin = ["--admin", &world.master.admin];
    let listed = world.expect_success(&[&["ls"][..], &admin[..]].concat(), b"").await;
    let mut keys: Vec<_> = std::str::from_utf8(&listed).unwrap().lines().collect();
    keys.sort_unstable();
    assert_eq!(keys, ["a/file", "stream"]);
    assert_eq!(world.expect_success(&[&["ls", "a/"][..], &admin[..]].concat(), b"").await, b"a/file\n");

    let leased = world.expect_failure(&["rm", "stream"]).await;
    assert!(leased.contains("--force"), "{leased}");
    world.expect_success(&["rm", "stream", "--force"], b"").await;
    assert_eq!(json(&world.expect_success(&["rm", "--all", "--force", "--json"], b"").await)["removed"], 1);
    let none = world.expect_failure(&["get", "stream"]).await;
    assert!(none.contains("there is no object \"stream\""), "{none}");
}

#[tokio::test]
async fn the_bench_removes_its_objects() {
    let (world, _folder) = KvFixture::new().await;
    let flags = ["bench", "--sizes=4KiB,1MiB", "--threads=1,2", "--bytes=4MiB", "--json"];
    let printed = world.expect_success(&flags, b"").await;
    let lines: Vec<Value> =
        printed.split(|byte| *byte == b'\n').filter(|it| !it.is_empty()).map(json).collect();
    assert_eq!(lines.len(), 8, "{lines:?}");
    for line in &lines {
        let number = |name: &str| line[name].as_f64().unwrap();
        assert!(number("gb_per_s") > 0.0 && number("p50_ms") <= number("p99_ms"), "{line}");
    }
    assert!(world.expect_success(&["ls", "--admin", &world.master.admin], b"").await.is_empty());
}

#[tokio::test]
async fn errors_are_reported() {
    let unused_port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    let ran = command
        .args(["kv", "get", "k", "--master", &format!("127.0.0.1:{unused_port}")])
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1));
    assert!(said.contains("cannot be reached"), "{said}");
    for flags in [&["get"][..], &["put", "k", "--metadata", "nonsense"], &["bench", "--sizes", "0"], &["rm"]]
    {
        let ran = Command::new(env!("CARGO_BIN_EXE_moongate")).arg("kv").args(flags).output().await.unwrap();
        assert_eq!(ran.status.code(), Some(2), "{flags:?}: {}", String::from_utf8_lossy(&ran.stderr));
    }
}
