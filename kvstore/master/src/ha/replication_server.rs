//! The leader side of replication: sends the state and then every change to its followers.

use std::sync::Arc;
use std::time::Duration;

use moongate_master_core::{SnapshotCursor, StateChange, StateChangeSink, encode};
use moongate_runtime::Supervisor;
use moongate_runtime::net::{TcpListener, TcpStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::frame::{self, BATCH, ReplicationFrame, ReplicationRecords, ReplicationStart, push_record};
use super::link::{ReplicationError, read_frame, send};
use super::member::{HaMember, MAX_MEMBERS};
use super::replicated_journal::ReplicatedJournal;
use super::tls::{TlsFiles, accept};
use crate::server::MasterServer;
use crate::state::SLOTS_PER_LOCK;

/// Pause after a failed accept, such as one without free file descriptors.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Serves the followers of one leader.
#[derive(Clone, Debug)]
pub(super) struct ReplicationServer {
    pub(super) server: Arc<MasterServer>,
    pub(super) journal: Arc<ReplicatedJournal>,
    pub(super) term: i64,
    /// A follower without a frame for this long is removed.
    pub(super) follower_timeout: Duration,
    /// Files for mutual TLS with followers.
    pub(super) tls: Option<TlsFiles>,
}

impl ReplicationServer {
    /// Accepts followers until the supervisor's shutdown.
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
                    tracing::warn!(%error, "cannot accept followers; retrying");
                    tokio::time::sleep(RETRY_PAUSE).await;
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
                        tracing::info!(%peer, %error, "follower disconnected");
                    },
                    () = stop.cancelled() => {}
                }
                drop(slot);
            });
        }
    }

    async fn serve(self, stream: TcpStream) -> Result<(), ReplicationError> {
        stream.set_nodelay(true)?;
        match &self.tls {
            Some(files) => {
                let tls_stream = timeout(self.follower_timeout, accept(files, stream)).await;
                let tls_stream =
                    tls_stream.map_err(|_| ReplicationError::ReadTimeout(self.follower_timeout))??;
                self.serve_on(tokio::io::split(tls_stream)).await
            }
            None => self.serve_on(stream.into_split()).await,
        }
    }

    async fn serve_on(
        self,
        (mut input, output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    ) -> Result<(), ReplicationError> {
        let mut body = Vec::new();
        let checksum = read_frame(&mut input, &mut body, self.follower_timeout).await?;
        let ReplicationFrame::Hello { member, term, last_record } = frame::read(&body, checksum)? else {
            return Err(ReplicationError::Unexpected);
        };
        if term != self.term {
            // The follower's view of the leader is outdated, or newer than this master's.
            return Ok(());
        }
        let start = match last_record {
            Some(position) if self.journal.can_resume_from(position) => {
                ReplicationStart::Resume(position.number)
            }
            _ => ReplicationStart::Snapshot(self.journal.facts().next() - 1),
        };
        tracing::info!(%member, ?start, "follower connected");
        let mut sender = ReplicationSender {
            output,
            follower_timeout: self.follower_timeout,
            next: 0,
            out: Vec::new(),
            records: Vec::new(),
        };
        tokio::select! {
            ended = self.send_updates(&mut sender, start) => ended,
            ended = self.receive_acknowledgements(&mut input, &member, &mut body) => ended,
        }
    }

    async fn receive_acknowledgements(
        &self,
        input: &mut (impl AsyncRead + Unpin),
        member: &HaMember,
        body: &mut Vec<u8>,
    ) -> Result<(), ReplicationError> {
        let mut joined = false;
        loop {
            // Applying a full state takes long. After that, the in-sync updater detects silent followers.
            let checksum = read_frame(input, body, Duration::MAX).await?;
            let ReplicationFrame::Acknowledged(number) = frame::read(body, checksum)? else {
                return Err(ReplicationError::Unexpected);
            };
            let is_required = match std::mem::replace(&mut joined, true) {
                true => self.journal.acknowledge(member, number),
                false => self.journal.join(member, number),
            };
            if !is_required {
                // It was removed for its silence and has to connect again.
                return Err(ReplicationError::ReadTimeout(self.follower_timeout));
            }
        }
    }

    async fn send_updates(
        &self,
        sender: &mut ReplicationSender<impl AsyncWrite + Unpin>,
        start: ReplicationStart,
    ) -> Result<(), ReplicationError> {
        let mut target = self.journal.commit_target();
        sender.send(&ReplicationFrame::Welcome { term: self.term, start }).await?;
        let (ReplicationStart::Resume(number) | ReplicationStart::Snapshot(number)) = start;
        sender.next = number + 1;
        if let ReplicationStart::Snapshot(_) = start {
            self.send_state(sender).await?;
        }
        loop {
            target.mark_unchanged();
            if !sender.send_facts(&self.journal).await? {
                sender.send(&ReplicationFrame::Heartbeat(sender.next - 1)).await?;
            }
            // A record is appended before the target is raised, so none is missed.
            let _ = timeout(self.follower_timeout / 4, target.changed()).await;
        }
    }

    /// Sends the full state. Records are sent between its batches, before they are evicted from memory. A record never overtakes an
    /// earlier batch: the batch would undo it.
    async fn send_state(
        &self,
        sender: &mut ReplicationSender<impl AsyncWrite + Unpin>,
    ) -> Result<(), ReplicationError> {
        let (mut cursor, mut batch) = (Some(SnapshotCursor::default()), StateTransferBatch::default());
        self.journal.aux().for_each_record(|record| batch.push(record));
        while let Some(from) = cursor {
            cursor = self.server.master.snapshot(from, SLOTS_PER_LOCK, &mut batch);
            for part in batch.parts() {
                let records = ReplicationRecords::new(part).ok_or(ReplicationError::Unexpected)?;
                sender.send(&ReplicationFrame::State(records)).await?;
            }
            batch.clear();
            sender.send_facts(&self.journal).await?;
            tokio::task::yield_now().await;
        }
        let last = self.journal.facts().next() - 1;
        sender.send(&ReplicationFrame::StateComplete(last)).await
    }
}

