//! Clients of the store, and checks of their results.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_runtime::net::simulated::record;
use moongate_store_client::{KvClient, KvError, PutOptions};
use tokio::time::Instant;

use crate::hosts::{HostResult, MASTER, client_options};
use crate::plan::{FAULTS_END, SeedPlan, StoreOperation};
use crate::report::{count, violation};

/// Delay before the first call.
const START_DELAY: Duration = Duration::from_secs(2);
/// Time for nodes and master to reconnect after the last fault.
const RECOVERY_TIME: Duration = Duration::from_secs(6);
/// Time limit of every client call, including its retries.
const OPERATION_DEADLINE: Duration = Duration::from_secs(60);

thread_local! {
    static HISTORY: RefCell<BTreeMap<usize, Vec<KeyWrite>>> = const { RefCell::new(BTreeMap::new()) };
    static NEXT_VERSION: RefCell<u64> = const { RefCell::new(0) };
}

/// One write of a key.
#[derive(Debug, Clone, Copy)]
struct KeyWrite {
    version: u64,
    bytes: usize,
    started: Instant,
    /// When it was acknowledged. A failed write may still take effect, because only its response may be lost.
    acknowledged: Option<Instant>,
    ended: Option<Instant>,
}

/// Expected content of a version of a key.
fn expected_content(key: usize, version: u64, bytes: usize) -> Vec<u8> {
    let head = format!("{key}/{version}/");
    let mut random = fastrand::Rng::with_seed(version.wrapping_mul(31) + key as u64);
    let mut content = head.into_bytes();
    content.extend(std::iter::repeat_with(|| random.u8(..)).take(bytes.saturating_sub(content.len())));
    content
}

/// Runs all store clients of a plan, and reads all keys after all faults have ended.
pub(crate) async fn run(plan: Rc<SeedPlan>) -> HostResult {
    let load_start = Instant::now();
    let supervisor = Supervisor::new();
    let client = KvClient::new(MASTER, client_options(), &supervisor)?;
    tokio::time::sleep(START_DELAY).await;
    let tasks = plan.operations.iter().map(|operations| {
        let (client, operations) = (client.clone(), operations.clone());
        tokio::task::spawn_local(async move {
            for (pause, operation) in operations {
                tokio::time::sleep(pause).await;
                match operation {
                    StoreOperation::Upsert { key, bytes } => _ = upsert(&client, key, bytes).await,
                    StoreOperation::Get { key } => get(&client, key, false).await,
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await?;
    }
    tokio::time::sleep_until(load_start + FAULTS_END + RECOVERY_TIME).await;
    let must_have = plan.is_lossless();
    let keys: Vec<usize> = HISTORY.with_borrow(|history| history.keys().copied().collect());
    for key in keys {
        get(&client, key, must_have).await;
    }
    verify_recovery(&client).await;
    Ok(())
}

/// Checks that the store accepts and returns objects after all faults have ended.
async fn verify_recovery(client: &KvClient) {
    for key in 100..103 {
        let mut tries = 0;
        while !upsert(client, key, 2_000).await {
            tries += 1;
            if tries == 5 {
                return violation("recovery", "the store accepts no object after all faults have ended");
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        get(client, key, true).await;
    }
}

async fn upsert(client: &KvClient, key: usize, bytes: usize) -> bool {
    let version = NEXT_VERSION.with_borrow_mut(|next| {
        *next += 1;
        *next
    });
    let write = KeyWrite { version, bytes, started: Instant::now(), acknowledged: None, ended: None };
    HISTORY.with_borrow_mut(|history| history.entry(key).or_default().push(write));
    let name = format!("key-{key}");
    let value = expected_content(key, version, bytes);
    let put =
        tokio::time::timeout(OPERATION_DEADLINE, client.upsert(&name, &value, &PutOptions::default())).await;
    let put = put.unwrap_or_else(|_| {
        violation(
            "request deadline",
            &format!("the put of {name} has not ended within {OPERATION_DEADLINE:?}"),
        );
        Err(KvError::Empty { key: name.clone() })
    });
    record(format_args!("put {name} version {version}: {put:?}"));
    count(if put.is_ok() { "puts" } else { "failed-puts" });
    HISTORY.with_borrow_mut(|history| {
        let writes = history.entry(key).or_default();
        if let Some(write) = writes.iter_mut().find(|write| write.version == version) {
            let now = Instant::now();
            (write.ended, write.acknowledged) = (Some(now), put.is_ok().then_some(now));
        }
    });
    put.is_ok()
}

async fn get(client: &KvClient, key: usize, must_have: bool) {
    let name = format!("key-{key}");
    let started = Instant::now();
    let got = tokio::time::timeout(OPERATION_DEADLINE, client.get(&name)).await;
    let end = Instant::now();
    let Ok(got) = got else {
        return violation(
            "request deadline",
            &format!("the get of {name} has not ended within {OPERATION_DEADLINE:?}"),
        );
    };
    let writes = HISTORY.with_borrow(|history| history.get(&key).cloned().unwrap_or_default());
    match got {
        Ok(bytes) => {
            count("gets");
            let found =
                writes.iter().find(|write| expected_content(key, write.version, write.bytes) == bytes);
            record(format_args!("get {name}: version {:?}", found.map(|write| write.version)));
            match found {
                None => {
                    violation(
                        "read integrity",
                        &format!("{name} has {} bytes that were never written", bytes.len()),
                    );
                }
                Some(found) => check_version(&name, found, &writes, started, end),
            }
        }
        Err(error) => {
            count("failed-gets");
            record(format_args!("get {name}: {error:?}"));
            let last = writes.iter().filter_map(|write| write.acknowledged).max();
            // A failed write may remove the object: its incomplete replacement cannot be read.
            let is_disturbed = writes.iter().any(|write| {
                write.acknowledged.is_none()
                    && last.is_none_or(|last| write.ended.is_none_or(|end| end >= last))
                    || write.started <= end && write.ended.is_none_or(|ended| ended >= started)
            });
            if must_have && last.is_some() && !is_disturbed {
                violation(
                    "put durability",
                    &format!("{name} was put and acknowledged, and cannot be read: {error}"),
                );
            }
        }
    }
}

/// Checks that the version was written before the read ended, and not replaced before the read started.
fn check_version(name: &str, found: &KeyWrite, writes: &[KeyWrite], started: Instant, end: Instant) {
    if found.started > end {
        violation(
            "read integrity",
            &format!("{name}: version {} was read before it was written", found.version),
        );
    }
    // A failed write has no time after which it cannot take effect.
    let Some(acknowledged) = found.acknowledged else { return };
    let replaced = writes.iter().find(|other| {
        other.started > acknowledged && other.acknowledged.is_some_and(|acknowledged| acknowledged < started)
    });
    if let Some(other) = replaced {
        let problem = format!(
            "{name}: version {} was read, which version {} had replaced",
            found.version, other.version
        );
        violation("read integrity", &problem);
    }
}
