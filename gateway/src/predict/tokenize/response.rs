//! Engines' responses to queries for tokens.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::fleet::TokenizeMethod;

/// Response of `/tokenize` of both engines.
#[derive(Deserialize)]
struct TokenizeResponse {
    tokens: Vec<u32>,
}

/// Response of vLLM's `…/render`: the request as its engine would get it.
#[derive(Deserialize)]
struct RenderResponse {
    token_ids: Vec<u32>,
    /// Images and other media, which are part of the block hashes.
    #[serde(default)]
    features: Option<IgnoredAny>,
}

/// A rendered chat with one image, recording or video.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::predict) struct RenderedMedium {
    pub(in crate::predict) token_ids: Vec<u32>,
    /// The engine's name of the content in block hashes.
    pub(in crate::predict) identifier: String,
    /// First of its tokens.
    pub(in crate::predict) offset: usize,
    /// Number of its tokens.
    pub(in crate::predict) length: usize,
}

/// Response of vLLM's `…/render` for a chat with media.
#[derive(Deserialize)]
struct MediaRenderResponse {
    token_ids: Vec<u32>,
    features: MediaFeatures,
}

/// By modality.
#[derive(Deserialize)]
struct MediaFeatures {
    mm_hashes: BTreeMap<String, Vec<String>>,
    mm_placeholders: BTreeMap<String, Vec<PlaceholderRange>>,
}

#[derive(Deserialize)]
struct PlaceholderRange {
    offset: usize,
    length: usize,
}

/// The chat with one medium in a response of `…/render`; `None` if the response does not have it, or has several: an engine may convert a
/// video to frames and sound.
pub(super) fn parse_medium(body: &[u8]) -> Option<RenderedMedium> {
    let MediaRenderResponse { token_ids, features } = serde_json::from_slice(body).ok()?;
    let [identifier] = <[String; 1]>::try_from(only(features.mm_hashes)?).ok()?;
    let [PlaceholderRange { offset, length }] = <[_; 1]>::try_from(only(features.mm_placeholders)?).ok()?;
    Some(RenderedMedium { token_ids, identifier, offset, length })
}

/// The value of a map with one entry.
fn only<T>(map: BTreeMap<String, T>) -> Option<T> {
    let mut values = map.into_values();
    let first = values.next()?;
    values.next().is_none().then_some(first)
}

/// The ids of the single prompt in the query; `None` if the response does not have them.
pub(super) fn parse(method: TokenizeMethod, body: &[u8]) -> Option<Arc<[u32]>> {
    let ids = match method {
        TokenizeMethod::TokenizeChat | TokenizeMethod::TokenizeText => {
            serde_json::from_slice::<TokenizeResponse>(body).ok()?.tokens
        }
        TokenizeMethod::RenderChat | TokenizeMethod::RenderMessages | TokenizeMethod::RenderResponses => {
            rendered_ids(serde_json::from_slice(body).ok()?)?
        }
        TokenizeMethod::RenderText => {
            let [only]: [RenderResponse; 1] = serde_json::from_slice(body).ok()?;
            rendered_ids(only)?
        }
    };
    (!ids.is_empty()).then(|| ids.into())
}

fn rendered_ids(rendered: RenderResponse) -> Option<Vec<u32>> {
    rendered.features.is_none().then_some(rendered.token_ids)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const METHODS: [TokenizeMethod; TokenizeMethod::COUNT] = [
        TokenizeMethod::RenderChat,
        TokenizeMethod::RenderText,
        TokenizeMethod::RenderMessages,
        TokenizeMethod::RenderResponses,
        TokenizeMethod::TokenizeChat,
        TokenizeMethod::TokenizeText,
    ];

    #[test]
    fn each_method_has_its_response_format() {
        let ids = |method, text: &str| parse(method, text.as_bytes()).map(|ids| ids.to_vec());
        let tokenized = r#"{"count":2,"max_model_len":8,"tokens":[7,8],"token_strs":null}"#;
        assert_eq!(ids(TokenizeMethod::TokenizeChat, tokenized), Some(vec![7, 8]));
        assert_eq!(
            ids(TokenizeMethod::TokenizeText, r#"{"tokens":[[7],[8]],"count":[1,1]}"#),
            None,
            "of a batch"
        );
        let rendered = r#"{"request_id":"r","token_ids":[7,8],"features":null,"sampling_params":{}}"#;
        assert_eq!(ids(TokenizeMethod::RenderChat, rendered), Some(vec![7, 8]));
        assert_eq!(ids(TokenizeMethod::RenderText, &format!("[{rendered}]")), Some(vec![7, 8]));
        assert_eq!(ids(TokenizeMethod::RenderText, &format!("[{rendered},{rendered}]")), None);
        let image = r#"{"token_ids":[7],"features":{"mm_hashes":{"image":["x"]}}}"#;
        assert_eq!(ids(TokenizeMethod::RenderChat, image), None);
        assert_eq!(ids(TokenizeMethod::TokenizeText, r#"{"tokens":[]}"#), None);
        assert_eq!(ids(TokenizeMethod::TokenizeText, r#"{"tokens":[-1]}"#), None);
    }

    #[test]
    fn a_rendered_medium_is_the_only_one() {
        let response = |hashes: &str, ranges: &str| {
            let text = format!(
                r#"{{"token_ids":[7,8],"features":{{"mm_hashes":{hashes},"mm_placeholders":{ranges},"kwargs_data":null}}}}"#
            );
            parse_medium(text.as_bytes())
        };
        let (hash, range) = (r#"{"image":["x"]}"#, r#"{"image":[{"offset":1,"length":1}]}"#);
        let expected =
            RenderedMedium { token_ids: vec![7, 8], identifier: "x".to_owned(), offset: 1, length: 1 };
        assert_eq!(response(hash, range), Some(expected));
        assert_eq!(response(r#"{"image":["x"],"audio":["y"]}"#, range), None);
        assert_eq!(response(r#"{"image":["x","y"]}"#, range), None);
        assert_eq!(response(hash, r#"{"image":[{"offset":-1,"length":1}]}"#), None);
        assert_eq!(parse_medium(br#"{"token_ids":[7],"features":null}"#), None);
    }

    proptest! {
        #[test]
        fn no_response_panics(text in "\\PC{0,60}", ids in prop::collection::vec(any::<i64>(), 0..4)) {
            for method in METHODS {
                let _ = parse(method, text.as_bytes());
                let _ = parse(method, format!(r#"{{"tokens":{ids:?},"token_ids":{ids:?},"features":{text:?}}}"#).as_bytes());
            }
        }
    }
}
