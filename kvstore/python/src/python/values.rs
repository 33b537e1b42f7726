//! Conversions of values, and the guard around every call.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::registered_memory::MemoryRange;

/// Bytes of a Python object. The content of `bytes` is used in place; other objects may change while a call runs, so theirs is
/// copied.
pub(super) enum PayloadBytes<'py> {
    InPlace(Bound<'py, PyBytes>),
    Copied(Vec<u8>),
}

impl<'py> FromPyObject<'_, 'py> for PayloadBytes<'py> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = value.cast::<PyBytes>() {
            return Ok(Self::InPlace(bytes.to_owned()));
        }
        // Fails with a TypeError if the object is no buffer.
        let copied = PyMemoryView::from(&value)?.call_method0("tobytes")?;
        Ok(Self::Copied(copied.cast::<PyBytes>()?.as_bytes().to_vec()))
    }
}

impl PayloadBytes<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::InPlace(bytes) => bytes.as_bytes(),
            Self::Copied(bytes) => bytes,
        }
    }
}

/// Runs a call without the GIL. A panic in it becomes a `RuntimeError`.
pub(super) fn without_gil<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(call))).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
        PyRuntimeError::new_err(format!("moongate_store: a defect stopped the call: {text}"))
    })
}

pub(super) fn texts(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

/// One range per object. `None` if the lists have different lengths.
pub(super) fn ranges(addresses: &[usize], sizes: &[usize]) -> Option<Vec<Vec<MemoryRange>>> {
    Some(buffer_list(addresses, sizes)?.into_iter().map(|range| vec![range]).collect())
}

/// Several ranges per object.
pub(super) fn nested_ranges(addresses: &[Vec<usize>], sizes: &[Vec<usize>]) -> Option<Vec<Vec<MemoryRange>>> {
    if addresses.len() != sizes.len() {
        return None;
    }
    // An object with lists of different lengths has no ranges, which fails for it alone.
    let lists = addresses.iter().zip(sizes);
    Some(lists.map(|(addresses, sizes)| buffer_list(addresses, sizes).unwrap_or_default()).collect())
}

fn buffer_list(addresses: &[usize], sizes: &[usize]) -> Option<Vec<MemoryRange>> {
    let pairs = addresses.iter().zip(sizes);
    (addresses.len() == sizes.len())
        .then(|| pairs.map(|(address, size)| MemoryRange { address: *address, size: *size }).collect())
}
