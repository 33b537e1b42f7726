//! The span of a leg.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use moongate_discovery::EngineKind;
use moongate_telemetry::{
    AttributeWriter, ChildSpans, SpanAttributes, SpanContext, SpanHandle, SpanKind, TraceId, attribute_names,
};
use tokio::time::Instant;

use super::attempts::{AttemptTrace, RetryCause};
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::upstream::{LegError, LegKind};

impl AttemptTrace<'_> {
    /// Span of a leg that starts at `start`.
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

/// Attributes of a leg's span.
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

/// State of a response's first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstByteState {
    /// Not recorded, because the response does not go to the client.
    Ignored,
    Awaited,
    Received(Instant),
}

impl LegSpan {
    /// A leg without a span.
    pub(crate) fn disabled() -> Self {
        Self(SpanHandle::disabled())
    }

    /// Headers that make the leg's span the parent of the engine's spans. In an unsampled trace this is unnecessary: the request's
    /// span, which is already in the headers, serves for all legs.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let mut headers = HeaderMap::new();
        if self.0.is_sampled() {
            self.0.inject(&mut headers);
        }
        headers.into_iter().filter_map(|(name, value)| Some((name?, value)))
    }

    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        self.0.trace_id()
    }

    /// Records the time to the first byte, because the response goes to the client.
    pub(crate) fn await_first_byte(&mut self) {
        self.0.update_attributes(|fields| fields.first_byte = FirstByteState::Awaited);
    }

    /// Whether no byte of a response for the client has arrived.
    pub(crate) fn awaits_first_byte(&self) -> bool {
        self.0.attributes().is_some_and(|fields| fields.first_byte == FirstByteState::Awaited)
    }

    /// The engine has sent the response's status.
    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.0.update_attributes(|fields| fields.status = Some(status));
    }

    /// A chunk of the body has arrived.
    pub(crate) fn record_data(&mut self, at: Instant) {
        self.0.update_attributes(|fields| {
            if fields.first_byte == FirstByteState::Awaited {
                fields.first_byte = FirstByteState::Received(at);
            }
        });
    }

    /// The leg waited for the KV cache in this interval.
    pub(crate) fn set_kv_transfer(&mut self, since: Instant, until: Instant) {
        self.0.update_attributes(|fields| fields.transfer = Some((since, until)));
    }

    /// The leg has ended successfully.
    pub(crate) fn ended(&mut self, at: Instant) {
        self.0.set_end(at);
    }

    /// Records the leg's failure and returns its span context. An engine's message about a rejected request may quote the prompt
    /// and is omitted.
    pub(crate) fn failed(&mut self, error: &LegError) -> Option<SpanContext> {
        self.0.update_attributes(|fields| fields.error = Some(error.reason()));
        self.record_data(Instant::now());
        if error.blames_engine() && self.0.is_recording() {
            self.0.force_export("error");
            self.0.error(error.to_string());
        }
        self.0.context()
    }

    /// The leg is aborted before its end.
    pub(crate) fn aborted(&mut self) {
        self.0.event("aborted");
    }
}

impl SpanAttributes for LegSpanFields {
    fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        if let Some(retry) = &self.retry_cause {
            retry.write_attributes(attributes);
        }
        if let Some(engine) = self.engine {
            attributes.set(attribute_names::GEN_AI_PROVIDER_NAME, engine.as_str());
        }
        attributes.set("moongate.engine", &*self.endpoint.id.0);
        let (host, port) = split_authority(self.endpoint.pool.authority());
        attributes.set(attribute_names::SERVER_ADDRESS, host);
        if let Some(port) = port {
            attributes.set(attribute_names::SERVER_PORT, port);
        }
        if let Some(status) = self.status {
            attributes.set(attribute_names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            attributes.set(attribute_names::ERROR_TYPE, error);
        }
    }

    fn write_children(&self, children: &mut ChildSpans<'_>) {
        let (start, end) = (children.start(), children.end());
        match self.first_byte {
            FirstByteState::Ignored => {}
            FirstByteState::Awaited => children.add("first byte", (start, end), |_| ()),
            FirstByteState::Received(at) => children.add("first byte", (start, at), |_| ()),
        }
        if let Some(transfer) = self.transfer {
            children.add("kv transfer", transfer, |_| ());
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
