"""Measures Mooncake's own client. Reads one command per line from stdin.

speed.py MASTER METADATA
put PREFIX SIZE COUNT THREADS | get PREFIX SIZE COUNT THREADS
Each response starts with "> ", followed by a JSON object with the wall-clock time, the CPU time and the latency of each
call, all in seconds.
"""

import ctypes
import json
import mmap
import resource
import sys
import threading
import time

from mooncake.store import MooncakeDistributedStore

MAX_SIZE = 64 << 20
master, metadata = sys.argv[1:]
store = MooncakeDistributedStore()
result = store.setup("127.0.0.1", metadata, 0, MAX_SIZE * 2, "tcp", "", master)
if result != 0:
    sys.exit(f"setup: {result}")
buffers = []
for _ in range(2):
    memory = mmap.mmap(-1, MAX_SIZE)
    memory.write(bytes(range(256)) * (MAX_SIZE >> 8))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if store.register_buffer(address, MAX_SIZE) != 0:
        sys.exit("register_buffer failed")
    buffers.append((memory, address))


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
    command, prefix, size, count, threads = line.split()
    size, count, threads = int(size), int(count), int(threads)
    call = store.put_from if command == "put" else store.get_into
    times = [[] for _ in range(threads)]
    workers = []
    for thread in range(threads):
        keys = [f"{prefix}-{number}" for number in range(thread, count, threads)]
        workers.append(threading.Thread(target=work, args=(call, thread, keys, size, times[thread])))
    began, used = time.perf_counter(), cpu()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    print(">", json.dumps({"wall": took, "cpu": cpu() - used, "calls": sum(times, [])}), flush=True)
