use proptest::prelude::*;

use super::*;
use crate::kv_cache::DeclaredKvFacts;
use crate::listing::listed_instance;
use crate::topology::EngineRole;

fn reported(members: &str) -> Vec<KvEventSource> {
    let body = format!(r#"{{"model_path":"m","dp_size":2,{members}}}"#);
    sglang(&SglangServerInfo::parse(body.as_bytes()).unwrap(), "10.0.0.7")
}

#[test]
fn sglang_describes_its_publishers_and_configures_replay() {
    let config = r#""kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\",\"topic\":\"kv\"}""#;
    let descriptor = r#""kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,"dp_size":2,"load_topic":"load"}"#;
    let rank = |dp_rank: u32, replay: bool| KvEventSource {
        dp_rank,
        endpoint: format!("tcp://10.0.0.7:{}", 5557 + dp_rank),
        engine_binds: true,
        replay: replay.then(|| format!("tcp://10.0.0.7:{}", 5657 + dp_rank)),
        topic: "kv".into(),
    };
    assert_eq!(reported(descriptor), [rank(0, false), rank(1, false)]);
    assert_eq!(reported(&format!("{descriptor},{config}")), [rank(0, true), rank(1, true)]);
    assert_eq!(reported(config), [rank(0, true), rank(1, true)], "a version without descriptor");
}

#[test]
fn sglang_without_a_publisher_that_can_be_reached_has_no_events() {
    for members in [
        r#""kv_events":null,"kv_events_config":null"#,
        r#""kv_events":"soon""#,
        r#""kv_events":{"publisher":"null","endpoint_host":"*","endpoint_port_base":5557}"#,
        r#""kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":0}"#,
        r#""kv_events_config":"{\"topic\":\"kv\"}""#,
        r#""kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"ipc:///tmp/kv\"}""#,
        r#""kv_events_config":"{""#,
    ] {
        assert_eq!(reported(members), [], "{members}");
    }
    let connects =
        reported(r#""kv_events":{"publisher":"zmq","endpoint_host":"10.0.0.1","endpoint_port_base":65535}"#);
    assert_eq!(connects.len(), 1, "the second rank has no port");
    assert_eq!((connects[0].endpoint.as_str(), connects[0].engine_binds), ("tcp://10.0.0.1:65535", false));
}

#[test]
fn vllm_names_every_ranks_own_address() {
    let body = br#"{
        "0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","replay_endpoint":null,"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv@a"},
        "1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5658","topic":""},
        "2":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:5559","topic":""},
        "3":{"enable_kv_cache_events":true,"publisher":"null","endpoint":"tcp://*:5560","topic":""}}"#;
    let found = sources(body, "fd00::7");
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].endpoint.as_str(), found[0].engine_binds), ("tcp://127.0.0.1:5557", false));
    assert_eq!((found[0].topic.as_str(), &found[0].replay), ("kv@a", &None));
    assert_eq!((found[1].dp_rank, found[1].endpoint.as_str()), (1, "tcp://[fd00::7]:5558"));
    assert_eq!((found[1].replay.as_deref(), found[1].engine_binds), (Some("tcp://[fd00::7]:5658"), true));
    for nothing in ["{}", "[]", r#"{"detail":"Not Found"}"#, ""] {
        assert_eq!(sources(nothing.as_bytes(), "h"), [], "{nothing}");
    }
    let long = format!(r#"{{"0":{{"endpoint":"tcp://*:1","topic":"{}"}}}}"#, "t".repeat(MAX_TOPIC + 1));
    assert_eq!(sources(long.as_bytes(), "h"), []);
}

#[test]
fn declared_addresses_override_reported_ones_for_each_rank() {
    let mut listed = listed_instance("a", EngineRole::Plain);
    let engine = sources(br#"{"0":{"endpoint":"tcp://*:1","replay_endpoint":"tcp://*:2"}}"#, &listed.host);
    assert_eq!(with_declared(&listed, 1, Some(engine.clone())), Some(engine.clone()));
    assert_eq!(with_declared(&listed, 1, None), None);

    listed.declared.kv = DeclaredKvFacts { replay: Some("tcp://r:9".into()), ..DeclaredKvFacts::default() };
    let replayed = with_declared(&listed, 1, Some(engine)).unwrap();
    assert_eq!(
        (replayed[0].endpoint.as_str(), replayed[0].replay.as_deref()),
        ("tcp://a:1", Some("tcp://r:9"))
    );

    listed.declared.kv.events = Some("tcp://10.0.0.1:5557".into());
    let declared = with_declared(&listed, 2, None).unwrap();
    assert_eq!(declared[1].endpoint, "tcp://10.0.0.1:5558");
    assert_eq!((declared[1].engine_binds, declared[1].replay.as_deref()), (true, Some("tcp://r:10")));
    assert_eq!(with_declared(&listed, 2, Some(replayed)), Some(declared));
}

proptest! {
    #[test]
    fn arbitrary_responses_never_panic(body in "\\PC{0,60}", ranks in any::<u32>(), port in any::<u16>()) {
        let _ = sources(body.as_bytes(), "h");
        let found = reported(&format!(
            r#""kv_events":{{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":{port},"dp_size":{ranks}}}"#
        ));
        prop_assert!(found.len() <= MAX_RANKS as usize);
    }
}
