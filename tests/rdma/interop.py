"""Who understands whom over RDMA: our client and Mooncake's, our store node and Mooncake's; and whether our node can be replaced
without a loss. For the machine of `machine`.

interop.py MOONGATE MOONCAKE
MOONGATE is our program, built with the feature rdma; MOONCAKE is where kvstore/testkit/mooncake/setup has installed it.
What a client puts, the other gets byte for byte, and the device has sent at least as many packets as that takes.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

moongate, mooncake = sys.argv[1], pathlib.Path(sys.argv[2])
HOST, RELEASE = "10.77.0.1", "0.3.13.post1"
SIZES = [1, 65_537, (4 << 20) + 4097]
# Payload of a packet at most: the device's MTU is 1024, as that of the interface below it is 1500.
PAYLOAD = 1024
LIMIT = 120
here = pathlib.Path(__file__).resolve().parent
work = pathlib.Path(tempfile.mkdtemp())
environment = dict(os.environ, PYTHONPATH=str(mooncake / RELEASE), STORE_HOST=HOST, STORE_PROTOCOL="rdma")
ports = iter(range(50051, 60000))


def packets():
    return int(pathlib.Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts").read_text())


def content(key, size):
    return (key.encode() * (size // len(key) + 1))[:size]


class Process:
    """A program that is killed when this ends."""

    def __init__(self, name, command, variables):
        self.log = work / name
        output = self.log.open("wb")
        self.child = subprocess.Popen(
            command, env=dict(environment, **variables), stdin=subprocess.PIPE, stdout=output, stderr=output
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()

    def until(self, said, count=1):
        """Waits until it has written lines with a text, so many, and returns the last of them."""
        end = time.monotonic() + LIMIT
        while True:
            log = self.log.read_text(errors="replace")
            lines = [line for line in log.splitlines() if said in line]
            if len(lines) >= count:
                return lines[-1]
            if time.monotonic() > end or self.child.poll() is not None:
                sys.exit(f"{self.log.name} does not say {said!r}:\n{log[-4000:]}")
            time.sleep(0.05)


def master(whose):
    rpc, metrics = next(ports), next(ports)
    flags = [f"--rpc_address={HOST}", f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    if whose == "ours":
        process = Process("master", [moongate, "master", *flags], {})
    else:
        program = mooncake / RELEASE / "mooncake/mooncake_master"
        process = Process("their-master", [program, *flags, "--logtostderr=true"], {})
    end = time.monotonic() + LIMIT
    while subprocess.run(["bash", "-c", f"exec 3<>/dev/tcp/{HOST}/{rpc}"], stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > end:
            sys.exit(f"no master:\n{process.log.read_text()}")
        time.sleep(0.1)
    return process, f"{HOST}:{rpc}"


def our_node(address, *flags):
    variables = {
        "MOONCAKE_MASTER": address,
        "MOONCAKE_LOCAL_HOSTNAME": HOST,
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64mb",
        "MOONCAKE_PROTOCOL": "rdma",
    }
    process = Process("node", [moongate, "store", "--port=0", "--allow-peers=0.0.0.0/0,::/0", *flags], variables)
    process.until("this node serves transfers over RDMA")
    process.until("store node ready")
    return process


class Theirs(Process):
    """Mooncake's client, which lends memory too if it is asked to."""

    def __init__(self, name, address, mebibytes):
        program = [mooncake / "venv/bin/python", here / "../../kvstore/testkit/mooncake/store.py"]
        super().__init__(name, [*program, address, "P2PHANDSHAKE", str(mebibytes)], {})
        self.answers = 0
        self.answer()

    def answer(self):
        self.answers += 1
        return self.until("> ", self.answers).partition("> ")[2]

    def ask(self, command):
        self.child.stdin.write(f"{command}\n".encode())
        self.child.stdin.flush()
        return self.answer()

    def put(self, key, size):
        answer = self.ask(f"put {key} {size}")
        if answer != "0":
            sys.exit(f"their client cannot put {key}: {answer}\n{self.log.read_text(errors='replace')[-4000:]}")

    def has(self, key):
        return self.ask(f"read {key}") == "1"


