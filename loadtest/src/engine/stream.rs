//! A generation answered as a stream of server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde_json::Value;

use super::faults::EngineFault;
use super::generation::{ChoiceGeneration, GenerationError, GenerationFinish, GenerationJob, OutputToken};
use super::render::{ChoiceOutput, ResponseRenderer};
use super::request::{GenerationEndpoint, GenerationRequest};
use super::response::{self, BodyAborted, SimResponse};
use super::serve::{OpenRequestGuard, abort_body, done_event, fill_request_fields};
use super::{SimEngineState, SimProtocol};

/// Something that happened to one of a stream's answers.
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
                    Ok(speech) => (GenerationEvent::Started, GenerationState::Generating(Box::new(speech))),
                    Err(error) => (GenerationEvent::Failed(error), GenerationState::Done),
                },
                GenerationState::Generating(mut speech) => match speech.next().await {
                    Some(piece) => (GenerationEvent::Token(piece), GenerationState::Generating(speech)),
                    None => {
                        let mut answer = ChoiceOutput::default();
                        answer.close(&speech);
                        debug_assert!(
                            speech.generated() > 0 || answer.finish == Some(GenerationFinish::Abort)
                        );
                        (GenerationEvent::Finished(Box::new(answer)), GenerationState::Done)
                    }
                },
                GenerationState::Done => return None,
            };
            Some(((index, happening), next))
        }
    })
    .boxed()
}

/// A stream of events over all answers of a request.
struct SseEventStream {
    events: stream::SelectAll<BoxStream<'static, (usize, GenerationEvent)>>,
    frame: ResponseRenderer,
    answers: Vec<ChoiceOutput>,
    /// Tokens that were not sent yet, by answer.
    unsent: Vec<Option<OutputToken>>,
    /// So many tokens are sent together, after the first one.
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
                    // Settled before the last bytes leave: a client may hang up on seeing them.
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
                if let (Some(answer), Some(unsent)) =
                    (self.answers.get_mut(index), self.unsent.get_mut(index))
                {
                    let unsent =
                        unsent.get_or_insert_with(|| OutputToken { text: String::new(), id: piece.id });
                    unsent.text.push_str(&piece.text);
                    answer.push(piece);
                    if answer.token_ids.len() as u64 % self.interval == 1 % self.interval {
                        self.flush(index);
                    }
                }
            }
            GenerationEvent::Finished(ended) => {
                self.flush(index);
                if let Some(answer) = self.answers.get_mut(index) {
                    answer.finish = ended.finish;
                    answer.prompt_tokens = ended.prompt_tokens;
                    answer.cached = ended.cached;
                    let value = self.frame.closing_event(index, answer);
                    self.push(&value);
                }
            }
            GenerationEvent::Failed(error) => {
                self.failed = true;
                self.push(&response::stream_error_value(&error.message));
            }
        }
    }

    /// Sends what was held back of an answer.
    fn flush(&mut self, index: usize) {
        let unsent = self.unsent.get_mut(index).and_then(Option::take);
        if let (Some(piece), Some(answer)) = (unsent, self.answers.get(index)) {
            let value = self.frame.token_event(index, &piece, answer);
            self.push(&value);
        }
    }

    fn close(&mut self) {
        if self.include_usage && self.frame.endpoint != GenerationEndpoint::Generate && !self.failed {
            let value = self.frame.usage_event(&self.answers);
            self.push(&value);
        }
        self.queue.push_back(done_event());
    }
}

/// Answers with a stream; the head is sent when the engine in question would send it.
pub(crate) async fn stream_response(
    engine: &Arc<SimEngineState>,
    guard: OpenRequestGuard,
    frame: ResponseRenderer,
    ask: &GenerationRequest,
    jobs: Vec<GenerationJob>,
    fault: EngineFault,
) -> SimResponse {
    let answers: Vec<ChoiceOutput> = jobs
        .iter()
        .enumerate()
        .map(|(index, job)| {
            let mut answer = ChoiceOutput {
                dp_rank: job.rank,
                prompt_tokens: job.tokens.len(),
                ..ChoiceOutput::default()
            };
            fill_request_fields(&mut answer, ask, index, &engine.options.role);
            answer
        })
        .collect();
    let happenings = jobs
        .into_iter()
        .enumerate()
        .map(|(index, job)| generation_events(Arc::clone(engine), index, job))
        .collect::<Vec<_>>();
    // What is told of each token needs an event for each.
    let each = engine.options.protocol == SimProtocol::Vllm || frame.logprobs || frame.return_token_ids;
    let mut events = SseEventStream {
        events: stream::select_all(happenings),
        unsent: vec![None; answers.len()],
        interval: if each { 1 } else { u64::from(engine.options.stream_interval) },
        frame,
        answers,
        include_usage: ask.include_usage,
        queue: VecDeque::new(),
        guard: Some(guard),
        failed: false,
        tokens_sent: 0,
        fault_after_tokens: match fault {
            EngineFault::DieMidStream { tokens } | EngineFault::HangMidStream { tokens } => Some(tokens),
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
