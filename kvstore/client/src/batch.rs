//! Batch operations: many objects with few calls to the master.

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

/// Maximum number of keys in one call to the master.
const KEYS_PER_CALL: usize = 1024;

/// Key of an object to put, and the ranges of memory with its bytes.
pub type ObjectRanges<'a> = (&'a str, &'a [&'a [u8]]);

fn single_ranges<'a>(objects: &'a [(&'a str, &'a [u8])]) -> Vec<ObjectRanges<'a>> {
    objects.iter().map(|(key, bytes)| (*key, std::slice::from_ref(bytes))).collect()
}

fn size_of(ranges: &[&[u8]]) -> u64 {
    ranges.iter().map(|range| range.len() as u64).sum()
}

impl KvClient {
    /// Gets several objects. Results are in the keys' order.
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

    /// Gets several objects, each into its buffer, and returns their sizes in the same order. Buffer bytes beyond the
    /// object's size are unchanged.
    pub async fn get_batch_into(&self, objects: &mut [(&str, &mut [u8])]) -> Vec<Result<usize, KvError>> {
        let mut objects: Vec<_> = objects.iter_mut().map(|(key, into)| (*key, vec![&mut **into])).collect();
        self.get_batch_into_ranges(&mut objects).await
    }

    /// As [`KvClient::get_batch_into`], each into several ranges of memory, which are filled in their order.
    pub async fn get_batch_into_ranges(
        &self,
        objects: &mut [(&str, Vec<&mut [u8]>)],
    ) -> Vec<Result<usize, KvError>> {
        let mut results = Vec::with_capacity(objects.len());
        for objects in objects.chunks_mut(KEYS_PER_CALL) {
            let keys: Vec<&str> = objects.iter().map(|(key, _)| *key).collect();
            let located = self.locate_all(&keys).await;
            let gets = objects.iter_mut().zip(located);
            let gets = gets.map(|((key, into), located)| async move {
                self.get_into_located(key, into, Some(located?)).await
            });
            results.extend(self.in_flight(gets.collect()).await);
        }
        results
    }

