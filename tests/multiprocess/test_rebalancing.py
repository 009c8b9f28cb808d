"""Real nodes move to the stage that lacks them, and the losses stay those of one process."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from itertools import product

import pytest

from swarm.manifest import Manifest
from swarm.model.needs import stage_needs
from swarm.model.registry import model_spec
from tests.multiprocess.support import REPOSITORY, Command, metrics, run, wait_for_step
from tests.multiprocess.volunteers import (
    Volunteers,
    assert_quiet,
    assert_same_losses,
    kill,
    peer_of,
    reference_of,
    volunteers,
    wait_until_admitted,
)

STAGES, HEAVY, FOR_EVER = 3, 1, 100_000
"""Of the stages the middle one takes 43 % of all work, the others 22 and 35 %."""
SLOWED = (sys.executable, str(REPOSITORY / "scripts" / "_slowed.py"), "0.8")
"""Each microbatch takes 0.8 s: what seven nodes can do does not depend on the cores they share."""
BEST_OF_SEVEN, BEST_OF_FIVE = [2, 3, 2], [1, 2, 2]
PERIODS = """
[rebalancing]
period_s = 5
[periods]
announce_s = 0.5
record_ttl_s = 4
watch_s = 0.3
status_s = 0.3
"""
"""In the defaults, too, announcements of the dead live on for less than a period."""

LOOKED = re.compile(r"stays: |would move to stage ")
"""What a node says after each look that did not end in a move."""
MOVES = re.compile(r"(\w{6}) \(stage (\d)\) moves to stage (\d)")


class Nodes:
    """The nodes of a run that have been admitted."""

    def __init__(self, here: Volunteers, lead: Command) -> None:
        self.here, self.lead = here, lead
        self.alive: dict[str, Command] = {}

    def start(self, name: str, *more: object) -> Command:
        return self.here.start("node", "--join", self.here.join, *more, name=name, program=SLOWED)

    def start_all(self, stages: list[int]) -> None:
        """One for each of ``stages``, at the same time; they may have moved when they serve."""
        names = [f"node-{len(self.alive) + i}" for i in range(len(stages))]
        started = [
            self.start(name, "--stage", stage) for name, stage in zip(names, stages, strict=True)
        ]
        for node in started:
            peer = peer_of(node)[-6:]
            self.lead.wait_until_says(f"{peer} serves stage ")
            self.alive[peer] = node

    def kill(self, peers: list[str]) -> None:
        kill(*(self.alive.pop(peer) for peer in peers))

    def looks(self, peer: str) -> int:
        """How often it has looked whether it should move, and stayed."""
        return len(LOOKED.findall(self.alive[peer].out + self.alive[peer].err))

    def wait_until_all_look(self, times: int) -> None:
        """None of them rests, and each has looked so many times from now on."""
        before = {peer: self.looks(peer) for peer in self.alive}

        def looked() -> bool:
            return all(self.looks(peer) >= n + times for peer, n in before.items())

        self.lead.wait_until(looked, f"each node has looked {times} times")

    def status(self) -> list[list[dict]]:
        """Those that serve, of each stage, as any of them tells."""
        ended = run(self.here.folder, "status", "--json", "--join", self.here.join, name="status")
        assert ended.code == 0, ended
        stages = json.loads(ended.out)["stages"]
        here = [r["peer"] for stage in stages for r in stage["replicas"] if r["state"] != "gone"]
        assert len(here) == len(set(here)), "one that moves is in one place at a time"
        return [[r for r in stage["replicas"] if r["state"] == "ready"] for stage in stages]

    def serving(self, wanted: Callable[[list[list[dict]]], bool], what: str) -> list[list[dict]]:
        return self.lead.wait_until(lambda: s if wanted(s := self.status()) else None, what)


def counts(stages: list[list[dict]]) -> list[int]:
    return [len(stage) for stage in stages]


def rate_and_best(stages: list[list[dict]], costs: list[float]) -> tuple[float, float]:
    """Samples per second of the slowest stage, and of the best assignment of all these peers."""
    speeds = [[replica["samples_per_s"] for replica in stage] for stage in stages]
    work = [s * cost for stage, cost in zip(speeds, costs, strict=True) for s in stage]

    def slowest(places: tuple[int, ...]) -> float:
        done = [0.0] * len(costs)
        for place, does in zip(places, work, strict=True):
            done[place] += does / costs[place]
        return min(done)

    best = max(map(slowest, product(range(len(costs)), repeat=len(work))))
    return min(map(sum, speeds)), best


@pytest.mark.timeout(480)
def test_two_of_three_die_and_a_peer_of_another_stage_takes_their_place(monkeypatch):
    monkeypatch.setenv("SWARM_LOG_LEVEL", "debug")  # who looks and stays says so
    with volunteers(stages=STAGES, steps=FOR_EVER, more=PERIODS) as here:
        lead = here.coordinator()
        nodes = Nodes(here, lead)
        nodes.start_all([0, 1, 2])
        wait_for_step(lead, here.out, 1)
        nodes.start_all([0, 1, 1, 2])
        nodes.serving(lambda stages: counts(stages) == BEST_OF_SEVEN, f"{BEST_OF_SEVEN} serve")
        nodes.wait_until_all_look(2)
        settled = len(MOVES.findall(lead.out))
        nodes.wait_until_all_look(1)
        stages = nodes.status()
        assert counts(stages) == BEST_OF_SEVEN
        assert len(MOVES.findall(lead.out)) == settled, "they are where they should be"

        heavy = [r["peer"][-6:] for r in stages[HEAVY]]
        nodes.kill(heavy[:2])
        before = {peer: nodes.looks(peer) for peer in nodes.alive}
        lead.wait_until(lambda: MOVES.findall(lead.out)[settled:], "somebody moves")
        ((mover, source, target),) = MOVES.findall(lead.out)[settled:]
        assert (int(source), int(target)) == (0, HEAVY)
        assert nodes.looks(mover) - before[mover] < 2, "it moves at its second look, or its first"
        wait_until_admitted(lead, nodes.alive[mover], HEAVY)
        here.wait_until_shared(lead, HEAVY, 2)

        def measured(stages: list[list[dict]]) -> bool:
            return counts(stages) == BEST_OF_FIVE and all(
                r["samples_per_s"] for stage in stages for r in stage
            )

        stages = nodes.serving(measured, f"{BEST_OF_FIVE} serve and know how fast they are")
        manifest = Manifest.load(here.out / "run.toml")
        costs = [need.cost for need in stage_needs(manifest, model_spec(manifest, ()))]
        rate, best = rate_and_best(stages, costs)
        assert rate >= 0.9 * best

        nodes.wait_until_all_look(2)
        assert len(MOVES.findall(lead.out)) == settled + 1, "nobody else moves"
        lead.signal_group(signal.SIGINT)
        assert lead.wait() == 130
        assert_quiet(lead)
        lines = metrics(here.out)
        assert_same_losses(lines, reference_of(here.folder, here.manifest, len(lines)))
