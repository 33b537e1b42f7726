//! A leader's side of replication: the state and then every change, to whoever follows.

use std::sync::Arc;
use std::time::Duration;

use moongate_kvcore::{Effects, Fact, SnapshotCursor, encode};
use moongate_runtime::Supervisor;
use moongate_runtime::net::{TcpListener, TcpStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::frame::{self, BATCH, Frame, Records, Start, push_record};
use super::link::{LinkError, next, send};
use super::member::{MAX_MEMBERS, Member};
use super::replicated::Replicated;
use super::tls::{TlsFiles, accept};
use crate::server::Server;
use crate::state::PLACES_AT_ONCE;

/// Pause after an accept that failed for want of something.
const PAUSE: Duration = Duration::from_millis(100);

/// What a leader serves its followers with.
#[derive(Clone, Debug)]
pub(super) struct Sessions {
    pub(super) server: Arc<Server>,
    pub(super) journal: Arc<Replicated>,
    pub(super) term: i64,
    /// After which silence a follower is given up.
    pub(super) patience: Duration,
    /// For TLS with followers.
    pub(super) tls: Option<TlsFiles>,
}

impl Sessions {
    /// Serves followers until the supervisor's shutdown.
    pub(super) async fn listen(self, listener: TcpListener, supervisor: Supervisor) {
        let (slots, stop) = (Arc::new(Semaphore::new(MAX_MEMBERS)), supervisor.token());
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => return,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept followers; trying again after a pause");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
                tracing::warn!(%peer, "too many followers");
                continue;
            };
            let (session, stop) = (self.clone(), stop.clone());
            supervisor.spawn("follower", async move {
                tokio::select! {
                    ended = session.serve(stream) => if let Err(error) = ended {
                        tracing::info!(%peer, %error, "a follower is gone");
                    },
                    () = stop.cancelled() => {}
                }
                drop(slot);
            });
        }
    }

    async fn serve(self, stream: TcpStream) -> Result<(), LinkError> {
        stream.set_nodelay(true)?;
        match &self.tls {
            Some(files) => {
                let secured = timeout(self.patience, accept(files, stream)).await;
                let secured = secured.map_err(|_| LinkError::Silent(self.patience))??;
                self.serve_on(tokio::io::split(secured)).await
            }
            None => self.serve_on(stream.into_split()).await,
        }
    }

    async fn serve_on(
        self,
        (mut input, output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    ) -> Result<(), LinkError> {
        let mut body = Vec::new();
        let checksum = next(&mut input, &mut body, self.patience).await?;
        let Frame::Hello { member, term, has } = frame::read(&body, checksum)? else {
            return Err(LinkError::Unexpected);
        };
        if term != self.term {
            // It has old news, or news that this master does not have yet.
            return Ok(());
        }
        let start = match has {
            Some(position) if self.journal.leads_on_from(position) => Start::Resume(position.1),
            _ => Start::Snapshot(self.journal.facts().next() - 1),
        };
        tracing::info!(%member, ?start, "has a follower");
        let mut feed =
            Feed { output, patience: self.patience, next: 0, out: Vec::new(), records: Vec::new() };
        tokio::select! {
            ended = self.feed(&mut feed, start) => ended,
            ended = self.listen_to(&mut input, &member, &mut body) => ended,
        }
    }

    async fn listen_to(
        &self,
        input: &mut (impl AsyncRead + Unpin),
        member: &Member,
        body: &mut Vec<u8>,
    ) -> Result<(), LinkError> {
        let mut joined = false;
        loop {
            // A state takes its time to be read; after that silence is seen elsewhere.
            let checksum = next(input, body, Duration::MAX).await?;
            let Frame::Acknowledged(number) = frame::read(body, checksum)? else {
                return Err(LinkError::Unexpected);
            };
            let counts = match std::mem::replace(&mut joined, true) {
                true => self.journal.acknowledge(member, number),
                false => self.journal.join(member, number),
            };
            if !counts {
                // It was given up, and has to begin anew.
                return Err(LinkError::Silent(self.patience));
            }
        }
    }

    async fn feed(&self, feed: &mut Feed<impl AsyncWrite + Unpin>, start: Start) -> Result<(), LinkError> {
        let mut wanted = self.journal.wanted();
        feed.send(&Frame::Welcome { term: self.term, start }).await?;
        let (Start::Resume(number) | Start::Snapshot(number)) = start;
        feed.next = number + 1;
        if let Start::Snapshot(_) = start {
            self.send_state(feed).await?;
        }
        loop {
            wanted.mark_unchanged();
            if !feed.send_facts(&self.journal).await? {
                feed.send(&Frame::Idle(feed.next - 1)).await?;
            }
            // Nothing that waits is missed: it is told after it was appended.
            let _ = timeout(self.patience / 4, wanted.changed()).await;
        }
    }

    /// Changes are sent between its pieces, so that none is forgotten before it is sent. None may overtake a piece that was
    /// told before: that would take the change back.
    async fn send_state(&self, feed: &mut Feed<impl AsyncWrite + Unpin>) -> Result<(), LinkError> {
        let (mut cursor, mut piece) = (Some(SnapshotCursor::default()), Piece::default());
        self.journal.beside().tell(|record| piece.push(record));
        while let Some(from) = cursor {
            cursor = self.server.master.snapshot(from, PLACES_AT_ONCE, &mut piece);
            for part in piece.parts() {
                let records = Records::new(part).ok_or(LinkError::Unexpected)?;
                feed.send(&Frame::State(records)).await?;
            }
            piece.clear();
            feed.send_facts(&self.journal).await?;
            tokio::task::yield_now().await;
        }
        let last = self.journal.facts().next() - 1;
        feed.send(&Frame::Whole(last)).await
    }
}

