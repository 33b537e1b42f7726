//! Whatever the master and the lines say, and in whatever order, events make sense.

use std::collections::BTreeSet;

use mooncake_wire::types::Uuid;
use proptest::prelude::*;

use super::connection::NodeConnectionEvent;
use super::descriptor::DescriptorLookup;
use super::watch::NodeWatchState;
use super::{MetadataSource, NodeLossReason, NodeWatchOptions, StoreNodeEvent, WatchedNode};
use crate::admin::AdminError;

const NODES: u64 = 4;

fn node(n: u64) -> WatchedNode {
    let endpoint = format!("10.0.0.{n}:1");
    WatchedNode { name: endpoint.clone(), endpoint, client: Some(Uuid { first: n, second: 0 }) }
}

#[derive(Clone, Debug)]
enum NodeWatchStep {
    Listed(BTreeSet<u64>),
    NotAnswered,
    Line(u64, NodeConnectionEvent),
}

fn step() -> impl Strategy<Value = NodeWatchStep> {
    let line = prop_oneof![
        Just(NodeConnectionEvent::Connected),
        Just(NodeConnectionEvent::Closed(NodeLossReason::Unreachable("gone".to_owned()))),
        Just(NodeConnectionEvent::Closed(NodeLossReason::Replaced)),
        Just(NodeConnectionEvent::Unwatchable("rdma".to_owned())),
    ];
    prop_oneof![
        prop::collection::btree_set(0..NODES, 0..4).prop_map(NodeWatchStep::Listed),
        Just(NodeWatchStep::NotAnswered),
        (0..NODES, line).prop_map(|(n, event)| NodeWatchStep::Line(n, event)),
    ]
}

proptest! {
    #[test]
    fn events_tell_what_is_up(steps in prop::collection::vec(step(), 0..60)) {
        let lookup = DescriptorLookup::new(MetadataSource::Handshake, reqwest::Client::new(), None);
        let mut state = NodeWatchState::new(lookup, NodeWatchOptions::default());
        let (mut up, mut listed, mut master) = (BTreeSet::new(), BTreeSet::new(), true);
        for step in steps {
            match &step {
                NodeWatchStep::Listed(nodes) => {
                    let new = nodes.difference(&listed).count();
                    let answer = nodes.iter().map(|n| node(*n)).collect();
                    prop_assert_eq!(state.on_poll(Ok(answer)).len(), new, "a line for each new node");
                    listed = nodes.clone();
                }
                NodeWatchStep::NotAnswered => {
                    let error = AdminError::NotServing { url: String::new() };
                    prop_assert!(state.on_poll(Err(error)).is_empty());
                }
                NodeWatchStep::Line(n, event) => state.on_connection_event(&node(*n), event.clone()),
            }
            while let Some(event) = state.events.pop_front() {
                match event {
                    StoreNodeEvent::Up(node) => prop_assert!(up.insert(node), "{:?}", step),
                    StoreNodeEvent::Lost(node, _) => prop_assert!(up.remove(&node), "{:?}", step),
                    StoreNodeEvent::MasterLost(_) => prop_assert!(std::mem::replace(&mut master, false)),
                    StoreNodeEvent::MasterRecovered => prop_assert!(!std::mem::replace(&mut master, true)),
                }
            }
            prop_assert_eq!(state.mark_up().collect::<Vec<_>>(), up.iter().collect::<Vec<_>>());
            // Only listed nodes are up.
            let known: BTreeSet<_> = listed.iter().map(|n| node(*n)).collect();
            prop_assert!(up.is_subset(&known));
            prop_assert_eq!(state.mark_lost().collect::<Vec<_>>(), known.difference(&up).collect::<Vec<_>>());
        }
    }
}

#[test]
fn nodes_beyond_the_limit_are_ignored() {
    let lookup = DescriptorLookup::new(MetadataSource::Handshake, reqwest::Client::new(), None);
    let mut state =
        NodeWatchState::new(lookup, NodeWatchOptions { max_nodes: 2, ..NodeWatchOptions::default() });
    assert_eq!(state.on_poll(Ok((0..4).map(node).collect())).len(), 2);
    assert_eq!(state.events.len(), 2);
}
