//! Joins what the master says with what the lines say.

use std::collections::{BTreeMap, VecDeque};

use futures_util::stream::{self, AbortHandle, BoxStream, SelectAll, StreamExt as _};

use super::descriptor::Lookup;
use super::line::{self, LineEvent};
use super::{Loss, Node, NodeEvent, Options};
use crate::admin::{Admin, AdminError};

/// Tells when store nodes come and go. It has no task of its own: nothing is noticed while nobody waits in
/// [`NodeWatch::next`].
pub struct NodeWatch {
    polls: BoxStream<'static, Result<Vec<Node>, AdminError>>,
    lines: SelectAll<BoxStream<'static, (Node, LineEvent)>>,
    state: State,
}

/// All that is known, and what has not been told yet.
pub(super) struct State {
    lookup: Lookup,
    options: Options,
    nodes: BTreeMap<Node, Listed>,
    master_lost: bool,
    /// Whether it has been logged that some node cannot be watched.
    told_useless: bool,
    told_too_many: bool,
    pub(super) events: VecDeque<NodeEvent>,
}

/// A node that the master lists.
struct Listed {
    lost: bool,
    line: AbortHandle,
}

impl NodeWatch {
    /// Watches the nodes of the master behind `admin`.
    #[must_use]
    pub fn new(admin: Admin, options: Options) -> Self {
        let pause = options.poll;
        let state = State::new(Lookup::new(options.metadata.clone(), admin.http(), admin.tls()), options);
        let polls = stream::unfold((admin, false), move |(admin, again)| async move {
            if again {
                tokio::time::sleep(pause).await;
            }
            Some((nodes_of(&admin).await, (admin, true)))
        });
        Self { polls: polls.boxed(), lines: SelectAll::new(), state }
    }

    /// What happens next. Cancel-safe: no event is lost if the future is dropped.
    pub async fn next(&mut self) -> NodeEvent {
        loop {
            if let Some(event) = self.state.events.pop_front() {
                return event;
            }
            tokio::select! {
                Some(answer) = self.polls.next() => {
                    for line in self.state.polled(answer) {
                        self.lines.push(line);
                    }
                }
                Some((node, event)) = self.lines.next() => self.state.line_told(&node, event),
                // The polls never end, so this is never reached.
                else => std::future::pending().await,
            }
        }
    }

    /// The nodes that are there, as far as has been told.
    pub fn up(&self) -> impl Iterator<Item = &Node> {
        self.state.up()
    }

    /// Nodes that are lost although the master still lists them, with all of their pages.
    pub fn lost(&self) -> impl Iterator<Item = &Node> {
        self.state.lost()
    }
}

async fn nodes_of(admin: &Admin) -> Result<Vec<Node>, AdminError> {
    let mut nodes: Vec<_> = match admin.segments_detail().await {
        Ok(detail) => {
            let node = |segment: mooncake_wire::admin::SegmentDetail| Node {
                endpoint: segment.te_endpoint,
                client: Some(segment.client_id),
                name: segment.segment_name,
            };
            detail.segments.into_iter().map(node).collect()
        }
        Err(AdminError::Missing { .. }) => {
            let node = |name: String| Node { endpoint: name.clone(), client: None, name };
            admin.segments().await?.into_iter().map(node).collect()
        }
        Err(error) => return Err(error),
    };
    // A node may lend several segments.
    nodes.sort();
    nodes.dedup_by(|one, other| (&one.endpoint, one.client) == (&other.endpoint, other.client));
    Ok(nodes)
}

impl State {
    pub(super) fn new(lookup: Lookup, options: Options) -> Self {
        Self {
            lookup,
            options,
            nodes: BTreeMap::new(),
            master_lost: false,
            told_useless: false,
            told_too_many: false,
            events: VecDeque::new(),
        }
    }

    pub(super) fn up(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|(_, listed)| !listed.lost).map(|(node, _)| node)
    }

    pub(super) fn lost(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|(_, listed)| listed.lost).map(|(node, _)| node)
    }

    /// The master has answered, or not. Returns the lines of new nodes.
    pub(super) fn polled(
        &mut self,
        answer: Result<Vec<Node>, AdminError>,
    ) -> Vec<BoxStream<'static, (Node, LineEvent)>> {
        let listed = match answer {
            Ok(listed) => listed,
            Err(error) => {
                if !std::mem::replace(&mut self.master_lost, true) {
                    self.events.push_back(NodeEvent::MasterLost(error));
                }
                return Vec::new();
            }
        };
        if std::mem::take(&mut self.master_lost) {
            self.events.push_back(NodeEvent::MasterBack);
        }
        self.nodes.retain(|node, known| {
            let stays = listed.binary_search(node).is_ok();
            if !stays {
                known.line.abort();
                if !known.lost {
                    self.events.push_back(NodeEvent::Lost(node.clone(), Loss::Unlisted));
                }
            }
            stays
        });
        listed.into_iter().filter_map(|node| self.listed(node)).collect()
    }

    /// A node is listed. Returns its line if it is new.
    fn listed(&mut self, node: Node) -> Option<BoxStream<'static, (Node, LineEvent)>> {
        if self.nodes.contains_key(&node) {
            return None;
        }
        if self.nodes.len() >= self.options.max_nodes {
            if !std::mem::replace(&mut self.told_too_many, true) {
                let max = self.options.max_nodes;
                tracing::warn!(max, "the store has more nodes than are watched; the others are ignored");
            }
            return None;
        }
        let events = line::events(node.endpoint.clone(), self.lookup.clone(), &self.options);
        let (events, line) = stream::abortable(events);
        self.nodes.insert(node.clone(), Listed { lost: false, line });
        self.events.push_back(NodeEvent::Up(node.clone()));
        Some(events.map(move |event| (node.clone(), event)).boxed())
    }

    /// Something has happened on a node's line.
    pub(super) fn line_told(&mut self, node: &Node, event: LineEvent) {
        let Some(known) = self.nodes.get_mut(node) else { return };
        match event {
            LineEvent::Open if known.lost => {
                known.lost = false;
                self.events.push_back(NodeEvent::Up(node.clone()));
            }
            LineEvent::Closed(loss) if !known.lost => {
                known.lost = true;
                self.events.push_back(NodeEvent::Lost(node.clone(), loss));
            }
            LineEvent::Open | LineEvent::Closed(_) => {}
            LineEvent::Useless(reason) => {
                if !std::mem::replace(&mut self.told_useless, true) {
                    tracing::info!(
                        endpoint = node.endpoint,
                        reason,
                        "a store node cannot be watched by a connection; its death is noticed when the master \
                         does not list it any more, as with all nodes of its kind"
                    );
                }
            }
        }
    }
}
