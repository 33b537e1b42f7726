"""A sequence of calls by a Mooncake client with a disk. Its output is compared between masters.

disks.py MASTER ADMIN FOLDER

The client mounts 32 MiB of memory and FOLDER, puts more than fits into memory, and reads all of it. Output lines start with
"> ", because the client also logs to stdout. The master must offload evicted objects to disk, promote objects that are read,
and have a lease time of half a second.
"""

import json
import os
import sys
import time
import urllib.request

from mooncake import store as mooncake

LIMIT = 60
# Error code of objects that are being promoted.
BUSY = -703
SIZE = 1 << 20
KEYS = [f"k{number}" for number in range(48)]

master, admin, folder = sys.argv[1:]
store = mooncake.MooncakeDistributedStore()


def say(what, answer):
    print(f"> {what}: {answer}", flush=True)


def content(key):
    return (key.encode() * SIZE)[:SIZE]


def media():
    """For each key whether it is in memory (M), on disk (D), both, or nowhere. This leases nothing."""
    with urllib.request.urlopen(f"http://{admin}/batch_query_keys?keys={','.join(KEYS)}", timeout=LIMIT) as answer:
        found = json.load(answer)["data"]
    return {
        key: ("M" if it["values"] else "") + ("D" if it["local_disk_values"] else "") if it["ok"] else "nowhere"
        for key, it in found.items()
    }


def wait(what, condition):
    end = time.monotonic() + LIMIT
    while not (answer := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    say(what, bool(answer))
    return answer


def files():
    return sum(len(names) for _, _, names in os.walk(folder))


say(
    "setup",
    store.setup(
        {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(32 << 20),
            "local_buffer_size": str(16 << 20),
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": master,
            "enable_ssd_offload": "true",
            "ssd_offload_path": folder,
        }
    ),
)
for key in KEYS:
    wait(f"put {key}", lambda: store.put(key, content(key)) == 0)
wait("some are only on the disk", lambda: list(media().values()).count("D") >= 16)
say("nothing is lost", "nowhere" not in media().values())
say("there are files", files() > 0)
say("exist", store.batch_is_exist(KEYS) == [1] * len(KEYS))
say("get", [key for key in KEYS if bytes(store.get(key)) != content(key)])
say("get_batch", [bytes(it) == content(key) for key, it in zip(KEYS, store.get_batch(KEYS[:4]))])
only_disk = next(key for key, it in media().items() if it == "D")
say("size", store.get_size(only_disk))
kinds = [
    "disk" if it.is_local_disk_replica() else "memory" for it in store.get_replica_desc(only_disk)
]
say("replicas", kinds)
say("put again", store.put(only_disk, b"other"))
say("get again", bytes(store.get(only_disk)) == content(only_disk))
# Objects are promoted only if there is free memory.
time.sleep(1)
remaining = [only_disk, *(key for key in KEYS if key != only_disk)][:8]
say("remove", all(store.remove(key, True) in (0, BUSY) for key in KEYS if key not in remaining))


def is_back():
    ok = bytes(store.get(only_disk)) == content(only_disk)
    return ok and media()[only_disk] == "MD"


wait("it is brought back", is_back)
time.sleep(1)
left = sum(it != "nowhere" for it in media().values())
say("remove all", store.remove_all(True) == left)
say("nothing is left", set(media().values()))
if not hasattr(mooncake, "ExistOptions"):
    # Clients since 0.3.14 do not ask the master whether everything was removed.
    wait("the disk is emptied", lambda: files() == 0)
store.close()
