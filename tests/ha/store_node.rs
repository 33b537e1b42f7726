//! This project's node and command line as clients of several masters.

use std::io::Write as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::cluster::HaCluster;

/// Long, because it only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// `moongate store`, and `moongate kv` with the same settings.
pub(crate) struct HaStoreNode {
    entry: String,
    folder: TempDir,
    _store: Child,
}

impl HaStoreNode {
    pub(crate) fn start(cluster: &HaCluster) -> Self {
        let (entry, folder) = (cluster.entry(), TempDir::new().unwrap());
        let mut command = moongate(&entry);
        command.args(["store", "--port=0", "--memory=process", "--listen=127.0.0.1", "--data-port=0"]);
        command.env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1").env("MOONCAKE_GLOBAL_SEGMENT_SIZE", "64mb");
        let store = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { entry, folder, _store: store }
    }

    /// Puts an object as soon as it can be put.
    pub(crate) async fn put(&self, key: &str) {
        let path = self.folder.path().join(key);
        std::fs::File::create(&path).unwrap().write_all(key.as_bytes()).unwrap();
        self.kv(&["put", key, path.to_str().unwrap()]).await;
    }

    /// Gets an object, with retries until it can be read.
    pub(crate) async fn get(&self, key: &str) {
        assert_eq!(self.kv(&["get", key]).await, key.as_bytes());
    }

    async fn kv(&self, arguments: &[&str]) -> Vec<u8> {
        let begun = Instant::now();
        loop {
            let output = moongate(&self.entry).arg("kv").args(arguments).output().await.unwrap();
            if output.status.success() {
                return output.stdout;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(begun.elapsed() < LIMIT, "{arguments:?}: {said}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn moongate(entry: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.env("MOONCAKE_MASTER", entry).kill_on_drop(true);
    command
}
