//! The span of a leg.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use moongate_discovery::Engine;
use moongate_telemetry::{Notes, SpanContext, SpanHandle, SpanKind, Steps, Tell, TraceId, names};
use tokio::time::Instant;

use super::tries::{Again, Try};
use crate::dispatch::Side;
use crate::fleet::{Endpoint, Member};
use crate::upstream::LegError;

impl Try<'_> {
    /// Span of a leg that begins at `start`.
    pub(crate) fn leg(&self, side: Side, member: &Member, start: Instant) -> LegSpan {
        LegSpan(self.span.root.child_at(side.as_str(), SpanKind::Client, start, || LegFacts {
            endpoint: member.endpoint.clone(),
            engine: member.facts().map(|facts| facts.engine),
            again: self.again(),
            status: None,
            first_byte: FirstByte::Any,
            transfer: None,
            error: None,
        }))
    }
}

/// Span of a leg, which ends with it.
#[derive(Debug)]
pub(crate) struct LegSpan(SpanHandle<LegFacts>);

/// What is known of a leg.
#[derive(Debug)]
struct LegFacts {
    endpoint: Arc<Endpoint>,
    engine: Option<Engine>,
    again: Option<Box<Again>>,
    status: Option<StatusCode>,
    first_byte: FirstByte,
    transfer: Option<(Instant, Instant)>,
    error: Option<&'static str>,
}

/// The first byte of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstByte {
    /// It matters to nobody.
    Any,
    Awaited,
    Came(Instant),
}

impl LegSpan {
    /// Nothing is told of the leg.
    pub(crate) fn off() -> Self {
        Self(SpanHandle::off())
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
        self.0.know(|facts| facts.first_byte = FirstByte::Awaited);
    }

    /// Whether nothing has come of an answer that is for the client.
    pub(crate) fn awaits_first_byte(&self) -> bool {
        self.0.facts().is_some_and(|facts| facts.first_byte == FirstByte::Awaited)
    }

    /// The engine answers with this status.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.0.know(|facts| facts.status = Some(status));
    }

    /// A piece of the body came.
    pub(crate) fn heard(&mut self, at: Instant) {
        self.0.know(|facts| {
            if facts.first_byte == FirstByte::Awaited {
                facts.first_byte = FirstByte::Came(at);
            }
        });
    }

    /// The leg waited for the KV cache in that time.
    pub(crate) fn waited_for_kv_cache(&mut self, since: Instant, until: Instant) {
        self.0.know(|facts| facts.transfer = Some((since, until)));
    }

    /// The leg has ended well.
    pub(crate) fn ended(&mut self, at: Instant) {
        self.0.ends_at(at);
    }

    /// Notes how the leg failed, and tells which span that is. The engine's words to a request that it finds at fault may quote the prompt:
    /// they are left out.
    pub(crate) fn failed(&mut self, error: &LegError) -> Option<SpanContext> {
        self.0.know(|facts| facts.error = Some(error.reason()));
        self.heard(Instant::now());
        if error.blames_engine() && self.0.is_recording() {
            self.0.keep("error");
            self.0.error(error.to_string());
        }
        self.0.context()
    }

    /// The leg is stopped before its end.
    pub(crate) fn aborted(&mut self) {
        self.0.event("aborted");
    }
}

impl Tell for LegFacts {
    fn tell(&self, notes: &mut Notes<'_>) {
        if let Some(again) = &self.again {
            again.tell(notes);
        }
        if let Some(engine) = self.engine {
            let provider = match engine {
                Engine::Sglang => "sglang",
                Engine::Vllm => "vllm",
            };
            notes.set(names::GEN_AI_PROVIDER_NAME, provider);
        }
        notes.set("moongate.engine", &*self.endpoint.id.0);
        let (host, port) = split(self.endpoint.pool.authority());
        notes.set(names::SERVER_ADDRESS, host);
        if let Some(port) = port {
            notes.set(names::SERVER_PORT, port);
        }
        if let Some(status) = self.status {
            notes.set(names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            notes.set(names::ERROR_TYPE, error);
        }
    }

    fn steps(&self, steps: &mut Steps<'_>) {
        let (start, end) = (steps.start(), steps.end());
        match self.first_byte {
            FirstByte::Any => {}
            FirstByte::Awaited => steps.step("first byte", (start, end), |_| ()),
            FirstByte::Came(at) => steps.step("first byte", (start, at), |_| ()),
        }
        if let Some(transfer) = self.transfer {
            steps.step("kv transfer", transfer, |_| ());
        }
    }
}

fn split(authority: &str) -> (&str, Option<u16>) {
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
        assert_eq!(split("engine:8000"), ("engine", Some(8000)));
        assert_eq!(split("[::1]:80"), ("[::1]", Some(80)));
        assert_eq!(split("[::1]"), ("[::1]", None));
        assert_eq!(split("engine"), ("engine", None));
    }
}
