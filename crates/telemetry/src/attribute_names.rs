//! Attribute names of the OpenTelemetry semantic conventions, as far as they are used here, and our own.
//!
//! The `GEN_AI_*` constants of `opentelemetry-semantic-conventions` are deprecated (they moved to a
//! repository of their own), so the names stand here.
//! Sources: <https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/> and
//! <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>.

/// What the model is asked for: `chat`, `text_completion`, `embeddings`.
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// Who serves the model, such as `vllm` or `sglang`.
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// Model the client asked for.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Upper limit of generated tokens the client asked for.
pub const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
/// Whether the client asked for a stream.
pub const GEN_AI_REQUEST_STREAM: &str = "gen_ai.request.stream";
/// Identifier of the completion.
pub const GEN_AI_RESPONSE_ID: &str = "gen_ai.response.id";
/// Model that answered.
pub const GEN_AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
/// Why generating stopped, an array with one entry for each choice.
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Seconds from the request to the first chunk of the answer.
pub const GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
/// Tokens of the prompt.
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Tokens of the answer.
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// Tokens of the prompt whose KV cache was found.
pub const GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
/// Kind of a token count: `input` or `output`.
pub const GEN_AI_TOKEN_TYPE: &str = "gen_ai.token.type";

/// Kind of failure, such as `timeout` or an HTTP status.
pub const ERROR_TYPE: &str = "error.type";
/// Host the request went to.
pub const SERVER_ADDRESS: &str = "server.address";
/// Port the request went to.
pub const SERVER_PORT: &str = "server.port";
/// Address of the client.
pub const CLIENT_ADDRESS: &str = "client.address";
/// Method of the request.
pub const HTTP_REQUEST_METHOD: &str = "http.request.method";
/// How many times the request had been sent before.
pub const HTTP_REQUEST_RESEND_COUNT: &str = "http.request.resend_count";
/// Status of the response.
pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
/// Matched route, such as `/v1/chat/completions`.
pub const HTTP_ROUTE: &str = "http.route";
/// Path of the request.
pub const URL_PATH: &str = "url.path";

/// Why a trace is exported although it may not have been sampled: `error`, `slow` or `mispredicted`.
pub const KEEP_REASON: &str = "moongate.kept";
