//! An access file assigns each listed key to its tenant and no other key to any tenant, and an error contains no key.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_gateway::tenants_of_keys;
use toml::{Table, Value};

/// The tables of keys according to an independent parser.
fn listed(text: &str) -> Vec<Table> {
    let file = text.parse::<Table>().unwrap_or_default();
    let keys = file.get("key").and_then(Value::as_array).cloned().unwrap_or_default();
    keys.into_iter().filter_map(|key| key.as_table().cloned()).collect()
}

/// Whether the error contains these words for any key: they are its own.
fn is_own_text(text: &str, key: &str) -> bool {
    let other = text.replace(key, &"x".repeat(key.len()));
    tenants_of_keys(&other, &[]).is_err_and(|error| error.to_string().contains(key))
}

fuzz_target!(|text: &str| {
    let listed = listed(text);
    let member = |key: &Table, name: &str| key.get(name).and_then(Value::as_str).map(str::to_owned);
    let plain: Vec<(String, Option<String>)> =
        listed.iter().filter_map(|key| Some((member(key, "key")?, member(key, "tenant")))).collect();
    let mut keys: Vec<&[u8]> = plain.iter().map(|(key, _)| key.as_bytes()).collect();
    keys.push(b"a key that no file can list");
    match tenants_of_keys(text, &keys) {
        Ok(found) => {
            let tenants: Vec<Option<&str>> = found.iter().map(Option::as_deref).collect();
            let expected = plain.iter().map(|(_, tenant)| tenant.as_deref());
            assert_eq!(tenants, expected.chain([None]).collect::<Vec<_>>());
        }
        Err(error) => {
            let error = error.to_string();
            for (key, _) in plain.iter().filter(|(key, _)| key.len() >= 16) {
                let is_elsewhere = text.matches(key.as_str()).count() != 1;
                assert!(is_elsewhere || !error.contains(key.as_str()) || is_own_text(text, key), "{error}");
            }
        }
    }
});
