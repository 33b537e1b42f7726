//! Simulated connections between masters.

use std::time::Duration;

use moongate_master::ha::follower::ReplicationFollower;
use moongate_master::ha::frame::{self, ReplicationFrame, ReplicationRecords, ReplicationStart};

use super::master::{SILENCE_TIMEOUT, SimulatedLink, SimulatedReplica, SimulatedSession};
use super::simulation::{HaSimulation, HaSimulationEvent};

impl HaSimulation {
    /// Sends new records to the followers.
    pub(crate) fn send_updates(&mut self, index: usize, clock: Duration) {
        let master = &mut self.masters[index];
        let Some(leader_state) = &mut master.leader_state else { return };
        let (mut out, last) = (Vec::new(), master.replica.current.last());
        for (connection, session) in &mut leader_state.sessions {
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
            self.send(connection, index, peer, false, bytes);
        }
    }

    /// Bytes keep their order on a connection. A partition ends it without notice.
    fn send(&mut self, connection: u64, from: usize, to: usize, to_leader: bool, bytes: Vec<u8>) {
        if self.is_cut(from, to) {
            self.arrivals.insert((connection, to_leader), u64::MAX);
        }
        let earliest = self.arrivals.get(&(connection, to_leader)).copied().unwrap_or_default();
        if earliest == u64::MAX {
            return;
        }
        let arrival = earliest.max(self.now + self.delay()) + 1;
        self.arrivals.insert((connection, to_leader), arrival);
        let process = self.masters[to].process_number;
        self.after(arrival - self.now, HaSimulationEvent::Message(connection, to, process, to_leader, bytes));
    }

    pub(crate) fn message(&mut self, connection: u64, index: usize, to_leader: bool, bytes: &[u8]) {
        let (_, sum) = frame::header(*bytes.first_chunk().unwrap()).unwrap();
        let frame = frame::read(&bytes[frame::HEADER..], sum).unwrap();
        if to_leader {
            self.deliver_to_leader(connection, index, frame);
        } else {
            self.deliver_to_follower(connection, index, frame);
        }
    }

    fn deliver_to_leader(&mut self, connection: u64, index: usize, frame: ReplicationFrame<'_>) {
        let (now, clock) = (self.now, self.masters[index].clock(self.now));
        // The listener closes when the leadership ends.
        if !self.masters[index].serves(now) {
            return;
        }
        let master = &mut self.masters[index];
        let Some(leader_state) = &mut master.leader_state else { return };
        match frame {
            ReplicationFrame::Hello { member, term, last_record }
                if term == leader_state.leader_term.term =>
            {
                let state = &master.replica.current;
                let resume_position = last_record.filter(|position| {
                    let is_known_record =
                        self.faults.skips_epoch_check || state.epochs.contains(state.last(), *position);
                    is_known_record && state.from(position.number + 1).is_some()
                });
                let start = match resume_position {
                    Some(position) => ReplicationStart::Resume(position.number),
                    None => ReplicationStart::Snapshot(state.last()),
                };
                let next = match start {
                    ReplicationStart::Resume(number) | ReplicationStart::Snapshot(number) => number + 1,
                };
                let peer = member.address.parse().unwrap();
                leader_state.sessions.retain(|_, session| session.peer != peer);
                let state = resume_position.is_none().then(|| state.parts());
                let session = SimulatedSession { member, peer, state, next, joined: false, sent_at: clock };
                leader_state.sessions.insert(connection, session);
                match resume_position {
                    Some(_) => self.resumed += 1,
                    None => self.copied += 1,
                }
                let mut bytes = Vec::new();
                frame::write(&ReplicationFrame::Welcome { term, start }, &mut bytes);
                self.send(connection, index, peer, false, bytes);
                self.send_updates(index, clock);
            }
            ReplicationFrame::Acknowledged(number) => {
                let Some(session) = leader_state.sessions.get_mut(&connection) else { return };
                if std::mem::replace(&mut session.joined, true) {
                    if !leader_state.tracker.acknowledge(&session.member, number, clock) {
                        // It was removed and has to connect again.
                        leader_state.sessions.remove(&connection);
                    }
                } else {
                    let last = master.replica.current.last();
                    leader_state.tracker.join(&session.member, number, last, clock);
                }
                self.step(index);
            }
            _ => {}
        }
    }

    pub(crate) fn follow(&mut self, index: usize, clock: Duration) {
        let number = self.number();
        let master = &mut self.masters[index];
        if master.link.as_ref().is_some_and(|link| clock > link.last_heard_at + SILENCE_TIMEOUT) {
            master.link = None;
        }
        let Some(leader) = master.elector.leader() else { return };
        if master.link.as_ref().is_some_and(|link| link.term == leader.term) {
            return;
        }
        let (to, term) = (leader.replication.as_ref().unwrap().parse().unwrap(), leader.term);
        let last_record = master.replica.current.position().filter(|_| master.replica.accepts_records);
        let follower = ReplicationFollower::new(term, last_record);
        master.replica.loading = None;
        master.link = Some(SimulatedLink { id: number, leader: to, term, follower, last_heard_at: clock });
        let mut bytes = Vec::new();
        frame::write(
            &ReplicationFrame::Hello { member: master.member.clone(), term, last_record },
            &mut bytes,
        );
        self.send(number, index, to, true, bytes);
    }

    fn deliver_to_follower(&mut self, connection: u64, index: usize, frame: ReplicationFrame<'_>) {
        let clock = self.masters[index].clock(self.now);
        let master = &mut self.masters[index];
        let replica: &mut SimulatedReplica = &mut master.replica;
        let Some(link) = master.link.as_mut().filter(|link| link.id == connection) else { return };
        link.last_heard_at = clock;
        match link.follower.handle_frame(frame, replica) {
            Ok(None) => {}
            Ok(Some(number)) => {
                let (leader, mut bytes) = (link.leader, Vec::new());
                frame::write(&ReplicationFrame::Acknowledged(number), &mut bytes);
                self.send(connection, index, leader, true, bytes);
            }
            // The start of the connection was lost to a partition.
            Err(_) => master.link = None,
        }
    }
}
