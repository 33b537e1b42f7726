//! The Python module. Nothing here decides: it converts arguments and results.

mod configuration;
mod lifecycle;
mod memory;
mod replicas;
mod store;
mod values;

use pyo3::prelude::*;

/// The native part of the package `moongate_store`, which exports everything again.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<store::MooncakeDistributedStore>()?;
    module.add_class::<configuration::ReplicateConfig>()?;
    module.add_class::<configuration::ObjectDataType>()?;
    module.add_class::<configuration::SoftPinAction>()?;
    module.add_class::<memory::MooncakeHostMemAllocator>()?;
    module.add_class::<replicas::ReplicaStatus>()?;
    module.add_class::<replicas::ReplicaDescriptor>()?;
    module.add_class::<replicas::MemoryDescriptor>()?;
    module.add_class::<replicas::DiskDescriptor>()?;
    module.add_class::<replicas::BufferDescriptor>()?;
    module.add_function(wrap_pyfunction!(memory::bind_to_numa_node, module)?)?;
    module.add_function(wrap_pyfunction!(lifecycle::close_all, module)?)
}
