//! `MooncakeDistributedStore`.

use std::collections::BTreeMap;
use std::sync::Arc;

use moongate_master_client::rpc::PutMode;
use moongate_store_client::PutOptions;
use parking_lot::Mutex;
use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use super::configuration::ReplicateConfig;
use super::lifecycle::{self, OpenStore, setup_values};
use super::replicas::ReplicaDescriptor;
use super::values::{PayloadBytes, nested_ranges, ranges, texts, without_gil};
use crate::in_process_store::{InProcessStore, StoreOpenError};
use crate::registered_memory::{MemoryRange, NewBuffers};
use crate::return_code::{INVALID_PARAMS, ReturnCode};
use crate::settings::StoreSettings;

/// Result of `health_check` without a store.
const HEALTH_NOT_SET_UP: ReturnCode = 1;

/// Client of a KV store, and a node of it if a segment is mounted. With the calls and return codes of Mooncake's class.
#[pyclass(frozen, subclass, module = "moongate_store")]
#[derive(Default)]
pub(super) struct MooncakeDistributedStore {
    open: Mutex<Option<OpenStore>>,
}

impl MooncakeDistributedStore {
    /// The store, if it is set up and not closed.
    fn store(&self) -> PyResult<Option<Arc<InProcessStore>>> {
        self.open.lock().as_ref().map(OpenStore::get).transpose()
    }

    /// Runs a call of the store without the GIL. `missing` is the result without a store.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        missing: impl FnOnce() -> T,
        call: impl FnOnce(&InProcessStore) -> T + Send,
    ) -> PyResult<T> {
        match self.store()? {
            None => Ok(missing()),
            Some(store) => without_gil(py, || {
                let result = call(&store);
                drop(store);
                result
            }),
        }
    }

    fn code(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&InProcessStore) -> ReturnCode + Send,
    ) -> PyResult<ReturnCode> {
        self.call(py, || INVALID_PARAMS, call)
    }

    fn codes(
        &self,
        py: Python<'_>,
        keys: &[String],
        call: impl FnOnce(&InProcessStore) -> Vec<ReturnCode> + Send,
    ) -> PyResult<Vec<ReturnCode>> {
        self.call(py, || vec![INVALID_PARAMS; keys.len()], call)
    }

    fn set_up(&self, py: Python<'_>, values: &BTreeMap<String, String>) -> PyResult<ReturnCode> {
        lifecycle::start_logs();
        let settings = match StoreSettings::from_dictionary(values) {
            Ok(settings) => settings,
            Err(error) => {
                tracing::error!(%error, "cannot set up the store");
                return Ok(StoreOpenError::from(error).code());
            }
        };
        match without_gil(py, || InProcessStore::open(&settings))? {
            Ok(store) => {
                let previous = self.open.lock().replace(OpenStore::new(Arc::new(store)));
                without_gil(py, || drop(previous))?;
                Ok(0)
            }
            Err(error) => {
                tracing::error!(%error, "cannot set up the store");
                Ok(error.code())
            }
        }
    }

    fn put_values(
        &self,
        py: Python<'_>,
        mode: PutMode,
        keys: &[String],
        values: &[PayloadBytes<'_>],
        config: Option<&ReplicateConfig>,
    ) -> PyResult<ReturnCode> {
        let Some(options) = put_options(config, keys.len()).filter(|_| keys.len() == values.len()) else {
            return Ok(INVALID_PARAMS);
        };
        let objects: Vec<(&str, &[u8])> =
            keys.iter().zip(values).map(|(key, value)| (key.as_str(), value.bytes())).collect();
        let codes = self.codes(py, keys, |store| store.put(mode, &objects, &options))?;
        Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))
    }

    /// Puts several values as one object.
    fn put_joined(
        &self,
        py: Python<'_>,
        mode: PutMode,
        key: String,
        parts: &[PayloadBytes<'_>],
        config: Option<&ReplicateConfig>,
    ) -> PyResult<ReturnCode> {
        if parts.is_empty() {
            return Ok(0);
        }
        let whole = parts.iter().map(PayloadBytes::bytes).collect::<Vec<_>>().concat();
        self.put_values(py, mode, &[key], &[PayloadBytes::Copied(whole)], config)
    }

    fn put_buffers(
        &self,
        py: Python<'_>,
        mode: PutMode,
        keys: &[String],
        buffers: Option<Vec<Vec<MemoryRange>>>,
        config: Option<&ReplicateConfig>,
    ) -> PyResult<Vec<ReturnCode>> {
        let (Some(buffers), Some(options)) = (buffers, put_options(config, keys.len())) else {
            return Ok(vec![INVALID_PARAMS; keys.len()]);
        };
        self.codes(py, keys, |store| store.put_from(mode, keys, &buffers, &options))
    }

    /// Reads objects into new Python objects that have their memory.
    fn read_buffers<'py>(
        &self,
        py: Python<'py>,
        keys: &[String],
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        let Some(store) = self.store()? else { return Ok(vec![None; keys.len()]) };
        let names = texts(keys);
        let located = without_gil(py, || store.replicas(&names))?.unwrap_or_default();
        let class = py.import("moongate_store")?.getattr("BufferHandle")?;
        let (mut new, mut handles) = (NewBuffers::new(), vec![None; keys.len()]);
        let (mut found, mut wanted, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for ((index, key), list) in keys.iter().enumerate().zip(located) {
            let Some(size) = list.ok().as_ref().and_then(object_size) else { continue };
            buffers.push(vec![new.allocate(&class, size)?]);
            found.push(index);
            wanted.push(key.clone());
        }
        let memory = new.memory();
        let codes = without_gil(py, || {
            let codes = store.get_into(memory, &wanted, &buffers, true);
            drop(store);
            codes
        })?;
        for ((index, handle), code) in found.into_iter().zip(new.into_handles()).zip(codes) {
            if code >= 0
                && let Some(slot) = handles.get_mut(index)
            {
                *slot = Some(handle.into_any());
            }
        }
        Ok(handles)
    }
}