/// The sending half of a connection to a follower.
struct ReplicationSender<W> {
    output: W,
    follower_timeout: Duration,
    /// Number of the next record to send.
    next: u64,
    out: Vec<u8>,
    records: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> ReplicationSender<W> {
    async fn send(&mut self, frame: &ReplicationFrame<'_>) -> Result<(), ReplicationError> {
        self.out.clear();
        frame::write(frame, &mut self.out);
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), ReplicationError> {
        // A follower that applies a state may not read for a while.
        let write_timeout = self.follower_timeout * 10;
        let sent = timeout(write_timeout, send(&mut self.output, &self.out)).await;
        Ok(sent.map_err(|_| ReplicationError::WriteTimeout(write_timeout))??)
    }

    /// Sends the records appended since the last call. Returns whether there were any.
    async fn send_facts(&mut self, journal: &ReplicatedJournal) -> Result<bool, ReplicationError> {
        let mut sent_any = false;
        loop {
            self.records.clear();
            let (first, records) = (self.next, &mut self.records);
            let after = journal.facts().read(first, |_, record| push_record(record, records));
            let Some(after) = after else {
                self.send_logged(journal).await?;
                sent_any = true;
                continue;
            };
            if after == first {
                return Ok(sent_any);
            }
            self.send_records(after).await?;
            sent_any = true;
        }
    }

    /// Sends the contents of `records`, up to but not including the record `after`.
    async fn send_records(&mut self, after: u64) -> Result<(), ReplicationError> {
        let records = ReplicationRecords::new(&self.records).ok_or(ReplicationError::Unexpected)?;
        self.out.clear();
        frame::write(&ReplicationFrame::Records(self.next, records), &mut self.out);
        self.next = after;
        self.flush().await
    }

    /// Sends records that are only on disk.
    async fn send_logged(&mut self, journal: &ReplicatedJournal) -> Result<(), ReplicationError> {
        let log = journal.durable().ok_or(ReplicationError::TooSlow)?.log();
        let mut reader = log.reader(self.next).map_err(|_| ReplicationError::TooSlow)?;
        let mut next = self.next;
        loop {
            self.records.clear();
            while self.records.len() < BATCH {
                let record = reader.next().map_err(|error| match error {
                    moongate_oplog::OplogError::Pruned { .. } => ReplicationError::TooSlow,
                    damaged @ moongate_oplog::OplogError::Damaged { .. } => {
                        tracing::warn!(error = %damaged, "the log is damaged; followers receive the full state instead");
                        journal.mark_log_damaged();
                        ReplicationError::TooSlow
                    }
                    other => ReplicationError::Log(other),
                })?;
                let Some((number, record)) = record else { break };
                push_record(record, &mut self.records);
                next = number + 1;
            }
            if next == self.next {
                // Records that are not on disk yet are in memory.
                return Err(ReplicationError::TooSlow);
            }
            self.send_records(next).await?;
            if journal.facts().read(self.next, |_, _| {}).is_some() {
                return Ok(());
            }
        }
    }
}

/// A part of the state, encoded while a part of the table is locked.
#[derive(Default)]
struct StateTransferBatch {
    records: Vec<u8>,
    encoded: Vec<u8>,
    /// Offsets at which batches end.
    ends: Vec<usize>,
}

impl StateTransferBatch {
    /// The records in batches of about [`BATCH`] bytes.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ends = self.ends.iter().copied().chain([self.records.len()]);
        starts
            .zip(ends)
            .filter_map(|(start, end)| self.records.get(start..end))
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

impl StateChangeSink for StateTransferBatch {
    fn record(&mut self, fact: StateChange<'_>) {
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
    use moongate_master_core::{CallContext, MasterCoreOptions, PutStartRequest};

    use super::*;
    use crate::ha::fence::{LeaseFence, now};
    use crate::ha::follower::ReplicationFollower;
    use crate::ha::standby_replica::StandbyReplica;
    use crate::server::MasterServerOptions;

    const KEYS: usize = 500;
    const NODE: Uuid = Uuid { first: 1, second: 2 };
    const LONG: Duration = Duration::from_secs(600);

    fn replication_server() -> ReplicationServer {
        let fence = Arc::new(LeaseFence::default());
        fence.extend(now() + LONG);
        let journal = Arc::new(ReplicatedJournal::new(1, 1 << 20, fence, Arc::default(), None));
        journal.lead(&HaMember::new("leader"));
        let server = Arc::new(MasterServer::new(MasterServerOptions::default(), journal.clone()));
        let segment = Segment { id: NODE, name: "a:1", size: 1 << 30, ..Segment::default() };
        server.master.mount(0, &segment, NODE, &mut server.recorder()).unwrap();
        ReplicationServer { server, journal, term: 1, follower_timeout: LONG, tls: None }
    }

    fn start(server: &MasterServer, key: &str) {
        let config = ReplicateConfig::<&str> { replica_num: 1, ..ReplicateConfig::default() };
        let started = server.master.put_start(
            CallContext { now_ms: 1, client: NODE, tenant: "default" },
            &PutStartRequest { key, size: 64, config: &config },
            &mut server.recorder(),
        );
        started.unwrap();
    }

    fn end(server: &MasterServer, key: &str) {
        let object = ObjectMeta { key, object_checksum: None };
        let recorder = &mut server.recorder();
        server
            .master
            .put_end(
                CallContext { now_ms: 2, client: NODE, tenant: "default" },
                &object,
                ReplicaType::ALL,
                recorder,
            )
            .unwrap();
    }

    fn apply_frames(sent: &[u8], follower: &mut ReplicationFollower, replica: &mut StandbyReplica) {
        let mut rest = sent;
        while let Some((head, after)) = rest.split_first_chunk() {
            let (length, checksum) = frame::header(*head).unwrap();
            let (body, next) = after.split_at(length);
            follower.handle_frame(frame::read(body, checksum).unwrap(), replica).unwrap();
            rest = next;
        }
    }

    #[tokio::test]
    async fn changes_during_the_state_transfer_reach_the_copy() {
        let replication_server = replication_server();
        let keys: Vec<String> = (0..KEYS).map(|number| format!("key-{number}")).collect();
        keys.iter().for_each(|key| start(&replication_server.server, key));
        let number = replication_server.journal.facts().next() - 1;
        let mut sent = Vec::new();
        frame::write(
            &ReplicationFrame::Welcome { term: 1, start: ReplicationStart::Snapshot(number) },
            &mut sent,
        );
        let (out, records) = (Vec::new(), Vec::new());
        let mut sender =
            ReplicationSender { output: sent, follower_timeout: LONG, next: number + 1, out, records };
        // Writes alternate with the batches of the transfer.
        let writer = async {
            for key in &keys {
                end(&replication_server.server, key);
                tokio::task::yield_now().await;
            }
        };
        let (copied, ()) = tokio::join!(replication_server.send_state(&mut sender), writer);
        copied.unwrap();
        sender.send_facts(&replication_server.journal).await.unwrap();

        let mut replica = StandbyReplica::new(MasterCoreOptions::default());
        apply_frames(&sender.output, &mut ReplicationFollower::new(1, None), &mut replica);
        let (state, _) = replica.take_state();
        let missing = keys.iter().filter(|key| !state.master.exist(3, "default", key)).count();
        assert_eq!(missing, 0, "of {KEYS} keys");
    }
}
