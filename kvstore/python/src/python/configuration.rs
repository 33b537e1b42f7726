//! `ReplicateConfig` and its enumerations.

use std::time::Duration;

use mooncake_wire::types::DataType;
use moongate_store_client::{PutOptions, SoftPinChange};
use pyo3::prelude::*;

/// Kind of an object's content.
#[pyclass(eq, eq_int, frozen, hash, rename_all = "SCREAMING_SNAKE_CASE", module = "moongate_store")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) enum ObjectDataType {
    #[default]
    Unknown = 0,
    Kvcache = 1,
    Tensor = 2,
    Weight = 3,
    Sample = 4,
    Activation = 5,
    Gradient = 6,
    OptimizerState = 7,
    Metadata = 8,
    General = 9,
}

#[pymethods]
impl ObjectDataType {
    #[getter]
    fn value(&self) -> u8 {
        *self as u8
    }
}

/// Change of an object's soft pin.
#[pyclass(eq, eq_int, frozen, hash, rename_all = "SCREAMING_SNAKE_CASE", module = "moongate_store")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) enum SoftPinAction {
    #[default]
    Preserve = 0,
    Enable = 1,
    Disable = 2,
}

#[pymethods]
impl SoftPinAction {
    #[getter]
    fn value(&self) -> u8 {
        *self as u8
    }
}

/// Options of puts, with the members of Mooncake's class.
#[pyclass(get_all, set_all, module = "moongate_store")]
#[derive(Clone, Debug, Default)]
pub(super) struct ReplicateConfig {
    replica_num: u64,
    /// Replicas on NVMe-oF disks, which Moongate's client does not write. Only 0 is accepted by puts.
    nof_replica_num: u64,
    /// Replicas in a distributed file system, which Moongate's client does not write. Only 0 is accepted by puts.
    dfs_replica_num: u64,
    with_hard_pin: bool,
    soft_pin_action: SoftPinAction,
    soft_pin_ttl_ms: Option<u64>,
    preferred_segment: String,
    preferred_segments: Vec<String>,
    preferred_nof_segments: Vec<String>,
    prefer_alloc_in_same_node: bool,
    data_type: ObjectDataType,
    /// Per object, the group with which it is leased and evicted.
    group_ids: Option<Vec<String>>,
}

#[pymethods]
impl ReplicateConfig {
    #[new]
    fn new() -> Self {
        Self { replica_num: 1, ..Self::default() }
    }
}

impl ReplicateConfig {
    /// The options of a put of so many objects. `None` if they cannot be fulfilled.
    pub(super) fn options(&self, objects: usize) -> Option<PutOptions> {
        let is_wrong = self.group_ids.as_ref().is_some_and(|groups| groups.len() != objects);
        if is_wrong || self.replica_num == 0 || self.nof_replica_num > 0 || self.dfs_replica_num > 0 {
            return None;
        }
        let preferred = Some(&self.preferred_segment).filter(|name| !name.is_empty());
        Some(PutOptions {
            replicas: self.replica_num,
            soft_pin: match self.soft_pin_action {
                SoftPinAction::Preserve => SoftPinChange::Unchanged,
                SoftPinAction::Enable => {
                    SoftPinChange::Pinned(self.soft_pin_ttl_ms.map(Duration::from_millis))
                }
                SoftPinAction::Disable => SoftPinChange::Unpinned,
            },
            hard_pin: self.with_hard_pin,
            preferred_segments: preferred.into_iter().chain(&self.preferred_segments).cloned().collect(),
            one_node: self.prefer_alloc_in_same_node,
            object_groups: self.group_ids.clone().unwrap_or_default(),
            data_type: DataType(self.data_type as u8),
            ..PutOptions::default()
        })
    }
}
