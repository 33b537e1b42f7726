//! A set-up store: its clients, its registered buffers and its mounted segment.

use bytes::Bytes;
use mooncake_wire::types::ReplicaList;
use moongate_master_client::rpc::PutMode;
use moongate_store_client::{KvClient, KvError, ObjectRanges, PutOptions, PutOutcome};
use parking_lot::Mutex;

use crate::embedded_node::{EmbeddedNode, EmbeddedNodeError};
use crate::object_ranges::{merge_adjacent, total_size};
use crate::registered_memory::{MemoryRange, RegisteredMemory, RegistrationError};
use crate::return_code::{INVALID_PARAMS, ReturnCode, SETUP_FAILED, TRANSFER_FAILED, of_call, of_error};
use crate::session_pool::{SessionError, SessionPool};
use crate::settings::{StoreSettings, StoreSettingsError};

/// A store cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum StoreOpenError {
    #[error(transparent)]
    Settings(#[from] StoreSettingsError),
    #[error("cannot mount a segment: {0}")]
    Segment(#[from] EmbeddedNodeError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the master does not answer: {0}")]
    Master(#[from] KvError),
}

impl StoreOpenError {
    /// The return code of `setup`.
    #[must_use]
    pub fn code(&self) -> ReturnCode {
        match self {
            // Mooncake's module reports this as the failure of its transfer engine.
            Self::Settings(StoreSettingsError::Protocol(_)) => SETUP_FAILED,
            Self::Settings(_) => INVALID_PARAMS,
            _ => SETUP_FAILED,
        }
    }
}

/// A client of a store, and a node of it if a segment is mounted. Its calls block, and may be made from several threads.
///
/// Results are Mooncake's return codes. A batch has one for each key, in the keys' order.
pub struct InProcessStore {
    hostname: String,
    sessions: SessionPool,
    /// Buffers that Python registered.
    pub memory: RegisteredMemory,
    segment: Mutex<Option<EmbeddedNode>>,
}

impl InProcessStore {
    /// Connects to the master, and mounts a segment if the settings have one.
    ///
    /// # Errors
    /// [`StoreOpenError`] if the master does not answer or the segment cannot be mounted.
    pub fn open(settings: &StoreSettings) -> Result<Self, StoreOpenError> {
        let segment = match settings.segment_size {
            0 => None,
            _ => {
                let (flags, config) = settings.node()?;
                Some(EmbeddedNode::start(flags, config)?)
            }
        };
        let hostname = segment.as_ref().map_or(settings.hostname.as_str(), EmbeddedNode::endpoint).to_owned();
        let sessions = SessionPool::new(&settings.master, settings.client_options());
        let store =
            Self { hostname, sessions, memory: RegisteredMemory::default(), segment: Mutex::new(segment) };
        store.sessions.run(async |client| client.exist(&["setup"]).await)??;
        Ok(store)
    }

    /// The segment's name, or the configured host without a segment.
    #[must_use]
    pub fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Unmounts the segment. Further calls still reach the other nodes.
    pub fn close(&self) {
        drop(self.segment.lock().take());
    }

    fn run<T>(&self, call: impl AsyncFnOnce(&KvClient) -> T) -> Result<T, ReturnCode> {
        self.sessions.run(call).map_err(|error| {
            tracing::error!(%error, "a call to the store failed");
            SETUP_FAILED
        })
    }

    /// 0 if the master answers, 2 otherwise.
    pub fn health(&self) -> ReturnCode {
        let answered = self.run(async |client| client.exist(&["health"]).await.is_ok());
        if answered == Ok(true) { 0 } else { 2 }
    }

    /// Puts objects. An existing object is unchanged, and counts as success.
    pub fn put(&self, mode: PutMode, objects: &[(&str, &[u8])], options: &PutOptions) -> Vec<ReturnCode> {
        let objects: Vec<ObjectRanges<'_>> =
            objects.iter().map(|(key, bytes)| (*key, std::slice::from_ref(bytes))).collect();
        self.put_ranges(mode, &objects, options)
    }

    fn put_ranges(
        &self,
        mode: PutMode,
        objects: &[ObjectRanges<'_>],
        options: &PutOptions,
    ) -> Vec<ReturnCode> {
        if !is_applicable(options, objects.len()) {
            return vec![INVALID_PARAMS; objects.len()];
        }
        let results = self.run(async |client| match (objects, mode) {
            ([(key, ranges)], PutMode::Put) => vec![client.put_ranges(key, ranges, options).await],
            ([(key, ranges)], PutMode::Upsert) => {
                vec![client.upsert_ranges(key, ranges, options).await.map(|()| PutOutcome::Stored)]
            }
            (objects, PutMode::Put) => client.put_batch_ranges(objects, options).await,
            (objects, PutMode::Upsert) => client.upsert_batch_ranges(objects, options).await,
        });
        match results {
            Ok(results) => {
                objects.iter().zip(results).map(|((key, _), result)| put_code(key, result)).collect()
            }
            Err(code) => vec![code; objects.len()],
        }
    }

    /// Puts objects from registered buffers: each from several, in their order.
    pub fn put_from(
        &self,
        mode: PutMode,
        keys: &[String],
        buffers: &[Vec<MemoryRange>],
        options: &PutOptions,
    ) -> Vec<ReturnCode> {
        if keys.len() != buffers.len() || !is_applicable(options, keys.len()) {
            return vec![INVALID_PARAMS; keys.len()];
        }
        let sources = keys.iter().zip(buffers).enumerate().filter_map(|(index, (key, parts))| {
            let parts = merge_adjacent(parts);
            let source: Result<Vec<&[u8]>, _> = parts.iter().map(|part| self.memory.source(*part)).collect();
            Some((index, key.as_str(), source.ok().filter(|source| !source.is_empty())?))
        });
        let sources: Vec<(usize, &str, Vec<&[u8]>)> = sources.collect();
        let objects: Vec<ObjectRanges<'_>> =
            sources.iter().map(|(_, key, source)| (*key, source.as_slice())).collect();
        let indices: Vec<usize> = sources.iter().map(|(index, ..)| *index).collect();
        let mut codes = vec![INVALID_PARAMS; keys.len()];
        let results = self.put_ranges(mode, &objects, &options.of_indices(&indices));
        scatter_codes(&mut codes, &indices, results);
        codes
    }

    /// Gets an object.
    ///
    /// # Errors
    /// The return code, for example -704 if there is none.
    pub fn get(&self, key: &str) -> Result<Bytes, ReturnCode> {
        self.run(async |client| client.get(key).await)?.map_err(|error| get_code(key, &error))
    }

    /// Gets objects. Results are in the keys' order.
    pub fn get_all(&self, keys: &[&str]) -> Vec<Result<Bytes, ReturnCode>> {
        match self.run(async |client| client.get_batch(keys).await) {
            Ok(results) => {
                let results = keys.iter().zip(results);
                results.map(|(key, result)| result.map_err(|error| get_code(key, &error))).collect()
            }
            Err(code) => vec![Err(code); keys.len()],
        }
    }

    /// Gets objects into buffers that are registered in `memory`: each into several, in their order. Returns the objects' sizes.
    /// With `is_exact`, the buffers of an object must be as large as the object.
    pub fn get_into(
        &self,
        memory: &RegisteredMemory,
        keys: &[String],
        buffers: &[Vec<MemoryRange>],
        is_exact: bool,
    ) -> Vec<ReturnCode> {
        if keys.len() != buffers.len() {
            return vec![INVALID_PARAMS; keys.len()];
        }
        let buffers: Vec<Vec<MemoryRange>> = buffers.iter().map(|parts| merge_adjacent(parts)).collect();
        let mut codes = vec![INVALID_PARAMS; keys.len()];
        // Objects with buffers that are not registered keep the code for that.
        let usable = |index: &usize| {
            buffers.get(*index).is_some_and(|parts| !parts.is_empty() && memory.destinations(parts).is_ok())
        };
        let indices: Vec<usize> = (0..keys.len()).filter(usable).collect();
        let results = self.read_batch(memory, keys, &buffers, &indices, is_exact).unwrap_or_else(|_| {
            // Two objects have the same buffer. One after another, the last one wins.
            let alone = |index: &usize| self.read_batch(memory, keys, &buffers, &[*index], is_exact);
            let results =
                indices.iter().map(|index| alone(index).ok().and_then(|codes| codes.first().copied()));
            results.map(|code| code.unwrap_or(INVALID_PARAMS)).collect()
        });
        scatter_codes(&mut codes, &indices, results);
        codes
    }

    /// Reads the objects with these indices, all at once.
    fn read_batch(
        &self,
        memory: &RegisteredMemory,
        keys: &[String],
        buffers: &[Vec<MemoryRange>],
        indices: &[usize],
        is_exact: bool,
    ) -> Result<Vec<ReturnCode>, RegistrationError> {
        let chosen: Vec<(&str, &Vec<MemoryRange>)> = indices
            .iter()
            .filter_map(|index| Some((keys.get(*index)?.as_str(), buffers.get(*index)?)))
            .collect();
        let ranges: Vec<MemoryRange> = chosen.iter().flat_map(|(_, parts)| parts.iter().copied()).collect();
        let mut views = memory.destinations(&ranges)?.into_iter();
        let mut objects: Vec<(&str, Vec<&mut [u8]>)> =
            chosen.iter().map(|(key, parts)| (*key, views.by_ref().take(parts.len()).collect())).collect();
        let results = self.run(async |client| match &mut objects[..] {
            [(key, into)] => vec![client.get_into_ranges(key, into).await],
            objects => client.get_batch_into_ranges(objects).await,
        });
        let results = match results {
            Ok(results) => results,
            Err(code) => return Ok(vec![code; indices.len()]),
        };
        let codes = chosen.iter().zip(results).map(|((key, parts), result)| match result {
            Ok(size) if is_exact && Some(size) != total_size(parts) => TRANSFER_FAILED,
            Ok(size) => ReturnCode::try_from(size).unwrap_or(ReturnCode::MAX),
            Err(error) => get_code(key, &error),
        });
        Ok(codes.collect())
    }

    /// The replicas of objects, or their error codes. Leases the objects.
    ///
    /// # Errors
    /// The return code if the master does not answer.
    pub fn replicas(
        &self,
        keys: &[&str],
    ) -> Result<Vec<Result<ReplicaList<String>, ReturnCode>>, ReturnCode> {
        let lists = self.run(async |client| client.objects().replicas_of(keys.to_vec()).await)?;
        let lists = lists.map_err(|error| of_call(&error))?;
        Ok(lists.into_iter().map(|list| list.map_err(|code| ReturnCode::from(code.0))).collect())
    }

    /// 1 for each key with an object, 0 without, negative on failure. Leases the objects.
    pub fn exist(&self, keys: &[&str]) -> Vec<ReturnCode> {
        match self.run(async |client| client.objects().exist(keys.to_vec()).await) {
            Ok(Ok(results)) => {
                let code = |result| match result {
                    Ok(exists) => ReturnCode::from(exists),
                    Err(mooncake_wire::ErrorCode(code)) => ReturnCode::from(code),
                };
                results.into_iter().map(code).collect()
            }
            Ok(Err(error)) => vec![of_call(&error); keys.len()],
            Err(code) => vec![code; keys.len()],
        }
    }

    /// Removes objects. Results are in the keys' order.
    pub fn remove(&self, keys: &[&str], force: bool) -> Vec<ReturnCode> {
        let removed = self.run(async |client| match keys {
            [key] => Ok(vec![client.objects().remove(key, force).await.map_err(|error| of_call(&error))]),
            keys => {
                let results = client.objects().remove_batch(keys.to_vec(), force).await;
                let results = results.map_err(|error| of_call(&error))?;
                Ok(results.into_iter().map(|it| it.map_err(|code| ReturnCode::from(code.0))).collect())
            }
        });
        match removed.and_then(|results: Result<Vec<Result<(), ReturnCode>>, ReturnCode>| results) {
            Ok(results) => results.into_iter().map(|result| result.err().unwrap_or(0)).collect(),
            Err(code) => vec![code; keys.len()],
        }
    }

    /// Removes the objects whose key matches a regular expression. Returns their number.
    pub fn remove_matching(&self, regex: &str, force: bool) -> ReturnCode {
        count_code(self.run(async |client| client.remove_matching(regex, force).await))
    }

    /// Removes all objects of the tenant. Returns their number.
    pub fn remove_all(&self, force: bool) -> ReturnCode {
        count_code(self.run(async |client| client.remove_all(force).await))
    }
}

/// Whether the options can hold for so many objects.
fn is_applicable(options: &PutOptions, objects: usize) -> bool {
    options.replicas > 0 && (options.object_groups.is_empty() || options.object_groups.len() == objects)
}

fn scatter_codes(codes: &mut [ReturnCode], indices: &[usize], results: Vec<ReturnCode>) {
    for (index, result) in indices.iter().zip(results) {
        if let Some(code) = codes.get_mut(*index) {
            *code = result;
        }
    }
}

fn put_code(key: &str, result: Result<PutOutcome, KvError>) -> ReturnCode {
    match result {
        Ok(_) => 0,
        Err(error) => {
            tracing::warn!(key, %error, "a put failed");
            of_error(&error)
        }
    }
}

/// A missing object is no failure that needs a log line.
fn get_code(key: &str, error: &KvError) -> ReturnCode {
    if !matches!(error, KvError::NotFound { .. }) {
        tracing::warn!(key, %error, "a get failed");
    }
    of_error(error)
}

fn count_code(result: Result<Result<u64, KvError>, ReturnCode>) -> ReturnCode {
    match result {
        Ok(Ok(count)) => ReturnCode::try_from(count).unwrap_or(ReturnCode::MAX),
        Ok(Err(error)) => of_error(&error),
        Err(code) => code,
    }
}
