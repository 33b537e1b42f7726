"""A sequence of calls by Mooncake's own client. Its output is compared between masters.

scenario.py MASTER ADMIN

Two nodes mount memory. Each call prints a line with its name and its result, without ports, ids and times. Calls that a
release lacks are skipped. Output lines start with "> ", because the client also logs to stdout. The master must have a lease
time of two seconds.
"""

import json
import sys
import time
import urllib.error
import urllib.request

from mooncake import store as mooncake

LEASE = 2.1
LIMIT = 60
KIB = 1024

master, admin = sys.argv[1:]
nodes, names = [], {}


def node():
    store = mooncake.MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master)
    name = f"node{len(nodes) + 1}"
    nodes.append(store)
    names[store.get_hostname()] = name
    print(f"> setup: {code}", flush=True)
    return store


def find(store):
    """Finds the transfer endpoint of a node's memory."""
    own = store.get_hostname()
    store.put(f"at {own}", b"x", config(preferred_segment=own))
    replica = store.get_replica_desc(f"at {own}")[0]
    names[replica.get_memory_descriptor().buffer_descriptor.transport_endpoint] = names[own]


def plain(answer):
    """A result without the parts that differ between runs."""
    if isinstance(answer, (list, tuple)):
        return [plain(it) for it in answer]
    if isinstance(answer, (bytes, memoryview)):
        data = bytes(answer)
        return f"{len(data)} bytes of {data[:1]}" if data == data[:1] * len(data) else "mixed bytes"
    if isinstance(answer, str):
        return names.get(answer, answer)
    if type(answer).__name__ == "ReplicaDescriptor":
        medium = answer.get_memory_descriptor().buffer_descriptor
        return [names.get(medium.transport_endpoint, "?"), medium.size, str(answer.status)]
    return answer


def note(what, *values):
    print(f"> {what}: {' '.join(str(it) for it in values)}", flush=True)


def call(what, store, method, *arguments, **options):
    """Calls a method if the release has it, and prints the result."""
    if not hasattr(store, method):
        return None
    try:
        answer = getattr(store, method)(*arguments, **options)
    except Exception as error:
        note(f"{what} {method}", type(error).__name__)
        return None
    note(f"{what} {method}", plain(answer))
    return answer


def config(**options):
    """A configuration, or None if the release lacks an option."""
    created = mooncake.ReplicateConfig()
    for name, value in options.items():
        if not hasattr(created, name):
            return None
        setattr(created, name, value)
    return created


def soft_pin():
    old = config(with_soft_pin=True)
    return old or config(soft_pin_action=mooncake.SoftPinAction.ENABLE, soft_pin_ttl_ms=60_000)


def places(what, store, key):
    """Prints the replicas of an object, sorted by node."""
    try:
        replicas = sorted(plain(it) for it in store.get_replica_desc(key))
    except Exception as error:
        replicas = type(error).__name__
    note(f"{what} places of {key}", replicas)


def http(method, path, body=None):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http://{admin}{path}", data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, {}


def noted_http(what, method, path, body=None):
    status, answer = http(method, path, body)
    members = {name: answer.get(name) for name in ("success", "status", "status_name", "error_code")}
    note(what, status, members)
    return answer


def puts(first, second):
    call("missing", first, "is_exist", "a")
    call("missing", first, "get", "a")
    call("missing", first, "get_size", "a")
    call("missing", first, "get_replica_desc", "a")
    call("missing", first, "remove", "a")
    call("empty key", first, "put", "", b"x")
    call("empty key", first, "is_exist", "")
    call("empty key", first, "get", "")
    call("empty key", first, "remove", "")
    call("no bytes", first, "put", "none", b"")
    call("no bytes", first, "is_exist", "none")
    for size in (1, 1000, 70_000, 1 << 20):
        key = f"a{size}"
        call(key, first, "put", key, b"a" * size)
        call(key, second, "get", key)
        call(key, second, "get_size", key)
        call(key, second, "is_exist", key)
    call("again", second, "put", "a1000", b"b" * 1000)
    call("again", second, "put", "a1000", b"b" * 10)
    call("again", first, "get", "a1000")
    call("larger than a node", first, "put", "large", b"l" * (65 << 20))
    call("parts", first, "put_parts", "parts", b"p" * 10, b"p" * 20)
    call("parts", second, "get", "parts")
    call("odd key", first, "put", "odd/key:é,☃", b"o" * 10)
    call("odd key", second, "get", "odd/key:é,☃")


