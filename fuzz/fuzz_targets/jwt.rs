//! A token cannot be forged: only tokens signed by the provider are accepted, byte for byte. Keys of a set are used only if they are the
//! provider's.
//!
//! The first byte selects the kind of the rest: a token, a set of keys, or the unencoded parts of a token, one per line.

#![no_main]

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use clap::Parser;
use libfuzzer_sys::fuzz_target;
use moongate_gateway::{AccessOptions, tenant_of_token};
use serde_json::Value;

/// The public half of a key created for this target.
const PUBLIC: &str = "6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";
/// A token signed with the key, for the tenant `team-a` until the year 2100.
const SIGNED: &str = "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJodHRwczovL2lkLmV4YW1wbGUiLCJhdWQiOlsibW9vbmdhdGUiXSwic3ViIjoidGVhbS1hIiwiZXhwIjo0MTAyNDQ0ODAwfQ";
const SIGNATURE: &str =
    "sSaorSV1qG_mCpsMtnY19SjLn4RthAItSq7jJ9DNULfjv07RMvgPFDCXT4xt1qLS9zAFtBajdwmMNNRVx-OZDw";

#[derive(Parser)]
struct JwtFuzzArgs {
    #[command(flatten)]
    access: AccessOptions,
}

static TOKEN_RULES: LazyLock<AccessOptions> = LazyLock::new(|| {
    let line = ["fuzz", "--jwt-issuer=https://id.example", "--jwt-audience=moongate"];
    let rules = JwtFuzzArgs::parse_from(line).access;
    let tenant = tenant_of_token(&KEYS, format!("{SIGNED}.{SIGNATURE}").as_bytes(), &rules);
    assert_eq!(tenant.as_deref(), Some("team-a"), "or nothing would be compared");
    rules
});
static KEYS: LazyLock<String> =
    LazyLock::new(|| format!(r#"{{"keys":[{{"kty":"OKP","crv":"Ed25519","x":"{PUBLIC}"}}]}}"#));

fn check_token(token: &[u8]) {
    let Some(tenant) = tenant_of_token(&KEYS, token, &TOKEN_RULES) else { return };
    assert_eq!(&*tenant, "team-a");
    assert_eq!(token, format!("{SIGNED}.{SIGNATURE}").as_bytes());
}

fn check_keys(keys: &str) {
    let tenant = tenant_of_token(keys, format!("{SIGNED}.{SIGNATURE}").as_bytes(), &TOKEN_RULES);
    let set: Value = serde_json::from_str(keys).unwrap_or_default();
    let keys = set.get("keys").and_then(Value::as_array);
    let has_public = keys.is_some_and(|keys| keys.iter().any(|key| key["x"] == PUBLIC));
    assert!(tenant.is_none() || has_public);
}

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else { return };
    match first % 3 {
        0 => check_token(rest),
        1 => {
            if let Ok(keys) = std::str::from_utf8(rest) {
                check_keys(keys);
            }
        }
        _ => {
            let parts: Vec<String> =
                rest.splitn(3, |byte| *byte == b'\n').map(|part| URL_SAFE_NO_PAD.encode(part)).collect();
            check_token(parts.join(".").as_bytes());
        }
    }
});
