//! Several objects with few calls to the master.

use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::Outcome;
use mooncake_wire::types::{ObjectMeta, Replica, ReplicaList};
use moongate_kvstore::rpc::{Mode, RpcError};

use crate::client::Client;
use crate::error::KvError;
use crate::locate::Located;
use crate::options::PutOptions;
use crate::write::{Put, may_go_on};

/// Keys of one call to the master.
const KEYS_PER_CALL: usize = 1024;

impl Client {
    /// Gets several objects. The results are in the keys' order.
    pub async fn get_batch(&self, keys: &[&str]) -> Vec<Result<Bytes, KvError>> {
        let get = async |key, located: Result<Located, KvError>| self.get_located(key, Some(located?)).await;
        let mut results = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_CALL) {
            let gets = self.locate_all(keys).await.zip(keys).map(|(located, key)| get(key, located));
            results.extend(self.in_flight(gets).await);
        }
        results
    }

    /// Gets several objects, each into its buffer, and returns their sizes in the same order. What a buffer has
    /// beyond its object stays as it is.
    pub async fn get_batch_into(&self, wanted: &mut [(&str, &mut [u8])]) -> Vec<Result<usize, KvError>> {
        let mut results = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks_mut(KEYS_PER_CALL) {
            let keys: Vec<&str> = wanted.iter().map(|(key, _)| *key).collect();
            let gets = self.locate_all(&keys).await.zip(wanted).map(async |(located, (key, into))| {
                self.get_into_located(key, into, Some(located?)).await
            });
            results.extend(self.in_flight(gets).await);
        }
        results
    }

    /// Puts several objects. The results are in their order; one that fails does not keep the others from being
    /// stored. A key may come only once.
    pub async fn put_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<Put, KvError>> {
        self.store_batch(Mode::Put, objects, options).await
    }

    /// [`Client::upsert`] for several objects. The results are in their order.
    pub async fn upsert_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<Put, KvError>> {
        objects.iter().for_each(|(key, _)| self.shared.cache.forget(key));
        self.store_batch(Mode::Upsert, objects, options).await
    }

    async fn store_batch(
        &self,
        mode: Mode,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<Put, KvError>> {
        let mut results = Vec::with_capacity(objects.len());
        for objects in objects.chunks(KEYS_PER_CALL) {
            let started = self.start_all(mode, objects, options).await;
            let writes = objects.iter().zip(started).map(async |((key, bytes), started)| {
                match started {
                    Err(ErrorCode::OBJECT_ALREADY_EXISTS) => Ok(Put::AlreadyThere),
                    // One by one, a lack of room and a dead node are dealt with.
                    Err(ErrorCode::NO_AVAILABLE_HANDLE) => Err(KvError::NoRoom { key: (*key).to_owned(), size: bytes.len() as u64 }),
                    Err(code) => Err(KvError::master("put", key, RpcError::Refused(code))),
                    Ok(replicas) => self.write(key, &replicas, bytes).await.map(|()| Put::Stored),
                }
            });
            let _ = writes;
            results.extend(Vec::<Result<Put, KvError>>::new());
        }
        results
    }
}
