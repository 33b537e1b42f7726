//! Attribute names: the OpenTelemetry semantic conventions used here, and Moongate's own.
//!
//! The `GEN_AI_*` constants of `opentelemetry-semantic-conventions` are deprecated (the conventions moved to another repository), so the
//! names are defined here. Sources: <https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/> and
//! <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>.

/// Requested operation: `chat`, `text_completion`, `embeddings`.
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// Model server, such as `vllm` or `sglang`.
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// Model name in the client's request.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Maximum number of generated tokens in the client's request.
pub const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
/// Whether the client requested a stream.
pub const GEN_AI_REQUEST_STREAM: &str = "gen_ai.request.stream";
/// Completion id in the response.
pub const GEN_AI_RESPONSE_ID: &str = "gen_ai.response.id";
/// Model name in the response.
pub const GEN_AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
/// Finish reasons, an array with one entry per choice.
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Seconds from the request to the first chunk of the response.
pub const GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// Number of prompt tokens whose KV cache was reused.
pub const GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
/// Type of a token count: `input` or `output`.
pub const GEN_AI_TOKEN_TYPE: &str = "gen_ai.token.type";

/// Error class, such as `timeout` or an HTTP status.
pub const ERROR_TYPE: &str = "error.type";
/// Host that the request was sent to.
pub const SERVER_ADDRESS: &str = "server.address";
/// Port that the request was sent to.
pub const SERVER_PORT: &str = "server.port";
/// Network address of the client.
pub const CLIENT_ADDRESS: &str = "client.address";
/// HTTP method of the request.
pub const HTTP_REQUEST_METHOD: &str = "http.request.method";
/// How often the request had been sent before.
pub const HTTP_REQUEST_RESEND_COUNT: &str = "http.request.resend_count";
/// HTTP status code of the response.
pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
/// Matched route, such as `/v1/chat/completions`.
pub const HTTP_ROUTE: &str = "http.route";
/// URL path of the request.
pub const URL_PATH: &str = "url.path";

/// Why a trace is exported regardless of sampling: `error`, `slow` or `mispredicted`.
pub const KEEP_REASON: &str = "moongate.kept";
