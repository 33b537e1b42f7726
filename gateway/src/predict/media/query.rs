//! Queries for the tokens of one image, recording or video.

use std::sync::Arc;

use bytes::Bytes;
use moongate_tokenize::MediaReference;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::MediumTokens;
use super::cache::MediumKey;
use crate::memory::MemoryBudget;
use crate::predict::tokenize::RenderedMedium;

/// A chat that consists of one medium, to be rendered by an engine.
#[derive(Debug)]
pub(super) struct MediaQuery {
    pub(super) key: MediumKey,
    pub(super) model: Arc<str>,
    /// Whether the chat contains the data.
    pub(super) is_inline: bool,
    pub(super) body: Bytes,
}

/// Members of a request that change the tokens or the hash of its media.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::predict) struct MediaOptions<'a> {
    #[serde(borrow)]
    mm_processor_kwargs: Option<&'a RawValue>,
    #[serde(borrow)]
    media_io_kwargs: Option<&'a RawValue>,
}

impl<'a> MediaOptions<'a> {
    /// Reads them from a body that is a valid JSON object. Bodies rarely have any, so the raw bytes are searched first. `None` for a body
    /// that has them twice.
    pub(super) fn read(body: &'a [u8]) -> Option<Self> {
        const NAMES: [&[u8]; 2] = [b"\"mm_processor_kwargs\"", b"\"media_io_kwargs\""];
        if NAMES.iter().all(|name| memchr::memmem::find(body, name).is_none()) {
            return Some(Self::default());
        }
        serde_json::from_slice(body).ok()
    }

    pub(super) fn texts(&self) -> [Option<&'a str>; 2] {
        [self.mm_processor_kwargs, self.media_io_kwargs].map(|value| value.map(RawValue::get))
    }
}

impl MediaQuery {
    /// `None` if the medium cannot be written as JSON.
    pub(super) fn new(
        key: MediumKey,
        model: &Arc<str>,
        options: &MediaOptions<'_>,
        reference: &MediaReference,
    ) -> Option<Self> {
        // Without the processed pixels, the response is short.
        let mut body = br#"{"mm_payload":"none","model":"#.to_vec();
        serde_json::to_writer(&mut body, &**model).ok()?;
        for (name, value) in ["mm_processor_kwargs", "media_io_kwargs"].iter().zip(options.texts()) {
            if let Some(value) = value {
                body.extend_from_slice(format!(",\"{name}\":{value}").as_bytes());
            }
        }
        body.extend_from_slice(br#","messages":[{"role":"user","content":["#);
        reference.write_json(&mut body).ok()?;
        body.extend_from_slice(b"]}]}");
        Some(Self { key, model: model.clone(), is_inline: reference.is_inline(), body: body.into() })
    }

    /// Reserves the query's memory until it is answered. `None` if there is not enough.
    pub(super) fn reserve(self, memory: &Arc<MemoryBudget>) -> Option<Self> {
        let reservation = memory.reserve(self.body.len()).ok()?;
        Some(Self { body: reservation.attach(self.body), ..self })
    }
}

impl MediumTokens {
    /// Compares the tokens that this gateway renders for a chat with one medium to those of the engine. `None` if they differ in more than
    /// the medium's.
    pub(super) fn compare(rendered: &[u32], engine: RenderedMedium) -> Option<Self> {
        let RenderedMedium { token_ids, identifier, offset, length } = engine;
        let before = token_ids.get(..offset)?;
        let tokens = token_ids.get(offset..offset.checked_add(length)?)?;
        let after = &token_ids[offset + length..];
        let placeholder = rendered.strip_prefix(before)?.strip_suffix(after)?;
        let is_known = !placeholder.is_empty() && !tokens.is_empty() && !identifier.is_empty();
        is_known.then(|| Self {
            placeholder: placeholder.into(),
            tokens: tokens.into(),
            identifier: identifier.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use moongate_tokenize::ChatBody;
    use serde_json::{Value, json};

    use super::*;
    use crate::feedback::GatewayMetrics;
    use crate::predict::media::MediaTokenCache;

    #[test]
    fn a_query_has_one_medium_and_its_options() {
        let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA" } });
        let body = json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Long" }, image] }],
            "mm_processor_kwargs": { "max_pixels": 9 }, "temperature": 0 });
        let body = body.to_string();
        let media = ChatBody::parse(body.as_bytes()).unwrap().media().unwrap();
        let options = MediaOptions::read(body.as_bytes()).unwrap();
        let memory = MemoryBudget::new("--prompt-memory", 1 << 20);
        let (cache, _queries) =
            MediaTokenCache::new(1 << 20, memory.clone(), GatewayMetrics::new(None).tokenize);
        let key = cache.key("m", &options, &media[0]);
        let query = MediaQuery::new(key, &"m".into(), &options, &media[0]).unwrap().reserve(&memory).unwrap();
        assert_eq!(memory.used(), query.body.len() as u64);
        let sent: Value = serde_json::from_slice(&query.body).unwrap();
        let expected = json!({ "mm_payload": "none", "model": "m", "mm_processor_kwargs": { "max_pixels": 9 },
            "messages": [{ "role": "user", "content": [image] }] });
        assert_eq!((sent, query.is_inline), (expected, true));
        assert_ne!(key, cache.key("m", &MediaOptions::default(), &media[0]));
        assert_ne!(key, cache.key("other", &options, &media[0]));
    }

    #[test]
    fn the_rest_of_the_chat_must_be_equal() {
        let engine = |offset, length| RenderedMedium {
            token_ids: vec![1, 2, 9, 9, 9, 3],
            identifier: "x".to_owned(),
            offset,
            length,
        };
        let known = MediumTokens::compare(&[1, 2, 8, 3], engine(2, 3)).unwrap();
        assert_eq!(
            (&*known.placeholder, &*known.tokens, &*known.identifier),
            (&[8][..], &[9, 9, 9][..], "x")
        );
        for (rendered, offset, length) in [
            (&[1, 2, 8, 4][..], 2, 3),
            (&[1, 7, 8, 3], 2, 3),
            (&[1, 2, 3], 2, 3),
            (&[1, 2, 8, 3], 5, 3),
            (&[1, 3], 2, 3),
        ] {
            assert_eq!(MediumTokens::compare(rendered, engine(offset, length)), None, "{rendered:?}");
        }
        assert_eq!(MediumTokens::compare(&[1], engine(2, usize::MAX)), None);
    }
}
