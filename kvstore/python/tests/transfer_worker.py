"""Transfers objects with one module, and measures that. Reads one command per line from stdin.

transfer_worker.py MODULE MASTER THREADS SIZE
put PREFIX SIZE COUNT THREADS RANGES | get PREFIX SIZE COUNT THREADS RANGES | clear
THREADS and SIZE of the command line are the largest that are used. With RANGES above 1, each object is in so many ranges of memory that are
not adjacent. Each response starts with "> ", followed by a JSON object with the wall-clock time, the CPU time of the process and the latency
of each call, all in seconds. The bytes of the last object that each thread got are compared.
"""

import ctypes
import importlib
import json
import mmap
import resource
import sys
import threading
import time

MODULE, MASTER = sys.argv[1:3]
THREADS, SIZE = int(sys.argv[3]), int(sys.argv[4])
store = importlib.import_module(MODULE).MooncakeDistributedStore()
if (code := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, max(4 * SIZE, 64 << 20), "tcp", "", MASTER)) != 0:
    sys.exit(f"{MODULE}: setup returns {code}")


def buffer():
    # Twice the size, because ranges that are not adjacent have gaps between them.
    memory = mmap.mmap(-1, 2 * SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if (code := store.register_buffer(address, 2 * SIZE)) != 0:
        sys.exit(f"{MODULE}: register_buffer returns {code}")
    return memory, address


sources, targets = [[buffer() for _ in range(THREADS)] for _ in range(2)]
for memory, _ in sources:
    memory.write(bytes(range(251)) * (2 * SIZE // 251))


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def transfer(command, thread, size, ranges):
    """A function that transfers the object of a key."""
    address = (sources if command == "put" else targets)[thread][1]
    if ranges == 1:
        one = store.put_from if command == "put" else store.get_into
        return lambda key: one(key, address, size)
    several = store.batch_put_from_multi_buffers if command == "put" else store.batch_get_into_multi_buffers
    part = size // ranges
    addresses, sizes = [address + 2 * part * number for number in range(ranges)], [part] * ranges
    return lambda key: several([key], [addresses], [sizes])[0]


def work(call, keys, size, times):
    for key in keys:
        began = time.perf_counter()
        result = call(key)
        times.append(time.perf_counter() - began)
        if result not in (0, size):
            times.append(f"{MODULE}: {key} has the result {result}")
            return


def same(thread, size, ranges):
    part = size // ranges
    places = [(2 * part * number, 2 * part * number + part) for number in range(ranges)]
    (source, _), (target, _) = sources[thread], targets[thread]
    return all(source[start:end] == target[start:end] for start, end in places)


def measure(command, prefix, size, count, threads, ranges):
    times = [[] for _ in range(threads)]
    if command == "get":
        for memory, _ in targets[:threads]:
            memory[:] = bytes(2 * SIZE)
    workers = []
    for thread in range(threads):
        keys = [f"{prefix}-{number}" for number in range(thread, count, threads)]
        arguments = (transfer(command, thread, size, ranges), keys, size, times[thread])
        workers.append(threading.Thread(target=work, args=arguments))
    began, used = time.perf_counter(), cpu()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wall, used = time.perf_counter() - began, cpu() - used
    calls = sum(times, [])
    if failed := [call for call in calls if isinstance(call, str)]:
        sys.exit(failed[0])
    if command == "get" and not all(same(thread, size, ranges) for thread in range(threads)):
        sys.exit(f"{MODULE}: wrong bytes in {prefix}")
    return {"wall": wall, "cpu": used, "calls": calls}


print("> ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "clear":
        store.remove_all(True)
        response = {}
    else:
        response = measure(command, arguments[0], *map(int, arguments[1:]))
    print(">", json.dumps(response), flush=True)
