"""Engines with Moongate's wheel in place of Mooncake's module `mooncake.store`."""

from __future__ import annotations

from pathlib import Path

from pairs import Pair, path_of
from processes import Processes, Server

FOLDER = "our-wheel"
OWN_LIBRARY = f"{FOLDER}/moongate_store/_native.abi3.so"


def use_own_wheel(pair: Pair, installed: Path) -> None:
    """Puts the wheel before the packages of the engines' environment. That has Mooncake's wheel only for its transfer engine."""
    for server in pair.engines:
        if not pair.transfer_engine:
            _leave_environment(server, installed / pair.engine, installed / f"{pair.engine}-without-mooncake")
        paths = [str(installed / FOLDER), server.env.get("PYTHONPATH", "")]
        server.env["PYTHONPATH"] = ":".join(path for path in paths if path)


def _leave_environment(server: Server, old: Path, new: Path) -> None:
    program = Path(server.command[0]).relative_to(old)
    server.command[0] = str(new / program)
    server.env |= path_of(new)


def engines_use_own_wheel(pair: Pair, processes: Processes) -> str:
    """By the libraries in the memory of the engines' processes."""
    notes = []
    for running in processes.running:
        if running.server not in pair.engines:
            continue
        libraries = _mapped(running.process.pid)
        own = [path for path in libraries if path.endswith(OWN_LIBRARY)]
        theirs = sorted(path.split("/site-packages/")[1] for path in libraries if "/site-packages/mooncake/" in path)
        uses_store = running.server in pair.store_users
        assert bool(own) == uses_store, f"{running.server.name}: has Moongate's module: {bool(own)}"
        assert "mooncake/store.so" not in theirs, f"{running.server.name} has Mooncake's module as well"
        assert pair.transfer_engine or not theirs, f"{running.server.name} has Mooncake's {theirs}"
        notes.append(f"{running.server.name}: Moongate's module {'yes' if own else 'no'}, Mooncake's {', '.join(theirs) or 'none'}")
    return "; ".join(notes)


def _mapped(leader: int) -> set[str]:
    """Files that processes of the leader's session have mapped."""
    files: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The fields after the name, which may contain spaces: state, parent, group, session.
            session = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[3])
            if session == leader:
                files |= {line.split()[-1] for line in (entry / "maps").read_text().splitlines()}
        except (OSError, IndexError):
            continue
    return files
