"""Calls of `mooncake.store` that engines make, and their edge cases. Its output is compared between modules and masters.

scenario.py MODULE MASTER

MODULE is `mooncake.store` or `moongate_store`. Each call prints a line with its name and its result, without ports, addresses and times.
Output lines start with "> ", because Mooncake's client also logs to stdout. The master must have a lease time of one second.
"""

import ctypes
import importlib
import sys
import threading
import time

LEASE = 1.2
MIB = 1 << 20

module, master = sys.argv[1:]
store_module = importlib.import_module(module)
names = {}


def note(what, *values):
    print(f"> {what}: {' '.join(str(it) for it in values)}", flush=True)


def plain(answer):
    """A result without the parts that differ between runs."""
    if isinstance(answer, (list, tuple)):
        return [plain(it) for it in answer]
    if isinstance(answer, dict):
        return {key: plain(it) for key, it in sorted(answer.items())}
    kind = type(answer).__name__
    if kind == "BufferHandle":
        return f"buffer of {answer.size()}: {plain(ctypes.string_at(answer.ptr(), answer.size()))} = {plain(bytes(memoryview(answer)))}"
    if kind == "ReplicaDescriptor":
        medium = answer.get_memory_descriptor().buffer_descriptor
        kinds = [answer.is_memory_replica(), answer.is_disk_replica(), answer.is_local_disk_replica()]
        return [kinds, medium.size, str(answer.status), type(medium.transport_endpoint).__name__]
    if isinstance(answer, (bytes, bytearray, memoryview)):
        data = bytes(answer)
        if len(data) < 40:
            return data
        return f"{len(data)} bytes of {data[:1]}" if data == data[:1] * len(data) else f"{len(data)} mixed bytes, {sum(data)}"
    if isinstance(answer, str):
        return names.get(answer, answer)
    return answer


def call(what, store, method, *arguments, **options):
    """Calls a method and prints the result, or the type of the exception."""
    try:
        answer = getattr(store, method)(*arguments, **options)
    except Exception as error:
        note(f"{what} {method}", type(error).__name__)
        return None
    note(f"{what} {method}", plain(answer))
    return answer


def config(**options):
    created = store_module.ReplicateConfig()
    for name, value in options.items():
        setattr(created, name, value)
    return created


