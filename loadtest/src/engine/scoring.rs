//! Rerank, score, classification, pooling and embeddings: canned numbers that are a function of the texts, in each
//! engine's format. They use no KV cache.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::request::json_object;
use super::response::{self, SimRejection, SimResponse};
use super::stats::unix_ms;
use super::tokens::{hash_bytes, mix, tokens_of_text};
use super::{SimEngineState, SimProtocol, api_vllm};

/// Maximum number of inputs of a request.
const MAX_INPUTS: usize = 2_048;
/// Number of elements of an embedding.
const DIMENSIONS: u64 = 8;

type Members = Map<String, Value>;

/// An endpoint of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScoringEndpoint {
    Rerank,
    Score,
    Classify,
    Pooling,
    Embeddings,
}

impl ScoringEndpoint {
    fn of(protocol: SimProtocol, path: &str) -> Option<Self> {
        match (path, protocol) {
            ("/v1/rerank", _) | ("/rerank" | "/v2/rerank", SimProtocol::Vllm) => Some(Self::Rerank),
            ("/v1/score", _) | ("/score", SimProtocol::Vllm) => Some(Self::Score),
            ("/v1/classify", SimProtocol::Sglang) | ("/classify", SimProtocol::Vllm) => Some(Self::Classify),
            ("/pooling", SimProtocol::Vllm) => Some(Self::Pooling),
            ("/v1/embeddings", _) => Some(Self::Embeddings),
            _ => None,
        }
    }
}

/// The response to a POST, or `None` if the path is another one.
pub(crate) fn dispatch(engine: &SimEngineState, path: &str, body: &Bytes) -> Option<SimResponse> {
    let protocol = engine.options.protocol;
    let endpoint = ScoringEndpoint::of(protocol, path)?;
    let result = json_object(body).and_then(|body| {
        // SGLang does not check the model of these endpoints.
        if protocol == SimProtocol::Vllm {
            api_vllm::check_model(engine, body.get("model").and_then(Value::as_str))?;
        }
        let model = body.get("model").and_then(Value::as_str).filter(|model| !model.is_empty());
        let model = model.unwrap_or(&engine.options.model);
        match endpoint {
            ScoringEndpoint::Rerank => rerank(protocol, model, &body),
            ScoringEndpoint::Score => score(protocol, model, &body),
            ScoringEndpoint::Classify => classify(model, &body),
            ScoringEndpoint::Pooling => pooling(model, &body),
            ScoringEndpoint::Embeddings => embeddings(protocol, model, &body),
        }
    });
    Some(match result {
        Ok(value) => response::json_ok(&value),
        Err(rejection) => response::rejection(protocol, &rejection),
    })
}

/// A text, or the JSON of something else, such as token ids or an image.
fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// One input, or a list of them.
fn inputs(body: &Members, name: &'static str) -> Result<Vec<String>, SimRejection> {
    match body.get(name) {
        Some(Value::Array(many)) if many.is_empty() => {
            Err(SimRejection::invalid_body(name, "must not be empty"))
        }
        Some(Value::Array(ids)) if ids.iter().all(Value::is_number) => {
            Ok(vec![Value::from(ids.clone()).to_string()])
        }
        Some(Value::Array(many)) if many.len() > MAX_INPUTS => {
            Err(SimRejection::invalid_body(name, "must have at most 2048 items"))
        }
        Some(Value::Array(many)) => Ok(many.iter().map(text_of).collect()),
        Some(Value::Null) | None => Err(SimRejection::invalid_body(name, "Field required")),
        Some(one) => Ok(vec![text_of(one)]),
    }
}

fn token_count(texts: &[String]) -> usize {
    texts.iter().map(|text| tokens_of_text(text).len()).sum()
}

/// A number from 0 to 1.
fn unit_interval(seed: u64) -> f64 {
    super::api_sglang::fraction(seed >> 44, 1 << 20)
}

fn relevance(query: &str, document: &str) -> f64 {
    unit_interval(mix(hash_bytes(query.as_bytes()), hash_bytes(document.as_bytes())))
}

fn usage(protocol: SimProtocol, tokens: usize) -> Value {
    match protocol {
        SimProtocol::Vllm => json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
                                    "prompt_tokens_details": null, "completion_tokens_details": null}),
        SimProtocol::Sglang => {
            json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
                                      "prompt_tokens_details": null, "reasoning_tokens": 0})
        }
    }
}

