//! Envoy's messages: what they say, and those that answer them.

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{
    HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader, HeaderValueOption, Metadata,
};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse,
    ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use moongate_gateway::HeaderChanges;

use crate::exchange::ProxyMessage;

/// Header and metadata key with the endpoints that the proxy sends the request to.
const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Metadata namespace of [`DESTINATION`] and [`SERVED`].
const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// Metadata key with the endpoint that has responded.
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Metadata namespace and key with the endpoints from which the proxy lets one be picked.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// Envoy's limit of a chunk is 64 KiB, with the message around it.
pub(crate) const MAX_CHUNK: usize = 62_000;

/// Why the headers of a request cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidHeadersError {
    #[error("the request has no valid :method")]
    Method,
    #[error("the request has no valid :path")]
    Path,
}

/// How the proxy sends the response's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseBodyMode {
    /// It passes what the picker sends back.
    Duplex,
    /// It passes a chunk when the picker has answered.
    Streamed,
}

impl ResponseBodyMode {
    /// From the mode in the first message; proxies that do not name it use the first.
    pub(crate) fn of(mode: i32) -> Self {
        match BodySendMode::try_from(mode) {
            Ok(BodySendMode::Streamed | BodySendMode::Buffered | BodySendMode::BufferedPartial) => {
                Self::Streamed
            }
            _ => Self::Duplex,
        }
    }
}

/// Whether the proxy streams the request's body and awaits it back, which the endpoint picker protocol requires.
pub(crate) fn is_full_duplex(request_mode: i32) -> bool {
    request_mode == BodySendMode::FullDuplexStreamed as i32
}

/// What the message is, for the order of messages.
pub(crate) fn kind(part: &Part) -> ProxyMessage {
    match part {
        Part::RequestHeaders(headers) => ProxyMessage::RequestHeaders { ends: headers.end_of_stream },
        Part::RequestBody(body) => ProxyMessage::RequestBody { ends: body.end_of_stream },
        Part::RequestTrailers(_) => ProxyMessage::RequestTrailers,
        Part::ResponseHeaders(headers) => ProxyMessage::ResponseHeaders { ends: headers.end_of_stream },
        Part::ResponseBody(body) => ProxyMessage::ResponseBody { ends: body.end_of_stream },
        Part::ResponseTrailers(_) => ProxyMessage::ResponseTrailers,
    }
}

/// The client's request, without its body.
pub(crate) fn request_head(headers: Option<EnvoyHeaders>) -> Result<Request<()>, InvalidHeadersError> {
    let (pseudo, headers) = header_map(headers);
    let mut request = Request::new(());
    let method = pseudo.method.and_then(|method| Method::from_bytes(&method).ok());
    *request.method_mut() = method.ok_or(InvalidHeadersError::Method)?;
    let path = pseudo.path.and_then(|path| path.try_into().ok());
    *request.uri_mut() = path.ok_or(InvalidHeadersError::Path)?;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}

/// Status and headers of a response.
pub(crate) fn response_head(headers: Option<EnvoyHeaders>) -> (StatusCode, HeaderMap) {
    let (pseudo, headers) = header_map(headers);
    let status = pseudo.status.and_then(|status| StatusCode::from_bytes(&status).ok());
    (status.unwrap_or(StatusCode::BAD_GATEWAY), headers)
}

#[derive(Default)]
struct PseudoHeaders {
    method: Option<Vec<u8>>,
    path: Option<Vec<u8>>,
    status: Option<Vec<u8>>,
}

/// Pseudo-headers, and the valid ones of the others: the proxy has parsed them before.
fn header_map(headers: Option<EnvoyHeaders>) -> (PseudoHeaders, HeaderMap) {
    let headers = headers.unwrap_or_default().headers;
    let (mut pseudo, mut map) = (PseudoHeaders::default(), HeaderMap::with_capacity(headers.len()));
    for EnvoyHeader { key, value, raw_value } in headers {
        let value = if raw_value.is_empty() { value.into_bytes() } else { raw_value };
        match key.as_str() {
            ":method" => pseudo.method = Some(value),
            ":path" => pseudo.path = Some(value),
            ":status" => pseudo.status = Some(value),
            key if key.starts_with(':') => {}
            key => {
                if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
                    map.append(name, value);
                }
            }
        }
    }
    (pseudo, map)
}