class Memory:
    """Memory of this process, optionally registered, with a content that tells positions apart."""

    def __init__(self, size):
        self.size = size
        self.bytes = (ctypes.c_char * size)()
        self.address = ctypes.addressof(self.bytes)

    def fill(self, seed):
        unit = bytes((index * 7 + seed) % 251 for index in range(251))
        self.bytes.raw = (unit * (self.size // 251 + 1))[: self.size]
        return self.bytes.raw

    def wipe(self):
        ctypes.memset(self.address, 0, self.size)


def setups():
    """Arguments of setup, right and wrong."""
    def attempt(what, *arguments, **options):
        store = store_module.MooncakeDistributedStore()
        call(what, store, "setup", *arguments, **options)
        call(what, store, "close")

    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(16 * MIB),
        "local_buffer_size": str(16 * MIB),
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master,
    }
    attempt("dict", settings)
    attempt("dict of LMCache", settings | {"device_name": "", "master_server_address": master, "unknown": "1"})
    attempt("dict with integers", settings | {"global_segment_size": 16 * MIB})
    attempt("dict without host", {name: value for name, value in settings.items() if name != "local_hostname"})
    attempt("dict without metadata", {name: value for name, value in settings.items() if name != "metadata_server"})
    attempt("dict with a wrong size", settings | {"global_segment_size": "much"})
    attempt("empty dict", {})
    attempt("no segment", "127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master)
    attempt("no memory at all", "127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    attempt("tenant", "127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master, None, tenant_id="default")
    attempt("unknown option", "127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master, nonsense=1)
    attempt("missing arguments", "127.0.0.1", "P2PHANDSHAKE")
    attempt("small segment", "127.0.0.1", "P2PHANDSHAKE", MIB, 16 * MIB, "tcp", "", master)


def node(what):
    store = store_module.MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master)
    note(f"{what} setup", code)
    names[store.get_hostname()] = what
    call(what, store, "get_hostname")
    call(what, store, "health_check")
    return store


def puts(first, second):
    for size in (1, 1000, 70_000, MIB):
        key = f"a{size}"
        call(key, first, "put", key, b"a" * size)
        call(key, second, "get", key)
        call(key, second, "get_size", key)
        call(key, second, "is_exist", key)
        call(key, second, "get_buffer", key)
    call("again", second, "put", "a1000", b"b" * 10)
    call("again", first, "get", "a1000")
    call("missing", first, "get", "nope")
    call("missing", first, "get_buffer", "nope")
    call("missing", first, "get_size", "nope")
    call("missing", first, "is_exist", "nope")
    call("missing", first, "remove", "nope")
    call("missing", first, "get_replica_desc", "nope")
    call("empty key", first, "put", "", b"x")
    call("empty key", first, "is_exist", "")
    call("empty key", first, "get", "")
    call("empty key", first, "get_buffer", "")
    call("empty key", first, "remove", "")
    call("no bytes", first, "put", "none", b"")
    call("no bytes", first, "is_exist", "none")
    call("larger than a node", first, "put", "large", b"l" * (65 * MIB))
    call("odd key", first, "put", "odd/key:é,☃", b"o" * 10)
    call("odd key", second, "get", "odd/key:é,☃")
    call("bytearray", first, "put", "bytearray", bytearray(b"array"))
    call("bytearray", second, "get", "bytearray")
    call("memoryview", first, "put", "memoryview", memoryview(b"--view--")[2:6])
    call("memoryview", second, "get", "memoryview")
    call("text", first, "put", "text", "text")
    call("number as key", first, "put", 1, b"x")
    call("None as key", first, "is_exist", None)
    call("None as configuration", first, "put", "unconfigured", b"x", None)
    call("named arguments", first, "put", key="named", value=b"named", config=config())
    call("named arguments", second, "get", "named")
    call("parts", first, "put_parts", "parts", b"p" * 10, b"q" * 20)
    call("parts", second, "get", "parts")
    call("no parts", first, "put_parts", "noparts")
    call("empty part", first, "put_parts", "emptypart", b"", b"x")
    call("empty part", second, "get", "emptypart")
    call("configured parts", first, "put_parts", "parts2", b"x", bytearray(b"y"), memoryview(b"z"), config=config())
    call("configured parts", second, "get", "parts2")
    call("upsert", first, "upsert", "upserted", b"1")
    call("upsert", first, "upsert", "upserted", b"22")
    call("upsert", second, "get", "upserted")


def batches(first, second):
    keys = [f"b{number}" for number in range(100)]
    call("batch", first, "put_batch", keys, [b"b" * (number + 1) for number in range(100)])
    call("batch again", second, "put_batch", keys, [b"c" * 10] * 100)
    call("batch", second, "batch_is_exist", keys[:3] + ["nope", ""])
    call("batch", second, "get_batch", keys[:3] + ["nope"])
    call("batch", second, "get_batch", keys[:3])
    call("batch", second, "batch_get_buffer", keys[:3] + ["nope", ""])
    call("batch with an empty key", first, "put_batch", ["c1", "", "c2"], [b"c"] * 3)
    call("batch with a key twice", first, "put_batch", ["d1", "d1"], [b"d" * 3, b"d" * 4])
    call("batch with a key twice", first, "get", "d1")
    call("batch of uneven lists", first, "put_batch", ["e1", "e2"], [b"e"])
    call("batch of nothing", first, "put_batch", [], [])
    call("batch of nothing", first, "batch_is_exist", [])
    call("batch of nothing", first, "batch_get_buffer", [])
    call("batch of nothing", first, "get_batch", [])
    call("batch that is no list", first, "batch_is_exist", "b1")
    call("batch as a tuple", first, "batch_is_exist", ("b1", "nope"))


def buffers(first, second):
    source, target, stray = Memory(MIB), Memory(MIB), Memory(4096)
    content = source.fill(3)
    call("source", first, "register_buffer", source.address, source.size)
    call("source again", first, "register_buffer", source.address, source.size)
    call("source overlapping", first, "register_buffer", source.address + 4096, 4096)
    call("target", second, "register_buffer", target.address, target.size)
    call("nothing", first, "register_buffer", stray.address, 0)
    call("address 0", first, "register_buffer", 0, 4096)
    call("negative address", first, "register_buffer", -1, 4096)

    call("registered", first, "put_from", "f1", source.address, 100_000)
    call("registered", second, "get_into", "f1", target.address, target.size)
    note("registered equal", target.bytes.raw[:100_000] == content[:100_000], target.bytes.raw[100_000:100_010])
    call("exact", second, "get_into", "f1", target.address + 8, 100_000)
    call("whole", first, "put_from", "f2", source.address, source.size)
    call("whole", second, "get_into", "f2", target.address, target.size)
    note("whole equal", target.bytes.raw == content)
    call("too small", second, "get_into", "f2", target.address, 1000)
    call("again", first, "put_from", "f2", source.address, 10)
    call("missing", second, "get_into", "nope", target.address, target.size)
    call("empty key", second, "get_into", "", target.address, target.size)
    call("empty key", first, "put_from", "", source.address, 10)
    call("no bytes", first, "put_from", "f3", source.address, 0)
    call("unregistered", first, "put_from", "f4", stray.address, stray.size)
    call("unregistered", first, "is_exist", "f4")
    call("unregistered", second, "get_into", "f1", stray.address, stray.size)

    keys = [f"g{number}" for number in range(4)]
    addresses = [source.address + number * 1000 for number in range(4)]
    call("batch", first, "batch_put_from", keys, addresses, [1000] * 4)
    call("batch again", first, "batch_put_from", keys + ["g4"], addresses + [source.address], [1000] * 4 + [5])
    target.wipe()
    into = [target.address + number * 2000 for number in range(6)]
    call("batch", second, "batch_get_into", keys + ["nope", ""], into, [2000] * 6)
    note("batch equal", all(target.bytes.raw[number * 2000 : number * 2000 + 1000] == content[number * 1000 : number * 1000 + 1000] for number in range(4)))
    call("batch too small", second, "batch_get_into", keys[:2], into[:2], [2000, 10])
    call("batch uneven", first, "batch_put_from", ["h1", "h2"], [source.address], [10])
    call("batch uneven", second, "batch_get_into", ["g1", "g2"], [target.address], [1000])
    call("batch of nothing", first, "batch_put_from", [], [], [])
    call("batch of nothing", second, "batch_get_into", [], [], [])
    call("batch with an empty object", first, "batch_put_from", ["i1", "i2"], [source.address] * 2, [10, 0])
    call("batch with an empty key", first, "batch_put_from", ["j1", ""], [source.address] * 2, [10, 10])
    call("batch with a key twice", first, "batch_put_from", ["k1", "k1"], [source.address] * 2, [10, 10])
    call("batch twice into one place", second, "batch_get_into", ["g1", "g1"], [target.address] * 2, [1000] * 2)
    note("batch twice equal", target.bytes.raw[:1000] == content[1000:2000])
    multi_buffers(first, second, source, target, content)

    call("source", first, "unregister_buffer", source.address)
    call("source again", first, "unregister_buffer", source.address)
    call("inside", second, "unregister_buffer", target.address + 1)
    call("target", second, "unregister_buffer", target.address)


def multi_buffers(first, second, source, target, content):
    addresses = [[source.address, source.address + 5000, source.address + 20_000], [source.address + 400_000]]
    sizes = [[1000, 2, 3000], [200_000]]
    call("multi", first, "batch_put_from_multi_buffers", ["m1", "m2"], addresses, sizes)
    call("multi again", first, "batch_put_from_multi_buffers", ["m1", "m2"], addresses, sizes, config())
    call("multi", second, "get_size", "m1")
    target.wipe()
    into = [[target.address + 70_000, target.address, target.address + 80_000], [target.address + 100_000]]
    call("multi", second, "batch_get_into_multi_buffers", ["m1", "m2"], into, sizes)
    raw = target.bytes.raw
    parts = [raw[70_000:71_000] == content[:1000], raw[:2] == content[5000:5002], raw[80_000:83_000] == content[20_000:23_000]]
    note("multi equal", parts, raw[2:4], raw[100_000:300_000] == content[400_000:600_000])
    call("multi in other pieces", second, "batch_get_into_multi_buffers", ["m1"], [[target.address, target.address + 9000]], [[2002, 2000]])
    note("multi in other pieces equal", (target.bytes.raw[:2002] + target.bytes.raw[9000:11000]) == content[:1000] + content[5000:5002] + content[20_000:23_000])
    call("multi larger", second, "batch_get_into_multi_buffers", ["m1"], [[target.address, target.address + 9000]], [[4000, 4000]])
    call("multi too small", second, "batch_get_into_multi_buffers", ["m1"], [[target.address]], [[100]])
    call("multi missing", second, "batch_get_into_multi_buffers", ["m1", "nope"], [[target.address], [target.address + 10_000]], [[4002], [10]])
    call("multi uneven", first, "batch_put_from_multi_buffers", ["n1", "n2"], [[source.address]], [[10]])
    call("multi uneven inside", first, "batch_put_from_multi_buffers", ["n3"], [[source.address] * 2], [[10]])
    call("multi of nothing", first, "batch_put_from_multi_buffers", [], [], [])
    call("multi without buffers", first, "batch_put_from_multi_buffers", ["n4"], [[]], [[]])
    call("multi on the same node", second, "batch_get_into_multi_buffers", ["m1"], [[target.address]], [[4002]], True)
    grouped = config(group_ids=["x", "y"])
    call("multi groups", first, "batch_put_from_multi_buffers", ["n5", "n6"], [[source.address]] * 2, [[10]] * 2, grouped)
    call("multi groups", second, "batch_is_exist", ["n5", "n6"])


def removals(first, second):
    call("leased", first, "put", "r", b"r")
    call("leased", second, "get", "r")
    call("leased", first, "remove", "r")
    call("leased", first, "remove_by_regex", "^r$")
    call("leased", first, "batch_remove", ["r", "nope"])
    call("by force", first, "remove", "r", True)
    call("by force", first, "remove", "r", force=True)
    call("for regex", first, "put_batch", ["r1", "r2", "r3", "s1"], [b"r"] * 4)
    call("wrong regex", first, "remove_by_regex", "(")
    call("regex", first, "remove_by_regex", "^r[12]$")
    call("regex", second, "batch_is_exist", ["r1", "r2", "r3", "s1"])
    call("regex by force", first, "remove_by_regex", "^r", True)
    call("for all", first, "put_batch", ["t1", "t2"], [b"t"] * 2)
    time.sleep(LEASE)
    call("batch", first, "batch_remove", ["s1", "nope", ""])


def configurations(first, second):
    fresh = config()
    for name in (
        "replica_num with_hard_pin preferred_segment preferred_segments group_ids data_type prefer_alloc_in_same_node "
        "soft_pin_action soft_pin_ttl_ms nof_replica_num dfs_replica_num preferred_nof_segments"
    ).split():
        note(f"default {name}", getattr(fresh, name, "missing"))
    note("unknown field", hasattr(fresh, "with_soft_pin"), hasattr(fresh, "session_ids"), hasattr(store_module.ReplicateConfig, "group_ids"))
    fresh.preferred_segment = "a"
    note("preferred", fresh.preferred_segment, fresh.preferred_segments)
    fresh.preferred_segments = ["b", "c"]
    note("preferred", fresh.preferred_segment, fresh.preferred_segments)
    here, there = first.get_hostname(), second.get_hostname()
    call("two", first, "put", "two", b"t" * 1000, config(replica_num=2))
    call("two", second, "get_replica_desc", "two")
    call("three", first, "put", "three", b"t" * 1000, config(replica_num=3))
    call("none", first, "put", "zero", b"t" * 1000, config(replica_num=0))
    for name, preferred in (("here", here), ("there", there), ("nowhere", "127.0.0.1:1")):
        call(name, first, "put", name, b"t" * 1000, config(preferred_segment=preferred))
        call(name, first, "put", name + "s", b"t" * 1000, config(preferred_segments=[preferred]))
        call(name, second, "batch_get_replica_desc", [name, name + "s", "nope"])
    call("hard", first, "put", "hard", b"h", config(with_hard_pin=True))
    pinned = config(soft_pin_action=store_module.SoftPinAction.ENABLE, soft_pin_ttl_ms=60_000)
    call("soft", first, "put", "soft", b"s" * 10, pinned)
    call("typed", first, "put", "typed", b"s" * 10, config(data_type=store_module.ObjectDataType.TENSOR))
    call("same node", first, "put", "same", b"s" * 10, config(prefer_alloc_in_same_node=True))
    call("group", first, "put", "group", b"s" * 10, config(group_ids=["g"]))
    call("groups", first, "put_batch", ["group1", "group2"], [b"s"] * 2, config(group_ids=["g", "h"]))
    call("too few groups", first, "put_batch", ["group3", "group4"], [b"s"] * 2, config(group_ids=["g"]))
    call("too many groups", first, "put", "group5", b"s", config(group_ids=["g", "h"]))
    call("empty group", first, "put", "group6", b"s", config(group_ids=[""]))
    call("no groups", first, "put", "group7", b"s", config(group_ids=[]))
    try:
        config(replica_num="many")
    except TypeError as error:
        note("wrong field", type(error).__name__)


def threads(first, second):
    """Calls from several threads at once."""
    failures = []

    def work(number):
        for turn in range(20):
            key = f"thread{number}-{turn}"
            if first.put(key, key.encode() * 100) != 0 or second.get(key) != key.encode() * 100:
                failures.append(key)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    note("threads", failures)


def memory_and_placement():
    allocator = store_module.MooncakeHostMemAllocator()
    address = allocator.alloc(10_000)
    note("allocated", address != 0)
    ctypes.memset(address, 65, 10_000)
    note("allocated", plain(ctypes.string_at(address, 10_000)))
    note("freed", allocator.free(address))
    note("bind", store_module.bind_to_numa_node(0))


def closed(first, second):
    call("end", first, "put", "mine", b"m", config(preferred_segment=second.get_hostname()))
    note("close", second.close())
    note("close again", second.close())
    # Other calls before `setup` and after `close` crash Mooncake's module.
    call("closed", second, "get", "mine")
    call("closed", second, "health_check")
    call("other closed", first, "is_exist", "mine")
    call("other closed", first, "get", "mine")
    time.sleep(LEASE)
    note("remove all", first.remove_all() > 100)
    call("after all", first, "is_exist", "a1000")
    note("close", first.close())


setups()
first = node("first")
second = node("second")
puts(first, second)
batches(first, second)
buffers(first, second)
removals(first, second)
configurations(first, second)
threads(first, second)
memory_and_placement()
closed(first, second)
