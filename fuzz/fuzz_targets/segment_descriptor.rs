//! Segment descriptors come from nodes of any release. A parsed descriptor is unchanged after a round trip, and both parsers of this
//! project find the same address in it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_master_client::nodes::transfer_address;
use moongate_transfer::SegmentDescriptor;
use moongate_transfer::descriptor::RpcMeta;

const ENDPOINT: &str = "[fe80::1]:12345";

fuzz_target!(|json: &[u8]| {
    // Lists in the place of objects depend on the order of members, which is each reader's own.
    if !json.trim_ascii_start().starts_with(b"{") {
        return;
    }
    if let Ok(descriptor) = serde_json::from_slice::<SegmentDescriptor>(json) {
        let written = serde_json::to_vec(&descriptor).expect("what was read can be written");
        assert_eq!(serde_json::from_slice::<SegmentDescriptor>(&written).ok().as_ref(), Some(&descriptor));
        let address = descriptor.data_address(ENDPOINT).ok();
        assert_eq!(transfer_address(json, ENDPOINT), address);
        assert_eq!(transfer_address(&written, ENDPOINT), address);
        assert!(address.is_none_or(|(_, port)| port != 0));
    }
    let _ = transfer_address(json, ENDPOINT);
    if let Ok(meta) = serde_json::from_slice::<RpcMeta>(json) {
        let written = serde_json::to_vec(&meta).expect("what was read can be written");
        assert_eq!(serde_json::from_slice::<RpcMeta>(&written).ok(), Some(meta));
    }
});