/// A list of results, as vLLM has it and as `OpenAI`'s embeddings have it.
fn list(prefix: &str, model: &str, data: Vec<Value>, usage: Value) -> Value {
    json!({"id": format!("{prefix}-{}", response::hex_id()), "object": "list", "created": unix_ms() / 1_000,
           "model": model, "data": data, "usage": usage})
}

/// Documents, most relevant first. SGLang responds with the bare list.
fn rerank(protocol: SimProtocol, model: &str, body: &Members) -> Result<Value, SimRejection> {
    let query = body.get("query").filter(|query| !query.is_null()).map(text_of);
    let query = query.ok_or_else(|| SimRejection::invalid_body("query", "Field required"))?;
    let documents = inputs(body, "documents")?;
    let mut ranked: Vec<(usize, f64)> =
        documents.iter().map(|document| relevance(&query, document)).enumerate().collect();
    ranked.sort_by(|left, right| right.1.total_cmp(&left.1));
    let top = body.get("top_n").and_then(Value::as_u64).and_then(|top| usize::try_from(top).ok());
    ranked.truncate(top.filter(|top| *top > 0).unwrap_or(documents.len()));
    let tokens = token_count(&documents) + documents.len() * tokens_of_text(&query).len();
    let with_documents = body.get("return_documents").and_then(Value::as_bool).unwrap_or(true);
    let results = ranked.iter().map(|(index, score)| match protocol {
        SimProtocol::Vllm => json!({"index": index, "relevance_score": score,
                                    "document": {"text": documents[*index], "multi_modal": null}}),
        SimProtocol::Sglang => {
            let mut result = json!({"index": index, "score": score, "meta_info": {}});
            if with_documents {
                result["document"] = json!(documents[*index]);
            }
            result
        }
    });
    let results: Vec<Value> = results.collect();
    Ok(match protocol {
        SimProtocol::Sglang => Value::Array(results),
        SimProtocol::Vllm => json!({"id": format!("score-{}", response::hex_id()), "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}, "results": results}),
    })
}

/// Scores of pairs of texts. A single text on the left is paired with each one on the right.
fn score(protocol: SimProtocol, model: &str, body: &Members) -> Result<Value, SimRejection> {
    if protocol == SimProtocol::Sglang {
        return sglang_score(model, body);
    }
    let names = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")];
    let given = names.into_iter().find(|(left, right)| body.contains_key(*left) && body.contains_key(*right));
    let (left, right) = given.unwrap_or(("text_1", "text_2"));
    let (left, right) = (inputs(body, left)?, inputs(body, right)?);
    if left.len() != 1 && left.len() != right.len() {
        return Err(SimRejection::bad_request("Input lengths must be either 1:1, 1:N or N:N"));
    }
    let tokens = token_count(&right) + token_count(&left) * if left.len() == 1 { right.len() } else { 1 };
    let pairs = left.iter().cycle().zip(&right).enumerate();
    let data = pairs
        .map(|(index, (left, right))| json!({"index": index, "object": "score", "score": relevance(left, right)}))
        .collect();
    Ok(list("score", model, data, usage(protocol, tokens)))
}

/// SGLang scores items by the probabilities of tokens after them.
fn sglang_score(model: &str, body: &Members) -> Result<Value, SimRejection> {
    let query = body.get("query").map(text_of).unwrap_or_default();
    let items = inputs(body, "items")?;
    let labels: Vec<u64> = body
        .get("label_token_ids")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect();
    let row = |item: &String| -> Vec<f64> {
        let seed = mix(hash_bytes(query.as_bytes()), hash_bytes(item.as_bytes()));
        labels.iter().map(|label| unit_interval(mix(seed, *label))).collect()
    };
    let tokens = token_count(&items) + items.len() * tokens_of_text(&query).len();
    Ok(json!({"scores": items.iter().map(row).collect::<Vec<_>>(), "pooled_hidden_states": null,
              "token_logprobs": null, "model": model, "usage": usage(SimProtocol::Sglang, tokens),
              "object": "scoring"}))
}

/// Two classes.
fn classify(model: &str, body: &Members) -> Result<Value, SimRejection> {
    let texts = inputs(body, "input")?;
    let data = texts
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let first = unit_interval(hash_bytes(text.as_bytes()));
            let label = if first >= 0.5 { "LABEL_0" } else { "LABEL_1" };
            json!({"index": index, "label": label, "probs": [first, 1.0 - first], "num_classes": 2})
        })
        .collect();
    Ok(list("classify", model, data, usage(SimProtocol::Vllm, token_count(&texts))))
}

