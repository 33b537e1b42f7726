//! OpenAI's files and batches, with `--batch-store`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{Next, from_fn};
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::stream::try_unfold;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode, Uri};
use moongate_batch::{
    BatchEndpoint, BatchError, BatchRecord, BatchService, FileRecord, NewBatch, NewFile, ObjectPage,
    PageQuery, StorageError,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::batch_backend::BatchTenant;
use super::body::BodyLimits;
use super::form_data::{FormField, form_fields};
use super::handler::GatewayContext;
use super::headers::{REQUEST_ID, request_id};
use super::media_type::{MediaType, check_encoding};
use super::router;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};

/// Bytes of a form around its file.
const FORM_OVERHEAD: u64 = 64 << 10;
/// Part of a file that is read at a time.
const PART_BYTES: usize = 256 << 10;
/// Largest and default page of the list of files, and of batches, as in OpenAI's API.
const FILES_PAGE: [usize; 2] = [10_000, 10_000];
const BATCHES_PAGE: [usize; 2] = [100, 20];
/// The only time within which batches end.
const COMPLETION_WINDOW: &str = "24h";
/// The only purpose of uploads.
const PURPOSE: &str = "batch";

type Gateway = State<Arc<GatewayContext>>;

/// The paths of files and batches.
pub(super) fn routes() -> Router<Arc<GatewayContext>> {
    Router::new()
        .route("/v1/files", get(list_files).post(upload_file))
        .route("/v1/files/{id}", get(file).delete(delete_file))
        .route("/v1/files/{id}/content", get(file_content))
        .route("/v1/batches", get(list_batches).post(create_batch))
        .route("/v1/batches/{id}", get(batch))
        .route("/v1/batches/{id}/cancel", post(cancel_batch))
        .route_layer(from_fn(add_request_id))
}

