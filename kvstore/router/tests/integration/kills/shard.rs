//! A master whose process can be killed at any moment of a call.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bytes::BytesMut;
use fastrand::Rng;
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader, RpcFault};
use mooncake_wire::shards::ShardIdentity;
use moongate_master::call::CallerSession;
use moongate_master::durable::{DurableJournal, PersistenceSchedule, RestoredJournal, StatePersister};
use moongate_master::{
    AuxState, LeadershipStatus, MasterServer, MasterServerOptions, MasterState, MonotonicUnixClock,
};
use moongate_master_core::MasterCoreOptions;
use moongate_oplog::OplogOptions;
use moongate_store_shards::ShardResponse;
use tempfile::TempDir;

use super::CLIENTS;

fn core_options() -> MasterCoreOptions {
    // An unfinished put can be replaced at once, as its writer writes at once.
    MasterCoreOptions {
        shards: 4,
        seed: 3,
        put_discard_ms: 0,
        lease_ttl_ms: 0,
        ramp_ms: 0,
        ..MasterCoreOptions::default()
    }
}

fn oplog_options() -> OplogOptions {
    OplogOptions { file_bytes: 4000, boot_id: "a".to_owned(), ..OplogOptions::default() }
}

/// A defect, which the simulation must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShardDefect {
    None,
    /// Shards reply before the change is durable.
    RepliesBeforeCommit,
    /// All shards allocate in the whole of each segment.
    SharedSegments,
    /// A shard that does not respond is taken for one without objects.
    DamageAsAbsence,
}

/// How far a call is when the shard dies.
#[derive(Clone, Copy)]
pub(super) enum KillMoment {
    Arrived,
    /// The change is in its memory only.
    Executed,
    /// The change is durable, but the reply is not sent.
    Committed,
}

/// A master whose process can be killed.
pub(super) struct KillableShard {
    folder: TempDir,
    journal: Arc<DurableJournal>,
    aux: Arc<AuxState>,
    server: Arc<MasterServer>,
    /// The connection of each client.
    sessions: Vec<CallerSession>,
    identity: ShardIdentity,
    /// Number of calls for which it stays down after a kill.
    pub(super) down_for: u32,
    defect: ShardDefect,
}

impl KillableShard {
    pub(super) fn open(folder: TempDir, identity: ShardIdentity, defect: ShardDefect) -> Self {
        let clock = MonotonicUnixClock::start();
        let RestoredJournal { journal, state, report } =
            DurableJournal::open(folder.path(), oplog_options(), &core_options(), clock.now_ms()).unwrap();
        assert!(report.recovery.is_complete(), "{report}");
        let MasterState { master, aux, .. } = state;
        let journal = Arc::new(journal);
        let options = MasterServerOptions {
            core: core_options(),
            shard: Some(identity),
            ..MasterServerOptions::default()
        };
        let server = MasterServer::with_state(options, *master, clock, Arc::clone(&journal) as Arc<_>);
        server.leadership.store(Arc::new(LeadershipStatus::standalone()));
        let server = Arc::new(server);
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let sessions = (0..CLIENTS).map(|_| CallerSession::new(Arc::clone(&server), host, 0)).collect();
        Self { folder, journal, aux, server, sessions, identity, down_for: 0, defect }
    }

    /// Executes a call, in which the process may be killed.
    pub(super) fn call(
        &mut self,
        client: usize,
        frame: &[u8],
        kill: Option<KillMoment>,
        rng: &mut Rng,
    ) -> ShardResponse {
        if self.down_for > 0 {
            self.down_for -= 1;
            return ShardResponse::Unreachable;
        }
        let mut output = BytesMut::new();
        let session = &mut self.sessions[client];
        if !matches!(kill, Some(KillMoment::Arrived)) {
            session.run(frame, &mut output);
        }
        let is_late = self.defect == ShardDefect::RepliesBeforeCommit && rng.bool();
        if !matches!(kill, Some(KillMoment::Arrived | KillMoment::Executed)) && !is_late {
            session.recorder().commit().unwrap();
        }
        if kill.is_some() {
            self.kill(rng);
            return ShardResponse::Unreachable;
        }
        let response = frame::take::<ResponseHeader>(&mut output, 1 << 20).unwrap();
        let FrameParseResult::Frame(response) = response else { panic!("no response") };
        match response.header.error {
            0 => ShardResponse::Reply(response.body),
            error => ShardResponse::Fault(RpcFault::parse(error, &response.body).unwrap()),
        }
    }

    /// A killed process leaves the files as they are, with the beginning of its last write.
    fn kill(&mut self, rng: &mut Rng) {
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let next = self.journal.log().written() + 1;
        let header = [&1000_u32.to_le_bytes()[..], &[0xa5; 4], &next.to_le_bytes()].concat();
        let logs = fs::read_dir(copy.path()).unwrap().map(|entry| entry.unwrap().path());
        let newest =
            logs.filter(|path| path.extension().is_some_and(|suffix| suffix == "log")).max().unwrap();
        let mut bytes = fs::read(&newest).unwrap();
        let torn = rng.usize(0..40);
        bytes.extend(header.into_iter().chain(std::iter::repeat_with(|| rng.u8(..))).take(torn));
        fs::write(&newest, bytes).unwrap();
        *self = Self::open(copy, self.identity, self.defect);
        self.down_for = rng.u32(0..6);
    }

    pub(super) fn snapshot(&self) {
        let schedule = PersistenceSchedule::default();
        StatePersister::new(&self.journal, &self.server.master, &self.aux, schedule).snapshot().unwrap();
    }
}
