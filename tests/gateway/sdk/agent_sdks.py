"""The SDKs of agents against one plain engine, directly or through a gateway: agent_sdks.py BASE_URL MODEL [REFERENCE_URL]. Fails by
assertion.

URLs have no /v1. The engine must store responses, and check model names. With REFERENCE_URL the engines are real, with a model whose weights
are random: it calls no tools and does not reason, and the same requests must get the same texts from the engines at REFERENCE_URL.
"""

import asyncio
import sys

import agents
import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

base, model = sys.argv[1:3]
reference = sys.argv[3] if len(sys.argv) > 3 else None


def clients(url):
    # Two busy cores are slow.
    how = {"api_key": "any", "max_retries": 0, "timeout": 30 if reference is None else 180}
    return openai.OpenAI(base_url=f"{url}/v1", **how), anthropic.Anthropic(base_url=url, **how)


chat, claude = clients(base)
direct, direct_claude = clients(reference or base)
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


def agree(*texts):
    """Whether the texts are equal up to the length of the shortest. SGLang uses two tokens less than the limit of a response."""
    longest = max(texts, key=len)
    # A character of several tokens may be cut.
    return all(text and longest.startswith(text.rstrip("\ufffd")) for text in texts)


def ending(text):
    """Members that end a real model's response before its limit: openai-python has no final response for the event `response.incomplete`,
    with which SGLang ends a stream at the limit. And the text that remains."""
    if reference is None:
        return {}, text
    stop = text[len(text) // 2 :]
    return {"extra_body": {"stop": [stop]}}, text[: text.find(stop)]


def responses():
    wish = {"model": model, "input": prompt, "max_output_tokens": 12, "temperature": 0}
    whole = chat.responses.create(**wish)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens", whole
    tokens = whole.usage.output_tokens
    assert tokens == 12 or reference and tokens == 10, whole
    completion = chat.chat.completions.create(model=model, messages=hello, max_tokens=tokens, temperature=0)
    assert whole.output_text == completion.choices[0].message.content, (whole, completion)
    assert direct.responses.create(**wish).output_text == whole.output_text
    end, shorter = ending(whole.output_text)
    with chat.responses.stream(**wish, **end) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == shorter, (text, final, whole)
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
    asked = {"role": "user", "content": "please call_tool"}
    conversation = [asked, call.model_dump(exclude_none=True), result]
    second = chat.responses.create(model=model, input=conversation, tools=[tool])
    assert second.output_text and second.status == "completed", second
    with chat.responses.stream(model=model, input="please call_tool", tools=[tool]) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
    assert arguments == call.arguments, (arguments, call)


def tools_in_conversations():
    """A call and its result, which the model need not have made."""
    tool = {"type": "function", "name": "weather", "description": "x", "parameters": schema, "strict": False}
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn", "days": 2}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    conversation = [{"role": "user", "content": "Will it rain?"}, call, result]
    wish = {"model": model, "input": conversation, "tools": [tool], "max_output_tokens": 12, "temperature": 0}
    whole = chat.responses.create(**wish)
    assert whole.output_text and whole.output_text == direct.responses.create(**wish).output_text, whole
    conversation = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"days": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
    ]
    tools = [{"name": "weather", "description": "x", "input_schema": schema}]
    wish = {"model": model, "messages": conversation, "tools": tools, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**wish)
    assert whole.content[0].text and whole.content == direct_claude.messages.create(**wish).content, whole
    counted = claude.messages.count_tokens(model=model, messages=conversation, tools=tools)
    assert counted.input_tokens == input_tokens(whole.usage), (counted, whole)


