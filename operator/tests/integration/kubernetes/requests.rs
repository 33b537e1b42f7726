//! API requests per group: two roles of two instances, as in the measurements of upstream's controller.

use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, is_settled, role};

const GROUPS: u64 = 5;

/// Number of the operator's requests so far.
fn requests(stage: &TestOperator) -> u64 {
    let text = stage.metrics.text();
    let lines = text.lines().filter(|line| line.starts_with("moongate_operator_api_requests_total{"));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

fn roles(image: &str) -> Value {
    json!([role("a", 2, image), role("b", 2, image)])
}

/// Waits until every group is settled.
async fn settled(groups: &Api<RoleBasedGroup>, prefix: &str) {
    for index in 0..GROUPS {
        eventually("the group is settled", async || {
            is_settled(&groups.get(&format!("{prefix}{index}")).await.unwrap()).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_costs_half_of_upstreams_requests() {
    let stage = TestOperator::begin("requests").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    eventually("all kinds are listed", async || {
        // Matches whole lines, since the metric's help text contains the same words.
        let leads = stage.metrics.text().lines().any(|line| line == "moongate_operator_leading 1");
        (leads && stage.metrics.is_ready()).then_some(())
    })
    .await;
    let plain = cost(&stage, &groups, "g", json!({})).await;
    // Upstream's controller: 101 to 107, and 152 to 155.
    assert!(plain[0] <= 50 && plain[1] <= 70, "{plain:?}");
    let ladder = json!({ rbg_api::keys::TOPOLOGY_LADDER: "node,zone" });
    let placed = cost(&stage, &groups, "h", ladder).await;
    // The discovery file is written twice: before the pods are created, and after they are scheduled.
    assert!(placed[0] <= 52 && placed[1] <= 70, "{placed:?}");
    stage.end().await;
}

/// Requests per group for its creation and its in-place update.
async fn cost(
    stage: &TestOperator,
    groups: &Api<RoleBasedGroup>,
    prefix: &str,
    annotations: Value,
) -> [u64; 2] {
    let initial = requests(stage);
    for index in 0..GROUPS {
        let metadata = json!({ "name": format!("{prefix}{index}"), "annotations": annotations });
        let group = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
            "metadata": metadata, "spec": { "roles": roles("engine:1") } });
        groups.create(&PostParams::default(), &serde_json::from_value(group).unwrap()).await.unwrap();
    }
    settled(groups, prefix).await;
    let created = requests(stage);
    let body = Patch::Merge(json!({ "spec": { "roles": roles("engine:2") } }));
    for index in 0..GROUPS {
        groups.patch(&format!("{prefix}{index}"), &PatchParams::default(), &body).await.unwrap();
    }
    settled(groups, prefix).await;
    let updated = requests(stage);
    let each = [created - initial, updated - created].map(|requests| requests.div_ceil(GROUPS));
    eprintln!(
        "{annotations}: requests per group: {} to create it, {} to update it in place",
        each[0], each[1]
    );
    each
}
