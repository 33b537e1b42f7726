//! Arguments of `setup`, and the stores that are set up.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use moongate_telemetry::{LoggingArgs, init_logs};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::values::without_gil;
use crate::in_process_store::InProcessStore;

/// Positional arguments of `setup` by the names of the dictionary.
const POSITIONAL: [&str; 13] = [
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "engine",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
];
/// How many of them are required.
const REQUIRED: usize = 7;

/// All set-up stores with the process of each. They are closed at the interpreter's exit.
static OPEN_STORES: Mutex<Vec<(u32, Weak<InProcessStore>)>> = Mutex::new(Vec::new());

/// A store that is set up, and the process in which it was.
pub(super) struct OpenStore {
    process: u32,
    store: Arc<InProcessStore>,
}

/// In a process that was forked later, connections and threads are those of the parent: nothing may be closed or waited for.
impl Drop for OpenStore {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A reference that is never released, so that the store is never dropped.
            let _ = Arc::into_raw(Arc::clone(&self.store));
        }
    }
}

impl OpenStore {
    /// A store of this process.
    pub(super) fn new(store: Arc<InProcessStore>) -> Self {
        let process = std::process::id();
        let mut stores = OPEN_STORES.lock();
        stores.retain(|(_, store)| store.strong_count() > 0);
        stores.push((process, Arc::downgrade(&store)));
        Self { process, store }
    }

    /// The store, unless this process was forked from the one that set it up.
    pub(super) fn get(&self) -> PyResult<Arc<InProcessStore>> {
        let process = std::process::id();
        if self.process == process {
            return Ok(Arc::clone(&self.store));
        }
        Err(PyRuntimeError::new_err(format!(
            "this store was set up in process {}, and process {process} was forked from it: connections cannot be shared; \
             create a MooncakeDistributedStore in the new process and call setup there",
            self.process
        )))
    }
}

/// Closes all stores of this process. Runs at the interpreter's exit, so that segments are unmounted.
#[pyfunction]
pub(super) fn close_all(py: Python<'_>) -> PyResult<()> {
    let stores = std::mem::take(&mut *OPEN_STORES.lock());
    // In a process that was forked, the others are the parent's.
    let own = stores.into_iter().filter(|(process, _)| *process == std::process::id());
    let own: Vec<Arc<InProcessStore>> = own.filter_map(|(_, store)| store.upgrade()).collect();
    without_gil(py, || own.iter().for_each(|store| store.close()))
}

/// Warnings and errors by default, because an engine has logs of its own.
pub(super) fn start_logs() {
    let filter = std::env::var("MOONGATE_LOG_FILTER").unwrap_or_else(|_| "warn".to_owned());
    // After the first call, or in a program with logs of its own, they stay as they are.
    let _ = init_logs(&LoggingArgs { filter, ..LoggingArgs::default() });
}

/// The arguments of `setup` by name: of a dictionary, or positional and named.
pub(super) fn setup_values(
    arguments: &Bound<'_, PyTuple>,
    named: Option<&Bound<'_, PyDict>>,
) -> PyResult<BTreeMap<String, String>> {
    let config = named.and_then(|named| named.get_item("config").transpose()).transpose()?;
    let first = config.or_else(|| arguments.get_item(0).ok());
    let mut values = BTreeMap::new();
    if let Some(dictionary) = first.as_ref().and_then(|first| first.cast::<PyDict>().ok()) {
        for (name, value) in dictionary.iter() {
            insert_text(&mut values, &name.str()?.to_cow()?, &value)?;
        }
        return Ok(values);
    }
    if arguments.len() > POSITIONAL.len() {
        return Err(PyTypeError::new_err(format!("setup() takes at most {} arguments", POSITIONAL.len())));
    }
    for (name, value) in POSITIONAL.iter().zip(arguments.iter()) {
        insert_text(&mut values, name, &value)?;
    }
    for (name, value) in named.into_iter().flat_map(|named| named.iter()) {
        let name: String = name.extract()?;
        if !POSITIONAL.contains(&name.as_str()) {
            return Err(PyTypeError::new_err(format!("setup() got an unexpected keyword argument '{name}'")));
        }
        insert_text(&mut values, &name, &value)?;
    }
    match POSITIONAL.iter().take(REQUIRED).find(|name| !values.contains_key(**name)) {
        Some(missing) => Err(PyTypeError::new_err(format!("setup() misses the argument '{missing}'"))),
        None => Ok(values),
    }
}

/// Adds a value as text. None is no value.
fn insert_text(values: &mut BTreeMap<String, String>, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    if !value.is_none() {
        values.insert(name.to_owned(), value.str()?.to_cow()?.into_owned());
    }
    Ok(())
}
