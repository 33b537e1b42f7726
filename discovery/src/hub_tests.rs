use super::*;
use crate::listing::listed_instance;
use crate::location::PhysicalLocation;
use crate::publish::channel;
use crate::topology::{
    DeclaredFacts, EngineFacts, EngineKind, InstanceReadiness, InstanceSource, KubernetesWorkload,
};

fn hub(concurrency: usize) -> (DiscoveryHub, crate::publish::TopologyReader) {
    let options = ProbeOptions { concurrency, ..ProbeOptions::default() };
    let (publisher, reader) = channel();
    (DiscoveryHub::new(EngineProber::new(&options).unwrap(), options, publisher), reader)
}

fn facts(models: &[&str], transfer: Option<KvTransferMethod>) -> EngineFacts {
    EngineFacts {
        models: models.iter().map(|&name| name.to_owned()).collect(),
        transfer,
        ..EngineFacts::unreported(EngineKind::Vllm)
    }
}

fn instance(role: EngineRole, models: &[&str], transfer: Option<KvTransferMethod>) -> Arc<EngineInstance> {
    Arc::new(EngineInstance {
        id: "i".into(),
        role,
        url: String::new(),
        source: InstanceSource::Static,
        location: PhysicalLocation::default(),
        workload: KubernetesWorkload::default(),
        declared: DeclaredFacts::default(),
        readiness: InstanceReadiness::Ready,
        facts: Some(facts(models, transfer)),
    })
}

#[tokio::test]
async fn no_more_probes_run_than_allowed_and_the_rest_follows() {
    let (mut hub, _reader) = hub(3);
    let instances = (0..8).map(|index| listed_instance(&format!("i{index}"), EngineRole::Plain)).collect();
    hub.apply_update(SourceUpdate::of_engines(0, instances));
    hub.start_due();
    hub.start_due();
    assert_eq!(hub.running.len(), 3);
    let failed = |id: InstanceId, probe_id| {
        (id, probe_id, ProbeVerdict::NotReady { reason: "r".into(), facts: None, timed_out: false })
    };
    hub.running.clear();
    for (index, probe_id) in [(0, 1), (1, 2), (2, 3)] {
        hub.finish(failed(format!("i{index}").as_str().into(), probe_id));
    }
    hub.start_due();
    assert_eq!(hub.next_probe_id, 6, "the next three instances are probed, not the same ones again");
}

#[tokio::test]
async fn probe_of_removed_instance_does_not_reach_its_namesake() {
    let (mut hub, reader) = hub(3);
    hub.apply_update(SourceUpdate::of_engines(0, vec![listed_instance("a", EngineRole::Plain)]));
    hub.start_due();
    let late = ("a".into(), hub.next_probe_id, ProbeVerdict::Ready(facts(&["m"], None)));
    hub.apply_update(SourceUpdate::of_engines(0, Vec::new()));
    hub.apply_update(SourceUpdate::of_engines(0, vec![listed_instance("a", EngineRole::Plain)]));
    hub.start_due();
    hub.finish(late);
    assert_eq!(reader.current().instances[0].facts, None);
}

#[test]
fn decode_takes_connector_only_if_its_prefills_agree() {
    let decode = instance(EngineRole::Decode, &["m"], None);
    let nixl = instance(EngineRole::Prefill, &["m", "n"], Some(KvTransferMethod::VllmNixl));
    let store = instance(EngineRole::Prefill, &["m"], Some(KvTransferMethod::VllmStore));
    let other_model = instance(EngineRole::Prefill, &["x"], Some(KvTransferMethod::VllmStore));
    assert_eq!(prefills_transfer(&[nixl.clone(), other_model], &decode), Some(KvTransferMethod::VllmNixl));
    assert_eq!(prefills_transfer(&[nixl.clone(), store], &decode), None);
    assert_eq!(prefills_transfer(&[], &decode), None);
    let prefill = instance(EngineRole::Prefill, &["m"], None);
    assert_eq!(
        prefills_transfer(&[nixl], &prefill),
        None,
        "a prefill does not adopt another prefill's connector"
    );
}
