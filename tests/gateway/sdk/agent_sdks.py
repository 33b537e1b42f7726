"""The SDKs of agents against one plain engine, directly or through a gateway: agent_sdks.py BASE_URL MODEL. Fails by assertion.

BASE_URL has no /v1. The engine must store responses, and check model names.
"""

import asyncio
import sys

import agents
import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

base, model = sys.argv[1:]
chat = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=30)
claude = anthropic.Anthropic(base_url=base, api_key="any", max_retries=0, timeout=30)
# Longer than a page of cache.
prompt = "Hello, who are you? " * 20
schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
hello = [{"role": "user", "content": prompt}]


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def responses():
    whole = chat.responses.create(model=model, input=prompt, max_output_tokens=12)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens", whole
    assert whole.usage.output_tokens == 12, whole
    completion = chat.chat.completions.create(model=model, messages=hello, max_tokens=12)
    assert whole.output_text == completion.choices[0].message.content, (whole, completion)
    with chat.responses.stream(model=model, input=prompt, max_output_tokens=12) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text, (text, final)
    assert chat.responses.retrieve(whole.id).output_text == whole.output_text
    error = raises(openai.NotFoundError, lambda: chat.responses.create(model="nope", input="hi"))
    assert "nope" in error.message, error
    raises(openai.BadRequestError, lambda: chat.responses.create(model=model, input=[{"type": "computer_call"}]))


def responses_with_tools():
    tool = {"type": "function", "name": "weather", "parameters": schema, "strict": False}
    first = chat.responses.create(model=model, input="please call_tool", tools=[tool])
    (call,) = first.output
    assert (call.type, call.name, '"city"' in call.arguments) == ("function_call", "weather", True), first
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation = [{"role": "user", "content": "please call_tool"}, call.model_dump(exclude_none=True), result]
    second = chat.responses.create(model=model, input=conversation, tools=[tool])
    assert second.output_text and second.status == "completed", second
    with chat.responses.stream(model=model, input="please call_tool", tools=[tool]) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
    assert arguments == call.arguments, (arguments, call)


def responses_with_reasoning():
    wish = {"model": model, "input": prompt, "reasoning": {"effort": "low"}, "max_output_tokens": 12}
    whole = chat.responses.create(**wish)
    assert [item.type for item in whole.output] == ["reasoning", "message"], whole
    assert whole.usage.output_tokens_details.reasoning_tokens == 4, whole
    with chat.responses.stream(**wish) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
    assert text == whole.output[0].content[0].text, (text, whole)


def responses_with_history():
    first = chat.responses.create(model=model, input="first", max_output_tokens=8)
    second = chat.responses.create(model=model, input="and?", previous_response_id=first.id, max_output_tokens=8)
    conversation = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    whole = chat.responses.create(model=model, input=conversation, max_output_tokens=8)
    assert second.output_text == whole.output_text != first.output_text, (first, second, whole)
    missing = lambda: chat.responses.create(model=model, input="and?", previous_response_id="resp_missing")
    raises(openai.NotFoundError, missing)


def messages():
    whole = claude.messages.create(model=model, messages=hello, max_tokens=12, system="Be brief.")
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12, whole
    conversation = [{"role": "system", "content": "Be brief."}, *hello]
    completion = chat.chat.completions.create(model=model, messages=conversation, max_tokens=12)
    assert whole.content[0].text == completion.choices[0].message.content, (whole, completion)
    with claude.messages.stream(model=model, messages=hello, max_tokens=12, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == "max_tokens", (text, final)
    assert final.usage.output_tokens == 12 and final.usage.cache_read_input_tokens > 0, final
    counted = claude.messages.count_tokens(model=model, messages=hello, system="Be brief.")
    total = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert counted.input_tokens == total, (counted, final)
    error = raises(
        anthropic.NotFoundError, lambda: claude.messages.create(model="nope", messages=hello, max_tokens=1)
    )
    assert "nope" in error.message, error
    raises(anthropic.BadRequestError, lambda: claude.messages.create(model=model, messages=[], max_tokens=1))


def messages_with_tools_and_thinking():
    conversation = [{"role": "user", "content": "please call_tool"}]
    wish = {
        "model": model,
        "messages": conversation,
        "max_tokens": 100,
        "tools": [{"name": "weather", "input_schema": schema}],
        "thinking": {"type": "adaptive"},
    }
    first = claude.messages.create(**wish)
    assert [block.type for block in first.content] == ["thinking", "tool_use"], first
    assert first.stop_reason == "tool_use" and set(first.content[1].input) == {"city", "days"}, first
    with claude.messages.stream(**wish) as stream:
        assert stream.get_final_message().content[1].input == first.content[1].input
    conversation.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "sunny"}
    conversation.append({"role": "user", "content": [result]})
    second = claude.messages.create(**wish)
    assert [block.type for block in second.content] == ["thinking", "text"], second
    assert second.stop_reason == "max_tokens", second


def litellm_models():
    litellm.suppress_debug_info = True
    # The smallest limit that it passes on to Responses is 16 tokens.
    wish = {"api_base": f"{base}/v1", "api_key": "any"}
    completion = litellm.completion(model=f"openai/{model}", messages=hello, max_tokens=16, **wish)
    assert completion.usage.completion_tokens == 16, completion
    message = litellm.completion(
        model=f"anthropic/{model}", messages=hello, max_tokens=16, api_base=base, api_key="any"
    )
    assert message.choices[0].message.content == completion.choices[0].message.content, (message, completion)
    response = litellm.responses(model=f"openai/{model}", input=prompt, max_output_tokens=16, **wish)
    assert response.output[0].content[0].text == completion.choices[0].message.content, response
    ranked = litellm.rerank(
        model=f"hosted_vllm/{model}", query="moon", documents=["one", "two", "three"], top_n=2, api_base=base
    )
    scores = [result["relevance_score"] for result in ranked.results]
    assert len(scores) == 2 and scores[0] > scores[1], ranked


def openai_agents():
    agents.set_tracing_disabled(True)
    called = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=30)
    served = agents.OpenAIResponsesModel(model=model, openai_client=client)
    agent = agents.Agent(name="guide", instructions="Be brief.", model=served, tools=[weather])

    async def run():
        whole = await agents.Runner.run(agent, "please call_tool")
        streamed = agents.Runner.run_streamed(agent, "please call_tool")
        async for _ in streamed.stream_events():
            pass
        return whole.final_output, streamed.final_output

    whole, streamed = asyncio.run(run())
    assert whole and whole == streamed and len(called) == 2, (whole, streamed, called)


def langchain():
    wish = {"model": model, "api_key": "any", "max_retries": 0}
    models = [
        ChatOpenAI(base_url=f"{base}/v1", max_tokens=8, **wish),
        ChatOpenAI(base_url=f"{base}/v1", max_tokens=8, use_responses_api=True, **wish),
        ChatAnthropic(base_url=base, max_tokens=8, **wish),
    ]
    texts = {served.invoke(prompt).text for served in models}
    assert len(texts) == 1 and texts.pop(), texts
    for served in models:
        assert "".join(chunk.text for chunk in served.stream(prompt)) == served.invoke(prompt).text
        tool = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": schema}}
        called = served.bind(max_tokens=100).bind_tools([tool]).invoke("please call_tool").tool_calls
        assert called[0]["name"] == "weather", (served, called)


for check in (
    responses,
    responses_with_tools,
    responses_with_reasoning,
    responses_with_history,
    messages,
    messages_with_tools_and_thinking,
    litellm_models,
    openai_agents,
    langchain,
):
    check()
    print("ok", check.__name__)
