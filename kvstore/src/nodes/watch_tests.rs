//! Whatever the master and the lines say, and in whatever order, events make sense.

use std::collections::BTreeSet;

use mooncake_wire::types::Uuid;
use proptest::prelude::*;

use super::descriptor::Lookup;
use super::line::LineEvent;
use super::watch::State;
use super::{Loss, Metadata, Node, NodeEvent, Options};
use crate::admin::AdminError;

const NODES: u64 = 4;

fn node(n: u64) -> Node {
    let endpoint = format!("10.0.0.{n}:1");
    Node { name: endpoint.clone(), endpoint, client: Some(Uuid { first: n, second: 0 }) }
}

#[derive(Clone, Debug)]
enum Step {
    Listed(BTreeSet<u64>),
    NotAnswered,
    Line(u64, LineEvent),
}

fn step() -> impl Strategy<Value = Step> {
    let line = prop_oneof![
        Just(LineEvent::Open),
        Just(LineEvent::Closed(Loss::Unreachable("gone".to_owned()))),
        Just(LineEvent::Closed(Loss::Replaced)),
        Just(LineEvent::Useless("rdma".to_owned())),
    ];
    prop_oneof![
        prop::collection::btree_set(0..NODES, 0..4).prop_map(Step::Listed),
        Just(Step::NotAnswered),
        (0..NODES, line).prop_map(|(n, event)| Step::Line(n, event)),
    ]
}

proptest! {
    #[test]
    fn events_tell_what_is_up(steps in prop::collection::vec(step(), 0..60)) {
        let lookup = Lookup::new(Metadata::Handshake, reqwest::Client::new(), None);
        let mut state = State::new(lookup, Options::default());
        let (mut up, mut listed, mut master) = (BTreeSet::new(), BTreeSet::new(), true);
        for step in steps {
            match &step {
                Step::Listed(nodes) => {
                    let new = nodes.difference(&listed).count();
                    let answer = nodes.iter().map(|n| node(*n)).collect();
                    prop_assert_eq!(state.polled(Ok(answer)).len(), new, "a line for each new node");
                    listed = nodes.clone();
                }
                Step::NotAnswered => {
                    let error = AdminError::NotServing { url: String::new() };
                    prop_assert!(state.polled(Err(error)).is_empty());
                }
                Step::Line(n, event) => state.line_told(&node(*n), event.clone()),
            }
            while let Some(event) = state.events.pop_front() {
                match event {
                    NodeEvent::Up(node) => prop_assert!(up.insert(node), "{:?}", step),
                    NodeEvent::Lost(node, _) => prop_assert!(up.remove(&node), "{:?}", step),
                    NodeEvent::MasterLost(_) => prop_assert!(std::mem::replace(&mut master, false)),
                    NodeEvent::MasterBack => prop_assert!(!std::mem::replace(&mut master, true)),
                }
            }
            prop_assert_eq!(state.up().collect::<Vec<_>>(), up.iter().collect::<Vec<_>>());
            // Only listed nodes are up.
            let known: BTreeSet<_> = listed.iter().map(|n| node(*n)).collect();
            prop_assert!(up.is_subset(&known));
            prop_assert_eq!(state.lost().collect::<Vec<_>>(), known.difference(&up).collect::<Vec<_>>());
        }
    }
}

#[test]
fn nodes_beyond_the_limit_are_ignored() {
    let lookup = Lookup::new(Metadata::Handshake, reqwest::Client::new(), None);
    let mut state = State::new(lookup, Options { max_nodes: 2, ..Options::default() });
    assert_eq!(state.polled(Ok((0..4).map(node).collect())).len(), 2);
    assert_eq!(state.events.len(), 2);
}
