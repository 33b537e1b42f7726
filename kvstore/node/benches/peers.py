"""Mooncake's own node and client, for the benchmark beside it.

peers.py node MASTER MEBIBYTES
    Prints "ready SEGMENT", and serves until its standard input ends.
peers.py client MASTER
    Prints "ready", and reads one command per line: put PREFIX SIZE COUNT THREADS SEGMENT | get PREFIX SIZE COUNT THREADS SEGMENT.
    Puts go to this segment. It responds with a JSON object: the wall-clock time of all calls and the latency of each in seconds.
Responses start with "> ", because the client also logs to stdout.
"""

import ctypes
import json
import mmap
import sys
import threading
import time

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

MAX_SIZE = 16 << 20
role, master, *mebibytes = sys.argv[1:]
store = MooncakeDistributedStore()
segment_size = int(mebibytes[0]) << 20 if role == "node" else 0
result = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_size, MAX_SIZE * 4, "tcp", "", master)
if result != 0:
    sys.exit(f"setup: {result}")
if role == "node":
    print(f"> ready {store.get_hostname()}", flush=True)
    sys.stdin.read()
    sys.exit()
buffers = []
for _ in range(2):
    memory = mmap.mmap(-1, MAX_SIZE)
    memory.write(bytes(range(256)) * (MAX_SIZE >> 8))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if store.register_buffer(address, MAX_SIZE) != 0:
        sys.exit("register_buffer failed")
    buffers.append((memory, address))


def work(call, thread, keys, size, times):
    address = buffers[thread][1]
    for key in keys:
        began = time.perf_counter()
        result = call(key, address, size)
        times.append(time.perf_counter() - began)
        if result not in (0, size):
            sys.exit(f"{key}: {result}")


print("> ready", flush=True)
for line in sys.stdin:
    command, prefix, size, count, threads, segment = line.split()
    size, count, threads = int(size), int(count), int(threads)
    config = ReplicateConfig()
    config.preferred_segment = segment
    call = store.get_into
    if command == "put":
        call = lambda key, address, size: store.put_from(key, address, size, config)
    times = [[] for _ in range(threads)]
    workers = []
    for thread in range(threads):
        keys = [f"{prefix}-{number}" for number in range(thread, count, threads)]
        workers.append(threading.Thread(target=work, args=(call, thread, keys, size, times[thread])))
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(">", json.dumps({"wall": time.perf_counter() - began, "calls": sum(times, [])}), flush=True)
