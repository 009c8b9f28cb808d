"""Who uses the processors while a local swarm runs: by thread, from /proc.

What a pipeline loses against one process is processor time that goes elsewhere, processors that
have nothing to do, or computing that takes longer beside others; this tells which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import psutil


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor seconds since the processes began."""

    compute_s: float = 0.0
    """Threads of nodes other than their first: computing, and coding for the wire."""
    loops_s: float = 0.0
    """The first threads of nodes: messages, books and the directory."""
    trainer_s: float = 0.0
    daemons_s: float = 0.0
    """All p2pd."""
    at: float = 0.0

    def since(self, before: Cpu) -> Cpu:
        return Cpu(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def look(pid: int) -> Cpu:
    """Of the ``swarm local`` command ``pid`` and all that it started."""
    found = {"compute_s": 0.0, "loops_s": 0.0, "trainer_s": 0.0, "daemons_s": 0.0}
    command = psutil.Process(pid)
    for process in (command, *command.children(recursive=True)):
        try:
            threads = process.threads()
            is_daemon = process.name().startswith("p2pd")
        except psutil.Error:
            continue
        for thread in threads:
            used = thread.user_time + thread.system_time
            if is_daemon:
                found["daemons_s"] += used
            elif process.pid == pid:
                found["trainer_s"] += used
            else:
                found["loops_s" if thread.id == process.pid else "compute_s"] += used
    return Cpu(**found, at=time.monotonic())


def shares(spent: Cpu, *, cores: int, samples_per_s: float, one_process: float) -> dict[str, float]:
    """Where ``cores`` processors went, as shares of all that they could do in that time.

    Args:
        one_process: samples per second of one process with one thread, on one core.
    """
    able = cores * spent.at
    useful = samples_per_s / one_process / cores
    parts = {
        "computing, as one process would": useful,
        "computing more slowly than alone": max(0.0, spent.compute_s / able - useful),
        "event loops of the nodes": spent.loops_s / able,
        "trainer": spent.trainer_s / able,
        "p2pd": spent.daemons_s / able,
    }
    return {**parts, "idle": max(0.0, 1.0 - sum(parts.values()))}