    /// Puts several objects. Results are in the same order, and a failure of one object does not affect the others. Of objects
    /// with the same key, one is stored.
    pub async fn put_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        self.put_batch_ranges(&single_ranges(objects), options).await
    }

    /// As [`KvClient::put_batch`], of objects that are in several ranges of memory each, one after another.
    pub async fn put_batch_ranges(
        &self,
        objects: &[ObjectRanges<'_>],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        self.store_batch(PutMode::Put, objects, options).await
    }

    /// [`KvClient::upsert`] for several objects. Results are in the same order.
    pub async fn upsert_batch(
        &self,
        objects: &[(&str, &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        self.upsert_batch_ranges(&single_ranges(objects), options).await
    }

    /// As [`KvClient::upsert_batch`], of objects that are in several ranges of memory each, one after another.
    pub async fn upsert_batch_ranges(
        &self,
        objects: &[ObjectRanges<'_>],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        objects.iter().for_each(|(key, _)| self.shared.cache.remove(key));
        self.store_batch(PutMode::Upsert, objects, options).await
    }

    async fn store_batch(
        &self,
        mode: PutMode,
        objects: &[ObjectRanges<'_>],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        let mut results = Vec::with_capacity(objects.len());
        for objects in objects.chunks(KEYS_PER_CALL) {
            let options = options.of_objects(results.len()..results.len() + objects.len());
            results.extend(self.store_chunk(mode, objects, &options).await);
        }
        results
    }

    /// Stores as many objects as one call to the master can start.
    async fn store_chunk(
        &self,
        mode: PutMode,
        objects: &[ObjectRanges<'_>],
        options: &PutOptions,
    ) -> Vec<Result<PutOutcome, KvError>> {
        let locks: Vec<Option<KeyLockGuard>> =
            objects.iter().map(|(key, _)| self.shared.key_locks.try_lock(key)).collect();
        let starts = self.start_all(mode, objects, &locks, options).await;
        let started: Vec<bool> = starts.iter().map(Result::is_ok).collect();
        let open = objects.iter().zip(&started).filter(|(_, started)| **started).map(|((key, _), _)| *key);
        let mut open = InFlightPuts::new(self, mode, open.collect(), locks.into_iter().flatten().collect());
        let writes = objects.iter().zip(starts).map(|((key, ranges), start)| async move {
            match start {
                Ok(replicas) => self.write(key, &replicas, ranges, false).await,
                Err(error) => Err(error),
            }
        });
        let mut results = self.in_flight(writes.collect()).await;
        let failed: HashSet<&str> = objects
            .iter()
            .zip(started.iter().zip(&results))
            .filter(|(_, (started, result))| {
                **started && result.as_ref().is_err_and(|error| !may_still_be_writing(error))
            })
            .map(|((key, _), _)| *key)
            .collect();
        open.retain_keys(|key| failed.contains(key));
        self.end_all(mode, objects, &mut results).await;
        open.revoke().await;
        // Retryable failures are retried one by one.
        let results = objects.iter().zip(results).enumerate();
        let retries = results.map(|(index, ((key, ranges), result))| async move {
            match result {
                Ok(()) => Ok(PutOutcome::Stored),
                Err(error) if error.code() == Some(ErrorCode::OBJECT_ALREADY_EXISTS) => {
                    Ok(PutOutcome::AlreadyExists)
                }
                Err(error) if self.is_retryable(&error) => {
                    self.store(mode, key, ranges, &options.of_objects(index..index + 1)).await
                }
                Err(error) => Err(error),
            }
        });
        self.in_flight(retries.collect()).await
    }

    async fn start_all(
        &self,
        mode: PutMode,
        objects: &[ObjectRanges<'_>],
        locks: &[Option<KeyLockGuard>],
        options: &PutOptions,
    ) -> Vec<Result<Vec<WireReplica<String>>, KvError>> {
        // Empty objects and duplicate keys are rejected here, because the master could refuse the whole batch for them.
        let mut distinct = HashSet::new();
        let refusal = |key: &str, code| Some(KvError::master("put", key, RpcError::Refused(code)));
        let refused: Vec<Option<KvError>> = objects
            .iter()
            .zip(locks)
            .map(|((key, ranges), lock)| match (size_of(ranges) == 0, distinct.insert(*key), lock) {
                (true, _, _) => Some(KvError::Empty { key: (*key).to_owned() }),
                (false, false, _) => refusal(key, ErrorCode::OBJECT_ALREADY_EXISTS),
                (false, true, None) => refusal(key, being_written(mode)),
                (false, true, Some(_)) => None,
            })
            .collect();
        let accepted = objects.iter().zip(&refused).enumerate().filter(|(_, (_, refused))| refused.is_none());
        let (indices, (keys, sizes)): (Vec<_>, (Vec<_>, Vec<_>)) =
            accepted.map(|(index, ((key, ranges), _))| (index, (*key, size_of(ranges)))).unzip();
        let config = options.config(&indices, self.shared.options.locality.host_id());
        let mut started = if keys.is_empty() {
            Ok(Vec::new().into_iter())
        } else {
            self.shared.objects.start_batch(mode, keys, sizes, config).await.map(Vec::into_iter)
        };
        let result = |((key, _), refused): (&ObjectRanges<'_>, Option<KvError>)| match (refused, &mut started)
        {
            (Some(error), _) => Err(error),
            (None, Err(error)) => Err(KvError::master("put", key, error.clone())),
            // ObjectClient checks that there are as many results as keys.
            (None, Ok(results)) => {
                let result = results.next().unwrap_or(Err(ErrorCode::INTERNAL_ERROR));
                result.map_err(|code| KvError::master("put", key, RpcError::Refused(code)))
            }
        };
        objects.iter().zip(refused).map(result).collect()
    }

    /// Ends the puts whose writes succeeded, which makes the objects visible.
    async fn end_all(
        &self,
        mode: PutMode,
        objects: &[ObjectRanges<'_>],
        results: &mut [Result<(), KvError>],
    ) {
        let written: Vec<_> = objects.iter().zip(results).filter(|(_, result)| result.is_ok()).collect();
        if written.is_empty() {
            return;
        }
        let metas: Vec<_> = written
            .iter()
            .map(|((key, ranges), _)| ObjectMeta { key: *key, object_checksum: self.checksum(ranges) })
            .collect();
        let ended = self.end_batch(mode, metas).await;
        for (((key, _), result), ended) in written.into_iter().zip(ended) {
            *result = ended.map_err(|source| KvError::master("end the put of", key, source));
        }
    }

    /// Ends puts. The call is idempotent, so it is repeated for objects whose response was lost.
    async fn end_batch(&self, mode: PutMode, objects: Vec<ObjectMeta<&str>>) -> Vec<Result<(), RpcError>> {
        let mut ended = self.end_batch_once(mode, &objects).await;
        let is_lost = |result: &Result<(), RpcError>| result.as_ref().is_err_and(RpcError::is_response_lost);
        let (lost, again): (Vec<_>, Vec<_>) =
            ended.iter_mut().zip(objects).filter(|(result, _)| is_lost(result)).unzip();
        if !again.is_empty() {
            let repeated = self.end_batch_once(mode, &again).await;
            lost.into_iter().zip(repeated).for_each(|(result, repeated)| *result = repeated);
        }
        ended
    }

    async fn end_batch_once(&self, mode: PutMode, objects: &[ObjectMeta<&str>]) -> Vec<Result<(), RpcError>> {
        match self.shared.objects.end_batch(mode, objects.to_vec()).await {
            Ok(results) => results.into_iter().map(|result| result.map_err(RpcError::from)).collect(),
            Err(error) => objects.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Locates objects at the master. Results are in the keys' order.
    async fn locate_all(&self, keys: &[&str]) -> Vec<Result<ObjectLocation, KvError>> {
        let requested_at = Instant::now();
        match self.shared.objects.replicas_of(keys.to_vec()).await {
            Ok(lists) => {
                let located = lists.into_iter().zip(keys).map(|(list, key)| match list {
                    Ok(list) => self.located(key, requested_at, &list),
                    Err(code) => Err(KvError::master("find", key, RpcError::Refused(code))),
                });
                located.collect()
            }
            Err(error) => keys.iter().map(|key| Err(KvError::master("find", key, error.clone()))).collect(),
        }
    }

    /// Runs futures with bounded concurrency and returns their results in order. They are passed as a vector because the compiler
    /// cannot infer `Send` for most iterators.
    async fn in_flight<F: Future>(&self, futures: Vec<F>) -> Vec<F::Output> {
        stream::iter(futures).buffered(self.shared.options.batch_in_flight.max(1)).collect().await
    }

    /// Whether a retry of a failed put may succeed.
    fn is_retryable(&self, error: &KvError) -> bool {
        match error.code() {
            Some(ErrorCode::NO_AVAILABLE_HANDLE) => self.shared.options.allocation_attempts > 1,
            Some(ErrorCode::OBJECT_REPLICA_BUSY) => true,
            _ => matches!(error, KvError::Transfer { .. }) && !may_still_be_writing(error),
        }
    }
}

/// The error for a key that this client is already writing: a put leaves that object, an upsert is retried after it.
fn being_written(mode: PutMode) -> ErrorCode {
    match mode {
        PutMode::Put => ErrorCode::OBJECT_ALREADY_EXISTS,
        PutMode::Upsert => ErrorCode::OBJECT_REPLICA_BUSY,
    }
}
