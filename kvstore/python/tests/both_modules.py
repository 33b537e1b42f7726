"""What the programs beside this file need to run Moongate's module and Mooncake's: folders with both, and masters."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
MOONCAKE = Path(os.environ.get("MOONCAKE_FOLDER", TARGET / "mooncake"))
RELEASE = MOONCAKE / "0.3.13.post1"
MOONCAKE_LIBRARIES = {"LD_LIBRARY_PATH": str(RELEASE / "nvidia/cuda_runtime/lib")}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port, what):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"{what} does not listen on port {port}")


def master(program, arguments, environment):
    """A master with a lease time of one second, and its RPC port."""
    rpc, admin = free_port(), free_port()
    command = [program, *arguments, "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", f"--metrics_port={admin}", "--metrics_host=127.0.0.1"]
    command.append("--default_kv_lease_ttl=1000")
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(rpc, "the master")
    return process, f"127.0.0.1:{rpc}"


def install_mooncake():
    subprocess.run([ROOT / "kvstore/testkit/mooncake/setup", MOONCAKE], check=True)


def install_moongate():
    """A folder with the newest wheels."""
    into = TARGET / "wheel-installed"
    wheels = [max(TARGET.glob(f"wheels/{name}-*.whl"), key=os.path.getmtime) for name in ("moongate_store", "moongate_store_mooncake_shim")]
    pip = TARGET / "wheel-tools/bin/pip"
    subprocess.run(["rm", "-rf", into], check=True)
    subprocess.run([pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", into, *wheels], check=True)
    return into
