//! Generation with the response as a stream of server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde_json::Value;

use super::faults::EngineFault;
use super::generation::{ChoiceGeneration, GenerationError, GenerationFinish, GenerationJob, OutputToken};
use super::render::{ChoiceOutput, ResponseRenderer};
use super::request::GenerationEndpoint;
use super::response::{self, BodyAborted, SimResponse};
use super::serve::{OpenRequestGuard, PlannedGeneration, abort_body, fill_request_fields};
use super::{SimEngineState, SimProtocol};

/// An event of one of the stream's choices.
enum GenerationEvent {
    Started,
    Token(OutputToken),
    Finished(Box<ChoiceOutput>),
    Failed(GenerationError),
}

fn generation_events(
    engine: Arc<SimEngineState>,
    index: usize,
    job: GenerationJob,
) -> BoxStream<'static, (usize, GenerationEvent)> {
    enum GenerationState {
        Waiting(Box<GenerationJob>),
        Generating(Box<ChoiceGeneration>),
        Done,
    }
    stream::unfold(GenerationState::Waiting(Box::new(job)), move |state| {
        let engine = Arc::clone(&engine);
        async move {
            let (happening, next) = match state {
                GenerationState::Waiting(job) => match ChoiceGeneration::start(&engine, *job).await {
                    Ok(running) => (GenerationEvent::Started, GenerationState::Generating(Box::new(running))),
                    Err(error) => (GenerationEvent::Failed(error), GenerationState::Done),
                },
                GenerationState::Generating(mut running) => match running.next().await {
                    Some(piece) => (GenerationEvent::Token(piece), GenerationState::Generating(running)),
                    None => {
                        let mut output = ChoiceOutput::default();
                        output.close(&running);
                        debug_assert!(
                            running.generated() > 0 || output.finish == Some(GenerationFinish::Abort)
                        );
                        (GenerationEvent::Finished(Box::new(output)), GenerationState::Done)
                    }
                },
                GenerationState::Done => return None,
            };
            Some(((index, happening), next))
        }
    })
    .boxed()
}

/// An event stream over all choices of a request.
struct SseEventStream {
    events: stream::SelectAll<BoxStream<'static, (usize, GenerationEvent)>>,
    frame: ResponseRenderer,
    outputs: Vec<ChoiceOutput>,
    /// Tokens not sent yet, by choice.
    unsent: Vec<Option<OutputToken>>,
    /// Number of tokens per event, after the first one.
    interval: u64,
    include_usage: bool,
    queue: VecDeque<Bytes>,
    guard: Option<OpenRequestGuard>,
    failed: bool,
    tokens_sent: u64,
    fault_after_tokens: Option<u64>,
    fault: EngineFault,
}

impl SseEventStream {
    async fn next(&mut self) -> Option<Result<Bytes, BodyAborted>> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(Ok(event));
            }
            self.guard.as_ref()?;
            if self.fault_after_tokens.is_some_and(|limit| self.tokens_sent >= limit) {
                return Some(Err(abort_body(self.guard.take(), self.fault).await));
            }
            match self.events.next().await {
                Some((index, happening)) => self.write(index, happening),
                None => {
                    self.close();
                    // Recorded before the last bytes are sent: a client may disconnect when it receives them.
                    if let Some(mut guard) = self.guard.take() {
                        guard.record_outcome(self.failed);
                    }
                }
            }
        }
    }

    fn push(&mut self, value: &Value) {
        self.queue.push_back(response::event(value));
    }

    fn write(&mut self, index: usize, happening: GenerationEvent) {
        match happening {
            GenerationEvent::Started => {
                for value in self.frame.opening_events(index) {
                    self.push(&value);
                }
            }
            GenerationEvent::Token(piece) => {
                self.tokens_sent += 1;
                if let (Some(output), Some(unsent)) =
                    (self.outputs.get_mut(index), self.unsent.get_mut(index))
                {
                    let unsent =
                        unsent.get_or_insert_with(|| OutputToken { text: String::new(), id: piece.id });
                    unsent.text.push_str(&piece.text);
                    output.push(piece);
                    if output.token_ids.len() as u64 % self.interval == 1 % self.interval {
                        self.flush(index);
                    }
                }
            }
            GenerationEvent::Finished(ended) => {
                self.flush(index);
                if let Some(output) = self.outputs.get_mut(index) {
                    output.finish = ended.finish;
                    output.prompt_tokens = ended.prompt_tokens;
                    output.cached = ended.cached;
                    let value = self.frame.closing_event(index, output);
                    self.push(&value);
                }
            }
            GenerationEvent::Failed(error) => {
                self.failed = true;
                self.push(&response::stream_error_value(&error.message));
            }
        }
    }

    /// Sends the unsent tokens of a choice.
    fn flush(&mut self, index: usize) {
        let unsent = self.unsent.get_mut(index).and_then(Option::take);
        if let (Some(piece), Some(output)) = (unsent, self.outputs.get(index)) {
            let value = self.frame.token_event(index, &piece, output);
            self.push(&value);
        }
    }

    fn close(&mut self) {
        if self.include_usage && self.frame.endpoint != GenerationEndpoint::Generate && !self.failed {
            let value = self.frame.usage_event(&self.outputs);
            self.push(&value);
        }
        self.queue.push_back(response::done_event());
    }
}

/// Responds with a stream; the head is sent when the imitated engine would send it.
pub(crate) async fn stream_response(
    engine: &Arc<SimEngineState>,
    guard: OpenRequestGuard,
    planned: PlannedGeneration,
    fault: EngineFault,
) -> SimResponse {
    let PlannedGeneration { renderer: frame, parsed, jobs } = planned;
    let outputs: Vec<ChoiceOutput> = jobs
        .iter()
        .enumerate()
        .map(|(index, job)| {
            let mut output = ChoiceOutput {
                dp_rank: job.rank,
                prompt_tokens: job.tokens.len(),
                ..ChoiceOutput::default()
            };
            fill_request_fields(&mut output, &parsed, index, &engine.options.role);
            output
        })
        .collect();
    let happenings = jobs
        .into_iter()
        .enumerate()
        .map(|(index, job)| generation_events(Arc::clone(engine), index, job))
        .collect::<Vec<_>>();
    // Per-token values require an event per token.
    let each = engine.options.protocol == SimProtocol::Vllm || frame.logprobs || frame.return_token_ids;
    let mut events = SseEventStream {
        events: stream::select_all(happenings),
        unsent: vec![None; outputs.len()],
        interval: if each { 1 } else { u64::from(engine.options.stream_interval) },
        frame,
        outputs,
        include_usage: parsed.include_usage,
        queue: VecDeque::new(),
        guard: Some(guard),
        failed: false,
        tokens_sent: 0,
        fault_after_tokens: match fault {
            EngineFault::DisconnectMidStream { tokens } | EngineFault::HangMidStream { tokens } => {
                Some(tokens)
            }
            _ => None,
        },
        fault,
    };
    let mut first = Vec::new();
    if engine.options.protocol == SimProtocol::Sglang {
        // SGLang sends the head with the first event, vLLM before it.
        first.extend(events.next().await);
    }
    let body = stream::iter(first).chain(stream::unfold(events, |mut events| async {
        events.next().await.map(|event| (event, events))
    }));
    response::stream("text/event-stream; charset=utf-8", body)
}