/// The sending half of a connection.
struct Feed<W> {
    output: W,
    patience: Duration,
    /// The next record to send.
    next: u64,
    out: Vec<u8>,
    records: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> Feed<W> {
    async fn send(&mut self, frame: &Frame<'_>) -> Result<(), LinkError> {
        self.out.clear();
        frame::write(frame, &mut self.out);
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), LinkError> {
        // A follower that reads a state may be busy for a while.
        let patience = self.patience * 10;
        let sent = timeout(patience, send(&mut self.output, &self.out)).await;
        Ok(sent.map_err(|_| LinkError::NotTaken(patience))??)
    }

    /// Sends what has been appended since. Returns whether there was any.
    async fn send_facts(&mut self, journal: &Replicated) -> Result<bool, LinkError> {
        let mut any = false;
        loop {
            self.records.clear();
            let (first, records) = (self.next, &mut self.records);
            let after = journal.facts().read(first, |_, record| push_record(record, records));
            let Some(after) = after else {
                self.send_logged(journal).await?;
                any = true;
                continue;
            };
            if after == first {
                return Ok(any);
            }
            self.send_records(after).await?;
            any = true;
        }
    }

    /// Sends what is in `records`, which ends before the record `after`.
    async fn send_records(&mut self, after: u64) -> Result<(), LinkError> {
        let records = Records::new(&self.records).ok_or(LinkError::Unexpected)?;
        self.out.clear();
        frame::write(&Frame::Facts(self.next, records), &mut self.out);
        self.next = after;
        self.flush().await
    }

    /// Sends what is on the disk only.
    async fn send_logged(&mut self, journal: &Replicated) -> Result<(), LinkError> {
        let log = journal.durable().ok_or(LinkError::TooSlow)?.log();
        let mut reader = log.reader(self.next).map_err(|_| LinkError::TooSlow)?;
        let mut next = self.next;
        loop {
            self.records.clear();
            while self.records.len() < BATCH {
                let record = reader.next().map_err(|error| match error {
                    moongate_oplog::Error::Pruned { .. } => LinkError::TooSlow,
                    damaged @ moongate_oplog::Error::Damaged { .. } => {
                        tracing::warn!(error = %damaged, "the log is damaged: followers are sent the whole state instead of it");
                        journal.log_is_damaged();
                        LinkError::TooSlow
                    }
                    other => LinkError::Log(other),
                })?;
                let Some((number, record)) = record else { break };
                push_record(record, &mut self.records);
                next = number + 1;
            }
            if next == self.next {
                // What is not written yet is in memory.
                return Err(LinkError::TooSlow);
            }
            self.send_records(next).await?;
            if journal.facts().read(self.next, |_, _| {}).is_some() {
                return Ok(());
            }
        }
    }
}

/// A part of the state, told while a part of the table is locked.
#[derive(Default)]
struct Piece {
    records: Vec<u8>,
    encoded: Vec<u8>,
    /// Where batches end.
    ends: Vec<usize>,
}

impl Piece {
    /// Its records in batches.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        let ends = self.ends.iter().copied().chain([self.records.len()]);
        begins
            .zip(ends)
            .filter_map(|(begin, end)| self.records.get(begin..end))
            .filter(|part| !part.is_empty())
    }

