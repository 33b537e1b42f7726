//! Tells engines to stop, beside closing their connections.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Uri};
use moongate_runtime::Supervisor;
use tokio::time::{Instant, timeout};

use super::pair::{Running, Side};
use crate::feedback::{LegSpan, Metrics};
use crate::fleet::Endpoint;
use crate::prompt::Spliced;
use crate::upstream::{Leg, LegLimits, PreparedRequest};

/// How long an abort or a late prefill may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// A request id that the engine was given, by which it can be told to stop.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    /// `rid` in the body of both legs: of fixed width, because SGLang aborts every request whose id *starts* with
    /// the given one.
    pub(crate) rid: Arc<str>,
}

/// Sends aborts in the background.
#[derive(Debug)]
pub(crate) struct Aborter {
    supervisor: Supervisor,
    pub(super) metrics: Arc<Metrics>,
}

impl Aborter {
    pub(crate) fn new(supervisor: Supervisor, metrics: Arc<Metrics>) -> Self {
        Self { supervisor, metrics }
    }

    /// Counts the abort and, with a ticket, tells the engine.
    pub(super) fn abort(&self, side: Side, endpoint: &Arc<Endpoint>, ticket: Option<&Ticket>) {
        self.metrics.aborted(side);
        let Some(ticket) = ticket else { return };
        let request = abort_request(&ticket.rid);
        let limits = LegLimits::new(PATIENCE, PATIENCE);
        let leg = Leg::start(endpoint.pool.clone(), request, limits, Instant::now());
        self.drain(Running::new(leg, endpoint.clone(), LegSpan::off()));
    }

    /// Reads a leg to its end in the background, within the leg's own time limits.
    pub(super) fn run_on(&self, mut running: Running) {
        self.supervisor.spawn("let a prefill finish", async move {
            drop(poll_fn(|cx| running.poll_drain(cx)).await);
        });
    }

    /// Reads a leg to its end in the background, not for long.
    pub(super) fn drain(&self, mut running: Running) {
        self.supervisor.spawn("drain a leg", async move {
            // A failure here concerns nobody: the client has its answer, or its error.
            drop(timeout(PATIENCE, poll_fn(|cx| running.poll_drain(cx))).await);
        });
    }
}

fn abort_request(rid: &str) -> PreparedRequest {
    PreparedRequest {
        method: Method::POST,
        uri: Uri::from_static("/abort_request"),
        headers: Arc::default(),
        own: vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))],
        body: Spliced::verbatim(Bytes::from(format!("{{\"rid\":\"{rid}\",\"abort_all\":false}}"))),
    }
}
