//! Decisions for other gateways.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use moongate_runtime::Supervisor;
use moongate_scheduler::AttemptId;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::super::admission_queue::AdmissionQueue;
use super::super::admission_state::FollowerLink;
use super::election::QueueIdentity;
use super::follower::{ALIVE_INTERVAL, SILENCE_LIMIT};
use super::lines::{LineReader, line};
use super::messages::{LeaderMessage, TicketMessage};
use crate::feedback::SharedQueueMetrics;

/// Messages that wait to be sent to one gateway; with more, it is too slow to be of use.
const MAX_WAITING_MESSAGES: usize = 16_384;

/// Answers other gateways.
#[derive(Debug, Clone)]
pub(crate) struct QueueServer {
    queue: Arc<AdmissionQueue>,
    identity: QueueIdentity,
    metrics: SharedQueueMetrics,
    supervisor: Supervisor,
}

impl QueueServer {
    pub(crate) fn new(
        queue: Arc<AdmissionQueue>,
        identity: QueueIdentity,
        metrics: SharedQueueMetrics,
        supervisor: Supervisor,
    ) -> Self {
        Self { queue, identity, metrics, supervisor }
    }

    /// This gateway, as its peers see it.
    pub(crate) fn identity(&self, draining: bool) -> QueueIdentity {
        QueueIdentity { draining, ..self.identity.clone() }
    }

    /// Decides the requests of a gateway that sends `tickets`; returns the messages for it. `None` if this gateway follows another
    /// one.
    pub(crate) fn serve<S, E>(
        &self,
        tickets: S,
    ) -> Option<impl Stream<Item = Result<Bytes, Infallible>> + Send + use<S, E>>
    where
        S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
    {
        if self.queue.follows() {
            return None;
        }
        let (messages, receiver) = mpsc::channel(MAX_WAITING_MESSAGES);
        let link = FollowerLink { messages, closing: CancellationToken::new() };
        // The response's end closes the connection.
        let gone = link.closing.clone().drop_guard();
        let (queue, metrics, stop) = (self.queue.clone(), self.metrics.clone(), self.supervisor.token());
        self.supervisor.spawn("shared-queue", async move {
            metrics.follower_connected();
            tracing::info!("this gateway decides for another one");
            let mut follower = Follower::new(queue, link.clone());
            tokio::select! {
                () = stop.cancelled() => {}
                () = link.closing.cancelled() => {}
                () = follower.receive(tickets) => {}
            }
            metrics.follower_disconnected();
            let unfinished = follower.attempts.len();
            tracing::info!(unfinished, "a gateway for which this one decided has disconnected");
        });
        Some(outgoing(receiver, gone))
    }
}

/// The body of the response: messages, and signs of life. It ends with the task that receives the tickets.
fn outgoing(
    receiver: mpsc::Receiver<LeaderMessage>,
    gone: DropGuard,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    stream::unfold((receiver, gone), |(mut receiver, gone)| async move {
        let message = match timeout(ALIVE_INTERVAL, receiver.recv()).await {
            Err(_) => LeaderMessage::Alive,
            Ok(message) => message?,
        };
        Some((Ok(line(&message)), (receiver, gone)))
    })
}

/// A connected gateway with its unfinished requests.
pub(super) struct Follower {
    queue: Arc<AdmissionQueue>,
    link: FollowerLink,
    /// By its ticket.
    attempts: HashMap<u64, AttemptId>,
}

impl Follower {
    pub(super) fn new(queue: Arc<AdmissionQueue>, link: FollowerLink) -> Self {
        Self { queue, link, attempts: HashMap::new() }
    }

    /// Receives messages until the connection ends or is silent.
    async fn receive<E>(&mut self, mut tickets: impl Stream<Item = Result<Bytes, E>> + Unpin) {
        let mut lines = LineReader::default();
        while let Ok(Some(Ok(bytes))) = timeout(SILENCE_LIMIT, tickets.next()).await {
            match lines.push::<TicketMessage>(&bytes) {
                Ok(messages) => messages.into_iter().for_each(|message| self.apply(message)),
                Err(error) => {
                    tracing::warn!(%error, "a gateway of the shared queue sent an invalid message");
                    return;
                }
            }
        }
    }

    fn end(&self, ticket: u64, attempt: AttemptId) {
        self.queue.receive_ticket_message(attempt, TicketMessage::End { ticket, output_tokens: None });
    }

    pub(super) fn apply(&mut self, message: TicketMessage) {
        match message {
            TicketMessage::Alive => {}
            TicketMessage::Submit(ticket) => {
                let number = ticket.ticket;
                if let Some(attempt) = self.queue.submit_ticket(&self.link, *ticket) {
                    let earlier = self.attempts.insert(number, attempt);
                    earlier.into_iter().for_each(|attempt| self.end(number, attempt));
                }
            }
            TicketMessage::End { ticket, .. } => {
                if let Some(attempt) = self.attempts.remove(&ticket) {
                    self.queue.receive_ticket_message(attempt, message);
                }
            }
            TicketMessage::Exclude { ticket, .. } | TicketMessage::PromptComputed { ticket, .. } => {
                if let Some(&attempt) = self.attempts.get(&ticket) {
                    self.queue.receive_ticket_message(attempt, message);
                }
            }
        }
    }
}

impl Drop for Follower {
    /// Its engines' load is visible in their reports from now on.
    fn drop(&mut self) {
        for (ticket, attempt) in std::mem::take(&mut self.attempts) {
            self.end(ticket, attempt);
        }
    }
}
