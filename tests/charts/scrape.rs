//! What a master and a store node tell at `/metrics`, beside the tables of the pages.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use super::read;

/// A program that is ended when dropped.
struct Running {
    child: Child,
    /// The value after each of the words that were looked for in its log.
    told: [String; 2],
}

impl Running {
    /// Waits until its log has told something after each of the words.
    fn start(command: &mut Command, words: [&str; 2]) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut told = [const { None }; 2];
        while told.contains(&None) {
            let line = log.next().unwrap_or_else(|| panic!("it ends without telling {words:?}: {told:?}"));
            for (word, told) in words.iter().zip(&mut told) {
                if let Some((_, after)) = line.split_once(word) {
                    *told = after.split(' ').next().map(str::to_owned);
                }
            }
        }
        // Somebody must read on, or it would wait.
        std::thread::spawn(move || log.for_each(drop));
        Self { child, told: told.map(Option::unwrap) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn moongate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.args(arguments).env_clear().stdin(Stdio::null());
    command
}

/// Names and types of all families.
async fn families(address: &str) -> BTreeSet<(String, String)> {
    let text = reqwest::get(format!("http://{address}/metrics")).await.unwrap().text().await.unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

/// Names and types in the tables of a page, of metrics that begin so.
fn described(page: &str, prefix: &str) -> BTreeSet<(String, String)> {
    let page = read(page);
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows
        .filter_map(|row| row.split_once("` | ").map(|(name, rest)| (name, rest.split(' ').next().unwrap())));
    cells
        .filter(|(name, kind)| name.starts_with(prefix) && ["counter", "gauge", "histogram"].contains(kind))
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

#[tokio::test]
async fn pages_describe_the_metrics_of_master_and_store() {
    let folder = tempfile::tempdir().unwrap();
    let events = "--kv_events_bind_endpoint=tcp://127.0.0.1:0";
    let here = ["--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_host=127.0.0.1", "--metrics_port=0"];
    let flags = ["master", "--enable_kv_events", events, "--kv_events_backend_id=b", "--enable_offload"];
    let master = Running::start(&mut moongate(&[&flags[..], &here].concat()), [" rpc=", " admin="]);
    let mut store = moongate(&["store", "--port=0", "--tier-size=64mb", "-Dglobal_segment_size=64mb"]);
    store.env("MOONCAKE_MASTER", &master.told[0]).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
    store.env("MOONCAKE_OFFLOAD_ENABLED", "true").env("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", folder.path());
    let store = Running::start(&mut store, [" data=", " http="]);

    let real = families(&store.told[1]).await;
    assert_eq!(described("docs/store.md", ""), real, "docs/store.md on the left, the node on the right");
    let real = families(&master.told[1]).await;
    let ours = real.iter().filter(|(name, _)| name.starts_with("moongate_")).cloned().collect();
    assert_eq!(
        described("docs/master.md", "moongate_"),
        ours,
        "docs/master.md on the left, the master on the right"
    );
    let others = described("docs/master.md", "");
    assert!(others.is_subset(&real), "the master does not have {:?}", others.difference(&real));
}
