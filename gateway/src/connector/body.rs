//! Members that the gateway sets in an engine's body.

use std::fmt::Write as _;

use bytes::Bytes;

use crate::request_body::{BodyMember, MemberEdit, SplicedBody};
use crate::routed_request::RoutedRequest;

/// The client's body with `members` in place of its own, and `appended` members that it cannot have.
pub(super) fn with_members(
    routed: &RoutedRequest,
    members: Vec<(BodyMember, String)>,
    mut appended: String,
) -> SplicedBody {
    let mut edits = Vec::with_capacity(members.len());
    for (member, value) in members {
        if routed.routing.has(member) {
            edits.push(MemberEdit::new(member, value));
        } else {
            let comma = if appended.is_empty() { "" } else { "," };
            // Writing into a String does not fail.
            let _infallible = write!(appended, "{comma}\"{}\":{value}", member.key());
        }
    }
    SplicedBody::new(&routed.body, &routed.routing, &edits, Bytes::from(appended))
}
