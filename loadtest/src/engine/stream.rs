//! Generation with the response as a stream of server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde_json::Value;

use super::api_messages::MessagesStream;
use super::api_responses::ResponsesStream;
use super::cache::CachedTokens;
use super::faults::EngineFault;
use super::generation::{
    ChoiceGeneration, GenerationError, GenerationFinish, GenerationJob, OutputPart, OutputToken,
};
use super::render::{ChoiceOutput, ResponseRenderer};
use super::request::GenerationEndpoint;
use super::response::{self, BodyAborted, SimResponse};
use super::serve::{OpenRequestGuard, PlannedGeneration, abort_body, fill_request_fields};
use super::{SimEngineState, SimProtocol};

/// An event of one of the stream's choices.
enum GenerationEvent {
    /// The prompt is available; this many of its tokens were cached.
    Started(CachedTokens),
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
                    Ok(running) => (
                        GenerationEvent::Started(running.cached),
                        GenerationState::Generating(Box::new(running)),
                    ),
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

/// Renders what happens to a request's choices as one API's events.
enum EventRenderer {
    Openai {
        renderer: ResponseRenderer,
        include_usage: bool,
        /// Whether the tool call of a choice has been opened.
        tool_opened: Vec<bool>,
    },
    Messages(MessagesStream),
    Responses(Box<ResponsesStream>),
}

fn named_events(events: Vec<Value>) -> Vec<Bytes> {
    events.iter().map(response::named_event).collect()
}

impl EventRenderer {
    fn of(planned: &PlannedGeneration) -> Self {
        let renderer = planned.renderer.clone();
        match (renderer.endpoint, &planned.parsed.responses) {
            (GenerationEndpoint::Messages, _) => Self::Messages(MessagesStream::new(renderer)),
            (GenerationEndpoint::Responses, Some(request)) => {
                Self::Responses(Box::new(ResponsesStream::new(renderer, Arc::clone(request))))
            }
            _ => Self::Openai {
                renderer,
                include_usage: planned.parsed.include_usage,
                tool_opened: vec![false; planned.jobs.len()],
            },
        }
    }

    /// Events before any prompt is computed.
    fn opened(&mut self) -> Vec<Bytes> {
        match self {
            Self::Openai { .. } | Self::Messages(_) => Vec::new(),
            Self::Responses(stream) => named_events(stream.opened()),
        }
    }

    /// Whether the head is sent before the first event of the generation.
    fn sends_head_early(&self) -> bool {
        match self {
            Self::Openai { renderer, .. } => renderer.protocol == SimProtocol::Vllm,
            Self::Messages(_) | Self::Responses(_) => true,
        }
    }

    fn started(&mut self, index: usize, output: &ChoiceOutput) -> Vec<Bytes> {
        match self {
            Self::Openai { renderer, .. } => {
                renderer.opening_event(index).iter().map(response::event).collect()
            }
            Self::Messages(stream) => named_events(stream.started(output)),
            Self::Responses(_) => Vec::new(),
        }
    }

    fn token(&mut self, index: usize, piece: &OutputToken, output: &ChoiceOutput) -> Vec<Bytes> {
        match self {
            Self::Openai { renderer, tool_opened, .. } => {
                let opened = tool_opened.get_mut(index).filter(|_| piece.part == OutputPart::ToolArguments);
                let opens = opened.is_some_and(|opened| !std::mem::replace(opened, true));
                let tool = opens.then(|| renderer.tool_opening_event(index));
                tool.iter()
                    .chain(&[renderer.token_event(index, piece, output)])
                    .map(response::event)
                    .collect()
            }
            Self::Messages(stream) => named_events(stream.token(piece, output)),
            Self::Responses(stream) => named_events(stream.token(piece)),
        }
    }

    fn finished(&mut self, index: usize, output: &ChoiceOutput) -> Vec<Bytes> {
        match self {
            Self::Openai { renderer, .. } => vec![response::event(&renderer.closing_event(index, output))],
            Self::Messages(stream) => named_events(stream.finished(output)),
            Self::Responses(stream) => named_events(stream.finished(output)),
        }
    }

    /// Events of a failure, or `None` if the body is truncated.
    fn failed(&mut self, message: &str) -> Option<Vec<Bytes>> {
        match self {
            Self::Openai { .. } => Some(vec![response::event(&response::stream_error_value(message))]),
            Self::Messages(stream) => Some(named_events(stream.failed(message))),
            Self::Responses(stream) => stream.failed(message).map(named_events),
        }
    }

