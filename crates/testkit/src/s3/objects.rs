//! The part of Amazon's S3 REST API that the batches' storage uses, over one bucket in memory: `PutObject`, `GetObject`, `HeadObject`,
//! `DeleteObject`, `ListObjectsV2` and multipart uploads, with `If-Match` and `If-None-Match`. Signatures are not checked.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Bound;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;

use super::BUCKET;

/// Objects of one response of a list. S3 sends up to 1,000; fewer let tests have several.
const LIST_PAGE: usize = 10;
/// All parts but the last have at least this size.
const MIN_PART_BYTES: usize = 5 << 20;
/// Time of every change.
const MODIFIED_ISO: &str = "2026-01-01T00:00:00.000Z";
const MODIFIED_HTTP: &str = "Thu, 01 Jan 2026 00:00:00 GMT";

type Parts = BTreeMap<u32, Bytes>;
type Parameters = HashMap<String, String>;

#[derive(Debug, Default)]
pub(super) struct Objects {
    by_key: BTreeMap<String, Bytes>,
    /// Unfinished uploads, by key and id.
    uploads: HashMap<(String, String), Parts>,
    last_upload: u64,
}

pub(super) type SharedObjects = Arc<Mutex<Objects>>;

/// A status, and S3's code for it.
struct S3Failure(StatusCode, &'static str);

const NO_BUCKET: S3Failure = S3Failure(StatusCode::NOT_FOUND, "NoSuchBucket");
const NO_KEY: S3Failure = S3Failure(StatusCode::NOT_FOUND, "NoSuchKey");
const NO_UPLOAD: S3Failure = S3Failure(StatusCode::NOT_FOUND, "NoSuchUpload");
const PRECONDITION: S3Failure = S3Failure(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
const INVALID_RANGE: S3Failure = S3Failure(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
const INVALID_ARGUMENT: S3Failure = S3Failure(StatusCode::BAD_REQUEST, "InvalidArgument");
const INVALID_PART: S3Failure = S3Failure(StatusCode::BAD_REQUEST, "InvalidPart");
const SMALL_PART: S3Failure = S3Failure(StatusCode::BAD_REQUEST, "EntityTooSmall");
const NOT_IMPLEMENTED: S3Failure = S3Failure(StatusCode::NOT_IMPLEMENTED, "NotImplemented");

/// Responds to a request for the bucket.
pub(super) async fn list(
    State(objects): State<SharedObjects>,
    Path(bucket): Path<String>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let objects = objects.lock();
    match bucket == BUCKET {
        true => respond(objects.list(&parameters)),
        false => respond(Err(NO_BUCKET)),
    }
}

/// Responds to a request for an object.
pub(super) async fn object(
    State(objects): State<SharedObjects>,
    method: Method,
    Path((bucket, key)): Path<(String, String)>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if bucket != BUCKET {
        return respond(Err(NO_BUCKET));
    }
    let mut objects = objects.lock();
    let upload = parameters.get("uploadId").map(|id| (key.clone(), id.clone()));
    respond(match (method, upload) {
        (Method::PUT, Some(upload)) => objects.put_part(&upload, &parameters, body),
        (Method::PUT, None) => objects.put(key, &headers, body),
        (Method::POST, Some(upload)) => objects.complete(&upload, &headers, &body),
        (Method::POST, None) if parameters.contains_key("uploads") => Ok(objects.begin(key)),
        (Method::DELETE, Some(upload)) => {
            objects.uploads.remove(&upload).map(|_| StatusCode::NO_CONTENT.into_response()).ok_or(NO_UPLOAD)
        }
        (Method::DELETE, None) => {
            objects.by_key.remove(&key);
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        (Method::GET | Method::HEAD, None) => objects.get(&key, &headers),
        _ => Err(NOT_IMPLEMENTED),
    })
}

fn respond(result: Result<Response, S3Failure>) -> Response {
    result.unwrap_or_else(|S3Failure(status, code)| {
        let error = xml(&format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>"));
        (status, error).into_response()
    })
}

fn xml(content: &str) -> Response {
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{content}");
    ([(header::CONTENT_TYPE, "application/xml")], text).into_response()
}

/// The same for the same content, as in S3.
fn etag(content: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

impl Objects {
    fn check(&self, key: &str, headers: &HeaderMap) -> Result<(), S3Failure> {
        let condition = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let current = self.by_key.get(key).map(|content| etag(content));
        if condition(header::IF_NONE_MATCH).is_some() && current.is_some() {
            return Err(PRECONDITION);
        }
        match (condition(header::IF_MATCH), current) {
            (None, _) => Ok(()),
            (Some(_), None) => Err(NO_KEY),
            (Some(expected), Some(current)) if expected == current => Ok(()),
            _ => Err(PRECONDITION),
        }
    }

    fn put(&mut self, key: String, headers: &HeaderMap, content: Bytes) -> Result<Response, S3Failure> {
        self.check(&key, headers)?;
        let response = [(header::ETAG, etag(&content))].into_response();
        self.by_key.insert(key, content);
        Ok(response)
    }

    fn get(&self, key: &str, headers: &HeaderMap) -> Result<Response, S3Failure> {
        let content = self.by_key.get(key).ok_or(NO_KEY)?;
        let facts = [(header::ETAG, etag(content)), (header::LAST_MODIFIED, MODIFIED_HTTP.to_owned())];
        let Some(range) = headers.get(header::RANGE) else {
            return Ok((facts, content.clone()).into_response());
        };
        let range = range.to_str().ok().and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let (first, last) = range.ok_or(NOT_IMPLEMENTED)?;
        let first: usize = first.parse().map_err(|_| NOT_IMPLEMENTED)?;
        let last = last.parse().unwrap_or(usize::MAX).min(content.len().wrapping_sub(1));
        if first >= content.len() || last < first {
            return Err(INVALID_RANGE);
        }
        let range = [(header::CONTENT_RANGE, format!("bytes {first}-{last}/{}", content.len()))];
        Ok((StatusCode::PARTIAL_CONTENT, facts, range, content.slice(first..=last)).into_response())
    }

    fn list(&self, parameters: &Parameters) -> Result<Response, S3Failure> {
        if parameters.get("list-type").map(String::as_str) != Some("2")
            || parameters.contains_key("delimiter")
        {
            return Err(NOT_IMPLEMENTED);
        }
        let prefix = parameters.get("prefix").map_or("", String::as_str);
        // The token is the last key of the page before.
        let after = parameters.get("continuation-token").map_or("", String::as_str);
        let range = (Bound::Excluded(after), Bound::Unbounded);
        let mut keys = self.by_key.range::<str, _>(range).filter(|(key, _)| key.starts_with(prefix));
        let page: Vec<_> = keys.by_ref().take(LIST_PAGE).collect();
        let mut found = String::new();
        for (key, content) in &page {
            let (size, etag) = (content.len(), etag(content));
            // Writing to a text does not fail. Keys are plain, so nothing is escaped.
            let _ = write!(
                found,
                "<Contents><Key>{key}</Key><LastModified>{MODIFIED_ISO}</LastModified><ETag>{etag}</ETag><Size>{size}</Size></Contents>"
            );
        }
        if let (Some((last, _)), Some(_)) = (page.last(), keys.next()) {
            let _ = write!(found, "<NextContinuationToken>{last}</NextContinuationToken>");
        }
        Ok(xml(&format!("<ListBucketResult>{found}</ListBucketResult>")))
    }

    fn begin(&mut self, key: String) -> Response {
        self.last_upload += 1;
        let id = format!("upload-{}", self.last_upload);
        let response = xml(&format!(
            "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
        ));
        self.uploads.insert((key, id), Parts::new());
        response
    }

    fn put_part(
        &mut self,
        upload: &(String, String),
        parameters: &Parameters,
        content: Bytes,
    ) -> Result<Response, S3Failure> {
        let number = parameters.get("partNumber").and_then(|number| number.parse().ok());
        let number = number.filter(|number| (1..=10_000).contains(number)).ok_or(INVALID_ARGUMENT)?;
        let response = [(header::ETAG, etag(&content))].into_response();
        self.uploads.get_mut(upload).ok_or(NO_UPLOAD)?.insert(number, content);
        Ok(response)
    }

    fn complete(
        &mut self,
        upload: &(String, String),
        headers: &HeaderMap,
        request: &[u8],
    ) -> Result<Response, S3Failure> {
        self.check(&upload.0, headers)?;
        let parts = self.uploads.get(upload).ok_or(NO_UPLOAD)?;
        let request = String::from_utf8_lossy(request);
        let listed = request.matches("<PartNumber>").count();
        // Clients send every part, with the ETags that they got.
        if listed != parts.len() || !parts.values().all(|part| contains_etag(&request, &etag(part))) {
            return Err(INVALID_PART);
        }
        let last = parts.keys().next_back().copied();
        if parts.iter().any(|(number, part)| Some(*number) != last && part.len() < MIN_PART_BYTES) {
            return Err(SMALL_PART);
        }
        let content = parts.values().map(|part| &**part).collect::<Vec<_>>().concat();
        let etag = etag(&content);
        self.uploads.remove(upload);
        self.by_key.insert(upload.0.clone(), content.into());
        Ok(xml(&format!(
            "<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        )))
    }
}

/// Whether XML has this ETag, whose quotes may be escaped.
fn contains_etag(xml: &str, etag: &str) -> bool {
    xml.contains(etag.trim_matches('"'))
}
