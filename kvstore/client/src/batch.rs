//! Several objects with few calls to the master.

use std::collections::HashSet;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ObjectMeta, ReplicaDescriptor as WireReplica};
use moongate_master_client::rpc::{PutMode, RpcError};

use crate::client::KvClient;
use crate::error::KvError;
use crate::key_locks::KeyLockGuard;
use crate::locate::ObjectLocation;
use crate::options::PutOptions;
use crate::write::{InFlightPuts, PutOutcome, may_still_be_writing};

/// Keys of one call to the master.
const KEYS_PER_CALL: usize = 1024;

impl KvClient {
    /// Gets several objects. The results are in the keys' order.
    pub async fn get_batch(&self, keys: &[&str]) -> Vec<Result<Bytes, KvError>> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_CALL) {
            let located = self.locate_all(keys).await;
            let gets = keys
                .iter()
                .zip(located)
                .map(|(key, located)| async move { self.get_located(key, Some(located?)).await });
            results.extend(self.in_flight(gets.collect()).await);
        }
        results
    }

    /// Gets several objects, each into its buffer, and returns their sizes in the same order. What a buffer has
    /// beyond its object stays as it is.
    pub async fn get_batch_into(&self, wanted: &mut [(&str, &mut [u8])]) -> Vec<Result<usize, KvError>> {
        let mut results = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks_mut(KEYS_PER_CALL) {
            let keys: Vec<&str> = wanted.iter().map(|(key, _)| *key).collect();
            let located = self.locate_all(&keys).await;
            let gets = wanted.iter_mut().zip(located);
            let gets = gets.map(|((key, into), located)| async move {
                self.get_into_located(key, into, Some(located?)).await
            });
            results.extend(self.in_flight(gets.collect()).await);
        }
        results
    }

    /// Puts several objects. The results are in their order; one that fails does not keep the others from being
    /// stored. Of objects with the same key one is stored.
    pub async fn put_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        self.store_batch(PutMode::Put, objects, options).await
    }

    /// [`KvClient::upsert`] for several objects. The results are in their order.
    pub async fn upsert_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        objects.iter().for_each(|(key, _)| self.shared.cache.remove(key));
        self.store_batch(PutMode::Upsert, objects, options).await
    }

    async fn store_batch(
        &self,
        mode: PutMode,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        let mut results = Vec::with_capacity(objects.len());
        for objects in objects.chunks(KEYS_PER_CALL) {
            results.extend(self.store_chunk(mode, objects, options).await);
        }
        results
    }

    /// What one call to the master can start.
    async fn store_chunk(
        &self,
        mode: PutMode,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        let turns: Vec<Option<KeyLockGuard>> =
            objects.iter().map(|(key, _)| self.shared.key_locks.try_lock(key)).collect();
        let starts = self.start_all(mode, objects, &turns, options).await;
        let begun: Vec<bool> = starts.iter().map(Result::is_ok).collect();
        let open = objects.iter().zip(&begun).filter(|(_, begun)| **begun).map(|((key, _), _)| *key);
        let mut open = InFlightPuts::new(self, mode, open.collect(), turns.into_iter().flatten().collect());
        let writes = objects.iter().zip(starts).map(|((key, bytes), start)| async move {
            match start {
                Ok(replicas) => self.write(key, &replicas, bytes).await,
                Err(error) => Err(error),
            }
        });
        let mut results = self.in_flight(writes.collect()).await;
        let failed: HashSet<&str> = objects
            .iter()
            .zip(begun.iter().zip(&results))
            .filter(|(_, (begun, result))| {
                **begun && result.as_ref().is_err_and(|error| !may_still_be_writing(error))
            })
            .map(|((key, _), _)| *key)
            .collect();
        open.retain_keys(|key| failed.contains(key));
        self.end_all(mode, objects, &mut results).await;
        open.revoke().await;
        // One by one, those are tried again for which that may help.
        let again = objects.iter().zip(results).map(|((key, bytes), result)| async move {
            match result {
                Ok(()) => Ok(PutOutcome::Stored),
                Err(error) if error.code() == Some(ErrorCode::OBJECT_ALREADY_EXISTS) => {
                    Ok(PutOutcome::AlreadyExists)
                }
                Err(error) if is_retryable(&error) => self.store(mode, key, bytes, options).await,
                Err(error) => Err(error),
            }
        });
        self.in_flight(again.collect()).await
    }

    async fn start_all(
        &self,
        mode: PutMode,
        objects: &[(&str, &[u8])],
        turns: &[Option<KeyLockGuard>],
        options: &PutOptions,
    ) -> Vec<Result<Vec<WireReplica<String>>, KvError>> {
        // Of nothing and of twins there is nothing to write. The master would refuse them, too, but perhaps all.
        let mut seen = HashSet::new();
        let refusal = |key: &str, code| Some(KvError::master("put", key, RpcError::Refused(code)));
        let refused: Vec<Option<KvError>> = objects
            .iter()
            .zip(turns)
            .map(|((key, bytes), turn)| match (bytes.is_empty(), seen.insert(*key), turn) {
                (true, _, _) => Some(KvError::Empty { key: (*key).to_owned() }),
                (false, false, _) => refusal(key, ErrorCode::OBJECT_ALREADY_EXISTS),
                (false, true, None) => refusal(key, being_written(mode)),
                (false, true, Some(_)) => None,
            })
            .collect();
        let asked = objects.iter().zip(&refused).filter(|(_, refused)| refused.is_none());
        let (keys, sizes): (Vec<_>, Vec<_>) =
            asked.map(|((key, bytes), _)| (*key, bytes.len() as u64)).unzip();
        let config = options.config(keys.len(), self.shared.options.locality.host_id());
        let mut answers = if keys.is_empty() {
            Ok(Vec::new().into_iter())
        } else {
            self.shared.objects.start_batch(mode, keys, sizes, config).await.map(Vec::into_iter)
        };
        let answer = |((key, _), refused): (&(&str, &[u8]), Option<KvError>)| match (refused, &mut answers) {
            (Some(error), _) => Err(error),
            (None, Err(error)) => Err(KvError::master("put", key, error.clone())),
            // There are as many answers as keys.
            (None, Ok(answers)) => {
                let answer = answers.next().unwrap_or(Err(ErrorCode::INTERNAL_ERROR));
                answer.map_err(|code| KvError::master("put", key, RpcError::Refused(code)))
            }
        };
        objects.iter().zip(refused).map(answer).collect()
    }

    /// Makes visible what has been written.
    async fn end_all(&self, mode: PutMode, objects: &[(&str, &[u8])], results: &mut [Result<(), KvError>]) {
        let written: Vec<_> = objects.iter().zip(results).filter(|(_, result)| result.is_ok()).collect();
        if written.is_empty() {
            return;
        }
        let metas: Vec<_> = written
            .iter()
            .map(|((key, bytes), _)| ObjectMeta { key: *key, object_checksum: self.checksum(bytes) })
            .collect();
        let mut ended = self.shared.objects.end_batch(mode, metas.clone()).await;
        if matches!(ended, Err(RpcError::Lost { .. } | RpcError::TimedOut { .. })) {
            ended = self.shared.objects.end_batch(mode, metas).await;
        }
        let mut ended = ended.map(Vec::into_iter);
        for ((key, _), result) in written {
            let ended = match &mut ended {
                Ok(answers) => {
                    answers.next().unwrap_or(Err(ErrorCode::INTERNAL_ERROR)).map_err(RpcError::from)
                }
                Err(error) => Err(error.clone()),
            };
            *result = ended.map_err(|source| KvError::master("end the put of", key, source));
        }
    }

    /// Asks the master where objects are, in the keys' order.
    async fn locate_all(&self, keys: &[&str]) -> Vec<Result<ObjectLocation, KvError>> {
        let asked = Instant::now();
        match self.shared.objects.replicas_of(keys.to_vec()).await {
            Ok(answers) => {
                let located = answers.into_iter().zip(keys).map(|(answer, key)| match answer {
                    Ok(list) => self.located(key, asked, &list),
                    Err(code) => Err(KvError::master("find", key, RpcError::Refused(code))),
                });
                located.collect()
            }
            Err(error) => keys.iter().map(|key| Err(KvError::master("find", key, error.clone()))).collect(),
        }
    }

    /// The results of futures of which a bounded number is under way, in their order. They come in a vector because the compiler
    /// cannot tell of most iterators that they may be sent to another thread.
    async fn in_flight<F: Future>(&self, futures: Vec<F>) -> Vec<F::Output> {
        stream::iter(futures).buffered(self.shared.options.batch_in_flight.max(1)).collect().await
    }
}

/// What becomes of an object of which this client is writing another: a put leaves that, an upsert comes after it.
fn being_written(mode: PutMode) -> ErrorCode {
    match mode {
        PutMode::Put => ErrorCode::OBJECT_ALREADY_EXISTS,
        PutMode::Upsert => ErrorCode::OBJECT_REPLICA_BUSY,
    }
}

/// Whether an object that could not be put may be put by trying again.
fn is_retryable(error: &KvError) -> bool {
    let later = [ErrorCode::NO_AVAILABLE_HANDLE, ErrorCode::OBJECT_REPLICA_BUSY].map(Some);
    later.contains(&error.code())
        || (matches!(error, KvError::Transfer { .. }) && !may_still_be_writing(error))
}
