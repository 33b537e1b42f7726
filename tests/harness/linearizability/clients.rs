//! Clients that write, remove and read the same keys. An object's checksum is its value.

use std::sync::Arc;

use futures_util::future::join_all;
use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{
    GetReplicaList, KeyArguments, PutEndArguments, PutStartArguments, Remove, RemoveArguments, UpsertEnd,
    UpsertStart,
};
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Uuid};
use moongate_master_client::rpc::MasterClient;
use moongate_runtime::Supervisor;

use super::checker::KeyOperation;
use super::history::CallHistory;
use super::master::connect;

const CLIENTS: u64 = 4;
/// Keys that all clients use.
const KEYS: u64 = 40;

/// Starts clients of the master at `address`, each with a connection of its own. They end when the master does not respond any more.
pub(crate) fn start_clients(
    address: &str,
    supervisor: &Supervisor,
    history: &Arc<CallHistory>,
    random: &mut fastrand::Rng,
) -> impl Future<Output = ()> + use<> {
    let all: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut client = RecordingClient {
                master: connect(address, supervisor),
                id: Uuid { first: random.u64(..), second: random.u64(..) },
                history: Arc::clone(history),
                random: random.fork(),
            };
            async move { while client.call().await.is_some() {} }
        })
        .collect();
    async move { _ = join_all(all).await }
}

struct RecordingClient {
    master: MasterClient,
    id: Uuid,
    history: Arc<CallHistory>,
    random: fastrand::Rng,
}

impl RecordingClient {
    /// One call, or the two of a write. Nothing if the master has not answered.
    async fn call(&mut self) -> Option<()> {
        let key = format!("shared-{}-{}", self.history.number, self.random.u64(..KEYS));
        match self.random.u8(..10) {
            0..4 => self.write(key).await,
            4 => self.remove(key).await,
            _ => self.read(key).await,
        }
    }

    async fn write(&mut self, key: String) -> Option<()> {
        let tenant = DEFAULT_TENANT.to_owned();
        let begin = PutStartArguments {
            client_id: self.id,
            key: key.clone(),
            size: self.random.u64(1..3) * 1000,
            config: ReplicateConfig::default(),
            tenant: tenant.clone(),
        };
        let started = self.master.call::<UpsertStart, String>(&begin).await.ok()?;
        // Some are never ended: the version before stays.
        if started.is_err() || self.random.u8(..8) == 0 {
            return Some(());
        }
        let value = self.history.new_value();
        let end = PutEndArguments {
            client_id: self.id,
            object: ObjectMeta { key: key.clone(), object_checksum: Some(value) },
            replica_type: ReplicaType::ALL,
            tenant,
        };
        let called = self.history.now();
        let ended = self.master.call::<UpsertEnd, String>(&end).await.ok();
        self.record_change(&key, KeyOperation::Write(value), called, ended)
    }

    async fn remove(&self, key: String) -> Option<()> {
        let remove = RemoveArguments { key: key.clone(), force: true, tenant: DEFAULT_TENANT.to_owned() };
        let called = self.history.now();
        let removed = self.master.call::<Remove, String>(&remove).await.ok();
        self.record_change(&key, KeyOperation::Remove, called, removed)
    }

    /// What is refused changes nothing: another client has begun to write the key, or there is nothing to remove. A router replies
    /// `RPC_FAIL` if the key's master does not respond.
    fn record_change(
        &self,
        key: &str,
        operation: KeyOperation,
        called: u64,
        answer: Option<Result<(), ErrorCode>>,
    ) -> Option<()> {
        match answer {
            Some(Ok(())) => self.history.record_response(key, operation, called),
            Some(Err(ErrorCode::RPC_FAIL)) => self.history.record_no_response(key, operation, called),
            Some(Err(_)) => {}
            None => self.history.record_no_response(key, operation, called),
        }
        answer.map(|_| ())
    }

    /// A miss is no observation.
    async fn read(&self, key: String) -> Option<()> {
        let arguments = KeyArguments { key: key.clone(), tenant: DEFAULT_TENANT.to_owned() };
        let called = self.history.now();
        let found = self.master.call::<GetReplicaList, String>(&arguments).await.ok()?;
        if let Ok(list) = found {
            self.history.record_response(&key, KeyOperation::Read(list.object_checksum.unwrap()), called);
        }
        Some(())
    }
}