    /// Events after all choices.
    fn closed(&self, outputs: &[ChoiceOutput], failed: bool) -> Vec<Bytes> {
        match self {
            Self::Openai { renderer, include_usage, .. } => {
                let has_usage =
                    *include_usage && renderer.endpoint != GenerationEndpoint::Generate && !failed;
                let usage = has_usage.then(|| response::event(&renderer.usage_event(outputs)));
                usage.into_iter().chain([response::done_event()]).collect()
            }
            Self::Messages(_) | Self::Responses(_) => Vec::new(),
        }
    }
}

/// An event stream over all choices of a request.
struct SseEventStream {
    events: stream::SelectAll<BoxStream<'static, (usize, GenerationEvent)>>,
    renderer: EventRenderer,
    outputs: Vec<ChoiceOutput>,
    /// Tokens not sent yet, by choice.
    unsent: Vec<Option<OutputToken>>,
    /// Number of tokens per event, after the first one.
    interval: u64,
    queue: VecDeque<Bytes>,
    guard: Option<OpenRequestGuard>,
    failed: bool,
    /// Whether the body ends here without its end.
    truncated: bool,
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
            if self.truncated {
                return Some(Err(abort_body(self.guard.take(), EngineFault::None).await));
            }
            if self.fault_after_tokens.is_some_and(|limit| self.tokens_sent >= limit) {
                return Some(Err(abort_body(self.guard.take(), self.fault).await));
            }
            match self.events.next().await {
                Some((index, happening)) => self.write(index, happening),
                None => {
                    self.queue.extend(self.renderer.closed(&self.outputs, self.failed));
                    // Recorded before the last bytes are sent: a client may disconnect when it receives them.
                    if let Some(mut guard) = self.guard.take() {
                        guard.record_outcome(self.failed);
                    }
                }
            }
        }
    }

    fn write(&mut self, index: usize, happening: GenerationEvent) {
        match happening {
            GenerationEvent::Started(cached) => {
                if let Some(output) = self.outputs.get_mut(index) {
                    output.cached = cached;
                    self.queue.extend(self.renderer.started(index, output));
                }
            }
            GenerationEvent::Token(piece) => self.write_token(index, piece),
            GenerationEvent::Finished(ended) => {
                self.flush(index);
                if let Some(output) = self.outputs.get_mut(index) {
                    output.finish = ended.finish;
                    output.prompt_tokens = ended.prompt_tokens;
                    output.cached = ended.cached;
                    self.queue.extend(self.renderer.finished(index, output));
                }
            }
            GenerationEvent::Failed(error) => {
                self.failed = true;
                match self.renderer.failed(&error.message) {
                    Some(events) => self.queue.extend(events),
                    None => self.truncated = true,
                }
            }
        }
    }

    fn write_token(&mut self, index: usize, piece: OutputToken) {
        self.tokens_sent += 1;
        let continues = |unsent: &OutputToken| unsent.part == piece.part;
        if !self.unsent.get(index).and_then(Option::as_ref).is_none_or(continues) {
            self.flush(index);
        }
        if let (Some(output), Some(unsent)) = (self.outputs.get_mut(index), self.unsent.get_mut(index)) {
            let unsent = unsent.get_or_insert_with(|| OutputToken { text: String::new(), ..piece });
            unsent.text.push_str(&piece.text);
            output.push(piece);
            if output.token_ids.len() as u64 % self.interval == 1 % self.interval {
                self.flush(index);
            }
        }
    }

    /// Sends the unsent tokens of a choice.
    fn flush(&mut self, index: usize) {
        let unsent = self.unsent.get_mut(index).and_then(Option::take);
        if let (Some(piece), Some(output)) = (unsent, self.outputs.get(index)) {
            self.queue.extend(self.renderer.token(index, &piece, output));
        }
    }
}

/// Responds with a stream; the head is sent when the imitated engine would send it.
pub(crate) async fn stream_response(
    engine: &Arc<SimEngineState>,
    guard: OpenRequestGuard,
    planned: PlannedGeneration,
    fault: EngineFault,
) -> SimResponse {
    let mut renderer = EventRenderer::of(&planned);
    let PlannedGeneration { renderer: values, parsed, jobs } = planned;
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
    let each = engine.options.protocol == SimProtocol::Vllm || values.logprobs || values.return_token_ids;
    let mut events = SseEventStream {
        events: stream::select_all(happenings),
        unsent: vec![None; outputs.len()],
        interval: if each { 1 } else { u64::from(engine.options.stream_interval) },
        queue: renderer.opened().into(),
        renderer,
        outputs,
        guard: Some(guard),
        failed: false,
        truncated: false,
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
    if !events.renderer.sends_head_early() {
        first.extend(events.next().await);
    }
    let body = stream::iter(first).chain(stream::unfold(events, |mut events| async {
        events.next().await.map(|event| (event, events))
    }));
    response::stream("text/event-stream; charset=utf-8", body)
}
