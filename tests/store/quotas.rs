//! Tenants with a quota: a write that exceeds it fails with an error, for each kind of write, and by either client.

use mooncake_wire::ErrorCode;
use moongate_master_core::MasterCoreOptions;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};
use moongate_store_testkit::test_master::{TestHttpMaster, start_http_master_with};
use serde_json::json;

const MIB: usize = 1 << 20;
const QUOTA: usize = 4 * MIB;
/// Code of writes over the quota, and of an unknown tenant, as Mooncake's client returns them.
const EXCEEDED: &str = "-1700";
const NOT_REGISTERED: &str = "-1701";

async fn start_master() -> TestHttpMaster {
    let core = MasterCoreOptions { multi_tenant: true, ramp_ms: 0, ..MasterCoreOptions::default() };
    let master = start_http_master_with(None, core).await;
    let url = format!("http://{}/api/v1/tenant_quotas?tenant_id=limited", master.services.admin);
    let quota = reqwest::Client::new().put(url).json(&json!({ "requested_quota_bytes": QUOTA }));
    assert_eq!(quota.send().await.unwrap().status().as_u16(), 200);
    master
}

async fn their_client(master: &TestHttpMaster, tenant: &str) -> RealNode {
    RealNode::start_with(NEWEST_WITHOUT_CUDA, &master.rpc, HANDSHAKE, 64, &[("TENANT", tenant)]).await
}

#[tokio::test]
async fn their_client_gets_an_error_for_a_write_over_quota() {
    let master = start_master().await;
    let mut theirs = their_client(&master, "limited").await;
    theirs.put("fits", MIB).await;
    let over = QUOTA + 1;
    for command in [format!("put big {over}"), format!("upsert fits {over}"), format!("fill 1 {over} a")] {
        assert_eq!(theirs.send_command(&command).await, EXCEEDED, "{command}");
    }
    assert_eq!(theirs.send_command("exist fits big a").await, "100");
    // Space that other objects of the tenant use cannot be freed while they are leased.
    assert_eq!(theirs.send_command("exist fits").await, "1");
    assert_eq!(theirs.send_command(&format!("put rest {QUOTA}")).await, EXCEEDED);
    assert_eq!(theirs.get("fits").await, MIB);
    let mut unknown = their_client(&master, "unknown").await;
    assert_eq!(unknown.send_command("put k 100").await, NOT_REGISTERED);
}

#[tokio::test]
async fn our_client_gets_an_error_for_a_write_over_quota() {
    let master = start_master().await;
    // It mounts the memory.
    let _node = their_client(&master, "limited").await;
    let (supervisor, options) = (Supervisor::new(), PutOptions::default());
    let client = |tenant: &str| {
        let tenant = tenant.to_owned();
        KvClient::new(&master.rpc, KvClientOptions { tenant, ..KvClientOptions::default() }, &supervisor)
    };
    let ours = client("limited").unwrap();
    ours.put("fits", &vec![1; MIB], &options).await.unwrap();
    let big = vec![2; QUOTA + 1];
    let exceeded = Some(ErrorCode::TENANT_QUOTA_EXCEEDED);
    assert_eq!(ours.put("big", &big, &options).await.unwrap_err().code(), exceeded);
    assert_eq!(ours.upsert("fits", &big, &options).await.unwrap_err().code(), exceeded);
    let batch = ours.put_batch(&[("small", &big[..100]), ("large", &big[..])], &options).await;
    let codes: Vec<_> = batch.into_iter().map(|put| put.err().and_then(|error| error.code())).collect();
    assert_eq!(codes, [None, exceeded]);
    assert_eq!(ours.exist(&["fits", "big", "small", "large"]).await.unwrap(), [true, false, true, false]);
    let unknown = client("unknown").unwrap().put("k", b"v", &options).await.unwrap_err();
    assert_eq!(unknown.code(), Some(ErrorCode::TENANT_NOT_REGISTERED));
}
