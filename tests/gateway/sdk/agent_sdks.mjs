// The SDKs of agents against one plain engine, directly or through a gateway: agent_sdks.mjs NODE_MODULES BASE_URL MODEL [REFERENCE_URL].
// Fails by assertion. URLs have no /v1. The engine must store responses, and check model names. REFERENCE_URL: as for agent_sdks.py.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [modules, base, model, reference] = process.argv.slice(2);
const load = createRequire(`${modules}/`);
const OpenAI = load('openai');
const Anthropic = load('@anthropic-ai/sdk');
const { generateText, stepCountIs, streamText, tool } = load('ai');
const { createOpenAI } = load('@ai-sdk/openai');
const { createAnthropic } = load('@ai-sdk/anthropic');
const { z } = load('zod');

const how = { apiKey: 'any', maxRetries: 0, timeout: reference ? 180_000 : 30_000 };
const openai = new OpenAI({ baseURL: `${base}/v1`, ...how });
const claude = new Anthropic({ baseURL: base, ...how });
const direct = new OpenAI({ baseURL: `${reference ?? base}/v1`, ...how });
const directClaude = new Anthropic({ baseURL: reference ?? base, ...how });
// Longer than a page of cache.
const prompt = 'Hello, who are you? '.repeat(20);
const messages = [{ role: 'user', content: prompt }];
const schema = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };

// As in agent_sdks.py.
function agree(texts) {
  const longest = texts.reduce((one, other) => (other.length > one.length ? other : one));
  assert.ok(texts.every((text) => text && longest.startsWith(text.replace(/\uFFFD+$/, ''))), texts.join(' | '));
}

function ending(text) {
  const stop = text.slice(text.length / 2);
  return reference ? [{ stop: [stop] }, text.slice(0, text.indexOf(stop))] : [{}, text];
}

const checks = {
  async responses() {
    const wish = { model, input: prompt, max_output_tokens: 12, temperature: 0 };
    const whole = await openai.responses.create(wish);
    assert.equal(whole.status, 'incomplete');
    const tokens = whole.usage.output_tokens;
    assert.ok(tokens === 12 || (reference && tokens === 10));
    const completion = await openai.chat.completions.create({ model, messages, max_tokens: tokens, temperature: 0 });
    assert.equal(whole.output_text, completion.choices[0].message.content);
    assert.equal((await direct.responses.create(wish)).output_text, whole.output_text);
    const [end, shorter] = ending(whole.output_text);
    const final = await openai.responses.stream({ ...wish, ...end }).finalResponse();
    assert.equal(final.output_text, shorter);
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
    const wish = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await claude.messages.create(wish);
    assert.equal(whole.stop_reason, 'max_tokens');
    assert.deepEqual((await directClaude.messages.create(wish)).content, whole.content);
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
      const wish = { model: one, prompt, maxOutputTokens: 8, maxRetries: 0, temperature: 0 };
      const whole = await generateText(wish);
      texts.push(whole.text);
      assert.equal(await streamText(wish).text, whole.text);
      if (reference) continue;
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
    agree(texts);
  },
};

// They depend on what the model says.
if (reference) {
  delete checks.responsesWithToolsAndReasoning;
  delete checks.messagesWithToolsAndThinking;
}
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log('ok', name);
}
