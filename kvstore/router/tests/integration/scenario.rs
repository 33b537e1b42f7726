//! Runs one sequence of operations with Mooncake's own client, with one master and with several behind a router.

use futures_util::future::join_all;
use mooncake_wire::shards::ShardIdentity;
use moongate_master::MasterServerOptions;
use moongate_master_core::MasterCoreOptions;
use moongate_runtime::Supervisor;
use moongate_store_router::RouterOptions;
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, scenario};
use moongate_store_testkit::test_master::{start_http_master_of, start_http_master_with};

use crate::calls::options;

const SHARDS: u64 = 3;

/// The scenario waits for leases of this time. Ids of tasks follow from the seed.
fn core(seed: u64) -> MasterCoreOptions {
    MasterCoreOptions { lease_ttl_ms: 2000, ramp_ms: 0, seed, ..MasterCoreOptions::default() }
}

/// Lines about drain jobs, which a router's admin server does not have, and about puts into what they have left.
fn is_of_one_master(line: &str) -> bool {
    line.starts_with("drain") || line.starts_with("end ")
}

#[tokio::test(flavor = "multi_thread")]
async fn mooncakes_client_gets_the_same_results_by_a_router() {
    let shards = join_all((0..SHARDS).map(|index| {
        let shard = Some(ShardIdentity { index, count: SHARDS });
        start_http_master_of(
            None,
            MasterServerOptions { core: core(index << 32), shard, ..MasterServerOptions::default() },
        )
    }));
    let shards = shards.await;
    let router = RouterOptions {
        shard_admins: shards.iter().map(|shard| shard.services.admin.to_string()).collect(),
        ..options(shards.iter().map(|shard| shard.rpc.clone()).collect())
    };
    let supervisor = Supervisor::new();
    let router = moongate_store_router::start(&router, &supervisor).unwrap();
    let single = start_http_master_with(None, core(0)).await;
    let (address, admin) = (router.address().to_string(), router.admin_address().to_string());
    let single_admin = single.services.admin.to_string();
    let release = NEWEST_WITHOUT_CUDA;
    let (expected, actual) =
        tokio::join!(scenario(release, &single.rpc, &single_admin), scenario(release, &address, &admin));
    let of_all = |lines: Vec<String>| -> Vec<String> {
        lines.into_iter().filter(|line| !is_of_one_master(line)).collect()
    };
    let (expected, actual) = (of_all(expected), of_all(actual));
    assert!(expected.len() > 80, "{expected:?}");
    let same = expected.iter().zip(&actual).take_while(|(expected, actual)| expected == actual).count();
    assert_eq!(expected[same..], actual[same..], "one master's and a router's from line {same} on");
}
