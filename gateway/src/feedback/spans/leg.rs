//! The span of a leg.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use moongate_discovery::EngineKind;
use moongate_telemetry::{
    AttributeWriter, ChildSpans, SpanAttributes, SpanContext, SpanHandle, SpanKind, TraceId, attribute_names,
};
use tokio::time::Instant;

use super::attempts::{AttemptTrace, RetryCause};
use crate::dispatch::LegKind;
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::upstream::LegError;

impl AttemptTrace<'_> {
    /// Span of a leg that begins at `start`.
    pub(crate) fn leg(&self, side: LegKind, member: &FleetMember, start: Instant) -> LegSpan {
        LegSpan(self.span.root.child_at(side.as_str(), SpanKind::Client, start, || LegSpanFields {
            endpoint: member.endpoint.clone(),
            engine: member.facts().map(|facts| facts.engine),
            retry_cause: self.retry_cause(),
            status: None,
            first_byte: FirstByteState::Ignored,
            transfer: None,
            error: None,
        }))
    }
}

/// Span of a leg, which ends with it.
#[derive(Debug)]
pub(crate) struct LegSpan(SpanHandle<LegSpanFields>);

/// What is known of a leg.
#[derive(Debug)]
struct LegSpanFields {
    endpoint: Arc<UpstreamEndpoint>,
    engine: Option<EngineKind>,
    retry_cause: Option<Box<RetryCause>>,
    status: Option<StatusCode>,
    first_byte: FirstByteState,
    transfer: Option<(Instant, Instant)>,
    error: Option<&'static str>,
}

/// The first byte of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstByteState {
    /// It matters to nobody.
    Ignored,
    Awaited,
    Received(Instant),
}

impl LegSpan {
    /// Nothing is told of the leg.
    pub(crate) fn disabled() -> Self {
        Self(SpanHandle::disabled())
    }

    /// Headers that make the leg the parent of what the engine does. Of a trace that is not sampled nobody will see the parents: there the
    /// request's span, which stands in the headers already, serves for all.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let mut headers = HeaderMap::new();
        if self.0.is_sampled() {
            self.0.inject(&mut headers);
        }
        headers.into_iter().filter_map(|(name, value)| Some((name?, value)))
    }

    /// Identity of the trace, for logs.
    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        self.0.trace_id()
    }

    /// The leg's answer is for the client.
    pub(crate) fn await_first_byte(&mut self) {
        self.0.update_attributes(|facts| facts.first_byte = FirstByteState::Awaited);
    }

    /// Whether nothing has come of an answer that is for the client.
    pub(crate) fn awaits_first_byte(&self) -> bool {
        self.0.attributes().is_some_and(|facts| facts.first_byte == FirstByteState::Awaited)
    }

    /// The engine answers with this status.
    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.0.update_attributes(|facts| facts.status = Some(status));
    }

    /// A piece of the body came.
    pub(crate) fn record_data(&mut self, at: Instant) {
        self.0.update_attributes(|facts| {
            if facts.first_byte == FirstByteState::Awaited {
                facts.first_byte = FirstByteState::Received(at);
            }
        });
    }

    /// The leg waited for the KV cache in that time.
    pub(crate) fn set_kv_transfer(&mut self, since: Instant, until: Instant) {
        self.0.update_attributes(|facts| facts.transfer = Some((since, until)));
    }

    /// The leg has ended well.
    pub(crate) fn ended(&mut self, at: Instant) {
        self.0.set_end(at);
    }

    /// Notes how the leg failed, and tells which span that is. The engine's words to a request that it finds at fault may quote the prompt:
    /// they are left out.
    pub(crate) fn failed(&mut self, error: &LegError) -> Option<SpanContext> {
        self.0.update_attributes(|facts| facts.error = Some(error.reason()));
        self.record_data(Instant::now());
        if error.blames_engine() && self.0.is_recording() {
            self.0.force_export("error");
            self.0.error(error.to_string());
        }
        self.0.context()
    }

    /// The leg is stopped before its end.
    pub(crate) fn aborted(&mut self) {
        self.0.event("aborted");
    }
}

impl SpanAttributes for LegSpanFields {
    fn write_attributes(&self, notes: &mut AttributeWriter<'_>) {
        if let Some(again) = &self.retry_cause {
            again.write_attributes(notes);
        }
        if let Some(engine) = self.engine {
            let provider = match engine {
                EngineKind::Sglang => "sglang",
                EngineKind::Vllm => "vllm",
            };
            notes.set(attribute_names::GEN_AI_PROVIDER_NAME, provider);
        }
        notes.set("moongate.engine", &*self.endpoint.id.0);
        let (host, port) = split_authority(self.endpoint.pool.authority());
        notes.set(attribute_names::SERVER_ADDRESS, host);
        if let Some(port) = port {
            notes.set(attribute_names::SERVER_PORT, port);
        }
        if let Some(status) = self.status {
            notes.set(attribute_names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            notes.set(attribute_names::ERROR_TYPE, error);
        }
    }

    fn write_children(&self, steps: &mut ChildSpans<'_>) {
        let (start, end) = (steps.start(), steps.end());
        match self.first_byte {
            FirstByteState::Ignored => {}
            FirstByteState::Awaited => steps.add("first byte", (start, end), |_| ()),
            FirstByteState::Received(at) => steps.add("first byte", (start, at), |_| ()),
        }
        if let Some(transfer) = self.transfer {
            steps.add("kv transfer", transfer, |_| ());
        }
    }
}

fn split_authority(authority: &str) -> (&str, Option<u16>) {
    match authority.rsplit_once(':') {
        Some((host, port)) => match port.parse() {
            Ok(port) => (host, Some(port)),
            Err(_) => (authority, None),
        },
        None => (authority, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        assert_eq!(split_authority("engine:8000"), ("engine", Some(8000)));
        assert_eq!(split_authority("[::1]:80"), ("[::1]", Some(80)));
        assert_eq!(split_authority("[::1]"), ("[::1]", None));
        assert_eq!(split_authority("engine"), ("engine", None));
    }
}