class Ours:
    def __init__(self, address):
        self.address = address

    def run(self, *words):
        ran = subprocess.run(
            [moongate, "kv", "--master", self.address, *words], env=environment, capture_output=True, timeout=LIMIT
        )
        said = ran.stderr.decode()
        if ran.returncode or "over TCP" in said:
            sys.exit(f"moongate kv {words}: {ran.returncode}\n{said}")

    def put(self, key, size):
        file = work / "put"
        file.write_bytes(content(key, size))
        self.run("put", key, str(file))

    def has(self, key):
        file = work / "got"
        self.run("get", key, str(file))
        return file.read_bytes() == content(key, file.stat().st_size)


def check(what, writer, reader):
    before, began = packets(), time.monotonic()
    for size in SIZES:
        key = f"{type(writer).__name__}-{type(reader).__name__}-{size}".lower()
        writer.put(key, size)
        if not reader.has(key):
            sys.exit(f"{what}: the bytes of {key} are wrong")
    sent, least = packets() - before, 2 * sum(SIZES) // PAYLOAD
    if sent < least:
        sys.exit(f"{what}: the device has sent {sent} packets; {least} are needed")
    print(f"{what}: {len(SIZES)} objects right, {sent} packets, {time.monotonic() - began:.1f} s", flush=True)


def replace_node():
    """Replaces our node, whose memory is a holder's, while our client puts objects: once by a signal, as an upgrade does, and once
    by a kill. Both clients then find every object that a put has reported as stored, before, while and after the node was replaced.
    Mooncake's clients are started anew: one that was connected to the node waits forever for the software device's completions."""
    socket = work / "holder.sock"
    holder = Process("holder", [moongate, "store-holder", f"--socket={socket}"], {})
    process, address = master("ours")
    memory = ["--memory", f"holder:{socket}"]
    ours, stored, failed, done = Ours(address), {}, [], threading.Event()

    def write():
        while not done.is_set():
            number = len(stored) + len(failed)
            key, size = f"ours-{number}", 300_000 + number
            try:
                ours.put(key, size)
                stored[key] = size
            except SystemExit:
                failed.append(key)

    def stored_more(count):
        least = len(stored) + count
        while len(stored) < least and writer.is_alive():
            time.sleep(0.05)

    with holder, process:
        holder.until("listening on")
        node = our_node(address, *memory)
        with Theirs("their-writer", address, 0) as theirs:
            for number in range(40):
                key, size = f"theirs-{number}", 100_000 + 1_000 * number
                theirs.put(key, size)
                stored[key] = size
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        for stop in ["SIGTERM", "SIGKILL"]:
            stored_more(2)
            if stop == "SIGTERM":
                node.child.terminate()
            else:
                node.child.kill()
            node.child.wait()
            # The puts of this time wait for the node, or fail.
            time.sleep(1)
            node = our_node(address, *memory)
            print(f"{stop}: {node.until('restored').split(': ', 1)[-1]}", flush=True)
        stored_more(2)
        done.set()
        writer.join()
        with node, Theirs("their-reader", address, 0) as theirs:
            sent = packets()
            lost = [key for key in stored if not theirs.has(key)]
            lost += [key for key in list(stored)[::8] if not ours.has(key)]
            sent, least = packets() - sent, sum(stored.values()) // PAYLOAD
            if lost or sent < least:
                sys.exit(f"{len(lost)} of {len(stored)} objects are lost: {lost}; {sent} packets of {least}")
    print(f"node replaced twice: {len(stored)} objects, none lost; {len(failed)} puts failed meanwhile", flush=True)


process, address = master("ours")
with process, our_node(address), Theirs("their-client", address, 0) as theirs:
    ours = Ours(address)
    check("our client, our node", ours, ours)
    check("their client, our node", theirs, theirs)
    check("our client to their client, our node", ours, theirs)
    check("their client to our client, our node", theirs, ours)
process, address = master("theirs")
with process, Theirs("their-node", address, 64):
    ours = Ours(address)
    check("our client, their node", ours, ours)
replace_node()
print("all right")