def input_tokens(usage):
    """Anthropic counts cached tokens apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def responses_with_reasoning():
    wish = {"model": model, "input": prompt, "reasoning": {"effort": "low"}, "max_output_tokens": 12}
    whole = chat.responses.create(**wish)
    assert [item.type for item in whole.output] == ["reasoning", "message"], whole
    assert whole.usage.output_tokens_details.reasoning_tokens == 4, whole
    with chat.responses.stream(**wish) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
    assert text == whole.output[0].content[0].text, (text, whole)


def responses_with_history():
    wish = {"model": model, "max_output_tokens": 8, "temperature": 0}
    first = chat.responses.create(input="first", **wish)
    second = chat.responses.create(input="and?", previous_response_id=first.id, **wish)
    conversation = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    whole = chat.responses.create(input=conversation, **wish)
    assert second.output_text == whole.output_text != first.output_text, (first, second, whole)
    missing = lambda: chat.responses.create(model=model, input="and?", previous_response_id="resp_missing")
    raises(openai.NotFoundError, missing)


def messages():
    wish = {"model": model, "messages": hello, "max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**wish)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12, whole
    conversation = [{"role": "system", "content": "Be brief."}, *hello]
    completion = chat.chat.completions.create(model=model, messages=conversation, max_tokens=12, temperature=0)
    assert whole.content[0].text == completion.choices[0].message.content, (whole, completion)
    assert direct_claude.messages.create(**wish).content == whole.content
    with claude.messages.stream(**wish) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == "max_tokens", (text, final)
    assert final.usage.output_tokens == 12 and final.usage.cache_read_input_tokens > 0, final
    counted = claude.messages.count_tokens(model=model, messages=hello, system="Be brief.")
    assert counted.input_tokens == input_tokens(final.usage), (counted, final)
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
    wish = {"api_base": f"{base}/v1", "api_key": "any", "temperature": 0}
    completion = litellm.completion(model=f"openai/{model}", messages=hello, max_tokens=16, **wish)
    assert completion.usage.completion_tokens == 16, completion
    message = litellm.completion(
        model=f"anthropic/{model}", messages=hello, max_tokens=16, temperature=0, api_base=base, api_key="any"
    )
    assert message.choices[0].message.content == completion.choices[0].message.content, (message, completion)
    response = litellm.responses(model=f"openai/{model}", input=prompt, max_output_tokens=16, **wish)
    assert agree(response.output[0].content[0].text, completion.choices[0].message.content), response
    if reference:
        return
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
    wish, settings, expected = {"instructions": "Be brief."}, agents.ModelSettings(), None
    if reference:
        # It fails at the limit, so the response must end before.
        limits = {"max_output_tokens": 16, "temperature": 0}
        response = chat.responses.create(model=model, input="please call_tool", **wish, **limits)
        end, expected = ending(response.output_text)
        settings = agents.ModelSettings(temperature=0, max_tokens=16, **end)
    tools = [] if reference else [weather]
    agent = agents.Agent(name="guide", model=served, tools=tools, model_settings=settings, **wish)

    async def run():
        whole = await agents.Runner.run(agent, "please call_tool")
        streamed = agents.Runner.run_streamed(agent, "please call_tool")
        async for _ in streamed.stream_events():
            pass
        return whole.final_output, streamed.final_output

    whole, streamed = asyncio.run(run())
    if reference:
        assert whole == streamed == expected, (whole, streamed, expected)
    else:
        assert whole and whole == streamed and len(called) == 2, (whole, streamed, called)


def langchain():
    wish = {"model": model, "api_key": "any", "max_retries": 0, "max_tokens": 8}
    models = [
        ChatOpenAI(base_url=f"{base}/v1", temperature=0, **wish),
        ChatOpenAI(base_url=f"{base}/v1", temperature=0, use_responses_api=True, **wish),
        # Anthropic's SDK has no parameter for it.
        ChatAnthropic(base_url=base, model_kwargs={"extra_body": {"temperature": 0}}, **wish),
    ]
    texts = [served.invoke(prompt).text for served in models]
    assert agree(*texts), texts
    for served in models:
        assert "".join(chunk.text for chunk in served.stream(prompt)) == served.invoke(prompt).text
        if reference:
            continue
        tool = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": schema}}
        called = served.bind(max_tokens=100).bind_tools([tool]).invoke("please call_tool").tool_calls
        assert called[0]["name"] == "weather", (served, called)


with_any_model = [responses, responses_with_history, tools_in_conversations, messages, litellm_models, openai_agents, langchain]
for check in [
    *with_any_model,
    *([] if reference else [responses_with_tools, responses_with_reasoning, messages_with_tools_and_thinking]),
]:
    check()
    print("ok", check.__name__)
