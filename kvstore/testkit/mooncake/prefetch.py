"""Prefetch of objects from a client's disk to memory. Its output is compared between masters.

prefetch.py MASTER ADMIN FOLDER

The client mounts 32 MiB of memory and FOLDER, puts more than fits into memory, frees memory, looks up all objects with the
option to prefetch them, and reads all of them. Output lines start with "> ", because the client also logs to stdout. The master
must offload evicted objects to disk and have a lease time of half a second.
"""

import json
import sys
import time
import urllib.request

from mooncake import store as mooncake

LIMIT = 60
SIZE = 1 << 20
KEYS = [f"k{number}" for number in range(48)]

master, admin, folder = sys.argv[1:]
store = mooncake.MooncakeDistributedStore()


def say(what, answer):
    print(f"> {what}: {answer}", flush=True)


def content(key):
    return (key.encode() * SIZE)[:SIZE]


def media(keys):
    """For each key whether it is in memory (M), on disk (D), both, or nowhere. This leases nothing."""
    with urllib.request.urlopen(f"http://{admin}/batch_query_keys?keys={','.join(keys)}", timeout=LIMIT) as answer:
        found = json.load(answer)["data"]
    return {
        key: ("M" if it["values"] else "") + ("D" if it["local_disk_values"] else "") if it["ok"] else "nowhere"
        for key, it in found.items()
    }


def wait(what, condition):
    end = time.monotonic() + LIMIT
    while not (answer := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    say(what, bool(answer))


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
            "enable_ssd_prefetch": "true",
        }
    ),
)
for key in KEYS:
    wait(f"put {key}", lambda: store.put(key, content(key)) == 0)
wait("some are only on the disk", lambda: list(media(KEYS).values()).count("D") >= 16)
found = media(KEYS)
say("nothing is lost", "nowhere" not in found.values())
on_disk = [key for key, medium in found.items() if medium == "D"]
in_memory = [key for key in KEYS if key not in on_disk]
time.sleep(0.6)
say("remove", all(store.remove(key, True) == 0 for key in in_memory[:-4]))
wanted = on_disk[:8] + in_memory[-4:]
options = mooncake.ExistOptions()
options.prefetch_to_memory = True
say("exist", store.batch_is_exist(wanted, options))
wait("they are in memory", lambda: all("M" in medium for medium in media(wanted).values()))
say("leased", [store.remove(key) for key in wanted[:2]])
say("get", [key for key in on_disk + in_memory[-4:] if bytes(store.get(key)) != content(key)])
store.close()
