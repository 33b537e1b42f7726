//! Several completions of one prompt (`n` > 1) on disaggregated SGLang engines.
//!
//! SGLang gives all samples of a prompt the same bootstrap room, and one for the common prefix before them, so a pair with `n` > 1
//! waits for itself until it times out. The gateway sends one request per sample instead, and [`crate::relay::merge_stream`] merges
//! the responses.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moongate_scheduler::InstanceRole;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{ApiError, ApiErrorCode};
use crate::fleet::FleetSnapshot;
use crate::memory::MemoryBudget;
use crate::request_body::{BodyMember, InferenceApi, MemberEdit, SplicedBody};
use crate::routed_request::RoutedRequest;

/// Most samples of one request that are sent separately.
const MAX_SAMPLES: u32 = 128;

/// Whether the request must be split: it has several samples, and every engine it could start on is an SGLang prefill.
pub(crate) fn is_needed(fleet: &FleetSnapshot, routed: &RoutedRequest) -> bool {
    let Some(request) =
        routed.request.as_ref().filter(|_| routed.routing.n > 1 && routed.api != InferenceApi::Other)
    else {
        return false;
    };
    let prefills = fleet.cluster.prefills(request.model);
    !prefills.is_empty()
        && prefills.iter().all(|&ix| {
            let sglang = fleet.member(ix).is_some_and(|member| member.is_sglang());
            sglang && fleet.cluster.get(ix).is_some_and(|instance| instance.role == InstanceRole::Prefill)
        })
}

/// One request per sample, each with its own body reserved in `memory`.
pub(crate) fn split(
    routed: &RoutedRequest,
    memory: &Arc<MemoryBudget>,
) -> Result<Vec<RoutedRequest>, ApiError> {
    let n = routed.routing.n;
    if n > MAX_SAMPLES {
        let text = format!("`n` is {n}; this fleet serves at most {MAX_SAMPLES} samples per request");
        return Err(ApiError::new(ApiErrorCode::InvalidRequest, text).param("n"));
    }
    (0..n).map(|sample| single_sample_request(routed, sample, memory)).collect()
}

fn single_sample_request(
    routed: &RoutedRequest,
    sample: u32,
    memory: &Arc<MemoryBudget>,
) -> Result<RoutedRequest, ApiError> {
    let reservation = memory.reserve(routed.body.len()).map_err(|_| no_memory(routed.routing.n))?;
    let mut edits = Vec::with_capacity(2);
    if routed.api == InferenceApi::Generate {
        edits.push(MemberEdit::new(BodyMember::SamplingParams, single_sampling(&routed.body)?));
    } else {
        edits.push(MemberEdit::new(BodyMember::N, "1"));
        if let Some(seed) = routed.routing.seed {
            // The same seed would produce the same sample n times.
            edits.push(MemberEdit::new(BodyMember::Seed, seed.wrapping_add(i64::from(sample)).to_string()));
        }
    }
    let body = Bytes::from(SplicedBody::new(&routed.body, &routed.routing, &edits, Bytes::new()).to_vec());
    let body = reservation.attach(body);
    let mut fields = routed.routing.clone();
    fields.n = 1;
    let request = routed.request.clone().map(|mut request| {
        request.sequences = fields.sequences();
        request
    });
    Ok(RoutedRequest {
        id: routed.id.clone(),
        api: routed.api,
        method: routed.method.clone(),
        uri: routed.uri.clone(),
        headers: routed.headers.clone(),
        body,
        routing: fields,
        request,
        return_hint: routed.return_hint,
        session_route: routed.session_route.clone(),
        stored: routed.stored.clone(),
        translated: None,
        prompt_prediction: routed.prompt_prediction.clone(),
        model: routed.model.clone(),
        alias: routed.alias.clone(),
        pick_scope: None,
    })
}

fn no_memory(n: u32) -> ApiError {
    let text = format!(
        "`n` is {n}, and this gateway has not enough memory for that many copies of the body; retry soon"
    );
    let mut error = ApiError::new(ApiErrorCode::GatewayOverloaded, text);
    error.retry_after = Some(Duration::from_secs(1));
    error
}

/// SGLang's `sampling_params` with `n` set to 1.
fn single_sampling(body: &[u8]) -> Result<String, ApiError> {
    #[derive(Deserialize)]
    struct GenerateBody<'a> {
        #[serde(borrow)]
        sampling_params: &'a RawValue,
    }
    let parse = || -> serde_json::Result<String> {
        let generate: GenerateBody<'_> = serde_json::from_slice(body)?;
        let mut params: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(generate.sampling_params.get())?;
        params.insert("n".to_owned(), 1.into());
        serde_json::to_string(&params)
    };
    parse().map_err(|error| {
        ApiError::new(ApiErrorCode::InvalidRequest, format!("`sampling_params`: {error}"))
            .param("sampling_params")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn split_body(api: InferenceApi, body: &'static str) -> Vec<Value> {
        let routed = RoutedRequest::of_body(api, body);
        split(&routed, &MemoryBudget::new("--body-memory", 1 << 20))
            .unwrap()
            .iter()
            .map(|sample| serde_json::from_slice(&sample.body).unwrap())
            .collect()
    }

    #[test]
    fn each_sample_is_a_request_of_its_own() {
        let parts = split_body(InferenceApi::Chat, r#"{"messages":[{}],"n":2,"seed":7,"x":1.50}"#);
        assert_eq!(parts[0], json!({"messages":[{}],"n":1,"seed":7,"x":1.5}));
        assert_eq!(parts[1], json!({"messages":[{}],"n":1,"seed":8,"x":1.5}));
        let parts =
            split_body(InferenceApi::Generate, r#"{"text":"a","sampling_params":{"n":3,"temperature":0.5}}"#);
        assert_eq!(parts, vec![json!({"text":"a","sampling_params":{"n":1,"temperature":0.5}}); 3]);
    }
}
