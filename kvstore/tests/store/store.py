"""Mooncake's own client: lends memory to a store, and does what it is told on stdin, a command a line.

store.py MASTER METADATA MEBIBYTES
put KEY SIZE | fill COPIES SIZE KEY... | get KEY | remove KEY | close
fill puts many objects, one copy of each into its own memory while there is room.
Its answers begin with "> ", because the client writes to stdout too.
"""

import sys

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


def say(text):
    print(f"> {text}", flush=True)


master, metadata, mebibytes = sys.argv[1:]
store = MooncakeDistributedStore()
result = store.setup("127.0.0.1", metadata, int(mebibytes) << 20, 16 << 20, "tcp", "", master)
if result != 0:
    sys.exit(f"setup: {result}")
own = ReplicateConfig()
own.preferred_segment = store.get_hostname()
say("ready")
for line in sys.stdin:
    command, *words = line.split()
    if command == "put":
        say(store.put(words[0], bytes(int(words[1]))))
    elif command == "fill":
        copies, size, *keys = words
        own.replica_num = int(copies)
        say(store.put_batch(keys, [bytes(int(size))] * len(keys), own))
    elif command == "remove":
        say(store.remove(words[0]))
    elif command == "get":
        say(len(store.get(words[0])))
    elif command == "close":
        store.close()
        say("closed")
