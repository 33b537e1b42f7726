//! Sizes of segments, which reports about a part of a segment do not contain.

use std::collections::HashMap;

use mooncake_wire::rpc::Request;
use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Maximum number of segments. The report of one that is missing is not passed on, as if the master lacked the call.
const CAPACITY: usize = 65_536;

/// Sizes of the segments that clients have mounted through this router, in bytes.
#[derive(Debug, Default)]
pub(crate) struct SegmentSizes(Mutex<HashMap<Uuid, u64>>);

impl SegmentSizes {
    pub(crate) fn get(&self, segment: Uuid) -> Option<u64> {
        self.0.lock().get(&segment).copied()
    }

    /// Records the segments in a request.
    pub(crate) fn observe(&self, request: &Request<&str>) {
        match request {
            Request::MountSegment(arguments) => self.record([&arguments.segment]),
            Request::ReMountSegment(arguments) => self.record(&arguments.segments),
            Request::UnmountSegment(arguments) => _ = self.0.lock().remove(&arguments.segment_id),
            Request::GracefulUnmountSegment(arguments) => _ = self.0.lock().remove(&arguments.segment_id),
            _ => {}
        }
    }

    fn record<'s, 't: 's>(
        &self,
        segments: impl IntoIterator<Item = &'s mooncake_wire::types::Segment<&'t str>>,
    ) {
        let mut sizes = self.0.lock();
        for segment in segments {
            if sizes.len() < CAPACITY || sizes.contains_key(&segment.id) {
                sizes.insert(segment.id, segment.size);
            }
        }
    }
}
