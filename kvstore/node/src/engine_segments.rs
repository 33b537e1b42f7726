//! Lending memory that an engine made: the part of the REST API of Mooncake's store service that is about files in `/dev/shm`.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_wire::types::Uuid;
use moongate_memory::SegmentMemory;
use rustix::fs::OFlags;
use serde_json::{Map, Value};

use crate::memory::new_identity;
use crate::node::NodeContext;
use crate::rest::{error, failed, json, members, segment_ids, success, unmount_named};

/// Where engines' memory lies. Nothing elsewhere is lent: whoever may use the API could write to any file.
const FOLDER: &str = "/dev/shm";

/// What `/api/reconfigure` has made of a node.
#[derive(Debug, Default)]
pub(crate) struct EngineSegments {
    /// Whether it lends an engine's memory as that of a decode.
    decodes: bool,
    /// The segments that it lends as such. More than one if an older one could not be taken back.
    segments: Vec<Uuid>,
}

impl EngineSegments {
    fn mode(&self) -> &'static str {
        if self.decodes { "decode" } else { "prefill" }
    }
}

/// A part of a file.
struct SharedFileRange<'a> {
    name: &'a str,
    from: u64,
    size: u64,
}

impl<'a> SharedFileRange<'a> {
    /// The part of the file of that name, of which a body tells offset and size. None if they are not there.
    fn read(name: Option<&'a str>, data: &Map<String, Value>) -> Option<Self> {
        let name =
            name.filter(|name| !name.is_empty() && !name.contains('/') && !matches!(*name, "." | ".."));
        let from = data.get("offset").map_or(Some(0), Value::as_u64);
        Some(Self { name: name?, from: from?, size: data.get("size")?.as_u64()? })
    }

    fn open(&self) -> Result<SegmentMemory, String> {
        let told = |problem: String| format!("{FOLDER}/{}: {problem}", self.name);
        let mut options = File::options();
        // Neither a link to another file, nor a pipe that would be waited for.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let file = options.read(true).write(true).custom_flags(flags).open(format!("{FOLDER}/{}", self.name));
        let file = file.map_err(|problem| told(problem.to_string()))?;
        let found = file.metadata().map_err(|problem| told(problem.to_string()))?;
        if !found.is_file() {
            return Err(told("it is not a regular file".to_owned()));
        }
        let own = rustix::process::geteuid().as_raw();
        if found.uid() != own {
            return Err(told(format!("it belongs to the user {}, and this node runs as {own}", found.uid())));
        }
        let opened =
            SegmentMemory::from_file(file, self.from, self.size, |base| new_identity(base, self.size));
        opened.map_err(|problem| told(problem.to_string()))
    }
}

impl NodeContext {
    async fn mount_part(&self, part: &SharedFileRange<'_>) -> Result<Uuid, String> {
        self.check_capacity(part.size)?;
        self.mount_segment(part.open()?).await
    }
}

/// Lends a file in `/dev/shm`, or a part of it, until it is taken back or the node ends.
pub(crate) async fn mount_shm(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let name = data.get("name").and_then(Value::as_str);
    let Some(part) = SharedFileRange::read(name.map(|name| name.strip_prefix('/').unwrap_or(name)), &data)
    else {
        return error(StatusCode::BAD_REQUEST, "Missing or invalid name or size");
    };
    match shared.mount_part(&part).await {
        Ok(id) => json(
            StatusCode::OK,
            &[("status", "success".into()), ("segment_ids", vec![id.to_string()].into())],
        ),
        Err(problem) => failed(format!("Mount failed, {problem}")),
    }
}

/// Takes segments back that were lent so.
pub(crate) async fn unmount_shm(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let ids = segment_ids(&data);
    if ids.is_empty() {
        return error(StatusCode::BAD_REQUEST, "Missing segment_ids");
    }
    let mut left: Vec<&str> = Vec::new();
    let mut engines = shared.engines.lock().await;
    for id in ids {
        match unmount_named(&shared, id).await {
            Ok(()) => engines.segments.retain(|it| it.to_string() != id),
            Err(problem) => {
                tracing::warn!(id, %problem, "POST /api/unmount_shm");
                left.push(id);
            }
        }
    }
    engines.decodes &= !engines.segments.is_empty();
    if left.is_empty() {
        return success();
    }
    let problem = ("error", "Unmount failed for one or more segments".into());
    json(StatusCode::INTERNAL_SERVER_ERROR, &[problem, ("failed_segment_ids", left.into())])
}

/// Lends the memory of an engine that decodes, in the place of what was lent so before, or takes it back when the engine is to
/// prefill.
pub(crate) async fn reconfigure(State(shared): State<NodeContext>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let mode = data.get("mode").and_then(Value::as_str).unwrap_or_default().to_lowercase();
    let mut engines = shared.engines.lock().await;
    match mode.as_str() {
        "decode" => {
            let path = data.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
            let (Some(path), Some(_)) = (path, data.get("size")) else {
                return error(StatusCode::BAD_REQUEST, "Missing path or size for decode mode");
            };
            let name = path.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix('/'));
            let mounted = match SharedFileRange::read(name, &data) {
                Some(part) => shared.mount_part(&part).await,
                None => {
                    Err(format!("path must be that of a file in {FOLDER}, offset and size numbers of bytes"))
                }
            };
            decode(&shared, &mut engines, mounted).await
        }
        "prefill" => {
            if let Err(problem) = unmount_segments(&shared, &mut engines).await {
                return failed(format!("Unmount failed, {problem}"));
            }
            engines.decodes = false;
            json(StatusCode::OK, &[("status", "success".into()), ("mode", engines.mode().into())])
        }
        _ => error(StatusCode::BAD_REQUEST, "Invalid mode. Use 'decode' or 'prefill'"),
    }
}

/// The new segment first: when it cannot be had, what is lent stays.
async fn decode(
    shared: &NodeContext,
    engines: &mut EngineSegments,
    mounted: Result<Uuid, String>,
) -> Response {
    let new = match mounted {
        Ok(new) => new,
        Err(problem) => {
            engines.decodes &= !engines.segments.is_empty();
            let kept = if engines.segments.is_empty() {
                "rolled back to prefill"
            } else {
                "keeping previous decode segments"
            };
            let problem = format!("Mount failed, {problem}; {kept}");
            let members = [("error", problem.into()), ("mode", engines.mode().into())];
            return json(StatusCode::INTERNAL_SERVER_ERROR, &members);
        }
    };
    if let Err(problem) = unmount_segments(shared, engines).await {
        tracing::warn!(%problem, "memory that was lent before is lent still");
    }
    engines.segments.insert(0, new);
    engines.decodes = true;
    let ids: Vec<String> = engines.segments.iter().map(Uuid::to_string).collect();
    let mode = engines.mode().into();
    json(StatusCode::OK, &[("status", "success".into()), ("mode", mode), ("segment_ids", ids.into())])
}

/// Takes back all that is lent for an engine that decodes. What cannot be taken back stays known.
async fn unmount_segments(shared: &NodeContext, engines: &mut EngineSegments) -> Result<(), String> {
    let (mut left, mut failed) = (Vec::new(), None);
    for id in std::mem::take(&mut engines.segments) {
        if let Err(problem) = shared.unmount(id).await {
            failed = Some(problem);
            left.push(id);
        }
    }
    engines.segments = left;
    failed.map_or(Ok(()), Err)
}
