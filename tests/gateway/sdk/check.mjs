// The OpenAI Node SDK against a gateway: check.mjs NODE_MODULES BASE_URL METRICS_URL MODEL. Fails by assertion.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [modules, baseURL, metricsUrl, model] = process.argv.slice(2);
const OpenAI = createRequire(`${modules}/`)('openai');
const client = new OpenAI({ baseURL, apiKey: 'any', maxRetries: 0, timeout: 30_000 });
const messages = [{ role: 'user', content: 'Hello, who are you?' }];
const parameters = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };
const tools = [{ type: 'function', function: { name: 'weather', parameters } }];

const checks = {
  async chat() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
    assert.equal(whole.usage.completion_tokens, 12);
    let text = '';
    let usage = null;
    const wish = { model, messages, max_tokens: 12, temperature: 0, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create(wish)) {
      usage = chunk.usage ?? usage;
      text += chunk.choices.map((choice) => choice.delta.content ?? '').join('');
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
  },

  async completions() {
    const wish = { model, prompt: 'Once upon a time', max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(wish);
    let text = '';
    for await (const chunk of await client.completions.create({ ...wish, stream: true })) {
      text += chunk.choices.map((choice) => choice.text).join('');
    }
    assert.equal(text, whole.choices[0].text);
  },

  async models() {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async toolCalls() {
    const wish = { model, messages, tools, tool_choice: 'required' };
    const whole = await client.chat.completions.create(wish);
    const call = whole.choices[0].message.tool_calls[0].function;
    assert.equal(whole.choices[0].finish_reason, 'tool_calls');
    assert.equal(call.name, 'weather');
    const runner = client.chat.completions.stream(wish);
    const streamed = (await runner.finalChatCompletion()).choices[0];
    assert.equal(streamed.finish_reason, 'tool_calls');
    assert.equal(streamed.message.tool_calls[0].function.name, 'weather');
    assert.equal(streamed.message.tool_calls[0].function.arguments, call.arguments);
  },

  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ['one', 'two'], encoding_format: 'float' });
    assert.equal(answer.data.length, 2);
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ model: 'nope', messages }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      assert.equal(error.code, 'model_not_found');
      assert.equal(error.param, 'model');
      return true;
    });
    await assert.rejects(client.chat.completions.create({ model, messages: 'hi' }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.code, 'invalid_request');
      assert.equal(error.param, 'messages');
      return true;
    });
  },

  async parallel() {
    const one = async (number) => {
      const own = [{ role: 'user', content: `number ${number}` }];
      const answer = await client.chat.completions.create({ model, messages: own, max_tokens: 6 });
      return answer.choices[0].message.content;
    };
    const texts = await Promise.all(Array.from({ length: 16 }, (_, number) => one(number)));
    assert.equal(new Set(texts).size, 16);
  },

  async abort() {
    const before = await outcomes('client_closed');
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 5000, stream: true });
    let chunks = 0;
    for await (const _ of stream) {
      chunks += 1;
      if (chunks === 4) stream.controller.abort();
    }
    assert.ok(chunks < 5000);
    const deadline = Date.now() + 10_000;
    while ((await outcomes('client_closed')) === before) {
      assert.ok(Date.now() < deadline, 'the gateway has not noticed that the client left');
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  },
};

async function outcomes(code) {
  const text = await (await fetch(metricsUrl)).text();
  const lines = text.split('\n').filter((line) => line.startsWith('moongate_requests_total{') && line.includes(`code="${code}"`));
  return lines.reduce((sum, line) => sum + Number(line.split(' ').at(-1)), 0);
}

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log('ok', name);
}
