//! Messages between holder and client: one JSON packet each way, with an optional file descriptor. The two may be of different releases:
//! members may be added, and existing ones must stay.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::PageMode;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderRequest {
    Memory { name: String, len: u64, pages: WirePageMode },
    Listener { name: String, address: SocketAddr },
    Give { name: String, len: u64 },
    Forget { name: String },
    Names,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WirePageMode {
    Normal,
    Transparent,
    Huge,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderResponse {
    Kept { fresh: bool },
    Length { kept: u64 },
    Done,
    Names { names: Vec<String> },
    Refused { why: String },
}

impl From<PageMode> for WirePageMode {
    fn from(pages: PageMode) -> Self {
        match pages {
            PageMode::Normal => Self::Normal,
            PageMode::Transparent => Self::Transparent,
            PageMode::Huge => Self::Huge,
        }
    }
}

impl From<WirePageMode> for PageMode {
    fn from(pages: WirePageMode) -> Self {
        match pages {
            WirePageMode::Normal => Self::Normal,
            WirePageMode::Transparent => Self::Transparent,
            WirePageMode::Huge => Self::Huge,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of the first release, which later releases must accept.
    #[test]
    fn the_wire_format_is_stable() {
        let messages = [
            (
                HolderRequest::Memory { name: "a".into(), len: 5, pages: WirePageMode::Huge },
                r#"{"memory":{"name":"a","len":5,"pages":"huge"}}"#,
            ),
            (
                HolderRequest::Listener { name: "a".into(), address: ([127, 0, 0, 1], 80).into() },
                r#"{"listener":{"name":"a","address":"127.0.0.1:80"}}"#,
            ),
            (HolderRequest::Give { name: "a".into(), len: 5 }, r#"{"give":{"name":"a","len":5}}"#),
            (HolderRequest::Forget { name: "a".into() }, r#"{"forget":{"name":"a"}}"#),
            (HolderRequest::Names, r#""names""#),
        ];
        for (request, text) in messages {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<HolderRequest>(text).unwrap(), request);
        }
        let messages = [
            (HolderResponse::Kept { fresh: true }, r#"{"kept":{"fresh":true}}"#),
            (HolderResponse::Length { kept: 7 }, r#"{"length":{"kept":7}}"#),
            (HolderResponse::Done, r#""done""#),
            (HolderResponse::Names { names: vec!["a".into()] }, r#"{"names":{"names":["a"]}}"#),
            (HolderResponse::Refused { why: "x".into() }, r#"{"refused":{"why":"x"}}"#),
        ];
        for (response, text) in messages {
            assert_eq!(serde_json::to_string(&response).unwrap(), text);
            assert_eq!(serde_json::from_str::<HolderResponse>(text).unwrap(), response);
        }
        // A later release may add members.
        let more = r#"{"kept":{"fresh":false,"since":"yesterday"}}"#;
        assert_eq!(
            serde_json::from_str::<HolderResponse>(more).unwrap(),
            HolderResponse::Kept { fresh: false }
        );
    }
}
