//! Admin requests for segments.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::SegmentStatusResponse;

use super::{SharedAdminContext, client_ids, response};
use crate::query_string::QueryString;

pub(super) async fn names(State(admin): SharedAdminContext) -> Response {
    let detail = admin.server.master.segments_detail();
    let mut names = std::collections::HashSet::new();
    let mut lines = String::new();
    for name in detail.segments.iter().map(|segment| segment.segment_name.as_str()) {
        if names.insert(name) {
            lines.push_str(name);
            lines.push('\n');
        }
    }
    response::text(StatusCode::OK, lines)
}

pub(super) async fn detail(State(admin): SharedAdminContext) -> Response {
    let mut detail = admin.server.master.segments_detail();
    for segment in &mut detail.segments {
        segment.client_id = client_ids::published(segment.client_id);
    }
    response::ok(&detail)
}

/// The name is not percent-decoded, as in Mooncake.
pub(super) async fn usage(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let name = query.raw("segment").unwrap_or_default();
    match admin.server.master.segment_usage(name) {
        Ok(space) => {
            let (used, capacity) = (space.used, space.capacity);
            let lines = format!("{name}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n");
            response::text(StatusCode::OK, lines)
        }
        Err(_) => response::text(StatusCode::INTERNAL_SERVER_ERROR, "Failed to query segment"),
    }
}

pub(super) async fn status(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(name) = query.decoded("segment") else {
        return response::invalid("Missing segment query parameter");
    };
    match admin.server.master.segment_status(&name) {
        Ok(status) => response::ok(&SegmentStatusResponse {
            success: true,
            segment: name.into_owned(),
            status,
            status_name: status.name().unwrap_or_default().to_owned(),
            error_code: ErrorCode::OK,
            error_message: String::new(),
        }),
        Err(code) => response::failed(code),
    }
}
