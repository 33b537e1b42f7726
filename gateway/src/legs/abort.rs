//! Aborts requests on engines, in addition to closing their connections.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Uri};
use moongate_runtime::Supervisor;
use tokio::time::{Instant, timeout};

use super::running_leg::RunningLeg;
use crate::feedback::{GatewayMetrics, LegSpan};
use crate::fleet::UpstreamEndpoint;
use crate::request_body::SplicedBody;
use crate::upstream::{LegExchange, LegKind, LegTimeouts, PreparedRequest};

/// Time limit for an abort request, and for a prefill that is read to its end.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The request id that was sent to an engine, by which it can abort the request.
#[derive(Debug, Clone)]
pub(crate) struct EngineRequestId {
    /// `rid` in the body of both legs: of fixed width, because SGLang aborts every request whose id *starts* with the given one.
    pub(crate) rid: Arc<str>,
}

/// Sends abort requests in the background.
#[derive(Debug)]
pub(crate) struct AbortSender {
    supervisor: Supervisor,
    pub(super) metrics: Arc<GatewayMetrics>,
}

impl AbortSender {
    pub(crate) fn new(supervisor: Supervisor, metrics: Arc<GatewayMetrics>) -> Self {
        Self { supervisor, metrics }
    }

    /// Counts the abort and, with a request id, sends it to the engine.
    pub(super) fn abort(
        &self,
        side: LegKind,
        endpoint: &Arc<UpstreamEndpoint>,
        request_id: Option<&EngineRequestId>,
    ) {
        self.metrics.legs.record_abort(side);
        let Some(request_id) = request_id else { return };
        let request = abort_request(&request_id.rid);
        let limits = LegTimeouts::new(ABORT_TIMEOUT, ABORT_TIMEOUT);
        let leg = LegExchange::start(endpoint.pool.clone(), request, limits, Instant::now());
        self.drain(RunningLeg::new(leg, endpoint.clone(), LegSpan::disabled()));
    }

    /// Reads a leg to its end in the background, within the leg's own time limits.
    pub(super) fn drain_in_background(&self, mut running: RunningLeg) {
        self.supervisor.spawn("background-prefill", async move {
            drop(poll_fn(|cx| running.poll_drain(cx)).await);
        });
    }

    /// Reads a leg to its end in the background, for at most [`ABORT_TIMEOUT`].
    pub(super) fn drain(&self, mut running: RunningLeg) {
        self.supervisor.spawn("drain-leg", async move {
            // A failure here has no effect: the client has its response or its error.
            drop(timeout(ABORT_TIMEOUT, poll_fn(|cx| running.poll_drain(cx))).await);
        });
    }
}

fn abort_request(rid: &str) -> PreparedRequest {
    PreparedRequest {
        method: Method::POST,
        uri: Uri::from_static("/abort_request"),
        headers: Arc::default(),
        extra_headers: vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))],
        body: SplicedBody::verbatim(Bytes::from(format!("{{\"rid\":\"{rid}\",\"abort_all\":false}}"))),
    }
}