fn vector(text: &str) -> Vec<f64> {
    let seed = hash_bytes(text.as_bytes());
    (0..DIMENSIONS).map(|element| unit_interval(mix(seed, element))).collect()
}

/// A vector for each token.
fn pooling(model: &str, body: &Members) -> Result<Value, SimRejection> {
    let texts = inputs(body, "input")?;
    let data = texts
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let tokens = tokens_of_text(text);
            let vectors: Vec<Vec<f64>> = tokens.iter().map(|token| vector(&token.to_string())).collect();
            json!({"index": index, "object": "pooling", "data": vectors})
        })
        .collect();
    Ok(list("pool", model, data, usage(SimProtocol::Vllm, token_count(&texts))))
}

fn embeddings(protocol: SimProtocol, model: &str, body: &Members) -> Result<Value, SimRejection> {
    let texts = inputs(body, "input")?;
    let data = texts
        .iter()
        .enumerate()
        .map(|(index, text)| json!({"object": "embedding", "index": index, "embedding": vector(text)}))
        .collect();
    Ok(list("embd", model, data, usage(protocol, token_count(&texts))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(body: Value) -> Members {
        body.as_object().unwrap().clone()
    }

    #[test]
    fn documents_are_ranked() {
        let body = members(json!({"query": "moon", "documents": ["one", "two", "three"], "top_n": 2}));
        let ranked = rerank(SimProtocol::Vllm, "m", &body).unwrap();
        let results = ranked["results"].as_array().unwrap();
        assert_eq!(results.len(), 2);
        assert!(results[0]["relevance_score"].as_f64() > results[1]["relevance_score"].as_f64());
        let index = usize::try_from(results[0]["index"].as_u64().unwrap()).unwrap();
        assert_eq!(results[0]["document"]["text"], body["documents"][index]);
        assert_eq!(ranked["usage"]["prompt_tokens"], 4 + 3);
        let bare = rerank(SimProtocol::Sglang, "m", &body).unwrap();
        assert_eq!(bare[0]["score"], results[0]["relevance_score"]);
    }

    #[test]
    fn pairs_are_scored() {
        let one = members(json!({"text_1": "a", "text_2": ["b", "c"]}));
        let scored = score(SimProtocol::Vllm, "m", &one).unwrap();
        assert_eq!(
            (scored["data"].as_array().unwrap().len(), &scored["usage"]["prompt_tokens"]),
            (2, &json!(4))
        );
        assert_eq!(scored["data"][1]["score"], relevance("a", "c"));
        let uneven = members(json!({"queries": ["a", "b"], "documents": ["c", "d", "e"]}));
        assert!(score(SimProtocol::Vllm, "m", &uneven).is_err());
        let labels = members(json!({"query": "a", "items": ["b"], "label_token_ids": [1, 2]}));
        assert_eq!(
            score(SimProtocol::Sglang, "m", &labels).unwrap()["scores"][0].as_array().unwrap().len(),
            2
        );
    }

    #[test]
    fn inputs_are_texts_or_token_ids() {
        for (input, expected) in
            [(json!("a"), 1), (json!(["a", "b"]), 2), (json!([1, 2, 3]), 1), (json!([[1], [2]]), 2)]
        {
            let body = members(json!({"input": input}));
            let embedded = embeddings(SimProtocol::Vllm, "m", &body).unwrap();
            assert_eq!(embedded["data"].as_array().unwrap().len(), expected, "{input}");
        }
        for input in [json!([]), Value::Null] {
            assert!(classify("m", &members(json!({"input": input}))).is_err());
        }
        let pooled = pooling("m", &members(json!({"input": "abcdefgh"}))).unwrap();
        assert_eq!(pooled["data"][0]["data"].as_array().unwrap().len(), 2);
    }
}