/// Responses name their request, as those of inference do.
async fn add_request_id(request: Request, next: Next) -> Response<Body> {
    let id = request_id(request.headers());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The service and the tenant of a request.
fn open<B>(
    gateway: &GatewayContext,
    request: &http::Request<B>,
) -> Result<(Arc<BatchService>, String), ApiError> {
    let text = "files and batches are off; start the gateway with --batch-store DIR";
    let host = gateway.batches.as_deref().ok_or_else(|| ApiError::new(ApiErrorCode::NotFound, text))?;
    let service = host.service().map_err(|error| api_error(&error.into()))?;
    Ok((service, BatchTenant::of(gateway, request).encode()))
}

fn api_error(error: &BatchError) -> ApiError {
    let text = error.to_string();
    match error {
        BatchError::NoSuchFile(_) | BatchError::NoSuchBatch(_) => ApiError::new(ApiErrorCode::NotFound, text),
        BatchError::Invalid { param, .. } => ApiError::new(ApiErrorCode::InvalidRequest, text).param(*param),
        BatchError::Full(_) => ApiError::new(ApiErrorCode::InvalidRequest, text),
        BatchError::Damaged { .. } => ApiError::new(ApiErrorCode::StorageFailed, text),
        BatchError::Storage(StorageError::LeaseLost(_)) => {
            let text = "another gateway runs the batches now, or their storage does not work; retry";
            ApiError::new(ApiErrorCode::StorageFailed, text)
        }
        BatchError::Storage(_) | BatchError::Encoding(_) => {
            // The path of the storage is for operators.
            tracing::warn!(%error, "a request for a file or batch failed");
            ApiError::new(
                ApiErrorCode::StorageFailed,
                "the storage of files and batches does not work now; retry",
            )
        }
    }
}

fn respond(result: Result<Value, ApiError>) -> Response<Body> {
    match result {
        Ok(object) => router::json(StatusCode::OK, &object),
        Err(error) => error.response(ErrorFormat::OpenAi),
    }
}

async fn upload_file(State(gateway): Gateway, request: Request) -> Response<Body> {
    respond(upload(&gateway, request).await)
}

async fn upload(gateway: &GatewayContext, request: Request) -> Result<Value, ApiError> {
    let (service, tenant) = open(gateway, &request)?;
    let (mut parts, body) = request.into_parts();
    let media_type = check_encoding(&parts.headers).and_then(|()| MediaType::of(&parts.headers));
    let content_type = match (media_type, parts.headers.get(CONTENT_TYPE)) {
        (Ok(MediaType::Form), Some(content_type)) => content_type.clone(),
        (media_type, _) => {
            gateway.bodies.discard(&parts.headers, body);
            let text = "send the file as multipart/form-data, with the fields `purpose` and `file`";
            return Err(media_type.err().unwrap_or(ApiError::new(ApiErrorCode::UnsupportedMediaType, text)));
        }
    };
    let limit = service.options().max_file_bytes.saturating_add(FORM_OVERHEAD);
    let limit = limit.min(gateway.bodies.memory.max_request());
    let limits =
        BodyLimits { max_bytes: usize::try_from(limit).unwrap_or(usize::MAX), ..gateway.bodies.limits };
    let form = gateway.bodies.collect_within(limits, &mut parts, body).await.map_err(|error| match error.code {
        ApiErrorCode::BodyTooLarge => {
            let text = format!(
                "the upload is larger than {limit} bytes; split the file, or raise the gateway's --batch-max-file-bytes and \
                 --body-memory"
            );
            ApiError::new(ApiErrorCode::BodyTooLarge, text)
        }
        _ => error,
    })?;
    let file = file_of_form(&content_type, &form)?;
    let record = service.create_file(&tenant, file).await.map_err(|error| api_error(&error))?;
    Ok(record.object())
}

fn file_of_form(content_type: &HeaderValue, form: &Bytes) -> Result<NewFile, ApiError> {
    let invalid = |param: &str, text: String| ApiError::new(ApiErrorCode::InvalidRequest, text).param(param);
    let fields = form_fields(content_type, form).map_err(|error| invalid("file", error.to_string()))?;
    let (mut file, mut purpose) = (None, None);
    for FormField { name, filename, value } in fields {
        let slot = match name.as_str() {
            "file" => &mut file,
            "purpose" => &mut purpose,
            name if name.starts_with("expires_after") => {
                let text = "`expires_after` is not supported: files are stored until they are deleted";
                return Err(invalid("expires_after", text.to_owned()));
            }
            _ => continue,
        };
        if slot.replace((filename, value)).is_some() {
            return Err(invalid(&name, format!("the form has more than one field {name:?}; send one")));
        }
    }
    match purpose {
        Some((_, purpose)) if purpose == PURPOSE => {}
        _ => return Err(invalid("purpose", format!("`purpose` must be {PURPOSE:?}"))),
    }
    let (filename, content) = file
        .ok_or_else(|| invalid("file", "the form has no field `file`; send the input as one".to_owned()))?;
    Ok(NewFile { filename: filename.unwrap_or_else(|| "file".to_owned()), content })
}

#[derive(Debug, Default, Deserialize)]
struct ListParameters {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
    purpose: Option<String>,
}

impl ListParameters {
    fn parse(uri: &Uri, [max, default]: [usize; 2]) -> Result<(PageQuery, Option<String>), ApiError> {
        let invalid =
            |param: &str, text: String| ApiError::new(ApiErrorCode::InvalidRequest, text).param(param);
        let parsed = Query::<Self>::try_from_uri(uri);
        let Query(parameters) = parsed.map_err(|error| invalid("limit", error.to_string()))?;
        let limit = parameters.limit.unwrap_or(default);
        if !(1..=max).contains(&limit) {
            return Err(invalid("limit", format!("`limit` must be from 1 to {max}")));
        }
        let ascending = match parameters.order.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => return Err(invalid("order", "`order` must be \"asc\" or \"desc\"".to_owned())),
        };
        Ok((PageQuery { after: parameters.after, limit, ascending }, parameters.purpose))
    }
}

fn list<T>(page: &ObjectPage<T>, object: impl Fn(&T) -> Value) -> Value {
    let data: Vec<Value> = page.items.iter().map(object).collect();
    let id = |object: Option<&Value>| object.map(|object| object["id"].clone());
    json!({
        "object": "list",
        "first_id": id(data.first()),
        "last_id": id(data.last()),
        "has_more": page.has_more,
        "data": data,
    })
}

async fn list_files(State(gateway): Gateway, request: Request) -> Response<Body> {
    respond(open(&gateway, &request).and_then(|(service, tenant)| {
        let (query, purpose) = ListParameters::parse(request.uri(), FILES_PAGE)?;
        let page = service.files(&tenant, purpose.as_deref(), &query).map_err(|error| api_error(&error))?;
        Ok(list(&page, FileRecord::object))
    }))
}

async fn file(State(gateway): Gateway, Path(id): Path<String>, request: Request) -> Response<Body> {
    respond(open(&gateway, &request).and_then(|(service, tenant)| {
        service.file(&tenant, &id).map(|file| file.object()).map_err(|error| api_error(&error))
    }))
}

