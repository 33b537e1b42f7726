//! Two queues on a network that cuts, delays, duplicates and reorders messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{EngineKind, EngineRole};
use moongate_scheduler::{ModelIndex, PolicyName, RequestProfile, Scheduler, SchedulerOptions};
use proptest::prelude::*;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::super::admission_queue::{AdmissionOptions, AdmissionQueue};
use super::super::admission_state::{FollowerLink, LeaderLink, RouteResult};
use super::super::clock::SchedulerClock;
use super::super::eligibility::ChosenRoute;
use super::messages::{LeaderMessage, TicketMessage};
use super::server::Follower;
use crate::feedback::{DecisionHistory, GatewayMetrics};
use crate::fleet::{FleetReader, FleetSnapshot};
use crate::kv_index::KvIndex;
use crate::request_body::InferenceApi;
use crate::routed_request::RoutedRequest;
use crate::test_fleet;

/// One event of the test.
#[derive(Debug, Clone)]
enum QueueEvent {
    /// A request arrives at the leader or at the other gateway.
    Arrive {
        at_leader: bool,
        tokens: u32,
    },
    /// The network delivers this many messages to the leader or to the other gateway.
    Deliver {
        to_leader: bool,
        count: usize,
    },
    /// It delivers the next message twice.
    Duplicate {
        to_leader: bool,
    },
    /// It exchanges the next two messages.
    Reorder {
        to_leader: bool,
    },
    Cut,
    Connect,
    PromptComputed(usize),
    End(usize),
    /// A client leaves while its request may still be queued.
    Abandon(usize),
    Wait(u16),
}

fn any_event() -> impl Strategy<Value = QueueEvent> {
    prop_oneof![
        4 => (any::<bool>(), 1_u32..30_000).prop_map(|(at_leader, tokens)| QueueEvent::Arrive { at_leader, tokens }),
        6 => (any::<bool>(), 1_usize..5).prop_map(|(to_leader, count)| QueueEvent::Deliver { to_leader, count }),
        1 => any::<bool>().prop_map(|to_leader| QueueEvent::Duplicate { to_leader }),
        1 => any::<bool>().prop_map(|to_leader| QueueEvent::Reorder { to_leader }),
        1 => Just(QueueEvent::Cut),
        2 => Just(QueueEvent::Connect),
        3 => (0_usize..20).prop_map(QueueEvent::PromptComputed),
        3 => (0_usize..20).prop_map(QueueEvent::End),
        1 => (0_usize..20).prop_map(QueueEvent::Abandon),
        2 => (0_u16..5_000).prop_map(QueueEvent::Wait),
    ]
}

/// Two prefills, one of them with two ranks, and a decode; `reversed` numbers them in another order.
fn fleet(reversed: bool) -> FleetSnapshot {
    let mut instances = vec![
        test_fleet::engine("d", EngineRole::Decode, EngineKind::Sglang, 1),
        test_fleet::engine("p", EngineRole::Prefill, EngineKind::Sglang, 1),
        test_fleet::engine("q", EngineRole::Prefill, EngineKind::Sglang, 2),
    ];
    if reversed {
        instances.reverse();
    }
    test_fleet::snapshot(instances, &FleetSnapshot::default(), &KvIndex::new(10))
}

fn queue(reversed: bool) -> Arc<AdmissionQueue> {
    let settings = SchedulerOptions::default();
    let scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
    let options = AdmissionOptions { capacity: 100, policy: PolicyName::Predictive, is_shared: true };
    AdmissionQueue::new(
        scheduler,
        SchedulerClock::start(1.0),
        options,
        Arc::new(DecisionHistory::new(0)),
        FleetReader::fixed(fleet(reversed)),
        Arc::new(GatewayMetrics::new(None)),
    )
}

/// Messages under way, and the ends of the connection.
struct QueueConnection {
    follower: Follower,
    from_follower: mpsc::Receiver<TicketMessage>,
    from_leader: mpsc::Receiver<LeaderMessage>,
    to_leader: VecDeque<TicketMessage>,
    to_follower: VecDeque<LeaderMessage>,
}

struct QueuePair {
    leader: Arc<AdmissionQueue>,
    other: Arc<AdmissionQueue>,
    connection: Option<QueueConnection>,
    requests: Vec<Option<JoinHandle<RouteResult>>>,
    routes: Vec<ChosenRoute>,
    answered: usize,
    abandoned: usize,
}

impl QueuePair {
    fn connect(&mut self) {
        self.cut();
        let (messages, from_follower) = mpsc::channel(10_000);
        let (decisions, from_leader) = mpsc::channel(10_000);
        let link = FollowerLink { messages: decisions, closing: CancellationToken::new() };
        let follower = Follower::new(self.leader.clone(), link);
        self.connection = Some(QueueConnection {
            follower,
            from_follower,
            from_leader,
            to_leader: VecDeque::new(),
            to_follower: VecDeque::new(),
        });
        self.other.set_leader(Some(LeaderLink { messages, closing: CancellationToken::new() }));
    }

