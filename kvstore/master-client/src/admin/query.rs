//! `/batch_query_keys`: request URLs and responses.

use std::collections::BTreeMap;

use mooncake_wire::admin::{AdminSuccess, KeyReplicas};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Characters to escape in a key. Releases up to 0.3.11 do not unescape, so the set is minimal: engines' keys consist of letters,
/// digits and the characters that are removed from the set here.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b'@');

/// A lookup request for several keys.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BatchKeyQuery {
    pub(crate) url: String,
    /// Number of keys consumed from the caller's list.
    pub(crate) consumed: usize,
    /// Number of those that are in the URL.
    pub(crate) requested: usize,
    /// Number of those that cannot be requested.
    pub(crate) skipped: usize,
}

/// A request for as many of `keys`, from the first on, as fit into a URL of `max_url` bytes.
pub(super) fn next<K: AsRef<str>>(base: &str, keys: &[K], max_url: usize) -> BatchKeyQuery {
    let mut query = BatchKeyQuery {
        url: format!("{base}/batch_query_keys?keys="),
        consumed: 0,
        requested: 0,
        skipped: 0,
    };
    let start = query.url.len();
    for key in keys {
        let key = key.as_ref();
        let comma = usize::from(query.requested > 0);
        let length: usize = utf8_percent_encode(key, ESCAPED).map(str::len).sum();
        if key.is_empty() || key.contains(',') || start + length > max_url {
            query.skipped += 1;
        } else if query.url.len() + comma + length > max_url {
            break;
        } else {
            if comma == 1 {
                query.url.push(',');
            }
            query.url.extend(utf8_percent_encode(key, ESCAPED));
            query.requested += 1;
        }
        query.consumed += 1;
    }
    query
}

/// Parses a response, and calls `found` for each key in it.
pub(super) fn read(
    body: &[u8],
    found: &mut impl FnMut(&str, &KeyReplicas<'_>),
) -> Result<(), serde_json::Error> {
    let response: AdminSuccess<BTreeMap<String, KeyReplicas<'_>>> = serde_json::from_slice(body)?;
    for (key, replicas) in &response.data {
        found(key, replicas);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: &str = "http://m:9003";

    #[test]
    fn keys_are_escaped_and_unqueryable_ones_are_skipped() {
        let query = next(BASE, &["model@a/b c", "x,y", "", "é_k"], 1000);
        assert_eq!(query.url, "http://m:9003/batch_query_keys?keys=model@a/b%20c,%C3%A9_k");
        assert_eq!((query.consumed, query.requested, query.skipped), (4, 2, 2));
        let nothing = next(BASE, &[",", "a key that is longer than the URL may be"], 45);
        assert_eq!((nothing.consumed, nothing.requested, nothing.skipped), (2, 0, 2));
    }

    proptest! {
        #[test]
        fn every_key_is_requested_once_or_skipped(keys in prop::collection::vec("[a-z,%@+é]{0,30}", 0..60), max in 40_usize..200) {
            let (mut rest, mut requested, mut skipped) = (&keys[..], Vec::new(), 0);
            while !rest.is_empty() {
                let query = next(BASE, rest, max);
                prop_assert!(query.consumed > 0 && query.url.len() <= max);
                prop_assert_eq!(query.consumed, query.requested + query.skipped);
                let (_, list) = query.url.split_once('=').unwrap();
                let decoded = list.split(',').filter(|key| !key.is_empty());
                requested.extend(decoded.map(|key| percent_encoding::percent_decode_str(key).decode_utf8().unwrap().into_owned()));
                skipped += query.skipped;
                rest = &rest[query.consumed..];
            }
            prop_assert_eq!(requested.len() + skipped, keys.len());
            prop_assert!(requested.iter().all(|key| keys.contains(key)));
        }
    }
}
