// The SDKs of agents against one plain engine, directly or through a gateway: agent_sdks.mjs NODE_MODULES BASE_URL MODEL. Fails by
// assertion. BASE_URL has no /v1. The engine must store responses, and check model names.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [modules, base, model] = process.argv.slice(2);
const load = createRequire(`${modules}/`);
const OpenAI = load('openai');
const Anthropic = load('@anthropic-ai/sdk');
const { generateText, stepCountIs, streamText, tool } = load('ai');
const { createOpenAI } = load('@ai-sdk/openai');
const { createAnthropic } = load('@ai-sdk/anthropic');
const { z } = load('zod');

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'any', maxRetries: 0, timeout: 30_000 });
const claude = new Anthropic({ baseURL: base, apiKey: 'any', maxRetries: 0, timeout: 30_000 });
// Longer than a page of cache.
const prompt = 'Hello, who are you? '.repeat(20);
const messages = [{ role: 'user', content: prompt }];
const schema = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };

const checks = {
  async responses() {
    const wish = { model, input: prompt, max_output_tokens: 12 };
    const whole = await openai.responses.create(wish);
    assert.equal(whole.status, 'incomplete');
    assert.equal(whole.usage.output_tokens, 12);
    const completion = await openai.chat.completions.create({ model, messages, max_tokens: 12 });
    assert.equal(whole.output_text, completion.choices[0].message.content);
    const final = await openai.responses.stream(wish).finalResponse();
    assert.equal(final.output_text, whole.output_text);
    const next = await openai.responses.create({ ...wish, input: 'and?', previous_response_id: whole.id });
    assert.notEqual(next.output_text, whole.output_text);
    await assert.rejects(openai.responses.create({ ...wish, model: 'nope' }), OpenAI.NotFoundError);
  },

  async responsesWithToolsAndReasoning() {
    const tools = [{ type: 'function', name: 'weather', parameters: schema, strict: false }];
    const wish = { model, input: 'please call_tool', tools, reasoning: { effort: 'low' } };
    const whole = await openai.responses.create(wish);
    assert.deepEqual(whole.output.map((item) => item.type), ['reasoning', 'function_call']);
    const final = await openai.responses.stream(wish).finalResponse();
    assert.equal(final.output[1].arguments, whole.output[1].arguments);
    const output = { type: 'function_call_output', call_id: whole.output[1].call_id, output: 'sunny' };
    const input = [{ role: 'user', content: 'please call_tool' }, ...whole.output, output];
    const second = await openai.responses.create({ ...wish, input });
    assert.deepEqual(second.output.map((item) => item.type), ['reasoning', 'message']);
  },

  async messages() {
    const wish = { model, messages, max_tokens: 12 };
    const whole = await claude.messages.create(wish);
    assert.equal(whole.stop_reason, 'max_tokens');
    const final = await claude.messages.stream(wish).finalMessage();
    assert.deepEqual(final.content, whole.content);
    assert.ok(final.usage.cache_read_input_tokens > 0);
    const counted = await claude.messages.countTokens({ model, messages });
    assert.equal(counted.input_tokens, final.usage.input_tokens + final.usage.cache_read_input_tokens);
    await assert.rejects(claude.messages.create({ ...wish, model: 'nope' }), Anthropic.NotFoundError);
    await assert.rejects(claude.messages.create({ ...wish, messages: [] }), Anthropic.BadRequestError);
  },

  async messagesWithToolsAndThinking() {
    const asked = { role: 'user', content: 'please call_tool' };
    const tools = [{ name: 'weather', input_schema: schema }];
    const wish = { model, messages: [asked], max_tokens: 100, tools, thinking: { type: 'adaptive' } };
    const whole = await claude.messages.create(wish);
    assert.deepEqual(whole.content.map((block) => block.type), ['thinking', 'tool_use']);
    const final = await claude.messages.stream(wish).finalMessage();
    assert.deepEqual(final.content[1].input, whole.content[1].input);
    const result = { type: 'tool_result', tool_use_id: whole.content[1].id, content: 'sunny' };
    const turns = [asked, { role: 'assistant', content: whole.content }, { role: 'user', content: [result] }];
    const second = await claude.messages.create({ ...wish, messages: turns });
    assert.equal(second.stop_reason, 'max_tokens');
  },

  async vercel() {
    const served = createOpenAI({ baseURL: `${base}/v1`, apiKey: 'any' });
    const anthropic = createAnthropic({ baseURL: `${base}/v1`, apiKey: 'any' });
    const texts = [];
    for (const one of [served.chat(model), served.responses(model), anthropic(model)]) {
      const wish = { model: one, prompt, maxOutputTokens: 8, maxRetries: 0 };
      const whole = await generateText(wish);
      texts.push(whole.text);
      assert.equal(await streamText(wish).text, whole.text);
      let called = 0;
      const weather = tool({
        description: 'The weather of a city.',
        inputSchema: z.object({ city: z.string() }),
        execute: async () => {
          called += 1;
          return 'sunny';
        },
      });
      const agent = { model: one, prompt: 'please call_tool', tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
      const done = await generateText({ ...agent, maxOutputTokens: 100 });
      assert.equal(called, 1);
      assert.equal(done.steps.length, 2);
      assert.ok(done.text.length > 0);
    }
    assert.equal(new Set(texts).size, 1);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log('ok', name);
}
