"""Calls of `mooncake.store` for PyTorch tensors. Its output is compared between modules and masters, as that of scenario.py.

tensor_scenario.py MODULE MASTER [put|get]

`put` leaves tensors in the store, in memory that another client mounts, and `get` prints those that are there. Without it, both.
"""

import ctypes
import importlib
import sys

import torch

MIB = 1 << 20
TYPES = "float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool float16 bfloat16 float8_e4m3fn float8_e5m2".split()
SHAPES = [(), (0,), (1,), (2, 0, 3), (2, 3, 4, 5), (1, 2, 1, 2, 1, 2, 1, 2)]

module, master, *part = sys.argv[1:]
store_module = importlib.import_module(module)
store = store_module.MooncakeDistributedStore()
if store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB if part != ["get"] else 0, 16 * MIB, "tcp", "", master) != 0:
    sys.exit("setup failed")


def plain(answer):
    if isinstance(answer, torch.Tensor):
        return f"{str(answer.dtype)} {tuple(answer.shape)} {answer.to(torch.float64).flatten().tolist()[:24]}"
    return [plain(it) for it in answer] if isinstance(answer, (list, tuple)) else answer


def call(what, method, *arguments, **options):
    try:
        answer = plain(getattr(store, method)(*arguments, **options))
    except Exception as error:
        answer = type(error).__name__
    print(f"> {what} {method}: {answer}", flush=True)


def numbers(shape, element_type=torch.float32):
    count = 1
    for length in shape:
        count *= length
    return (torch.arange(count) % 5).reshape(shape).to(element_type)


def header(key):
    print(f"> header of {key}: {store.get(key)[:304].hex()}")


def puts():
    for name in TYPES:
        call(name, "put_tensor", name, numbers((2, 3), getattr(torch, name)))
    for shape in SHAPES:
        call(f"shape {shape}", "put_tensor", f"shape {shape}", numbers(shape))
    whole = numbers((6, 8))
    call("transposed", "put_tensor", "transposed", whole.t())
    call("with gradients", "put_tensor", "with gradients", torch.ones(2, requires_grad=True))
    call("of complex numbers", "put_tensor", "of complex numbers", torch.zeros(2, dtype=torch.complex64))
    call("of nine dimensions", "put_tensor", "of nine dimensions", torch.zeros((1,) * 9))
    for name, wrong in (("number", 5), ("None", None), ("text", "x"), ("bytes", b"x")):
        call(f"a {name}", "put_tensor", f"a {name}", wrong)
    call("empty key", "put_tensor", "", whole)
    call("again", "put_tensor", "float32", whole)
    call("upserted", "upsert_tensor", "upserted", whole)
    call("upserted", "upsert_tensor", "upserted", whole + 1)
    config = store_module.ReplicateConfig()
    call("configured", "pub_tensor", "configured", whole, config)
    call("configured", "upsert_pub_tensor", "configured", whole + 2, config)
    call("batch", "batch_put_tensor", ["b1", "b2", "b3"], [whole, 5, whole + 1])
    call("batch", "batch_pub_tensor", ["c1", "c2"], [whole, whole + 1], config)
    call("batch", "batch_upsert_tensor", ["c1", "c3"], [whole + 2, whole])
    call("batch", "batch_upsert_pub_tensor", ["c1"], [whole + 3], config)
    call("batch of uneven lists", "batch_put_tensor", ["d1", "d2", "d3"], [whole])
    call("batch of nothing", "batch_put_tensor", [], [])
    for ranks, dimension in ((2, 0), (4, 1), (5, 0), (2, 2), (2, -1), (1, 0)):
        call(f"{ranks} along {dimension}", "put_tensor_with_tp", f"tp{ranks}.{dimension}", whole, 0, ranks, dimension)
    call("divided", "pub_tensor_with_tp", "divided", whole, config, 1, 2, 1)
    call("divided", "batch_put_tensor_with_tp", ["e1", "e2"], [whole, whole + 1], 0, 2, 1)
    call("divided", "batch_pub_tensor_with_tp", ["f1"], [whole], config, 0, 2, 1)
    call("parts", "upsert_parts", "parts", b"a", b"bc")
    call("parts", "upsert_parts", "parts", b"d")
    call("no tensor", "put", "no tensor", b"NOOM" + bytes(400))
    call("short", "put", "short", b"x")


def gets():
    for name in [*TYPES, *[f"shape {shape}" for shape in SHAPES], "transposed", "with gradients", "upserted", "configured"]:
        call(name, "get_tensor", name)
        header(name)
    for name in ("of complex numbers", "a number", "nope", "", "no tensor", "short", "parts"):
        call(name, "get_tensor", name)
    call("batch", "batch_get_tensor", ["b1", "b2", "b3", "c1", "c2", "c3", "d1", "nope", ""])
    call("batch of nothing", "batch_get_tensor", [])
    for ranks, dimension in ((2, 0), (4, 1), (5, 0), (1, 0)):
        for rank in range(ranks):
            call(f"{rank} of {ranks} along {dimension}", "get_tensor_with_tp", f"tp{ranks}.{dimension}", rank, ranks, dimension)
    header("tp4.1_tp_2")
    call("a whole one as divided", "get_tensor_with_tp", "float32", 0, 2, 0)
    call("divided", "get_tensor_with_tp", "divided", 1, 2, 1)
    call("divided", "batch_get_tensor_with_tp", ["e1", "nope", "e2", "f1"], 1, 2)
    memory = (ctypes.c_char * 8192)()
    address = ctypes.addressof(memory)
    store.register_buffer(address, 8192)
    call("into memory", "get_tensor_into", "transposed", address, 8192)
    call("into memory that is too small", "get_tensor_into", "transposed", address, 100)
    call("nothing into memory", "get_tensor_into", "nope", address, 8192)
    call("batch into memory", "batch_get_tensor_into", ["transposed", "nope", "int64"], [address, address + 2048, address + 4096], [2048] * 3)
    store.unregister_buffer(address)


if part != ["get"]:
    puts()
if part != ["put"]:
    gets()
else:
    print("> ready", flush=True)
    sys.stdin.read()
store.close()
