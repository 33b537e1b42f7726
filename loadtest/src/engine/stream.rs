//! A generation answered as a stream of server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde_json::Value;

use super::ask::{Api, Ask};
use super::faults::Fault;
use super::reply::{self, BreakOff, Reply};
use super::serve::{OpenGuard, break_off, complete, done_event};
use super::speech::{EngineError, Finish, Job, Piece, Speech};
use super::write::{Answer, Frame};
use super::{Engine, Face};

/// Something that happened to one of a stream's answers.
enum Happening {
    Begun,
    Piece(Piece),
    Ended(Box<Answer>),
    Failed(EngineError),
}

fn happenings(engine: Arc<Engine>, index: usize, job: Job) -> BoxStream<'static, (usize, Happening)> {
    enum State {
        Waiting(Box<Job>),
        Speaking(Box<Speech>),
        Over,
    }
    stream::unfold(State::Waiting(Box::new(job)), move |state| {
        let engine = Arc::clone(&engine);
        async move {
            let (happening, next) = match state {
                State::Waiting(job) => match Speech::begin(&engine, *job).await {
                    Ok(speech) => (Happening::Begun, State::Speaking(Box::new(speech))),
                    Err(error) => (Happening::Failed(error), State::Over),
                },
                State::Speaking(mut speech) => match speech.next().await {
                    Some(piece) => (Happening::Piece(piece), State::Speaking(speech)),
                    None => {
                        let mut answer = Answer::default();
                        answer.close(&speech);
                        debug_assert!(speech.spoken() > 0 || answer.finish == Some(Finish::Abort));
                        (Happening::Ended(Box::new(answer)), State::Over)
                    }
                },
                State::Over => return None,
            };
            Some(((index, happening), next))
        }
    })
    .boxed()
}

/// A stream of events over all answers of a request.
struct EventStream {
    happenings: stream::SelectAll<BoxStream<'static, (usize, Happening)>>,
    frame: Frame,
    answers: Vec<Answer>,
    /// Tokens that were not sent yet, by answer.
    unsent: Vec<Option<Piece>>,
    /// So many tokens are sent together, after the first one.
    interval: u64,
    include_usage: bool,
    queue: VecDeque<Bytes>,
    guard: Option<OpenGuard>,
    failed: bool,
    tokens_sent: u64,
    stop_after: Option<u64>,
    fault: Fault,
}

impl EventStream {
    async fn next(&mut self) -> Option<Result<Bytes, BreakOff>> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(Ok(event));
            }
            self.guard.as_ref()?;
            if self.stop_after.is_some_and(|limit| self.tokens_sent >= limit) {
                return Some(Err(break_off(self.guard.take(), self.fault).await));
            }
            match self.happenings.next().await {
                Some((index, happening)) => self.write(index, happening),
                None => {
                    self.close();
                    // Settled before the last bytes leave: a client may hang up on seeing them.
                    if let Some(mut guard) = self.guard.take() {
                        guard.settle(self.failed);
                    }
                }
            }
        }
    }

    fn push(&mut self, value: &Value) {
        self.queue.push_back(reply::event(value));
    }

    fn write(&mut self, index: usize, happening: Happening) {
        match happening {
            Happening::Begun => {
                for value in self.frame.opening(index) {
                    self.push(&value);
                }
            }
            Happening::Piece(piece) => {
                self.tokens_sent += 1;
                if let (Some(answer), Some(unsent)) =
                    (self.answers.get_mut(index), self.unsent.get_mut(index))
                {
                    let unsent = unsent.get_or_insert_with(|| Piece { text: String::new(), id: piece.id });
                    unsent.text.push_str(&piece.text);
                    answer.push(piece);
                    if answer.token_ids.len() as u64 % self.interval == 1 % self.interval {
                        self.flush(index);
                    }
                }
            }
            Happening::Ended(ended) => {
                self.flush(index);
                if let Some(answer) = self.answers.get_mut(index) {
                    answer.finish = ended.finish;
                    answer.prompt_tokens = ended.prompt_tokens;
                    answer.cached = ended.cached;
                    let value = self.frame.closing(index, answer);
                    self.push(&value);
                }
            }
            Happening::Failed(error) => {
                self.failed = true;
                self.push(&reply::stream_error_value(&error.message));
            }
        }
    }

    /// Sends what was held back of an answer.
    fn flush(&mut self, index: usize) {
        let unsent = self.unsent.get_mut(index).and_then(Option::take);
        if let (Some(piece), Some(answer)) = (unsent, self.answers.get(index)) {
            let value = self.frame.token(index, &piece, answer);
            self.push(&value);
        }
    }

    fn close(&mut self) {
        if self.include_usage && self.frame.api != Api::Generate && !self.failed {
            let value = self.frame.usage_event(&self.answers);
            self.push(&value);
        }
        self.queue.push_back(done_event());
    }
}

/// Answers with a stream; the head is sent when the engine in question would send it.
pub(crate) async fn stream_answer(
    engine: &Arc<Engine>,
    guard: OpenGuard,
    frame: Frame,
    ask: &Ask,
    jobs: Vec<Job>,
    fault: Fault,
) -> Reply {
    let answers: Vec<Answer> = jobs
        .iter()
        .enumerate()
        .map(|(index, job)| {
            let mut answer =
                Answer { dp_rank: job.rank, prompt_tokens: job.tokens.len(), ..Answer::default() };
            complete(&mut answer, ask, index, &engine.config.role);
            answer
        })
        .collect();
    let happenings = jobs
        .into_iter()
        .enumerate()
        .map(|(index, job)| happenings(Arc::clone(engine), index, job))
        .collect::<Vec<_>>();
    // What is told of each token needs an event for each.
    let each = engine.config.face == Face::Vllm || frame.logprobs || frame.return_token_ids;
    let mut events = EventStream {
        happenings: stream::select_all(happenings),
        unsent: vec![None; answers.len()],
        interval: if each { 1 } else { u64::from(engine.config.stream_interval) },
        frame,
        answers,
        include_usage: ask.include_usage,
        queue: VecDeque::new(),
        guard: Some(guard),
        failed: false,
        tokens_sent: 0,
        stop_after: match fault {
            Fault::DieMidStream { tokens } | Fault::HangMidStream { tokens } => Some(tokens),
            _ => None,
        },
        fault,
    };
    let mut first = Vec::new();
    if engine.config.face == Face::Sglang {
        // SGLang sends the head with the first event, vLLM before it.
        first.extend(events.next().await);
    }
    let body = stream::iter(first).chain(stream::unfold(events, |mut events| async {
        events.next().await.map(|event| (event, events))
    }));
    reply::stream("text/event-stream; charset=utf-8", body)
}
