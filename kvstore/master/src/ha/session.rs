//! A leader's side of replication: the state and then every change, to whoever follows.

use std::sync::Arc;
use std::time::Duration;

use moongate_kvcore::{Effects, Fact, SnapshotCursor, encode};
use moongate_runtime::Supervisor;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::frame::{self, BATCH, Frame, Records, Start, push_record};
use super::link::{LinkError, next, send};
use super::member::{MAX_MEMBERS, Member};
use super::replicated::Replicated;
use super::tls::{TlsFiles, accept};
use crate::server::Server;

/// Places of the table that are looked at under one lock.
const PLACES_AT_ONCE: u32 = 1024;
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

    /// Changes are sent between its pieces, so that none is forgotten before it is sent.
    async fn send_state(&self, feed: &mut Feed<impl AsyncWrite + Unpin>) -> Result<(), LinkError> {
        let (mut cursor, mut piece) = (Some(SnapshotCursor::default()), Piece::default());
        self.journal.beside().tell(|record| piece.push(record));
        while let Some(from) = cursor {
            cursor = self.server.master.snapshot(from, PLACES_AT_ONCE, &mut piece);
            if piece.records.len() >= BATCH || cursor.is_none() {
                for part in piece.parts() {
                    let records = Records::new(part).ok_or(LinkError::Unexpected)?;
                    feed.send(&Frame::State(records)).await?;
                }
                piece.clear();
            }
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
