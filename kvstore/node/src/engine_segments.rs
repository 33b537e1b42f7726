//! Mounts shared memory that an engine created: the `/dev/shm` part of the REST API of Mooncake's store service.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use mooncake_wire::types::Uuid;
use moongate_memory::SegmentMemory;
use moongate_memory::segment::SegmentError;
use rustix::fs::OFlags;
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use crate::memory::new_identity;
use crate::rest_response::{error, failed, json, members, segment_ids, success};
use crate::segment_mounter::{SegmentMountError, SegmentMounter, SegmentUnmountError};

/// Folder of engines' shared memory. Other folders are refused, or callers of the API could write to any file.
const FOLDER: &str = "/dev/shm";

/// Mode and segments set by `/api/reconfigure`.
#[derive(Debug, Default)]
struct EngineSegments {
    /// Whether the node is in decode mode, with an engine's memory mounted.
    decodes: bool,
    /// Segments mounted in decode mode. More than one if unmounting an older one failed.
    segments: Vec<Uuid>,
}

impl EngineSegments {
    fn mode(&self) -> &'static str {
        if self.decodes { "decode" } else { "prefill" }
    }
}

/// A file in `/dev/shm` that cannot be mapped.
#[derive(Debug, thiserror::Error)]
#[error("{FOLDER}/{name}: {source}")]
struct SharedFileError {
    name: String,
    source: SharedFileMapError,
}

#[derive(Debug, thiserror::Error)]
enum SharedFileMapError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is not a regular file")]
    NotRegular,
    #[error("it belongs to the user {owner}, and this node runs as {own}")]
    OtherOwner { owner: u32, own: u32 },
    #[error(transparent)]
    Memory(#[from] SegmentError),
}

/// Why an engine's memory was not mounted.
#[derive(Debug, thiserror::Error)]
enum EngineMountError {
    #[error("path must be that of a file in {FOLDER}, offset and size numbers of bytes")]
    InvalidRange,
    #[error(transparent)]
    File(#[from] SharedFileError),
    #[error(transparent)]
    Mount(#[from] SegmentMountError),
}

/// A byte range of a file in `/dev/shm`.
struct SharedFileRange<'a> {
    name: &'a str,
    offset: u64,
    size: u64,
}

impl<'a> SharedFileRange<'a> {
    /// Reads offset and size offset a request body. None if they are missing or the name is not that of a file in the folder.
    fn read(name: Option<&'a str>, data: &Map<String, Value>) -> Option<Self> {
        let name =
            name.filter(|name| !name.is_empty() && !name.contains('/') && !matches!(*name, "." | ".."));
        let offset = data.get("offset").map_or(Some(0), Value::as_u64);
        Some(Self { name: name?, offset: offset?, size: data.get("size")?.as_u64()? })
    }

    fn open(&self, direct_writes: bool) -> Result<SegmentMemory, SharedFileError> {
        self.map(direct_writes).map_err(|source| SharedFileError { name: self.name.to_owned(), source })
    }

    fn map(&self, direct_writes: bool) -> Result<SegmentMemory, SharedFileMapError> {
        let mut options = File::options();
        // NOFOLLOW refuses symbolic links, and NONBLOCK avoids waiting for the writer of a pipe.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let file =
            options.read(true).write(true).custom_flags(flags).open(format!("{FOLDER}/{}", self.name))?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(SharedFileMapError::NotRegular);
        }
        let (owner, own) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != own {
            return Err(SharedFileMapError::OtherOwner { owner, own });
        }
        let identity = |base| new_identity(base, self.size);
        Ok(SegmentMemory::from_file(file, self.offset, self.size, direct_writes, identity)?)
    }
}

/// Mounts engines' memory, and keeps track of it.
struct EngineSegmentsApi {
    segments: SegmentMounter,
    engines: Mutex<EngineSegments>,
}

impl EngineSegmentsApi {
    async fn mount_part(&self, part: &SharedFileRange<'_>) -> Result<Uuid, EngineMountError> {
        self.segments.check_capacity(part.size)?;
        Ok(self.segments.mount_segment(part.open(self.segments.fabric.is_some())?).await?)
    }
}

pub(crate) fn router(segments: SegmentMounter) -> Router {
    let engines = Mutex::default();
    Router::new()
        .route("/api/mount_shm", post(mount_shm))
        .route("/api/unmount_shm", post(unmount_shm))
        .route("/api/reconfigure", post(reconfigure))
        .with_state(Arc::new(EngineSegmentsApi { segments, engines }))
}

