//! Clients can store objects under any key. A key that is parsed as a page's key consists only of the parsed parts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_wire::key::ObjectKey;

fuzz_target!(|key: &str| {
    if let Some(parsed) = ObjectKey::parse(key) {
        assert_eq!(parsed.to_string(), key);
    }
});
