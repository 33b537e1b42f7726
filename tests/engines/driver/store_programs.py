"""The programs of a store: Mooncake's, or Moongate's in their place."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from addresses import HOST, MASTER_HTTP, MASTER_HTTP_PORT, MASTER_PORT
from processes import Server


@dataclass
class OwnPrograms:
    """Which programs of the store are Moongate's. All others are Mooncake's."""

    master: bool = False
    node: bool = False


OWN = OwnPrograms()


def store_config(logs: Path) -> Path:
    """The file in which vLLM's connector reads the store's settings."""
    config = logs / "mooncake-store.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{HOST}:{MASTER_PORT}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": "256MB",
                "local_buffer_size": "64MB",
            }
        )
    )
    return config


def store_master(installed: Path) -> Server:
    program = [os.environ["MOONGATE_BIN"], "master"] if OWN.master else [str(installed / "vllm/bin/mooncake_master")]
    return Server(
        name="master",
        ready_url=f"{MASTER_HTTP}/health",
        ready_seconds=60,
        command=[
            *program,
            *(f"--rpc_address={HOST}", f"--rpc_port={MASTER_PORT}"),
            *(f"--metrics_host={HOST}", f"--metrics_port={MASTER_HTTP_PORT}"),
            "--logtostderr=true",
        ],
    )


def store_node(installed: Path, port: int) -> Server:
    """Two of Mooncake's on one machine need different ports even in networks of their own: a local socket is named after it."""
    if OWN.node:
        settings = {
            "MOONCAKE_MASTER": f"{HOST}:{MASTER_PORT}",
            "MOONCAKE_LOCAL_HOSTNAME": HOST,
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(256 << 20),
        }
        return Server(
            name="store-node",
            ready_url=f"http://{HOST}:{port}/health",
            ready_seconds=60,
            command=[os.environ["MOONGATE_BIN"], "store", f"--port={port}", f"--listen={HOST}", "--data-port=0"],
            env=settings,
        )
    return Server(
        name="store-node",
        ready_url=f"{MASTER_HTTP}/health",
        ready_seconds=60,
        command=[
            str(installed / "vllm/bin/mooncake_client"),
            *(f"--master_server_address={HOST}:{MASTER_PORT}", f"--host={HOST}", f"--port={port}"),
            *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--global_segment_size=256 MB"),
            "--logtostderr=true",
        ],
        env={"MC_FORCE_TCP": "1"},
    )