/// Mounts a file in `/dev/shm`, or a range of it, until it is unmounted or the node exits.
async fn mount_shm(State(api): State<Arc<EngineSegmentsApi>>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let name = data.get("name").and_then(Value::as_str);
    let Some(part) = SharedFileRange::read(name.map(|name| name.strip_prefix('/').unwrap_or(name)), &data)
    else {
        return error(StatusCode::BAD_REQUEST, "Missing or invalid name or size");
    };
    match api.mount_part(&part).await {
        Ok(id) => json(
            StatusCode::OK,
            &[("status", "success".into()), ("segment_ids", vec![id.to_string()].into())],
        ),
        Err(problem) => failed(format!("Mount failed, {problem}")),
    }
}

/// Unmounts segments that [`mount_shm`] mounted.
async fn unmount_shm(State(api): State<Arc<EngineSegmentsApi>>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let ids = segment_ids(&data);
    if ids.is_empty() {
        return error(StatusCode::BAD_REQUEST, "Missing segment_ids");
    }
    let mut remaining: Vec<&str> = Vec::new();
    let mut engines = api.engines.lock().await;
    for id in ids {
        match api.segments.unmount_named(id).await {
            Ok(()) => engines.segments.retain(|it| it.to_string() != id),
            Err(problem) => {
                tracing::warn!(id, %problem, "POST /api/unmount_shm");
                remaining.push(id);
            }
        }
    }
    engines.decodes &= !engines.segments.is_empty();
    if remaining.is_empty() {
        return success();
    }
    let problem = ("error", "Unmount failed for one or more segments".into());
    json(StatusCode::INTERNAL_SERVER_ERROR, &[problem, ("failed_segment_ids", remaining.into())])
}

/// Mode `decode` mounts the engine's memory and unmounts what an earlier `decode` mounted. Mode `prefill` only unmounts.
async fn reconfigure(State(api): State<Arc<EngineSegmentsApi>>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let mode = data.get("mode").and_then(Value::as_str).unwrap_or_default().to_lowercase();
    let mut engines = api.engines.lock().await;
    match mode.as_str() {
        "decode" => {
            let path = data.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
            let (Some(path), Some(_)) = (path, data.get("size")) else {
                return error(StatusCode::BAD_REQUEST, "Missing path or size for decode mode");
            };
            let name = path.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix('/'));
            let mounted = match SharedFileRange::read(name, &data) {
                Some(part) => api.mount_part(&part).await,
                None => Err(EngineMountError::InvalidRange),
            };
            decode(&api.segments, &mut engines, mounted).await
        }
        "prefill" => {
            if let Err(problem) = unmount_segments(&api.segments, &mut engines).await {
                return failed(format!("Unmount failed, {problem}"));
            }
            engines.decodes = false;
            json(StatusCode::OK, &[("status", "success".into()), ("mode", engines.mode().into())])
        }
        _ => error(StatusCode::BAD_REQUEST, "Invalid mode. Use 'decode' or 'prefill'"),
    }
}

/// The new segment is mounted first, so the old ones stay mounted if that fails.
async fn decode(
    mounter: &SegmentMounter,
    engines: &mut EngineSegments,
    mounted: Result<Uuid, EngineMountError>,
) -> Response {
    let new = match mounted {
        Ok(new) => new,
        Err(problem) => {
            engines.decodes &= !engines.segments.is_empty();
            let consequence = if engines.segments.is_empty() {
                "rolled back to prefill"
            } else {
                "keeping previous decode segments"
            };
            let problem = format!("Mount failed, {problem}; {consequence}");
            let members = [("error", problem.into()), ("mode", engines.mode().into())];
            return json(StatusCode::INTERNAL_SERVER_ERROR, &members);
        }
    };
    if let Err(problem) = unmount_segments(mounter, engines).await {
        tracing::warn!(%problem, "cannot unmount the previous decode segments; they stay mounted");
    }
    engines.segments.insert(0, new);
    engines.decodes = true;
    let ids: Vec<String> = engines.segments.iter().map(Uuid::to_string).collect();
    let mode = engines.mode().into();
    json(StatusCode::OK, &[("status", "success".into()), ("mode", mode), ("segment_ids", ids.into())])
}

/// Unmounts all decode segments. Those that fail stay in the list.
async fn unmount_segments(
    mounter: &SegmentMounter,
    engines: &mut EngineSegments,
) -> Result<(), SegmentUnmountError> {
    let (mut remaining, mut failed) = (Vec::new(), None);
    for id in std::mem::take(&mut engines.segments) {
        if let Err(problem) = mounter.unmount(id).await {
            failed = Some(problem);
            remaining.push(id);
        }
    }
    engines.segments = remaining;
    failed.map_or(Ok(()), Err)
}
