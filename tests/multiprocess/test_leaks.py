"""Peers that come and go leave nothing behind in those that stay, and no process of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.multiprocess.support import metrics, wait_for
from tests.multiprocess.volunteers import (
    assert_quiet,
    counted,
    volunteers,
    wait_until_admitted,
    wait_until_left,
)

CYCLES = int(os.environ.get("SWARM_LEAK_CYCLES", "6"))
"""Nodes that join, serve and leave; AT_ONCE of them together."""

AT_ONCE = min(3, CYCLES)
TUNED = (sys.executable, str(Path(__file__).with_name("tuned.py")))
STAGES, MICROBATCHES = 2, 8
PERIODS = """
[periods]
announce_s = 0.5
record_ttl_s = 6
watch_s = 0.3
"""

SPARE_DESCRIPTORS = 4
"""Streams are opened as they are needed: so many more may be in use at the moment."""

SPARE_THREADS = {"itself": 2, "daemon": 6}
"""Python's pools, and Go's runtime, add threads as they need them."""

SPARE_MIB = {"itself": 16, "daemon": 40}
"""Resident memory that all cycles together may add, up to a point: an allocator keeps what it had,
and Go's collector lets p2pd grow to twice what is in use."""

SPARE_MIB_PER_CYCLE = 0.5


@dataclass(frozen=True)
class Usage:
    """What a process has at a moment. ``mib``: MiB of resident memory."""

    descriptors: int
    threads: int
    children: int
    mib: float


def usage(pid: int) -> Usage:
    process = Path(f"/proc/{pid}")
    words = (line.split() for line in (process / "status").read_text().splitlines())
    status = {line[0]: line[1] for line in words if len(line) > 1}
    children = sum(len(path.read_text().split()) for path in (process / "task").glob("*/children"))
    return Usage(
        descriptors=len(list((process / "fd").iterdir())),
        threads=int(status["Threads:"]),
        children=children,
        mib=int(status["VmRSS:"]) / 1024,
    )


def usages(commands):
    """Of all that came of ``commands``, by (command, itself or daemon)."""
    return {
        (command.name, "itself" if pid == command.process.pid else "daemon"): usage(pid)
        for command in commands
        for pid in command.living()
    }


def is_back(before, now, cycles):
    """Whether nothing has grown beyond what is stated above."""
    return before.keys() == now.keys() and all(
        now[name].descriptors <= was.descriptors + SPARE_DESCRIPTORS
        and now[name].threads <= was.threads + SPARE_THREADS[name[1]]
        and now[name].children == was.children
        and now[name].mib <= was.mib + SPARE_MIB[name[1]] + SPARE_MIB_PER_CYCLE * cycles
        for name, was in before.items()
    )


def cycle(here, lead, names):
    """Some nodes join, serve and leave, all at once; what each has counted, by peer."""
    nodes = [here.node(name, i % STAGES) for i, name in enumerate(names)]
    peers = [wait_until_admitted(lead, node, i % STAGES) for i, node in enumerate(nodes)]
    here.wait_for_steps(lead, 2)
    for node in nodes:
        node.signal_group(signal.SIGINT)
    found = {}
    for i, (peer, node) in enumerate(zip(peers, nodes, strict=True)):
        node.succeed()
        assert "finished: left after step" in node.out, node.said
        assert node.living() == []
        mine = f"swarm-p2pd-{node.process.pid}-"
        assert not [folder for folder in node.socket_folders() if folder.startswith(mine)]
        found[peer] = counted(node)[0]
        wait_until_left(lead, peer, i % STAGES)
    return found


def test_those_who_stay_keep_nothing_of_those_who_leave():
    with volunteers(stages=STAGES, steps=100_000, more=PERIODS) as here:
        lead = here.coordinator(program=TUNED)
        stay = [here.node(f"stays-{stage}", stage, program=TUNED) for stage in range(STAGES)]
        here.wait_for_steps(lead, 1)
        names = [f"guest-{i}" for i in range(CYCLES)]
        left = cycle(here, lead, names[:AT_ONCE])
        here.wait_for_steps(lead, 2)
        before = usages([lead, *stay])
        assert len(before) == 2 * (1 + STAGES), "each has its daemon"
        for first in range(AT_ONCE, CYCLES, AT_ONCE):
            left |= cycle(here, lead, names[first : first + AT_ONCE])
        wait_for(
            lambda: is_back(before, usages([lead, *stay]), CYCLES - AT_ONCE),
            lambda: f"back from\n{usages([lead, *stay])}\nto\n{before}",
        )
        for name, now in usages([lead, *stay]).items():
            print(f"{' '.join(name)}: {before[name]} after {AT_ONCE}, {now} after {CYCLES}")
        lead.signal_group(signal.SIGINT)
        assert lead.wait() == 130
        lines = metrics(here.out)
        summary = json.loads((here.out / "summary.json").read_text())
        assert_quiet(lead, *stay)
    assert sum(line["resent"] for line in lines) == 0, "who drains leaves no work undone"
    by_stage = summary["microbatches_by_peer"]
    assert [sum(counts.values()) for counts in by_stage] == STAGES * [MICROBATCHES * len(lines)]
    assert len(left) == CYCLES
    for peer, microbatches in left.items():
        assert sum(counts.get(peer, 0) for counts in by_stage) == microbatches
    assert sum(left.values()) > 0
