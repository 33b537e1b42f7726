//! Anybody can store objects under any key. A key that is taken for that of a page is made of nothing but the parts that were found.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_wire::key::ObjectKey;

fuzz_target!(|key: &str| {
    if let Some(parsed) = ObjectKey::parse(key) {
        assert_eq!(parsed.to_string(), key);
    }
});