    fn push(&mut self, record: &[u8]) {
        push_record(record, &mut self.records);
        if self.records.len() - self.ends.last().copied().unwrap_or(0) >= BATCH {
            self.ends.push(self.records.len());
        }
    }

    fn clear(&mut self) {
        self.records.clear();
        self.ends.clear();
    }
}

impl Effects for Piece {
    fn fact(&mut self, fact: Fact<'_>) {
        let mut encoded = std::mem::take(&mut self.encoded);
        encoded.clear();
        encode(&fact, &mut encoded);
        self.push(&encoded);
        self.encoded = encoded;
    }
}

#[cfg(test)]
mod tests {
    use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
    use moongate_kvcore::Settings;

    use super::*;
    use crate::ha::fence::{Fence, now};
    use crate::ha::follower::Follower;
    use crate::ha::replica::Replica;
    use crate::server::ServerOptions;

    const KEYS: usize = 500;
    const NODE: Uuid = Uuid { first: 1, second: 2 };
    const LONG: Duration = Duration::from_secs(600);

    fn sessions() -> Sessions {
        let fence = Arc::new(Fence::default());
        fence.set(now() + LONG);
        let journal = Arc::new(Replicated::new(1, 1 << 20, fence, Arc::default(), None));
        journal.lead(&Member::new("leader"));
        let server = Arc::new(Server::new(ServerOptions::default(), journal.clone()));
        let segment = Segment { id: NODE, name: "a:1", size: 1 << 30, ..Segment::default() };
        server.master.mount(0, &segment, NODE, &mut server.recorder()).unwrap();
        Sessions { server, journal, term: 1, patience: LONG, tls: None }
    }

    fn start(server: &Server, key: &str) {
        let config = ReplicateConfig::<&str> { replica_num: 1, ..ReplicateConfig::default() };
        let started = server.master.put_start(1, NODE, "default", key, 64, &config, &mut server.recorder());
        started.unwrap();
    }

    fn end(server: &Server, key: &str) {
        let object = ObjectMeta { key, object_checksum: None };
        let recorder = &mut server.recorder();
        server.master.put_end(2, NODE, "default", &object, ReplicaType::ALL, recorder).unwrap();
    }

    fn take_all(sent: &[u8], follower: &mut Follower, replica: &mut Replica) {
        let mut rest = sent;
        while let Some((head, after)) = rest.split_first_chunk() {
            let (length, checksum) = frame::header(*head).unwrap();
            let (body, next) = after.split_at(length);
            follower.take(frame::read(body, checksum).unwrap(), replica).unwrap();
            rest = next;
        }
    }

    #[tokio::test]
    async fn what_changes_while_the_state_is_sent_is_in_the_copy() {
        let sessions = sessions();
        let keys: Vec<String> = (0..KEYS).map(|number| format!("key-{number}")).collect();
        keys.iter().for_each(|key| start(&sessions.server, key));
        let number = sessions.journal.facts().next() - 1;
        let mut sent = Vec::new();
        frame::write(&Frame::Welcome { term: 1, start: Start::Snapshot(number) }, &mut sent);
        let (out, records) = (Vec::new(), Vec::new());
        let mut feed = Feed { output: sent, patience: LONG, next: number + 1, out, records };
        // One after the other, in turns with the steps of the copy.
        let writer = async {
            for key in &keys {
                end(&sessions.server, key);
                tokio::task::yield_now().await;
            }
        };
        let (copied, ()) = tokio::join!(sessions.send_state(&mut feed), writer);
        copied.unwrap();
        feed.send_facts(&sessions.journal).await.unwrap();

        let mut replica = Replica::new(Settings::default());
        take_all(&feed.output, &mut Follower::new(1, None), &mut replica);
        let (state, _) = replica.take();
        let missing = keys.iter().filter(|key| !state.master.exist(3, "default", key)).count();
        assert_eq!(missing, 0, "of {KEYS} keys");
    }
}