fn put_options(config: Option<&ReplicateConfig>, objects: usize) -> Option<PutOptions> {
    config.map_or_else(|| Some(PutOptions::default()), |config| config.options(objects))
}

fn object_size(list: &mooncake_wire::types::ReplicaList<String>) -> Option<u64> {
    Some(moongate_store_client::ObjectStat::from(list).size).filter(|size| *size > 0)
}

fn first_code(codes: Vec<ReturnCode>) -> ReturnCode {
    codes.into_iter().next().unwrap_or(INVALID_PARAMS)
}

fn single(address: usize, size: usize) -> Vec<Vec<MemoryRange>> {
    vec![vec![MemoryRange { address, size }]]
}

#[pymethods]
impl MooncakeDistributedStore {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Connects to a store, and mounts a segment of `global_segment_size` bytes in this process unless it is 0. The arguments
    /// are those of Mooncake's `setup`, positional, named or in a dictionary. An `engine` is ignored: this store has its own.
    #[pyo3(signature = (*arguments, **named))]
    fn setup(
        &self,
        py: Python<'_>,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<ReturnCode> {
        self.set_up(py, &setup_values(arguments, named)?)
    }

    /// Not supported: Mooncake's dummy client shares memory with a `mooncake_client` process over a protocol of its own.
    fn setup_dummy(
        &self,
        mem_pool_size: u64,
        local_buffer_size: u64,
        server_address: &str,
    ) -> PyResult<ReturnCode> {
        let _ = (mem_pool_size, local_buffer_size);
        Err(PyNotImplementedError::new_err(format!(
            "setup_dummy cannot connect to {server_address}: run `moongate store` on this host instead, and call setup with \
             global_segment_size=0 (SGLang: \"standalone_storage\": false)"
        )))
    }

    /// Unmounts the segment and closes all connections.
    fn close(&self, py: Python<'_>) -> PyResult<ReturnCode> {
        let open = self.open.lock().take();
        // A forked process leaves the store of its parent as it is.
        if let Some(Ok(store)) = open.as_ref().map(OpenStore::get) {
            without_gil(py, || store.close())?;
        }
        without_gil(py, || drop(open))?;
        Ok(0)
    }

    fn get_hostname(&self) -> PyResult<String> {
        Ok(self.store()?.map_or_else(String::new, |store| store.hostname().to_owned()))
    }

    /// 0 if the master answers, 1 if the store is not set up, 2 otherwise.
    fn health_check(&self, py: Python<'_>) -> PyResult<ReturnCode> {
        self.call(py, || HEALTH_NOT_SET_UP, InProcessStore::health)
    }

    /// Allows other calls to use this memory. It must be readable and writable, and stay allocated until `unregister_buffer` and all
    /// calls that began before have returned. While a call uses a part of it, nothing else may write to that part; while a call writes
    /// to a part of it, nothing else may read it. Nothing checks this: an address of other memory corrupts the process.
    fn register_buffer(&self, buffer_ptr: usize, size: usize) -> PyResult<ReturnCode> {
        let Some(store) = self.store()? else { return Ok(INVALID_PARAMS) };
        let range = MemoryRange { address: buffer_ptr, size };
        Ok(store.memory.register_for_python(range).map_or(INVALID_PARAMS, |()| 0))
    }

