//! Batches and their states.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Group of the storage with the batches' records.
pub(crate) const BATCHES: &str = "batches";
const RECORD_SUFFIX: &str = ".record";
pub(crate) const BATCH_ID_PREFIX: &str = "batch_";

/// Paths that the lines of a batch may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BatchEndpoint {
    #[serde(rename = "/v1/chat/completions")]
    ChatCompletions,
    #[serde(rename = "/v1/completions")]
    Completions,
    #[serde(rename = "/v1/embeddings")]
    Embeddings,
    #[serde(rename = "/v1/responses")]
    Responses,
    #[serde(rename = "/v1/messages")]
    Messages,
}

impl BatchEndpoint {
    /// All endpoints, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::ChatCompletions, Self::Completions, Self::Embeddings, Self::Responses, Self::Messages];

    /// The path of the endpoint.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }
}

/// The path is not one of a batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path:?} is not supported in batches; use one of {}", BatchEndpoint::ALL.map(BatchEndpoint::path).join(", "))]
pub struct UnsupportedEndpoint {
    path: String,
}

impl FromStr for BatchEndpoint {
    type Err = UnsupportedEndpoint;

    fn from_str(path: &str) -> Result<Self, UnsupportedEndpoint> {
        let found = Self::ALL.into_iter().find(|endpoint| endpoint.path() == path);
        found.ok_or_else(|| UnsupportedEndpoint { path: path.to_owned() })
    }
}

/// State of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    /// The input is waiting to be checked, or being checked.
    Validating,
    /// Lines are being run.
    InProgress,
    /// All lines have ended; the output files are being written.
    Finalizing,
    Completed,
    /// The input is invalid or the storage damaged.
    Failed,
    /// The completion window ended before all lines did.
    Expired,
    /// The output files of a cancelled batch are being written.
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    /// All states, in the order in which a batch may have them.
    pub const ALL: [Self; 8] = [
        Self::Validating,
        Self::InProgress,
        Self::Finalizing,
        Self::Completed,
        Self::Failed,
        Self::Expired,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// Name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the batch never changes again.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }
}

impl fmt::Display for BatchStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A problem with the input, as in `errors.data` of the API's batch object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputProblem {
    pub code: String,
    pub message: String,
    /// The member at fault.
    pub param: Option<String>,
    /// Line of the input, from 1.
    pub line: Option<u64>,
}

/// Lines of a batch by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    pub total: u32,
    /// Lines with a successful response.
    pub completed: u32,
    pub failed: u32,
}

/// Something that happened to a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BatchEvent {
    /// The input is valid.
    Validated {
        lines: u32,
    },
    /// The batch cannot go on.
    Failed(Vec<InputProblem>),
    CancelRequested,
    AllLinesEnded,
    /// The output files are complete.
    Finished(FinishedOutput),
}

/// What the output files of a batch contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FinishedOutput {
    /// [`BatchStatus::Completed`], [`BatchStatus::Expired`] or [`BatchStatus::Cancelled`].
    pub(crate) status: BatchStatus,
    pub(crate) counts: RequestCounts,
    /// Lines among the failed ones that have not ended.
    pub(crate) expired: u32,
    pub(crate) has_output: bool,
    pub(crate) has_errors: bool,
}

/// A batch in this state has no such event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a batch that is {0} cannot change in this way")]
pub(crate) struct InvalidTransition(pub(crate) BatchStatus);

/// A batch as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRecord {
    pub id: String,
    /// Owner of the batch; only it sees the batch.
    pub tenant: String,
    pub endpoint: BatchEndpoint,
    pub input_file: String,
    pub status: BatchStatus,
    pub metadata: BTreeMap<String, String>,
    /// Unix time in seconds, as all others.
    pub created_at: u64,
    pub expires_at: u64,
    /// When the batch got each of its other states.
    pub entered_at: BTreeMap<BatchStatus, u64>,
    pub counts: RequestCounts,
    pub errors: Vec<InputProblem>,
    /// Ids that the output files get, chosen in advance, so that writing them again replaces them.
    pub(crate) reserved_output: String,
    pub(crate) reserved_errors: String,
    pub output_file: Option<String>,
    pub error_file: Option<String>,
}

impl BatchRecord {
    /// Applies an event at `now`, in Unix seconds.
    pub(crate) fn apply(&mut self, event: BatchEvent, now: u64) -> Result<(), InvalidTransition> {
        use BatchStatus::{
            Cancelled, Cancelling, Completed, Expired, Failed, Finalizing, InProgress, Validating,
        };
        let next = match (&event, self.status) {
            (BatchEvent::Validated { .. }, Validating) => InProgress,
            (BatchEvent::Failed(_), status) if !status.is_final() => Failed,
            (BatchEvent::CancelRequested, Validating | InProgress | Cancelling) => Cancelling,
            (BatchEvent::AllLinesEnded, InProgress) => Finalizing,
            (BatchEvent::Finished(output), status) => match (output.status, status) {
                (Completed, Finalizing) | (Expired, InProgress) | (Cancelled, Cancelling) => output.status,
                _ => return Err(InvalidTransition(status)),
            },
            (_, status) => return Err(InvalidTransition(status)),
        };
        match event {
            BatchEvent::Validated { lines } => self.counts.total = lines,
            BatchEvent::Failed(problems) => self.errors = problems,
            BatchEvent::CancelRequested | BatchEvent::AllLinesEnded => {}
            BatchEvent::Finished(output) => {
                self.counts = output.counts;
                self.output_file = output.has_output.then(|| self.reserved_output.clone());
                self.error_file = output.has_errors.then(|| self.reserved_errors.clone());
            }
        }
        self.status = next;
        self.entered_at.entry(next).or_insert(now);
        Ok(())
    }

