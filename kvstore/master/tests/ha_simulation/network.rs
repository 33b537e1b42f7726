//! Connections between masters, and what goes over them.

use std::time::Duration;

use moongate_master::ha::follower::Follower;
use moongate_master::ha::frame::{self, Frame, Records, Start};

use crate::master::{Kept, Link, PATIENCE, Session};
use crate::world::{Event, World};

impl World {
    /// Sends followers what is new.
    pub(crate) fn feed(&mut self, at: usize, clock: Duration) {
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.lead else { return };
        let (mut out, last) = (Vec::new(), master.kept.current.last());
        for (connection, session) in &mut lead.sessions {
            let idle = clock >= session.sent_at + PATIENCE / 4;
            let mut send = |frame: &Frame<'_>| {
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
                send(&Frame::State(Records::new(&records).unwrap()));
                if state.is_empty() {
                    session.state = None;
                    send(&Frame::Whole(last));
                }
            }
            if session.next <= last {
                let mut records = Vec::new();
                for record in master.kept.current.from(session.next).unwrap() {
                    frame::push_record(&record.write(), &mut records);
                }
                send(&Frame::Facts(session.next, Records::new(&records).unwrap()));
                session.next = last + 1;
            } else if session.state.is_none() && idle {
                send(&Frame::Idle(last));
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
        let life = self.masters[to].life;
        self.after(at - self.now, Event::Message(connection, to, life, to_leader, bytes));
    }

    pub(crate) fn message(&mut self, connection: u64, at: usize, to_leader: bool, bytes: &[u8]) {
        let (_, sum) = frame::header(*bytes.first_chunk().unwrap()).unwrap();
        let frame = frame::read(&bytes[frame::HEADER..], sum).unwrap();
        if to_leader {
            self.heard_by_leader(connection, at, frame);
        } else {
            self.heard_by_follower(connection, at, frame);
        }
    }

    fn heard_by_leader(&mut self, connection: u64, at: usize, frame: Frame<'_>) {
        let (now, clock) = (self.now, self.masters[at].clock(self.now));
        // The listener closes with the tenure.
        if !self.masters[at].serves(now) {
            return;
        }
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.lead else { return };
        match frame {
            Frame::Hello { member, term, has } if term == lead.tenure.term => {
                let state = &master.kept.current;
                let resumes = has.filter(|position| {
                    let is_its_own = self.trouble.trusting || state.epochs.have(state.last(), *position);
                    is_its_own && state.from(position.1 + 1).is_some()
                });
                let start = match resumes {
                    Some((_, number)) => Start::Resume(number),
                    None => Start::Snapshot(state.last()),
                };
                let next = match start {
                    Start::Resume(number) | Start::Snapshot(number) => number + 1,
                };
                let peer = member.address.parse().unwrap();
                lead.sessions.retain(|_, it| it.peer != peer);
                let state = resumes.is_none().then(|| state.parts());
                let session = Session { member, peer, state, next, joined: false, sent_at: clock };
                lead.sessions.insert(connection, session);
                match resumes {
                    Some(_) => self.resumed += 1,
                    None => self.copied += 1,
                }
                let mut bytes = Vec::new();
                frame::write(&Frame::Welcome { term, start }, &mut bytes);
                self.send(connection, at, peer, false, bytes);
                self.feed(at, clock);
            }
            Frame::Acknowledged(number) => {
                let Some(session) = lead.sessions.get_mut(&connection) else { return };
                if std::mem::replace(&mut session.joined, true) {
                    if !lead.quorum.acknowledge(&session.member, number, clock) {
                        // It was given up: it has to come again.
                        lead.sessions.remove(&connection);
                    }
                } else {
                    let last = master.kept.current.last();
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
        if master.link.as_ref().is_some_and(|it| clock > it.heard + PATIENCE) {
            master.link = None;
        }
        let Some(leader) = master.elector.leader() else { return };
        if master.link.as_ref().is_some_and(|it| it.term == leader.term) {
            return;
        }
        let (to, term) = (leader.replication.as_ref().unwrap().parse().unwrap(), leader.term);
        let has = master.kept.current.position().filter(|_| master.kept.follows);
        let follower = Follower::new(term, has);
        master.kept.loading = None;
        master.link = Some(Link { id: number, leader: to, term, follower, heard: clock });
        let mut bytes = Vec::new();
        frame::write(&Frame::Hello { member: master.me.clone(), term, has }, &mut bytes);
        self.send(number, at, to, true, bytes);
    }

    fn heard_by_follower(&mut self, connection: u64, at: usize, frame: Frame<'_>) {
        let clock = self.masters[at].clock(self.now);
        let master = &mut self.masters[at];
        let kept: &mut Kept = &mut master.kept;
        let Some(link) = master.link.as_mut().filter(|it| it.id == connection) else { return };
        link.heard = clock;
        match link.follower.take(frame, kept) {
            Ok(None) => {}
            Ok(Some(number)) => {
                let (leader, mut bytes) = (link.leader, Vec::new());
                frame::write(&Frame::Acknowledged(number), &mut bytes);
                self.send(connection, at, leader, true, bytes);
            }
            // A connection that lost its beginning to a cut.
            Err(_) => master.link = None,
        }
    }
}
