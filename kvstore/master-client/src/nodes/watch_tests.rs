//! For any sequence of polls and connection events, the watcher's events are consistent with its state.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use proptest::prelude::*;

use super::connection::{IdleConnectionError, NodeConnectError, NodeConnectionEvent, UnwatchableNodeError};
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
    PollFailed,
    Connection(u64, NodeConnectionEvent),
}

fn step() -> impl Strategy<Value = NodeWatchStep> {
    let unreachable = NodeLossReason::Unreachable {
        ended: IdleConnectionError::EndOfStream,
        source: Arc::new(NodeConnectError::ConnectTimedOut(Duration::ZERO)),
    };
    let unwatchable = UnwatchableNodeError::ClosesIdle(IdleConnectionError::EndOfStream);
    let event = prop_oneof![
        Just(NodeConnectionEvent::Connected),
        Just(NodeConnectionEvent::Closed(unreachable)),
        Just(NodeConnectionEvent::Closed(NodeLossReason::Replaced)),
        Just(NodeConnectionEvent::Unwatchable(unwatchable)),
    ];
    prop_oneof![
        prop::collection::btree_set(0..NODES, 0..4).prop_map(NodeWatchStep::Listed),
        Just(NodeWatchStep::PollFailed),
        (0..NODES, event).prop_map(|(n, event)| NodeWatchStep::Connection(n, event)),
    ]
}

proptest! {
    #[test]
    fn events_are_consistent_with_live_and_lost_nodes(steps in prop::collection::vec(step(), 0..60)) {
        let lookup = DescriptorLookup::new(MetadataSource::Handshake, reqwest::Client::new(), None);
        let mut state = NodeWatchState::new(lookup, NodeWatchOptions::default());
        let (mut up, mut listed, mut master) = (BTreeSet::new(), BTreeSet::new(), true);
        for step in steps {
            match &step {
                NodeWatchStep::Listed(nodes) => {
                    let new = nodes.difference(&listed).count();
                    let response = nodes.iter().map(|n| node(*n)).collect();
                    prop_assert_eq!(state.on_poll(Ok(response)).len(), new, "a connection for each new node");
                    listed = nodes.clone();
                }
                NodeWatchStep::PollFailed => {
                    let error = AdminError::NotServing { url: String::new() };
                    prop_assert!(state.on_poll(Err(error)).is_empty());
                }
                NodeWatchStep::Connection(n, event) => state.on_connection_event(&node(*n), event.clone()),
            }
            while let Some(event) = state.events.pop_front() {
                match event {
                    StoreNodeEvent::Up(node) => prop_assert!(up.insert(node), "{:?}", step),
                    StoreNodeEvent::Lost(node, _) => prop_assert!(up.remove(&node), "{:?}", step),
                    StoreNodeEvent::MasterLost(_) => prop_assert!(std::mem::replace(&mut master, false)),
                    StoreNodeEvent::MasterRecovered => prop_assert!(!std::mem::replace(&mut master, true)),
                }
            }
            prop_assert_eq!(state.live_nodes().collect::<Vec<_>>(), up.iter().collect::<Vec<_>>());
            // Nodes that the master does not list are neither live nor lost.
            let all_listed: BTreeSet<_> = listed.iter().map(|n| node(*n)).collect();
            prop_assert!(up.is_subset(&all_listed));
            prop_assert_eq!(state.lost_nodes().collect::<Vec<_>>(), all_listed.difference(&up).collect::<Vec<_>>());
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