/// The endpoints from which the proxy lets one be picked; `None` for all.
pub(crate) fn allowed_endpoints(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    match entry(metadata, SUBSET_NAMESPACE, SUBSET)? {
        Kind::ListValue(list) => {
            let values = list.values.iter().filter_map(|value| value.kind.as_ref());
            Some(values.flat_map(addresses).collect())
        }
        kind => Some(addresses(kind).collect()),
    }
}

/// The endpoint that has responded, if the proxy reports it.
pub(crate) fn served_endpoint(metadata: Option<&Metadata>) -> Option<&str> {
    match entry(metadata, DESTINATION_NAMESPACE, SERVED)? {
        Kind::StringValue(endpoint) => Some(endpoint.trim()).filter(|endpoint| !endpoint.is_empty()),
        _ => None,
    }
}

fn entry<'a>(metadata: Option<&'a Metadata>, namespace: &str, key: &str) -> Option<&'a Kind> {
    metadata?.filter_metadata.get(namespace)?.fields.get(key)?.kind.as_ref()
}

fn addresses(kind: &Kind) -> impl Iterator<Item = String> {
    let text = match kind {
        Kind::StringValue(text) => text.as_str(),
        _ => "",
    };
    text.split(',').map(str::trim).filter(|address| !address.is_empty()).map(str::to_owned)
}

/// Sends the request to the first of `endpoints` that the proxy can use.
pub(crate) fn route(
    endpoints: &[String],
    changes: &HeaderChanges,
    body_length: Option<usize>,
) -> ProcessingResponse {
    let destination = endpoints.join(",");
    let mut set_headers = vec![header(DESTINATION, destination.as_bytes())];
    set_headers.extend(changes.set.iter().map(|(name, value)| header(name.as_str(), value.as_bytes())));
    set_headers
        .extend(body_length.map(|length| header(CONTENT_LENGTH.as_str(), length.to_string().as_bytes())));
    let remove_headers = changes.remove.iter().map(|name| name.as_str().to_owned()).collect();
    let response = CommonResponse {
        header_mutation: Some(HeaderMutation { set_headers, remove_headers }),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        dynamic_metadata: Some(structure(
            DESTINATION_NAMESPACE,
            Kind::StructValue(structure(DESTINATION, Kind::StringValue(destination))),
        )),
        ..answer(Answer::RequestHeaders(HeadersResponse { response: Some(response) }))
    }
}

fn structure(key: &str, kind: Kind) -> Struct {
    Struct { fields: [(key.to_owned(), Value { kind: Some(kind) })].into() }
}

fn header(name: &str, value: &[u8]) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(EnvoyHeader {
            key: name.to_owned(),
            raw_value: value.to_vec(),
            ..EnvoyHeader::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..HeaderValueOption::default()
    }
}

/// A chunk of the request's body for the engine.
pub(crate) fn request_chunk(chunk: &Bytes, ends: bool) -> ProcessingResponse {
    answer(Answer::RequestBody(BodyResponse { response: Some(chunk_response(chunk, ends)) }))
}

fn chunk_response(chunk: &Bytes, end_of_stream: bool) -> CommonResponse {
    let streamed =
        StreamedBodyResponse { body: chunk.to_vec(), end_of_stream, ..StreamedBodyResponse::default() };
    let body_mutation = Some(BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) });
    CommonResponse { body_mutation, ..CommonResponse::default() }
}

pub(crate) fn pass_request_trailers() -> ProcessingResponse {
    answer(Answer::RequestTrailers(TrailersResponse::default()))
}

