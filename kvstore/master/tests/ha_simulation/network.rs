//! Connections between masters, and what goes over them.

use std::time::Duration;

use moongate_master::ha::follower::ReplicationFollower;
use moongate_master::ha::frame::{self, ReplicationFrame, ReplicationRecords, ReplicationStart};

use crate::master::{SILENCE_TIMEOUT, SimulatedLink, SimulatedReplica, SimulatedSession};
use crate::simulation::{HaSimulation, HaSimulationEvent};

impl HaSimulation {
    /// Sends followers what is new.
    pub(crate) fn send_updates(&mut self, at: usize, clock: Duration) {
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.leader_state else { return };
        let (mut out, last) = (Vec::new(), master.replica.current.last());
        for (connection, session) in &mut lead.sessions {
            let idle = clock >= session.sent_at + SILENCE_TIMEOUT / 4;
            let mut send = |frame: &ReplicationFrame<'_>| {
                let mut bytes = Vec::new();
                frame::write(frame, &mut bytes);
                out.push((*connection, session.peer, bytes));
                session.sent_at = clock;
            };
            if let Some(state) = &mut session.state {
                let mut records = Vec::new();
                for part in state.split_off(state.len().saturating_sub(200)) {
                    frame::push_record(&part.write(), &mut records);
                }
                send(&ReplicationFrame::State(ReplicationRecords::new(&records).unwrap()));
                if state.is_empty() {
                    session.state = None;
                    send(&ReplicationFrame::StateComplete(last));
                }
            }
            if session.next <= last {
                let mut records = Vec::new();
                for record in master.replica.current.from(session.next).unwrap() {
                    frame::push_record(&record.write(), &mut records);
                }
                send(&ReplicationFrame::Records(session.next, ReplicationRecords::new(&records).unwrap()));
                session.next = last + 1;
            } else if session.state.is_none() && idle {
                send(&ReplicationFrame::Heartbeat(last));
            }
        }
        for (connection, peer, bytes) in out {
            self.send(connection, at, peer, false, bytes);
        }
    }

    /// Bytes keep their order on a connection. A cut ends it without a word.
    fn send(&mut self, connection: u64, from: usize, to: usize, to_leader: bool, bytes: Vec<u8>) {
        if self.is_cut(from, to) {
            self.arrivals.insert((connection, to_leader), u64::MAX);
        }
        let earliest = self.arrivals.get(&(connection, to_leader)).copied().unwrap_or_default();
        if earliest == u64::MAX {
            return;
        }
        let at = earliest.max(self.now + self.delay()) + 1;
        self.arrivals.insert((connection, to_leader), at);
        let life = self.masters[to].process_number;
        self.after(at - self.now, HaSimulationEvent::Message(connection, to, life, to_leader, bytes));
    }

    pub(crate) fn message(&mut self, connection: u64, at: usize, to_leader: bool, bytes: &[u8]) {
        let (_, sum) = frame::header(*bytes.first_chunk().unwrap()).unwrap();
        let frame = frame::read(&bytes[frame::HEADER..], sum).unwrap();
        if to_leader {
            self.deliver_to_leader(connection, at, frame);
        } else {
            self.deliver_to_follower(connection, at, frame);
        }
    }

    fn deliver_to_leader(&mut self, connection: u64, at: usize, frame: ReplicationFrame<'_>) {
        let (now, clock) = (self.now, self.masters[at].clock(self.now));
        // The listener closes with the tenure.
        if !self.masters[at].serves(now) {
            return;
        }
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.leader_state else { return };
        match frame {
            ReplicationFrame::Hello { member, term, last_record: has } if term == lead.tenure.term => {
                let state = &master.replica.current;
                let resumes = has.filter(|position| {
                    let is_its_own =
                        self.faults.skips_epoch_check || state.epochs.contains(state.last(), *position);
                    is_its_own && state.from(position.1 + 1).is_some()
                });
                let start = match resumes {
                    Some((_, number)) => ReplicationStart::Resume(number),
                    None => ReplicationStart::Snapshot(state.last()),
                };
                let next = match start {
                    ReplicationStart::Resume(number) | ReplicationStart::Snapshot(number) => number + 1,
                };
                let peer = member.address.parse().unwrap();
                lead.sessions.retain(|_, it| it.peer != peer);
                let state = resumes.is_none().then(|| state.parts());
                let session = SimulatedSession { member, peer, state, next, joined: false, sent_at: clock };
                lead.sessions.insert(connection, session);
                match resumes {
                    Some(_) => self.resumed += 1,
                    None => self.copied += 1,
                }
                let mut bytes = Vec::new();
                frame::write(&ReplicationFrame::Welcome { term, start }, &mut bytes);
                self.send(connection, at, peer, false, bytes);
                self.send_updates(at, clock);
            }
            ReplicationFrame::Acknowledged(number) => {
                let Some(session) = lead.sessions.get_mut(&connection) else { return };
                if std::mem::replace(&mut session.joined, true) {
                    if !lead.quorum.acknowledge(&session.member, number, clock) {
                        // It was given up: it has to come again.
                        lead.sessions.remove(&connection);
                    }
                } else {
                    let last = master.replica.current.last();
                    lead.quorum.join(&session.member, number, last, clock);
                }
                self.step(at);
            }
            _ => {}
        }
    }

    pub(crate) fn follow(&mut self, at: usize, clock: Duration) {
        let number = self.number();
        let master = &mut self.masters[at];
        if master.link.as_ref().is_some_and(|it| clock > it.last_heard_at + SILENCE_TIMEOUT) {
            master.link = None;
        }
        let Some(leader) = master.elector.leader() else { return };
        if master.link.as_ref().is_some_and(|it| it.term == leader.term) {
            return;
        }
        let (to, term) = (leader.replication.as_ref().unwrap().parse().unwrap(), leader.term);
        let has = master.replica.current.position().filter(|_| master.replica.accepts_records);
        let follower = ReplicationFollower::new(term, has);
        master.replica.loading = None;
        master.link = Some(SimulatedLink { id: number, leader: to, term, follower, last_heard_at: clock });
        let mut bytes = Vec::new();
        frame::write(
            &ReplicationFrame::Hello { member: master.member.clone(), term, last_record: has },
            &mut bytes,
        );
        self.send(number, at, to, true, bytes);
    }

    fn deliver_to_follower(&mut self, connection: u64, at: usize, frame: ReplicationFrame<'_>) {
        let clock = self.masters[at].clock(self.now);
        let master = &mut self.masters[at];
        let kept: &mut SimulatedReplica = &mut master.replica;
        let Some(link) = master.link.as_mut().filter(|it| it.id == connection) else { return };
        link.last_heard_at = clock;
        match link.follower.handle_frame(frame, kept) {
            Ok(None) => {}
            Ok(Some(number)) => {
                let (leader, mut bytes) = (link.leader, Vec::new());
                frame::write(&ReplicationFrame::Acknowledged(number), &mut bytes);
                self.send(connection, at, leader, true, bytes);
            }
            // A connection that lost its beginning to a cut.
            Err(_) => master.link = None,
        }
    }
}
