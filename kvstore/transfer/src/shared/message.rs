//! Messages between a client and a node on its host. The two may be of different releases: members may be added, and existing ones must
//! stay.

use serde::{Deserialize, Serialize};

use crate::plane::MappingId;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SharedMemoryRequest {
    /// Requests the segment that has this address, of the process in the descriptor.
    Map { process: String, address: u64 },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SharedMemoryResponse {
    /// A segment, with its descriptor.
    Segment {
        id: MappingId,
        /// Address of the first byte in transfers.
        base: u64,
        size: u64,
    },
    Refused {
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of the first release, which later releases must accept.
    #[test]
    fn the_wire_format_is_stable() {
        let request = SharedMemoryRequest::Map { process: "f00d".into(), address: 4096 };
        let text = r#"{"map":{"process":"f00d","address":4096}}"#;
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        let with_more = r#"{"map":{"process":"f00d","address":4096,"later":1}}"#;
        assert_eq!(serde_json::from_str::<SharedMemoryRequest>(with_more).unwrap(), request);
        for (response, text) in [
            (
                SharedMemoryResponse::Segment { id: MappingId::new(7), base: 4096, size: 8192 },
                r#"{"segment":{"id":7,"base":4096,"size":8192}}"#,
            ),
            (SharedMemoryResponse::Refused { why: "x".into() }, r#"{"refused":{"why":"x"}}"#),
        ] {
            assert_eq!(serde_json::to_string(&response).unwrap(), text);
            assert_eq!(serde_json::from_str::<SharedMemoryResponse>(text).unwrap(), response);
        }
    }
}