def batches(first, second):
    keys = [f"b{number}" for number in range(100)]
    call("batch", first, "put_batch", keys, [b"b" * (number + 1) for number in range(100)])
    call("batch again", second, "put_batch", keys, [b"c" * 10] * 100)
    call("batch", second, "batch_is_exist", keys + ["nope", ""])
    call("batch", second, "get_batch", keys[:5] + ["nope"])
    call("batch with an empty key", first, "put_batch", ["c1", "", "c2"], [b"c"] * 3)
    call("batch with an empty key", first, "batch_is_exist", ["c1", "", "c2"])
    call("batch with a key twice", first, "put_batch", ["d1", "d1"], [b"d" * 3, b"d" * 4])
    call("batch with a key twice", first, "get", "d1")
    call("batch of uneven lists", first, "put_batch", ["e1", "e2"], [b"e"])
    call("batch of nothing", first, "put_batch", [], [])
    call("batch of nothing", first, "batch_is_exist", [])


def leased(store, keys):
    """The keys that cannot be removed because they are leased. Removes the others."""
    return [key for key in keys if store.remove(key) == -706]


def probes(first, second):
    if not hasattr(first, "probe_key"):
        return
    keys = [f"p{number}" for number in range(6)]
    call("probes", first, "put_batch", [key for key in keys if key != "p4"], [b"p"] * 5)
    call("present", second, "probe_key", "p0")
    call("missing", second, "probe_key", "p4")
    call("without lease", second, "batch_probe_key", keys)
    call("no group", second, "batch_probe_key", keys, "LastHitOnly", 0)
    call("uneven groups", second, "batch_probe_key", keys, "LastHitOnly", 4)
    call("of nothing", second, "batch_probe_key", [], "LastHitOnly", 1)
    call("an empty key", second, "batch_probe_key", [""])
    call("with lease", second, "batch_probe_key", keys, "LastHitOnly", 2)
    note("probes leased", leased(first, keys))
    config = mooncake.ReplicateConfig()
    config.session_ids, config.preferred_hca_names = ["session", "other"], ["mlx5_0"]
    call("sessions", first, "put_batch", ["session1", "session2"], [b"s"] * 2, config)
    call("sessions", second, "get_batch", ["session1", "session2"])


def upserts(first, second):
    call("new", first, "upsert", "u", b"u" * 100)
    call("new", second, "get", "u")
    call("leased", second, "upsert", "u", b"v" * 100)
    call("leased", first, "get", "u")
    call("longer", first, "upsert", "u", b"w" * 5000)
    call("longer", second, "get", "u")
    time.sleep(LEASE)
    call("in place", first, "upsert", "u", b"x" * 5000)
    call("in place", second, "get", "u")
    call("empty key", first, "upsert", "", b"x")
    call("no bytes", first, "upsert", "u", b"")
    call("batch", first, "upsert_batch", ["u", "u1", "u2"], [b"y" * 10, b"y" * 20, b"y" * 30])
    call("batch", second, "get_batch", ["u", "u1", "u2"])


def removals(first, second):
    call("leased", first, "put", "r", b"r")
    call("leased", second, "get", "r")
    call("leased", first, "remove", "r")
    call("leased", first, "remove_by_regex", "^r$")
    call("leased", first, "batch_remove", ["r", "nope"])
    call("by force", first, "remove", "r", True)
    call("by force", first, "remove", "r", True)
    call("for regex", first, "put_batch", ["r1", "r2", "r3", "s1"], [b"r"] * 4)
    call("wrong regex", first, "remove_by_regex", "(")
    call("regex", first, "remove_by_regex", "^r[12]$")
    call("regex", first, "remove_by_regex", "^r[12]$")
    call("regex", second, "batch_is_exist", ["r1", "r2", "r3", "s1"])
    call("regex by force", first, "remove_by_regex", "^r", True)
    time.sleep(LEASE)
    call("batch", first, "batch_remove", ["s1", "s1", "nope", ""])
    call("single", first, "remove", "c1")
    call("single", first, "remove", "c1")


def pins(first, second):
    pinned = soft_pin()
    call("soft", first, "put", "soft", b"s" * 10, pinned)
    call("soft", second, "get", "soft")
    call("soft batch", first, "put_batch", ["soft1", "soft2"], [b"s"] * 2, pinned)
    hard = config(with_hard_pin=True)
    if hard:
        call("hard", first, "put", "hard", b"h" * 10, hard)
        call("hard", second, "upsert", "hard", b"i" * 10)
        call("hard", second, "get", "hard")
        call("hard", first, "upsert", "hard", b"j" * 1000, hard)
        call("hard", second, "get", "hard")
    time.sleep(LEASE)
    call("soft", first, "remove", "soft")
    call("hard", first, "remove", "hard")
    call("soft", first, "remove_by_regex", "^soft")


