//! Indices of the simulation's tables: a type for each table, so that an index of one is not used in another.

use moongate_scheduler::{AttemptId, InstanceIndex};

macro_rules! table_index {
    ($(#[$attribute:meta])* $visibility:vis $name:ident) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visibility struct $name(u32);

        impl $name {
            pub(crate) fn new(position: usize) -> Self {
                Self(u32::try_from(position).unwrap_or(u32::MAX))
            }

            pub(crate) fn get(self) -> usize {
                self.0 as usize
            }
        }
    };
}

table_index! {
    /// Request of the workload.
    pub WorkloadIndex
}
table_index! {
    /// Attempt to serve a request.
    pub(crate) AttemptIndex
}
table_index! {
    /// Prefill engine.
    pub PrefillIndex
}
table_index! {
    /// Decode engine.
    pub(crate) DecodeIndex
}
table_index! {
    /// Gateway.
    pub(crate) GatewayIndex
}

impl AttemptIndex {
    /// The identifier that schedulers get.
    pub(crate) fn id(self) -> AttemptId {
        AttemptId(self.0.into())
    }

    pub(crate) fn of(id: AttemptId) -> Self {
        Self(u32::try_from(id.0).unwrap_or(u32::MAX))
    }
}

impl PrefillIndex {
    /// Prefill engines are the first instances of the fleet.
    pub(crate) fn instance(self) -> InstanceIndex {
        InstanceIndex(self.0)
    }
}
