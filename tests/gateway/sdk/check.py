"""The OpenAI Python SDK against a gateway: check.py BASE_URL METRICS_URL MODEL. Fails by assertion."""

import asyncio
import sys
import time
import urllib.request

import openai

base, metrics_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=30)
hello = [{"role": "user", "content": "Hello, who are you?"}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def chat():
    whole = client.chat.completions.create(model=model, messages=hello, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 12, whole
    text, usage = "", None
    stream = client.chat.completions.create(
        model=model, messages=hello, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert usage == whole.usage, (usage, whole.usage)


def completions():
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    stream = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    text = "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].text, (text, whole)
    batch = client.completions.create(model=model, prompt=["one", "two"], max_tokens=4)
    assert [choice.index for choice in batch.choices] == [0, 1], batch


def models():
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def tool_calls():
    whole = client.chat.completions.create(model=model, messages=hello, tools=tools, tool_choice="required")
    call = whole.choices[0].message.tool_calls[0]
    assert whole.choices[0].finish_reason == "tool_calls" and call.function.name == "weather", whole
    assert '"city"' in call.function.arguments, call
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(
        model=model, messages=hello, tools=tools, tool_choice="required", stream=True
    ):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    assert (name, arguments, reason) == ("weather", call.function.arguments, "tool_calls"), (name, arguments, reason)


def embeddings():
    answer = client.embeddings.create(model=model, input=["one", "two"])
    assert len(answer.data) == 2 and len(answer.data[0].embedding) > 0, answer


def errors():
    try:
        client.chat.completions.create(model="nope", messages=hello)
        raise AssertionError("an unknown model was served")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model" and error.request_id, error
        assert model in error.message, error
    try:
        client.chat.completions.create(model=model, messages=[])
        raise AssertionError("no messages were served")
    except openai.BadRequestError as error:
        assert error.code == "invalid_request" and error.param == "messages", error
    try:
        client.completions.create(model=model, prompt="x", max_tokens=-1)
        raise AssertionError("max_tokens -1 was served")
    except openai.BadRequestError as error:
        assert error.param == "max_tokens", error
    try:
        client.models.retrieve("nope")
        raise AssertionError("an unknown model was found")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error


async def parallel():
    many = openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0, timeout=30)

    async def one(number):
        messages = [{"role": "user", "content": f"number {number}"}]
        answer = await many.chat.completions.create(model=model, messages=messages, max_tokens=6)
        return answer.choices[0].message.content

    texts = await asyncio.gather(*[one(number) for number in range(16)])
    assert len(set(texts)) == 16, texts


def outcomes(code):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(metrics_url) as response:
        lines = response.read().decode().splitlines()
    label = f'code="{code}"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith("moongate_requests_total{") and label in line)


def abort():
    before = outcomes("client_closed")
    stream = client.chat.completions.create(model=model, messages=hello, max_tokens=5000, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            stream.close()
            break
    deadline = time.monotonic() + 10
    while outcomes("client_closed") == before:
        assert time.monotonic() < deadline, "the gateway has not noticed that the client left"
        time.sleep(0.02)


for check in (chat, completions, models, tool_calls, embeddings, errors, abort):
    check()
    print("ok", check.__name__)
asyncio.run(parallel())
print("ok parallel")