async fn delete_file(State(gateway): Gateway, Path(id): Path<String>, request: Request) -> Response<Body> {
    let (service, tenant) = match open(&gateway, &request) {
        Ok(opened) => opened,
        Err(error) => return error.response(ErrorFormat::OpenAi),
    };
    let deleted = service.delete_file(&tenant, &id).await;
    respond(match deleted {
        Ok(()) => Ok(json!({"id": id, "object": "file", "deleted": true})),
        Err(error) => Err(api_error(&error)),
    })
}

async fn file_content(State(gateway): Gateway, Path(id): Path<String>, request: Request) -> Response<Body> {
    let file = open(&gateway, &request).and_then(|(service, tenant)| {
        let file = service.file(&tenant, &id).map_err(|error| api_error(&error))?;
        Ok((service, file))
    });
    match file {
        Ok((service, file)) => content(service, file),
        Err(error) => error.response(ErrorFormat::OpenAi),
    }
}

/// Streams a file. If it is deleted meanwhile, the response ends before its declared length.
fn content(service: Arc<BatchService>, file: FileRecord) -> Response<Body> {
    let length = HeaderValue::from(file.bytes);
    let parts = try_unfold((service, file, 0_u64), |(service, file, offset)| async move {
        if offset >= file.bytes {
            return Ok(None);
        }
        let part = service.read_file(&file, offset, PART_BYTES).await?;
        if part.is_empty() {
            return Err(StorageError::NotFound(format!("the rest of {}", file.id)));
        }
        let next = offset + part.len() as u64;
        Ok(Some((part, (service, file, next))))
    });
    let mut response = Response::new(Body::from_stream(parts));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_LENGTH, length);
    response
}

#[derive(Debug, Deserialize)]
struct CreateBatchBody {
    input_file_id: String,
    endpoint: String,
    completion_window: String,
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
}

async fn create_batch(State(gateway): Gateway, request: Request) -> Response<Body> {
    respond(create(&gateway, request).await)
}

async fn create(gateway: &GatewayContext, request: Request) -> Result<Value, ApiError> {
    let (service, tenant) = open(gateway, &request)?;
    let (mut parts, body) = request.into_parts();
    if let Err(error) = check_encoding(&parts.headers) {
        gateway.bodies.discard(&parts.headers, body);
        return Err(error);
    }
    let body = gateway.bodies.collect(&mut parts, body).await?;
    let body: CreateBatchBody = serde_json::from_slice(&body).map_err(|error| {
        let text = format!(
            "the body is not an object with `input_file_id`, `endpoint`, `completion_window` and perhaps `metadata`: {error}"
        );
        ApiError::new(ApiErrorCode::InvalidRequest, text)
    })?;
    let invalid = |param: &str, text: String| ApiError::new(ApiErrorCode::InvalidRequest, text).param(param);
    if body.completion_window != COMPLETION_WINDOW {
        return Err(invalid(
            "completion_window",
            format!("`completion_window` must be {COMPLETION_WINDOW:?}"),
        ));
    }
    let endpoint: BatchEndpoint =
        body.endpoint.parse().map_err(|error| invalid("endpoint", format!("`endpoint` {error}")))?;
    let metadata = body.metadata.unwrap_or_default();
    let batch = NewBatch { input_file: body.input_file_id, endpoint, metadata };
    let record = service.create_batch(&tenant, batch).await.map_err(|error| api_error(&error))?;
    Ok(batch_object(&record))
}

fn batch_object(batch: &BatchRecord) -> Value {
    batch.object(batch.counts)
}

async fn list_batches(State(gateway): Gateway, request: Request) -> Response<Body> {
    respond(open(&gateway, &request).and_then(|(service, tenant)| {
        let (query, _) = ListParameters::parse(request.uri(), BATCHES_PAGE)?;
        let page = service.batches(&tenant, &query).map_err(|error| api_error(&error))?;
        Ok(list(&page, batch_object))
    }))
}

async fn batch(State(gateway): Gateway, Path(id): Path<String>, request: Request) -> Response<Body> {
    respond(open(&gateway, &request).and_then(|(service, tenant)| {
        service.batch(&tenant, &id).map(|batch| batch_object(&batch)).map_err(|error| api_error(&error))
    }))
}

async fn cancel_batch(State(gateway): Gateway, Path(id): Path<String>, request: Request) -> Response<Body> {
    let (service, tenant) = match open(&gateway, &request) {
        Ok(opened) => opened,
        Err(error) => return error.response(ErrorFormat::OpenAi),
    };
    let cancelled = service.cancel_batch(&tenant, &id).await;
    respond(cancelled.map(|batch| batch_object(&batch)).map_err(|error| api_error(&error)))
}
