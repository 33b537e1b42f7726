//! Metrics that a running gateway exports.

use super::fleet::TestFleet;

/// The value of a metric of the gateway.
pub(crate) async fn metric(world: &TestFleet, name: &str) -> u64 {
    metric_at(&world.client, &world.gateway.admin_url(""), name).await
}

/// The same for the gateway whose admin listener has this URL.
pub(crate) async fn metric_at(client: &reqwest::Client, admin: &str, name: &str) -> u64 {
    let text = client.get(format!("{admin}/metrics")).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
