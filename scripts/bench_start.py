#!/usr/bin/env python3
"""How long a start takes: a node until it serves, and ``swarm local`` until its first step.

Wall-clock seconds on this machine, medians; promised are 10 s and 25 s on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import ROOT, median, read_metrics, swarm_local, write_json

LIMIT_S = 120.0
SMALL = "[stages]\ncount = 1\n[start]\nreplicas = 2\n[run]\nsteps = 1000\neval_every = 0\n"


def wait_for(log: Path, text: str, since: float) -> float:
    """Seconds from ``since`` until ``text`` stands in ``log``."""
    while time.monotonic() - since < LIMIT_S:
        if log.exists() and text in log.read_text(errors="replace"):
            return time.monotonic() - since
        time.sleep(0.02)
    raise RuntimeError(f"{text!r} did not come within {LIMIT_S:g} s:\n{log.read_text()[-1500:]}")


def node_start(folder: Path) -> float:
    """From starting ``swarm node`` until it serves, with a coordinator that waits for it."""
    (folder / "run.toml").write_text(SMALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    swarm = [sys.executable, "-m", "peers.cli"]
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0")
    logs = folder / "coordinator.log", folder / "node.log"
    processes = []
    try:
        with logs[0].open("wb") as log:
            command = [
                *swarm,
                "coordinator",
                str(folder / "run.toml"),
                "--out",
                str(folder / "out"),
            ]
            command += ["--identity", str(folder / "coordinator.key"), *loopback]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        wait_for(logs[0], "swarm node --join", time.monotonic())
        words = logs[0].read_text().split()
        address = words[words.index("--join") + 1]
        began = time.monotonic()
        with logs[1].open("wb") as log:
            command = [*swarm, "node", "--join", address, *loopback]
            command += ["--identity", str(folder / "node.key")]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return wait_for(logs[1], "serves stage", began)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def local_start() -> float:
    """From starting ``swarm local`` (3 stages x 2 replicas) until its first step has ended."""
    began = time.monotonic()
    with swarm_local("[stages]\ncount = 3\n[run]\nsteps = 1000\neval_every = 0\n") as (
        process,
        out,
    ):
        while not read_metrics(out):
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                raise RuntimeError((out.parent / "log").read_text()[-1500:])
            time.sleep(0.02)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    nodes, locals_ = [], []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
            nodes.append(node_start(Path(folder)))
        locals_.append(local_start())
    result: dict[str, Any] = {
        "node_serves_s": median(nodes),
        "local_first_step_s": median(locals_),
        "all": {"node": nodes, "local": locals_},
    }
    print(f"swarm node serves after        {result['node_serves_s']:6.1f} s  (promised: 10)")
    print(f"swarm local, first step after  {result['local_first_step_s']:6.1f} s  (promised: 25)")
    write_json(options.json, result)


if __name__ == "__main__":
    main()