    fn unregister_buffer(&self, buffer_ptr: usize) -> PyResult<ReturnCode> {
        let Some(store) = self.store()? else { return Ok(INVALID_PARAMS) };
        Ok(store.memory.unregister(buffer_ptr).map_or(INVALID_PARAMS, |()| 0))
    }

    #[pyo3(signature = (key, value, config=None))]
    fn put(
        &self,
        py: Python<'_>,
        key: String,
        value: PayloadBytes<'_>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_values(py, PutMode::Put, &[key], &[value], config.as_deref())
    }

    #[pyo3(signature = (key, value, config=None))]
    fn upsert(
        &self,
        py: Python<'_>,
        key: String,
        value: PayloadBytes<'_>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_values(py, PutMode::Upsert, &[key], &[value], config.as_deref())
    }

    #[pyo3(signature = (keys, values, config=None))]
    fn put_batch(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        values: Vec<PayloadBytes<'_>>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_values(py, PutMode::Put, &keys, &values, config.as_deref())
    }

    #[pyo3(signature = (keys, values, config=None))]
    fn upsert_batch(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        values: Vec<PayloadBytes<'_>>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_values(py, PutMode::Upsert, &keys, &values, config.as_deref())
    }

    /// Puts several values as one object.
    #[pyo3(signature = (key, *parts, config=None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        key: String,
        parts: Vec<PayloadBytes<'_>>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_joined(py, PutMode::Put, key, &parts, config.as_deref())
    }

    /// As `put_parts`, and replaces an object that exists.
    #[pyo3(signature = (key, *parts, config=None))]
    fn upsert_parts(
        &self,
        py: Python<'_>,
        key: String,
        parts: Vec<PayloadBytes<'_>>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        self.put_joined(py, PutMode::Upsert, key, &parts, config.as_deref())
    }

    #[pyo3(signature = (key, buffer_ptr, size, config=None))]
    fn put_from(
        &self,
        py: Python<'_>,
        key: String,
        buffer_ptr: usize,
        size: usize,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        if size == 0 && self.store()?.is_some() {
            return Ok(0);
        }
        let buffers = Some(single(buffer_ptr, size));
        Ok(first_code(self.put_buffers(py, PutMode::Put, &[key], buffers, config.as_deref())?))
    }

    #[pyo3(signature = (key, buffer_ptr, size, config=None))]
    fn upsert_from(
        &self,
        py: Python<'_>,
        key: String,
        buffer_ptr: usize,
        size: usize,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<ReturnCode> {
        let buffers = Some(single(buffer_ptr, size));
        Ok(first_code(self.put_buffers(py, PutMode::Upsert, &[key], buffers, config.as_deref())?))
    }

    #[pyo3(signature = (keys, buffer_ptrs, sizes, config=None))]
    fn batch_put_from(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffer_ptrs: Vec<usize>,
        sizes: Vec<usize>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<Vec<ReturnCode>> {
        self.put_buffers(py, PutMode::Put, &keys, ranges(&buffer_ptrs, &sizes), config.as_deref())
    }

    #[pyo3(signature = (keys, buffer_ptrs, sizes, config=None))]
    fn batch_upsert_from(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffer_ptrs: Vec<usize>,
        sizes: Vec<usize>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<Vec<ReturnCode>> {
        self.put_buffers(py, PutMode::Upsert, &keys, ranges(&buffer_ptrs, &sizes), config.as_deref())
    }

    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, config=None))]
    fn batch_put_from_multi_buffers(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<usize>>,
        all_sizes: Vec<Vec<usize>>,
        config: Option<PyRef<'_, ReplicateConfig>>,
    ) -> PyResult<Vec<ReturnCode>> {
        let buffers = nested_ranges(&all_buffer_ptrs, &all_sizes);
        self.put_buffers(py, PutMode::Put, &keys, buffers, config.as_deref())
    }

    /// The object's content; empty if there is none.
    fn get<'py>(&self, py: Python<'py>, key: String) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.call(py, || None, |store| store.get(&key).ok())?;
        Ok(PyBytes::new(py, bytes.as_deref().unwrap_or_default()))
    }

    fn get_batch<'py>(&self, py: Python<'py>, keys: Vec<String>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let found = self.call(py, Vec::new, |store| store.get_all(&texts(&keys)))?;
        let values: Vec<_> =
            found.into_iter().map(|bytes| PyBytes::new(py, bytes.as_deref().unwrap_or_default())).collect();
        // Mooncake's module returns one empty value for no keys.
        Ok(if values.is_empty() { vec![PyBytes::new(py, b"")] } else { values })
    }

    fn get_buffer<'py>(&self, py: Python<'py>, key: String) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(self.read_buffers(py, &[key])?.pop().flatten())
    }

    fn batch_get_buffer<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<String>,
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        self.read_buffers(py, &keys)
    }

    fn get_into(&self, py: Python<'_>, key: String, buffer_ptr: usize, size: usize) -> PyResult<ReturnCode> {
        let keys = [key];
        let codes = self.codes(py, &keys, |store| {
            store.get_into(&store.memory, &keys, &single(buffer_ptr, size), false)
        })?;
        Ok(first_code(codes))
    }

    fn batch_get_into(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffer_ptrs: Vec<usize>,
        sizes: Vec<usize>,
    ) -> PyResult<Vec<ReturnCode>> {
        let buffers = ranges(&buffer_ptrs, &sizes).unwrap_or_default();
        self.codes(py, &keys, |store| store.get_into(&store.memory, &keys, &buffers, false))
    }

    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node=false))]
    fn batch_get_into_multi_buffers(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        all_buffer_ptrs: Vec<Vec<usize>>,
        all_sizes: Vec<Vec<usize>>,
        prefer_alloc_in_same_node: bool,
    ) -> PyResult<Vec<ReturnCode>> {
        // It concerns writes only.
        let _ = prefer_alloc_in_same_node;
        let buffers = nested_ranges(&all_buffer_ptrs, &all_sizes).unwrap_or_default();
        self.codes(py, &keys, |store| store.get_into(&store.memory, &keys, &buffers, true))
    }

    fn get_size(&self, py: Python<'_>, key: String) -> PyResult<ReturnCode> {
        self.code(py, |store| match store.replicas(&[&key]) {
            Ok(lists) => match lists.into_iter().next() {
                Some(Ok(list)) => {
                    object_size(&list).and_then(|size| ReturnCode::try_from(size).ok()).unwrap_or(0)
                }
                Some(Err(code)) => code,
                None => INVALID_PARAMS,
            },
            Err(code) => code,
        })
    }

    fn get_replica_desc(&self, py: Python<'_>, key: String) -> PyResult<Vec<ReplicaDescriptor>> {
        let lists = self.call(py, Vec::new, |store| store.replicas(&[&key]).unwrap_or_default())?;
        let replicas = lists.into_iter().flatten().flat_map(|list| list.replicas);
        Ok(replicas.map(ReplicaDescriptor::from).collect())
    }

    /// The replicas of the keys that have an object.
    fn batch_get_replica_desc(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
    ) -> PyResult<BTreeMap<String, Vec<ReplicaDescriptor>>> {
        let lists = self.call(py, Vec::new, |store| store.replicas(&texts(&keys)).unwrap_or_default())?;
        let found = keys.iter().zip(lists).filter_map(|(key, list)| Some((key.clone(), list.ok()?.replicas)));
        Ok(found
            .map(|(key, replicas)| (key, replicas.into_iter().map(ReplicaDescriptor::from).collect()))
            .collect())
    }

    /// 1 if the object exists, 0 if not, negative on failure.
    fn is_exist(&self, py: Python<'_>, key: String) -> PyResult<ReturnCode> {
        self.code(py, |store| first_code(store.exist(&[&key])))
    }

    fn batch_is_exist(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<Vec<ReturnCode>> {
        self.codes(py, &keys, |store| store.exist(&texts(&keys)))
    }

    #[pyo3(signature = (key, force=false))]
    fn remove(&self, py: Python<'_>, key: String, force: bool) -> PyResult<ReturnCode> {
        self.code(py, |store| first_code(store.remove(&[&key], force)))
    }

    #[pyo3(signature = (keys, force=false))]
    fn batch_remove(&self, py: Python<'_>, keys: Vec<String>, force: bool) -> PyResult<Vec<ReturnCode>> {
        self.codes(py, &keys, |store| store.remove(&texts(&keys), force))
    }

    #[pyo3(signature = (regex_pattern, force=false))]
    fn remove_by_regex(&self, py: Python<'_>, regex_pattern: String, force: bool) -> PyResult<ReturnCode> {
        self.code(py, |store| store.remove_matching(&regex_pattern, force))
    }

    #[pyo3(signature = (force=false))]
    fn remove_all(&self, py: Python<'_>, force: bool) -> PyResult<ReturnCode> {
        self.code(py, |store| store.remove_all(force))
    }
}
