use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;

use super::resolved_names::HostResolver;
use super::*;

/// Recorded ConfigMap content of a live group.
const RECORDED: &str = include_str!("../../tests/data/rbg-config-pd-mooncake.yaml");

fn listed(text: &str, options: &RbgDiscoveryOptions) -> Vec<ListedInstance> {
    listing(&parse(text, options).unwrap(), &ResolvedNames::default(), options, 0).instances
}

#[test]
fn the_recorded_group_has_one_prefill_and_one_decode() {
    let options = RbgDiscoveryOptions { namespace: Some("prod".into()), ..RbgDiscoveryOptions::default() };
    let listed = listed(RECORDED, &options);
    let engines: Vec<_> = listed.iter().map(|instance| (instance.role, instance.url.as_str())).collect();
    assert_eq!(
        engines,
        [
            (
                EngineRole::Decode,
                "http://sglang-pd-with-mooncake-decode-0.s-sglang-pd-with-mooncake-decode.prod:8000"
            ),
            (
                EngineRole::Prefill,
                "http://sglang-pd-with-mooncake-prefill-0.s-sglang-pd-with-mooncake-prefill.prod:8000"
            ),
        ]
    );
    assert_eq!(listed[0].id, "sglang-pd-with-mooncake-decode-0.s-sglang-pd-with-mooncake-decode".into());
    assert!(listed.iter().all(|instance| instance.unavailable_reason.is_none()));
}

#[test]
fn ports_of_the_file_override_the_defaults() {
    let text = "group: {name: g, roles: [prefill]}\nroles:\n  prefill:\n    instances:\n    - address: a.b\n      ports: {h_ttp: 30000, bootstrap: 9000, metrics: 1}\n";
    let prefill =
        &listed(text, &RbgDiscoveryOptions { bootstrap_port: Some(1), ..RbgDiscoveryOptions::default() })[0];
    assert_eq!(prefill.url, "http://a.b:30000");
    assert_eq!(prefill.declared.bootstrap_port, Some(9000));
}

#[test]
fn the_file_may_contain_locations_of_instances() {
    let text = "group: {name: g, roles: [prefill]}\nroles:\n  prefill:\n    instances:\n    - address: a.b\n      place: {node: n1, nvlink_domain: d1, rack: r1, zone: z1, region: x}\n    - address: c.d\n";
    let listed = listed(text, &RbgDiscoveryOptions::default());
    let some = |name: &str| Some(name.to_owned());
    let location =
        PhysicalLocation { zone: some("z1"), rack: some("r1"), node: some("n1"), nvlink_domain: some("d1") };
    assert_eq!(listed[0].location, location);
    assert_eq!(listed[1].location, PhysicalLocation::default());
}

#[tokio::test]
async fn locations_of_store_nodes_are_listed_by_name_and_address() {
    let text = "group: {name: g, roles: [store]}\nroles:\n  store:\n    instances:\n    - address: g-store-0.s-g-store\n      place: {node: n1}\n    - address: g-store-1.s-g-store\n";
    let options = RbgDiscoveryOptions { namespace: Some("prod".into()), ..RbgDiscoveryOptions::default() };
    let members = parse(text, &options).unwrap();
    let mut names = ResolvedNames::default();
    let resolve: HostResolver = Arc::new(|_| Box::pin(async { vec![IpAddr::from([10, 0, 0, 7])] }));
    names.resolve(&members, &resolve).await;
    let update = listing(&members, &names, &options, 0);
    let names = ["g-store-0", "g-store-0.s-g-store.prod", "10.0.0.7"].map(str::to_owned);
    let location = PhysicalLocation { node: Some("n1".into()), ..PhysicalLocation::default() };
    assert_eq!(
        update.hosts,
        [ListedHost { names: names.into(), location }],
        "the other node has no location"
    );
    assert_eq!(update.instances, []);
}

#[test]
fn full_names_and_addresses_are_not_qualified() {
    assert_eq!(qualify("a.b", Some("ns")), "a.b.ns");
    assert_eq!(qualify("a.b", None), "a.b");
    assert_eq!(qualify("a.b.ns.svc.cluster.local", Some("ns")), "a.b.ns.svc.cluster.local");
    assert_eq!(qualify("10.0.0.1", Some("ns")), "10.0.0.1");
    assert_eq!(qualify("fd00::1", Some("ns")), "fd00::1");
}

#[tokio::test]
async fn dns_reveals_leader_worker_roles_and_a_name_in_use_is_kept() {
    let options = RbgDiscoveryOptions::default();
    let text = "group: {name: g, roles: [prefill, decode]}\nroles:\n  prefill: {instances: [{address: g-prefill-0.s-g-prefill}]}\n  decode: {instances: [{address: g-decode-0.s-g-decode}]}\n";
    let members = parse(text, &options).unwrap();
    let mut names = ResolvedNames::default();
    let existing = |hosts: &'static [&'static str]| -> HostResolver {
        let address = |host: String| hosts.contains(&host.as_str()).then_some(IpAddr::from([10, 0, 0, 7]));
        Arc::new(move |host: String| Box::pin(async move { address(host).into_iter().collect() }))
    };
    let urls = |names: &ResolvedNames| -> Vec<String> {
        listing(&members, names, &options, 0).instances.into_iter().map(|instance| instance.url).collect()
    };
    names.resolve(&members, &existing(&["g-decode-0.s-g-decode", "g-prefill-0-0.s-g-prefill"])).await;
    let leader = ["http://g-decode-0.s-g-decode:8000", "http://g-prefill-0-0.s-g-prefill:8000"];
    assert_eq!(urls(&names), leader);
    names.resolve(&members, &existing(&[])).await;
    assert_eq!(urls(&names), leader, "a restarting pod does not change its name");
    names.resolve(&members, &existing(&["g-prefill-0.s-g-prefill", "g-prefill-0-0.s-g-prefill"])).await;
    assert_eq!(urls(&names), leader);
    names.resolve(&members, &existing(&["g-prefill-0.s-g-prefill"])).await;
    assert_eq!(urls(&names)[1], "http://g-prefill-0.s-g-prefill:8000", "the role became standalone");
}

#[test]
fn an_invalid_file_is_rejected_with_the_line() {
    let options = RbgDiscoveryOptions::default();
    let error = parse("group: {name: g}\nroles:\n  prefill: [\n", &options).unwrap_err();
    assert!(matches!(&error, TopologyFileError::Syntax(text) if text.contains("line")), "{error}");
    assert!(parse("", &options).is_err());
    assert!(matches!(parse("a: 1", &options), Err(TopologyFileError::Rbg(_))));
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        if let Ok(members) = parse(&text, &RbgDiscoveryOptions::default()) {
            listing(&members, &ResolvedNames::default(), &RbgDiscoveryOptions::default(), 0);
        }
    }

    #[test]
    fn file_like_text_never_panics(
        group in "(g|\\{name: g\\}|\\[\\]|7)",
        role in "(prefill|decode|7|'')",
        body in "(\\{replicas: [0-9]{1,3}, excludes: \\[[0-9]\\]\\}|\\{instances: \\[\\{address: '?[a-z0-9.:-]{0,12}'?, ports: \\{http: [0-9]{1,6}\\}\\}\\]\\})",
    ) {
        let text = format!("group: {group}\nroles:\n  {role}: {body}\n");
        if let Ok(members) = parse(&text, &RbgDiscoveryOptions::default()) {
            listing(&members, &ResolvedNames::default(), &RbgDiscoveryOptions::default(), 0);
        }
    }
}
