//! Store nodes are replaced one after another under load: requests go on, and pages are found as before.
#![expect(clippy::print_stdout, reason = "the numbers are the point of a run by hand")]

mod curves;
mod load;
mod nodes;

use std::time::Duration;

use load::{UpgradeLoadPlan, replace_nodes};
use nodes::StoreImplementation;

const PLAN: UpgradeLoadPlan =
    UpgradeLoadPlan { prompts: 48, pause: Duration::ZERO, before: 200, after_each: 66, after_all: 200 };

async fn nothing_is_lost(signal: &str) {
    let report = replace_nodes(StoreImplementation::Moongate, signal, PLAN).await;
    println!("{signal}: {}", report.line());
    assert_eq!(report.corrupt, 0, "bytes that nobody has put there");
    let [before, during, after] = report.shares();
    assert!(before > 0.9, "{before} of the pages come from the store");
    assert!(during >= 0.99 * before, "{during} while nodes were replaced, {before} before");
    assert!(after >= 0.99 * before, "{after} after nodes were replaced, {before} before");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_loses_nothing() {
    nothing_is_lost("TERM").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_nodes_lose_nothing() {
    nothing_is_lost("KILL").await;
}
