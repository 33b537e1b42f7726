"""Mooncake's own client as a store node. Reads one command per line from stdin.

store.py MASTER METADATA MEBIBYTES
put KEY SIZE | upsert KEY SIZE | fill COPIES SIZE KEY... | get KEY | remove KEY | close
exist KEY... | read KEY... | force KEY | clear EXPRESSION | empty
Environment: BUFFER_MEBIBYTES is the size of the client's buffer (default 16), which limits the size of a get. STORE_HOST is
its address (default 127.0.0.1), STORE_PROTOCOL its protocol (default tcp), DISK a folder for offloaded objects, TENANT its tenant.
fill puts many objects, with one replica preferably in this node's memory. The content of an object is its repeated key; read
returns how many objects have this content. clear and empty remove many objects, and return their number.
Responses start with "> ", because the client also logs to stdout.
"""

import os
import sys

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


def say(text):
    print(f"> {text}", flush=True)


master, metadata, mebibytes = sys.argv[1:]
store = MooncakeDistributedStore()
buffer = int(os.environ.get("BUFFER_MEBIBYTES", "16")) << 20
host, protocol = os.environ.get("STORE_HOST", "127.0.0.1"), os.environ.get("STORE_PROTOCOL", "tcp")
if "DISK" in os.environ or "TENANT" in os.environ:
    disk = {"enable_ssd_offload": "true", "ssd_offload_path": os.environ["DISK"]} if "DISK" in os.environ else {}
    result = store.setup(
        {
            "local_hostname": host,
            "metadata_server": metadata,
            "global_segment_size": str(int(mebibytes) << 20),
            "local_buffer_size": str(buffer),
            "protocol": protocol,
            "rdma_devices": "",
            "master_server_addr": master,
            "tenant_id": os.environ.get("TENANT", "default"),
            **disk,
        }
    )
else:
    result = store.setup(host, metadata, int(mebibytes) << 20, buffer, protocol, "", master)
if result != 0:
    sys.exit(f"setup: {result}")


def content(key, size):
    return (key.encode() * (size // len(key) + 1))[:size]


own = ReplicateConfig()
own.preferred_segment = store.get_hostname()
say("ready")
for line in sys.stdin:
    command, *words = line.split()
    if command == "put":
        say(store.put(words[0], content(words[0], int(words[1]))))
    elif command == "upsert":
        say(store.upsert(words[0], content(words[0], int(words[1]))))
    elif command == "fill":
        copies, size, *keys = words
        own.replica_num = int(copies)
        say(store.put_batch(keys, [content(key, int(size)) for key in keys], own))
    elif command == "remove":
        say(store.remove(words[0]))
    elif command == "get":
        say(len(store.get(words[0])))
    elif command == "exist":
        say("".join(str(found) for found in store.batch_is_exist(words)))
    elif command == "read":
        found = store.get_batch(words)
        say(sum(1 for key, it in zip(words, found) if it and bytes(it) == content(key, len(it))))
    elif command == "force":
        say(store.remove(words[0], True))
    elif command == "clear":
        say(store.remove_by_regex(words[0]))
    elif command == "empty":
        say(store.remove_all())
    elif command == "close":
        store.close()
        say("closed")
