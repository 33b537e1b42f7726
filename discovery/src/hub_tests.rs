use super::*;
use crate::listing::sample;
use crate::reader::channel;
use crate::topology::{Declared, Engine, EngineFacts, Place, Readiness, Source, Workload};

fn hub(concurrency: usize) -> (Hub, crate::reader::TopologyReader) {
    let options = ProbeOptions { concurrency, ..ProbeOptions::default() };
    let (publisher, reader) = channel();
    (Hub::new(Prober::new(&options).unwrap(), options, publisher), reader)
}

fn facts(models: &[&str], transfer: Option<KvTransfer>) -> EngineFacts {
    EngineFacts {
        engine: Engine::Vllm,
        version: String::new(),
        models: models.iter().map(|&name| name.to_owned()).collect(),
        reported_role: None,
        dp_size: 1,
        page_size: None,
        context_length: None,
        tokenizer: None,
        transfer,
        hashing: None,
        events: None,
        host_cache: None,
        store: None,
        priority_order: None,
    }
}

fn instance(role: Role, models: &[&str], transfer: Option<KvTransfer>) -> Arc<Instance> {
    Arc::new(Instance {
        id: "i".into(),
        role,
        url: String::new(),
        source: Source::Static,
        place: Place::default(),
        workload: Workload::default(),
        declared: Declared::default(),
        readiness: Readiness::Ready,
        facts: Some(facts(models, transfer)),
    })
}

#[tokio::test]
async fn no_more_probes_run_than_allowed_and_the_rest_follows() {
    let (mut hub, _reader) = hub(3);
    let instances = (0..8).map(|index| sample(&format!("i{index}"), Role::Plain)).collect();
    hub.list(Update::engines(0, instances));
    hub.start_due();
    hub.start_due();
    assert_eq!(hub.running.len(), 3);
    let refused = |id: InstanceId, ticket| {
        (id, ticket, Verdict::NotReady { reason: "r".into(), facts: None, timed_out: false })
    };
    hub.running.clear();
    for (index, ticket) in [(0, 1), (1, 2), (2, 3)] {
        hub.finish(refused(format!("i{index}").as_str().into(), ticket));
    }
    hub.start_due();
    assert_eq!(hub.tickets, 6, "three others, not the same again");
}

#[tokio::test]
async fn an_answer_about_a_removed_instance_does_not_reach_its_namesake() {
    let (mut hub, reader) = hub(3);
    hub.list(Update::engines(0, vec![sample("a", Role::Plain)]));
    hub.start_due();
    let late = ("a".into(), hub.tickets, Verdict::Ready(facts(&["m"], None)));
    hub.list(Update::engines(0, Vec::new()));
    hub.list(Update::engines(0, vec![sample("a", Role::Plain)]));
    hub.start_due();
    hub.finish(late);
    assert_eq!(reader.current().instances[0].facts, None);
}

#[test]
fn a_decode_takes_the_transfer_only_if_its_models_prefills_agree() {
    let decode = instance(Role::Decode, &["m"], None);
    let nixl = instance(Role::Prefill, &["m", "n"], Some(KvTransfer::VllmNixl));
    let store = instance(Role::Prefill, &["m"], Some(KvTransfer::VllmStore));
    let other_model = instance(Role::Prefill, &["x"], Some(KvTransfer::VllmStore));
    assert_eq!(prefills_transfer(&[nixl.clone(), other_model], &decode), Some(KvTransfer::VllmNixl));
    assert_eq!(prefills_transfer(&[nixl.clone(), store], &decode), None);
    assert_eq!(prefills_transfer(&[], &decode), None);
    let prefill = instance(Role::Prefill, &["m"], None);
    assert_eq!(prefills_transfer(&[nixl], &prefill), None, "a prefill takes nothing from another");
}
