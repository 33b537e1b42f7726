"""The OpenAI Python SDK against a gateway that asks for keys: keys.py BASE_URL MODEL KEY. Fails by assertion."""

import sys

import openai

base, model, key = sys.argv[1:]
hello = [{"role": "user", "content": "Hello"}]


def client(api_key, retries=0):
    return openai.OpenAI(base_url=base, api_key=api_key, max_retries=retries, timeout=30)


def raises(kind, code, call):
    try:
        call()
    except kind as error:
        assert error.code == code, error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def ask(with_client):
    return with_client.chat.completions.create(model=model, messages=hello, max_tokens=2)


raises(openai.AuthenticationError, "invalid_api_key", lambda: ask(client("sk-not-known-here-0123")))
raises(openai.AuthenticationError, "invalid_api_key", lambda: client("sk-not-known-here-0123").models.list())
print("ok wrong key")
assert [entry.id for entry in client(key).models.list()] == [model]
assert ask(client(key)).choices[0].message.content
print("ok right key")
# The quota is one request in ten seconds.
raises(openai.RateLimitError, "rate_limit_exceeded", lambda: ask(client(key)))
print("ok quota")
# The SDK waits as long as Retry-After says.
assert ask(client(key, retries=3)).choices[0].message.content
print("ok retried")
