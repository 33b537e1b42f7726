//! Descriptions of prompts by gateways, for the store's retention.

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use mooncake_wire::admin::{
    DescribePromptsRequest, DescribedObjects, DescribedPrompt, ReturnHint, TENANT_BUCKETS,
};
use mooncake_wire::events::mooncake::DEFAULT_TENANT;
use moongate_master_core::{DescribedKeys, PromptDescription, PromptLength, PromptUse, TenantBucket};

use super::{SharedAdminContext, response};

/// Maximum number of objects of one request: eight per block for prompts of a million tokens in blocks of 64.
const MAX_OBJECTS: usize = 1 << 17;

const _: () =
    assert!(TenantBucket::COUNT > TENANT_BUCKETS as usize, "gateways' tenants have distinct buckets");

pub(super) async fn post(State(admin): SharedAdminContext, body: Bytes) -> Response {
    let request: DescribePromptsRequest<'_> = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return response::invalid(format!("Invalid JSON body: {error}")),
    };
    let objects: usize = request.prompts.iter().map(DescribedPrompt::key_count).sum();
    if objects > MAX_OBJECTS {
        let message = format!("{objects} objects, more than {MAX_OBJECTS}; send fewer prompts at once");
        return response::invalid(message);
    }
    let master = &admin.server.master;
    let mut described = DescribedObjects::default();
    for prompt in &request.prompts {
        let description = PromptDescription {
            length: PromptLength::of_tokens(prompt.tokens),
            hint: match prompt.returns {
                ReturnHint::Unknown => moongate_master_core::ReturnHint::Unknown,
                ReturnHint::Never => moongate_master_core::ReturnHint::Never,
                ReturnHint::Expected => moongate_master_core::ReturnHint::Expected,
            },
            tenants: TenantBucket::new(prompt.tenant_bucket),
        };
        let now_ms = admin.server.clock.now_ms();
        let prompt_use =
            PromptUse { now_ms, arrived_ms: now_ms.saturating_sub(prompt.elapsed_ms), description };
        let keys: Vec<String> = prompt.keys().collect();
        let DescribedKeys { existing, announced } = master.describe_prompt(DEFAULT_TENANT, &keys, prompt_use);
        let objects = DescribedObjects { existing, announced };
        admin.server.counters.add_described_prompt(prompt.returns, objects);
        described.existing += objects.existing;
        described.announced += objects.announced;
    }
    response::data(described)
}
