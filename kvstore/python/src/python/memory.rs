//! Memory of the host, and its placement.

use std::collections::HashMap;

use moongate_memory::{MappedRegion, PageMode, numa};
use parking_lot::Mutex;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::return_code::{INVALID_PARAMS, ReturnCode};

/// Allocates page-aligned memory. It is freed by `free`, or with the allocator.
#[pyclass(frozen, module = "moongate_store")]
#[derive(Default)]
pub(super) struct MooncakeHostMemAllocator {
    regions: Mutex<HashMap<u64, MappedRegion>>,
}

#[pymethods]
impl MooncakeHostMemAllocator {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The address of new memory; 0 if there is none.
    fn alloc(&self, size: u64) -> u64 {
        match MappedRegion::anonymous(size, PageMode::Transparent) {
            Ok(region) => {
                let address = region.base();
                self.regions.lock().insert(address, region);
                address
            }
            Err(error) => {
                tracing::error!(size, %error, "cannot allocate memory");
                0
            }
        }
    }

    /// Frees memory from `alloc`, which must not be in use.
    fn free(&self, address: u64) -> ReturnCode {
        self.regions.lock().remove(&address).map_or(INVALID_PARAMS, |_| 0)
    }
}

/// Binds the calling thread to the CPUs of a NUMA node, and lets it prefer the node's memory.
#[pyfunction]
pub(super) fn bind_to_numa_node(node: usize) -> PyResult<()> {
    numa::bind_current_thread(node)
        .map_err(|error| PyOSError::new_err(format!("cannot bind to NUMA node {node}: {error}")))
}