def replicas(first, second):
    here, there = first.get_hostname(), second.get_hostname()
    call("two", first, "put", "two", b"t" * 1000, config(replica_num=2))
    places("two", second, "two")
    call("more than nodes", first, "put", "three", b"t" * 1000, config(replica_num=3))
    places("more than nodes", second, "three")
    call("none", first, "put", "zero", b"t" * 1000, config(replica_num=0))
    for name, preferred in (("here", here), ("there", there), ("nowhere", "127.0.0.1:1")):
        call(name, first, "put", name, b"t" * 1000, config(preferred_segment=preferred))
        if name != "nowhere":
            places(name, second, name)
    call("second", second, "get", "two")
    call("clear", first, "batch_replica_clear", ["two"], here)
    time.sleep(LEASE)
    call("clear", first, "batch_replica_clear", ["two", "nope", "there"], here)
    places("clear", second, "two")
    call("clear all", first, "batch_replica_clear", ["three"])
    call("clear all", second, "is_exist", "three")


def finished(store, answer):
    """Waits until a task has ended, and prints its status."""
    # Clients of 0.3.9 can create tasks but do not execute them.
    if not answer or answer[1] != 0 or not hasattr(store, "health_check"):
        return
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        report, code = store.query_task(answer[0])
        if code != 0 or str(report.status).split(".")[-1] in ("SUCCESS", "FAILED"):
            note("task", code, report and report.status, report and report.type)
            return
        time.sleep(0.05)
    note("task", "is not done in time")


def task(what, store, method, *arguments):
    try:
        answer = getattr(store, method)(*arguments)
    except Exception as error:
        note(f"{what} {method}", type(error).__name__)
        return
    note(f"{what} {method}", answer[1])
    finished(store, answer)


def tasks(first, second):
    here, there = first.get_hostname(), second.get_hostname()
    task("missing", first, "create_copy_task", "nope", [there])
    task("nowhere", first, "create_copy_task", "here", ["127.0.0.1:1"])
    task("no target", first, "create_copy_task", "here", [])
    task("copy", first, "create_copy_task", "here", [there])
    places("copy", first, "here")
    task("copy again", first, "create_copy_task", "here", [there])
    places("copy again", first, "here")
    call("move", first, "put", "mover", b"m" * 1000, config(preferred_segment=here))
    task("missing", first, "create_move_task", "nope", here, there)
    task("nowhere", first, "create_move_task", "mover", here, "127.0.0.1:1")
    task("to itself", first, "create_move_task", "mover", here, here)
    task("from elsewhere", first, "create_move_task", "mover", there, here)
    task("move", first, "create_move_task", "mover", here, there)
    places("move", first, "mover")
    call("move", first, "get", "mover")
    report = first.query_task((1, 2))
    note("unknown task", report[1])


def drain(first, second):
    here, there = first.get_hostname(), second.get_hostname()
    status, answer = http("GET", "/api/v1/drain_jobs/query?job_id=1-2")
    if "error_code" not in answer or not hasattr(first, "batch_get_session_start"):
        # Releases without sessions have no drain jobs.
        return
    # An object with replicas on both nodes cannot be moved.
    call("drain", first, "remove", "here", True)
    create = "/api/v1/drain_jobs"
    noted_http("drain nowhere", "POST", create, {"segments": ["127.0.0.1:1"]})
    noted_http("drain nothing", "POST", create, {"segments": []})
    noted_http("drain to itself", "POST", create, {"segments": [here], "target_segments": [here]})
    noted_http("drain unknown job", "GET", "/api/v1/drain_jobs/query?job_id=1-2")
    request = {"segments": [here], "target_segments": [there], "max_concurrency": 100}
    job = noted_http("drain", "POST", create, request).get("job_id")
    noted_http("drain again", "POST", create, request)
    until = time.monotonic() + LIMIT
    status = None
    while status not in ("SUCCEEDED", "FAILED", "CANCELED") and time.monotonic() < until:
        status = http("GET", f"/api/v1/drain_jobs/query?job_id={job}")[1].get("status_name")
        time.sleep(0.1)
    note("drain ends", status)
    noted_http("drain cancel", "POST", f"/api/v1/drain_jobs/cancel?job_id={job}")
    noted_http("drain once more", "POST", create, request)
    places("drain", first, "a1")
    places("drain", first, "mover")
    call("drain", first, "get", "mover")
    call("drained", first, "put", "after", b"a" * 1000, config(preferred_segment=here))
    places("drained", first, "after")


first = node()
second = node()
puts(first, second)
batches(first, second)
probes(first, second)
upserts(first, second)
removals(first, second)
pins(first, second)
find(first)
find(second)
replicas(first, second)
tasks(first, second)
drain(first, second)
call("leased", first, "get", "mover")
call("end", first, "put", "mine", b"m", config(preferred_segment=first.get_hostname()))
note("close", second.close())
call("closed", first, "is_exist", "mover")
call("closed", first, "get", "there")
time.sleep(LEASE)
call("end", first, "put", "last", b"l" * 10)
time.sleep(LEASE)
call("end", first, "remove_by_regex", "^l")
note("close", first.close())