pub(crate) fn pass_response_headers() -> ProcessingResponse {
    answer(Answer::ResponseHeaders(HeadersResponse { response: Some(CommonResponse::default()) }))
}

pub(crate) fn pass_response_chunk(chunk: &Bytes, ends: bool, mode: ResponseBodyMode) -> ProcessingResponse {
    let response = match mode {
        ResponseBodyMode::Duplex => chunk_response(chunk, ends),
        ResponseBodyMode::Streamed => CommonResponse::default(),
    };
    answer(Answer::ResponseBody(BodyResponse { response: Some(response) }))
}

pub(crate) fn pass_response_trailers() -> ProcessingResponse {
    answer(Answer::ResponseTrailers(TrailersResponse::default()))
}

/// The picker's own response to the client.
pub(crate) fn respond(status: StatusCode, headers: &HeaderMap, body: &Bytes) -> ProcessingResponse {
    let set_headers = headers
        .iter()
        .filter(|(name, _)| *name != CONTENT_LENGTH)
        .map(|(name, value)| header(name.as_str(), value.as_bytes()))
        .collect();
    answer(Answer::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(status.as_u16()) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: body.to_vec(),
        details: "endpoint_picker".to_owned(),
        ..ImmediateResponse::default()
    }))
}

fn answer(response: Answer) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::google::protobuf::ListValue;

    use super::*;

    fn metadata(namespace: &str, key: &str, kind: Kind) -> Metadata {
        Metadata {
            filter_metadata: [(namespace.to_owned(), structure(key, kind))].into(),
            ..Metadata::default()
        }
    }

    #[test]
    fn endpoints_are_read_from_lists_and_texts() {
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let list = ["10.0.0.1:80", "[::1]:81"].map(|address| Value { kind: Some(text(address)) });
        let read = |kind| allowed_endpoints(Some(&metadata(SUBSET_NAMESPACE, SUBSET, kind)));
        let expected = Some(vec!["10.0.0.1:80".to_owned(), "[::1]:81".to_owned()]);
        assert_eq!(read(Kind::ListValue(ListValue { values: list.into() })), expected);
        assert_eq!(read(text("10.0.0.1:80, [::1]:81")), expected);
        assert_eq!(read(Kind::ListValue(ListValue::default())), Some(Vec::new()), "no engine is allowed");
        assert_eq!(allowed_endpoints(Some(&metadata("envoy.lb", SUBSET, text("a:1")))), None);
        let served = metadata(DESTINATION_NAMESPACE, SERVED, text("10.0.0.1:80"));
        assert_eq!(served_endpoint(Some(&served)), Some("10.0.0.1:80"));
        assert_eq!((served_endpoint(None), allowed_endpoints(None)), (None, None));
    }

    #[test]
    fn a_request_needs_method_and_path() {
        let head = |list: &[(&str, &str)]| {
            let header = |&(key, value): &(&str, &str)| EnvoyHeader {
                key: key.to_owned(),
                raw_value: value.as_bytes().to_vec(),
                ..EnvoyHeader::default()
            };
            request_head(Some(EnvoyHeaders { headers: list.iter().map(header).collect() }))
        };
        let all = [
            (":method", "POST"),
            (":path", "/v1/completions?a=b"),
            (":authority", "x"),
            ("x-a", "1"),
            ("x-a", "2"),
        ];
        let request = head(&all).unwrap();
        assert_eq!((request.method(), request.uri().path()), (&Method::POST, "/v1/completions"));
        assert_eq!(request.headers().get_all("x-a").iter().count(), 2);
        assert_eq!(head(&all[1..]).unwrap_err(), InvalidHeadersError::Method);
        assert_eq!(head(&all[..1]).unwrap_err(), InvalidHeadersError::Path);
        assert_eq!(head(&[all[0], (":path", "no path")]).unwrap_err(), InvalidHeadersError::Path);
        assert_eq!(request_head(None).unwrap_err(), InvalidHeadersError::Method);
    }
}
