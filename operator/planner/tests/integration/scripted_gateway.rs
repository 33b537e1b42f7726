//! A gateway's `/metrics` with a load that the test sets. Its counters grow with time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::net::TcpListener;

/// Load since the last change.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GatewayLoad {
    pub(crate) requests_per_s: f64,
    /// Prompt tokens of a request, none of them cached.
    pub(crate) prompt_tokens: f64,
    pub(crate) generated_tokens: f64,
    /// Engines of each role, and how many of the prefill engines compute.
    pub(crate) prefill_engines: u32,
    pub(crate) busy_prefill_engines: u32,
    pub(crate) decode_engines: u32,
    /// Whether `/metrics` fails.
    pub(crate) is_failing: bool,
}

struct GatewayState {
    load: GatewayLoad,
    counted_at: Instant,
    requests: f64,
    prompt_tokens: f64,
    generated_tokens: f64,
}

#[derive(Clone)]
pub(crate) struct ScriptedGateway {
    state: Arc<Mutex<GatewayState>>,
    pub(crate) address: SocketAddr,
}

impl ScriptedGateway {
    pub(crate) async fn start(load: GatewayLoad, supervisor: &Supervisor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = GatewayState {
            load,
            counted_at: Instant::now(),
            requests: 0.0,
            prompt_tokens: 0.0,
            generated_tokens: 0.0,
        };
        let state = Arc::new(Mutex::new(state));
        let gateway = Self { state, address };
        let of_route = gateway.clone();
        let routes = Router::new().route("/metrics", get(async move || of_route.respond()));
        supervisor.spawn("scripted gateway", async move { axum::serve(listener, routes).await.unwrap() });
        gateway
    }

    pub(crate) fn set(&self, load: GatewayLoad) {
        let mut state = self.state.lock();
        state.count();
        state.load = load;
    }

    fn respond(&self) -> (StatusCode, String) {
        let mut state = self.state.lock();
        state.count();
        match state.load.is_failing {
            true => (StatusCode::INTERNAL_SERVER_ERROR, String::new()),
            false => (StatusCode::OK, state.text()),
        }
    }
}

impl GatewayState {
    fn count(&mut self) {
        let seconds = self.counted_at.elapsed().as_secs_f64();
        self.counted_at = Instant::now();
        let requests = self.load.requests_per_s * seconds;
        self.requests += requests;
        self.prompt_tokens += requests * self.load.prompt_tokens;
        self.generated_tokens += requests * self.load.generated_tokens;
    }

    fn text(&self) -> String {
        let Self { requests, prompt_tokens, generated_tokens, load, .. } = self;
        let gaps = generated_tokens - requests;
        let mut text = format!(
            "moongate_prompt_tokens_total {prompt_tokens}
moongate_cached_tokens_total 0
moongate_completion_tokens_total {generated_tokens}
moongate_requests_total{{api=\"chat\",code=\"ok\"}} {requests}
moongate_requests_in_flight 1
moongate_requests_queued 0
moongate_ttft_seconds_bucket{{le=\"0.5\",api=\"chat\"}} {requests}
moongate_ttft_seconds_bucket{{le=\"+Inf\",api=\"chat\"}} {requests}
moongate_itl_seconds_bucket{{le=\"0.02\"}} {gaps}
moongate_itl_seconds_bucket{{le=\"+Inf\"}} {gaps}
"
        );
        for index in 0..load.prefill_engines {
            let pending = if index < load.busy_prefill_engines { 100 } else { 0 };
            let labels = format!("{{instance=\"prefill-{index}\",role=\"prefill\"}}");
            text += &format!(
                "moongate_engine_up{labels} 1\nmoongate_engine_pending_prefill_tokens{labels} {pending}\n"
            );
        }
        // By Little's law, with 20 ms per token.
        let running =
            load.requests_per_s * load.generated_tokens * 0.02 / f64::from(load.decode_engines.max(1));
        for index in 0..load.decode_engines {
            let labels = format!("{{instance=\"decode-{index}\",role=\"decode\"}}");
            text += &format!(
                "moongate_engine_up{labels} 1\nmoongate_engine_requests_in_flight{labels} {running}\n"
            );
        }
        text + "# EOF\n"
    }
}
