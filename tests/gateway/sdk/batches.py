"""The OpenAI Python SDK's files and batches against a gateway: batches.py BASE_URL MODEL. Fails by assertion."""

import json
import sys
import time

import openai

base, model = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=30)


def line(number, **more):
    body = {"model": model, "messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 3, **more}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def upload(lines):
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("requests.jsonl", content), purpose="batch")


def wait(batch):
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def run():
    file = upload([line(number) for number in range(10)] + [line(10, max_tokens=-1)])
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": "sdk"}
    )
    assert batch.metadata == {"name": "sdk"}, batch
    batch = wait(batch)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (11, 10, 1), batch
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [result["custom_id"] for result in results] == [f"line {number}" for number in range(10)], results
    assert all(result["response"]["body"]["usage"]["completion_tokens"] == 3 for result in results), results
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert errors[0]["response"]["status_code"] == 400, errors


def invalid_input():
    file = upload([line(0), line(0)])
    batch = wait(client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"))
    assert batch.status == "failed" and batch.errors.data[0].code == "duplicate_custom_id", batch


def lists():
    files = list(client.files.list(limit=2))
    assert len(files) == 4 and len({file.id for file in files}) == 4, files
    assert len(list(client.batches.list(limit=1))) == 2
    assert client.files.delete(files[0].id).deleted
    try:
        client.files.retrieve(files[0].id)
        raise AssertionError("a deleted file was found")
    except openai.NotFoundError as error:
        assert error.code == "not_found", error


for check in (run, invalid_input, lists):
    check()
    print("ok", check.__name__)