    fn cut(&mut self) {
        if self.connection.take().is_some() {
            self.other.set_leader(None);
        }
    }

    fn apply(&mut self, event: &QueueEvent) {
        if let Some(connection) = &mut self.connection {
            connection.to_leader.extend(std::iter::from_fn(|| connection.from_follower.try_recv().ok()));
            connection.to_follower.extend(std::iter::from_fn(|| connection.from_leader.try_recv().ok()));
        }
        match *event {
            QueueEvent::Arrive { at_leader, tokens } => self.arrive(at_leader, tokens),
            QueueEvent::Deliver { to_leader, count } => {
                (0..count).for_each(|_| self.deliver(to_leader, false));
            }
            QueueEvent::Duplicate { to_leader } => self.deliver(to_leader, true),
            QueueEvent::Reorder { to_leader } => {
                let Some(connection) = &mut self.connection else { return };
                if to_leader && connection.to_leader.len() > 1 {
                    connection.to_leader.swap(0, 1);
                } else if !to_leader && connection.to_follower.len() > 1 {
                    connection.to_follower.swap(0, 1);
                }
            }
            QueueEvent::Cut => self.cut(),
            QueueEvent::Connect => self.connect(),
            QueueEvent::PromptComputed(n) => {
                let count = self.routes.len().max(1);
                if let Some(route) = self.routes.get_mut(n % count) {
                    route.in_flight.record_prompt_computed(None);
                }
            }
            QueueEvent::End(n) => {
                if !self.routes.is_empty() {
                    drop(self.routes.swap_remove(n % self.routes.len()));
                }
            }
            QueueEvent::Abandon(n) => {
                let count = self.requests.len().max(1);
                if let Some(request) = self.requests.get_mut(n % count).and_then(Option::take) {
                    request.abort();
                    self.abandoned += 1;
                }
            }
            QueueEvent::Wait(_) => {}
        }
    }

    fn arrive(&mut self, at_leader: bool, input_tokens: u32) {
        let request = RequestProfile {
            model: ModelIndex(0),
            input_tokens,
            max_output_tokens: None,
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        };
        let body = r#"{"model":"m","prompt":"x","stream":true}"#;
        let routed = RoutedRequest {
            request: Some(request),
            ..RoutedRequest::of_body(InferenceApi::Completions, body)
        };
        let queue = if at_leader { self.leader.clone() } else { self.other.clone() };
        self.requests.push(Some(tokio::task::spawn_local(async move { queue.choose(&routed, &[]).await })));
    }

    fn deliver(&mut self, to_leader: bool, twice: bool) {
        let Some(connection) = &mut self.connection else { return };
        if to_leader {
            if let Some(message) = connection.to_leader.pop_front() {
                if twice {
                    connection.follower.apply(message.clone());
                }
                connection.follower.apply(message);
            }
        } else if let Some(message) = connection.to_follower.pop_front() {
            if twice {
                self.other.receive_decision(message.clone());
            }
            self.other.receive_decision(message);
        }
    }

    async fn collect(&mut self) {
        for request in &mut self.requests {
            if request.as_ref().is_some_and(JoinHandle::is_finished)
                && let Some(finished) = request.take()
            {
                self.routes.push(finished.await.unwrap().unwrap());
                self.answered += 1;
            }
        }
    }

    /// Lets tasks run, and the scheduler's time pass.
    async fn wait(&mut self, milliseconds: u16) {
        tokio::time::sleep(Duration::from_millis(u64::from(milliseconds) + 1)).await;
        self.collect().await;
    }
}

async fn run(events: Vec<QueueEvent>) {
    let mut pair = QueuePair {
        leader: queue(false),
        other: queue(true),
        connection: None,
        requests: Vec::new(),
        routes: Vec::new(),
        answered: 0,
        abandoned: 0,
    };
    let stop = CancellationToken::new();
    for queue in [&pair.leader, &pair.other] {
        tokio::task::spawn_local(queue.clone().run(stop.clone()));
    }
    for event in &events {
        pair.apply(event);
        pair.wait(if let QueueEvent::Wait(milliseconds) = event { *milliseconds } else { 0 }).await;
    }
    // Without a connection, every request is decided at its own gateway.
    pair.cut();
    let mut rounds = 0;
    while pair.requests.iter().any(Option::is_some) {
        pair.routes.clear();
        pair.wait(1_000).await;
        rounds += 1;
        assert!(rounds < 1_000, "requests without a route");
    }
    pair.routes.clear();
    let arrived = events.iter().filter(|event| matches!(event, QueueEvent::Arrive { .. })).count();
    assert_eq!(pair.answered + pair.abandoned, arrived);
    for queue in [&pair.leader, &pair.other] {
        assert_eq!(queue.queued(), 0);
        for load in queue.loads().1 {
            assert_eq!((load.in_flight, load.pending_prefills, load.active_decode_tokens), (0, 0, 0));
        }
    }
    stop.cancel();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever the network does, every request gets exactly one route, and no load is left.
    #[test]
    fn every_request_gets_one_route(events in prop::collection::vec(any_event(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, run(events));
    }
}
