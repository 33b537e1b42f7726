//! Descriptors of replicas.

use mooncake_wire::types::{self, ReplicaMedium};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// State of a replica.
#[pyclass(eq, eq_int, frozen, hash, rename_all = "SCREAMING_SNAKE_CASE", module = "moongate_store")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ReplicaStatus {
    Undefined = 0,
    Initialized = 1,
    Processing = 2,
    Complete = 3,
    Removed = 4,
    Failed = 5,
}

#[pymethods]
impl ReplicaStatus {
    #[getter]
    fn value(&self) -> u8 {
        *self as u8
    }
}

/// Memory of a node.
#[pyclass(frozen, get_all, module = "moongate_store")]
#[derive(Clone)]
pub(super) struct BufferDescriptor {
    size: u64,
    buffer_address: u64,
    transport_endpoint: String,
}

/// A replica in memory.
#[pyclass(frozen, get_all, module = "moongate_store")]
#[derive(Clone)]
pub(super) struct MemoryDescriptor {
    buffer_descriptor: BufferDescriptor,
}

/// A replica in a file.
#[pyclass(frozen, get_all, module = "moongate_store")]
#[derive(Clone)]
pub(super) struct DiskDescriptor {
    file_path: String,
    object_size: u64,
}

/// One replica of an object.
#[pyclass(frozen, module = "moongate_store")]
pub(super) struct ReplicaDescriptor {
    #[pyo3(get)]
    status: ReplicaStatus,
    medium: ReplicaMedium<String>,
}

impl From<types::ReplicaDescriptor<String>> for ReplicaDescriptor {
    fn from(replica: types::ReplicaDescriptor<String>) -> Self {
        let statuses = [
            (types::ReplicaStatus::INITIALIZED, ReplicaStatus::Initialized),
            (types::ReplicaStatus::PROCESSING, ReplicaStatus::Processing),
            (types::ReplicaStatus::COMPLETE, ReplicaStatus::Complete),
            (types::ReplicaStatus::REMOVED, ReplicaStatus::Removed),
            (types::ReplicaStatus::FAILED, ReplicaStatus::Failed),
        ];
        let status = statuses.into_iter().find(|(wire, _)| *wire == replica.status);
        Self { status: status.map_or(ReplicaStatus::Undefined, |(_, status)| status), medium: replica.medium }
    }
}

#[pymethods]
impl ReplicaDescriptor {
    fn is_memory_replica(&self) -> bool {
        matches!(self.medium, ReplicaMedium::Memory(_))
    }

    fn is_disk_replica(&self) -> bool {
        matches!(self.medium, ReplicaMedium::Disk(_))
    }

    fn is_local_disk_replica(&self) -> bool {
        matches!(self.medium, ReplicaMedium::LocalDisk(_))
    }

    fn get_memory_descriptor(&self) -> PyResult<MemoryDescriptor> {
        let ReplicaMedium::Memory(buffer) = &self.medium else {
            return Err(PyRuntimeError::new_err("the replica is not in memory"));
        };
        let buffer_descriptor = BufferDescriptor {
            size: buffer.size,
            buffer_address: buffer.address,
            transport_endpoint: buffer.endpoint.clone(),
        };
        Ok(MemoryDescriptor { buffer_descriptor })
    }

    fn get_disk_descriptor(&self) -> PyResult<DiskDescriptor> {
        let ReplicaMedium::Disk(disk) = &self.medium else {
            return Err(PyRuntimeError::new_err("the replica is not on disk"));
        };
        Ok(DiskDescriptor { file_path: disk.file_path.clone(), object_size: disk.object_size })
    }
}