    /// When the batch ended, if it has.
    pub(crate) fn ended_at(&self) -> Option<u64> {
        self.status.is_final().then(|| self.entered_at.get(&self.status).copied().unwrap_or(self.created_at))
    }

    /// The `batch` object of OpenAI's API. `counts` are those of now.
    #[must_use]
    pub fn object(&self, counts: RequestCounts) -> Value {
        let at = |status: BatchStatus| self.entered_at.get(&status);
        let errors = (!self.errors.is_empty()).then(|| json!({"object": "list", "data": self.errors}));
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint.path(),
            "errors": errors,
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": self.status.as_str(),
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "in_progress_at": at(BatchStatus::InProgress),
            "expires_at": self.expires_at,
            "finalizing_at": at(BatchStatus::Finalizing),
            "completed_at": at(BatchStatus::Completed),
            "failed_at": at(BatchStatus::Failed),
            "expired_at": at(BatchStatus::Expired),
            "cancelling_at": at(BatchStatus::Cancelling),
            "cancelled_at": at(BatchStatus::Cancelled),
            "request_counts": counts,
            "metadata": self.metadata,
        })
    }
}

pub(crate) fn record_key(id: &str) -> String {
    format!("{BATCHES}/{id}{RECORD_SUFFIX}")
}

/// The batch of a blob in the group; `None` for a name that is not one of ours.
pub(crate) fn id_of_name(name: &str) -> Option<&str> {
    name.strip_suffix(RECORD_SUFFIX).filter(|id| id.starts_with(BATCH_ID_PREFIX))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn batch() -> BatchRecord {
        BatchRecord {
            id: "batch_1".to_owned(),
            tenant: "a".to_owned(),
            endpoint: BatchEndpoint::Completions,
            input_file: "file-1".to_owned(),
            status: BatchStatus::Validating,
            metadata: BTreeMap::new(),
            created_at: 10,
            expires_at: 20,
            entered_at: BTreeMap::new(),
            counts: RequestCounts::default(),
            errors: Vec::new(),
            reserved_output: "file-out".to_owned(),
            reserved_errors: "file-err".to_owned(),
            output_file: None,
            error_file: None,
        }
    }

    fn finished(status: BatchStatus) -> BatchEvent {
        let counts = RequestCounts { total: 3, completed: 2, failed: 1 };
        BatchEvent::Finished(FinishedOutput {
            status,
            counts,
            expired: 0,
            has_output: true,
            has_errors: false,
        })
    }

    #[test]
    fn a_batch_completes_through_its_states() {
        let mut batch = batch();
        let events =
            [BatchEvent::Validated { lines: 3 }, BatchEvent::AllLinesEnded, finished(BatchStatus::Completed)];
        let mut states = Vec::new();
        for (now, event) in (11..).zip(events) {
            batch.apply(event, now).unwrap();
            states.push(batch.status);
        }
        assert_eq!(states, [BatchStatus::InProgress, BatchStatus::Finalizing, BatchStatus::Completed]);
        let object = batch.object(batch.counts);
        assert_eq!(object["in_progress_at"], 11);
        assert_eq!(object["completed_at"], 13);
        assert_eq!(object["output_file_id"], "file-out");
        assert_eq!(object["error_file_id"], Value::Null);
        assert_eq!(object["request_counts"], json!({"total": 3, "completed": 2, "failed": 1}));
        assert_eq!(batch.ended_at(), Some(13));
    }

    #[test]
    fn a_cancelled_batch_cannot_complete_or_expire() {
        let mut batch = batch();
        batch.apply(BatchEvent::Validated { lines: 3 }, 11).unwrap();
        batch.apply(BatchEvent::CancelRequested, 12).unwrap();
        batch.apply(BatchEvent::CancelRequested, 13).unwrap();
        assert_eq!(batch.entered_at[&BatchStatus::Cancelling], 12);
        for event in
            [BatchEvent::AllLinesEnded, finished(BatchStatus::Completed), finished(BatchStatus::Expired)]
        {
            assert_eq!(batch.apply(event, 14), Err(InvalidTransition(BatchStatus::Cancelling)));
        }
        batch.apply(finished(BatchStatus::Cancelled), 15).unwrap();
        assert!(batch.status.is_final());
    }

    fn event() -> impl Strategy<Value = BatchEvent> {
        prop_oneof![
            Just(BatchEvent::Validated { lines: 3 }),
            Just(BatchEvent::Failed(Vec::new())),
            Just(BatchEvent::CancelRequested),
            Just(BatchEvent::AllLinesEnded),
            proptest::sample::select(BatchStatus::ALL.to_vec()).prop_map(finished),
        ]
    }

    proptest! {
        #[test]
        fn final_states_never_change_and_states_only_advance(events in prop::collection::vec(event(), 0..20)) {
            let mut batch = batch();
            let mut seen = vec![batch.status];
            for (now, event) in (11..).zip(events) {
                let before = batch.clone();
                match batch.apply(event, now) {
                    Err(InvalidTransition(status)) => {
                        prop_assert_eq!(status, before.status);
                        prop_assert_eq!(&batch, &before);
                    }
                    Ok(()) => {
                        prop_assert!(!before.status.is_final());
                        if batch.status != before.status {
                            prop_assert!(!seen.contains(&batch.status), "{} again", batch.status);
                            seen.push(batch.status);
                        }
                    }
                }
            }
        }
    }
}
