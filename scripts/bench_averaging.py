#!/usr/bin/env python3
"""In-stage averaging beside its floor, hivemind's averaging and gloo, all in one run, in turn.

6.4 M float32 parameters (25.6 MB), 2 and 4 replicas, each a process of its own on loopback over
p2pd. Ours is the whole of a step's end, from the first prepare until every replica has applied the
optimizer step. The floor is what the same streams need to move the same bytes in the same pieces,
nothing done with them. hivemind averages at its fastest settings that work, gloo's all_reduce
encrypts nothing; neither steps an optimizer. Figures are medians, ratios those of one round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._averaging_group import Worker, all_of, started
from scripts._bench import Progress, median, run_parts, whole
from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel

Figures = dict[str, float]
Measure = Callable[[], Figures]

OURS, FLOOR, HIVEMIND, GLOO = "swarm", "floor", "hivemind", "gloo"
MODEL: dict[str, Any] = {"d_model": 256, "layers": 8, "heads": 4, "sequence": 128}
CODECS = ("fp32", "bf16", "int8")
WARM_UP = 3
AGAIN = 20
"""Attempts of hivemind, whose groups do not always come together."""


@dataclass(frozen=True, slots=True)
class Options:
    runs: int
    codecs: Sequence[str]
    alone: bool
    """Without hivemind and gloo."""


def tree(codec: str, lead: str) -> dict[str, Any]:
    """The manifest of a run of one stage that ``lead`` leads. ``int64``: reproducible mode."""
    exact = codec == "int64"
    return {
        "name": "bench",
        "trainers": [lead],
        "model": MODEL,
        "wire": {"averaging": "fp32" if exact else codec},
        "reproducible": {"enabled": exact},
    }


def length() -> int:
    manifest = Manifest.from_tree({"model": MODEL})
    return StageModel(manifest, model_spec(manifest), 0).length


class Swarm:
    """Replicas and one who leads them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._lead, *self._members = workers
        self._all = workers
        starts = [worker.answer() for worker in workers]
        self._leader: str = starts[0]["peer"]
        self._peers = [start["peer"] for start in starts[1:]]
        addresses = [start["address"] for start in starts[1:]]
        all_of(self._members, "connect", addresses=addresses)
        self._lead.ask("connect", addresses=addresses)
        self._codec = ""

    def use(self, codec: str) -> None:
        if codec != self._codec:
            run = {"manifest": tree(codec, self._leader), "order": self._peers}
            all_of(self._members, "begin", **run)
            self._lead.ask("begin", **run)
            self._codec = codec

    def average(self) -> Figures:
        self._lead.ask("hold")
        return self._with_cpu("average")

    def move(self) -> Figures:
        return self._with_cpu("move", codec=self._codec)

    def _with_cpu(self, what: str, **more: Any) -> Figures:
        before = sum(worker.cpu_s() for worker in self._all)
        found = self._lead.ask(what, **more)
        return {**found, "cpu_s": sum(worker.cpu_s() for worker in self._all) - before}


@contextmanager
def swarm(members: int) -> Iterator[Swarm]:
    kinds = [["scripts._averaging_lead"], *[["scripts._averaging_member"]] * members]
    with started(kinds) as workers:
        yield Swarm(workers)


@contextmanager
def other(kind: str, members: int) -> Iterator[Measure]:
    kinds = [["scripts._averaging_others", kind, length(), r, members] for r in range(members)]
    with started(kinds) as workers:
        for worker in workers:
            worker.answer()
        if kind == GLOO:
            all_of(workers, "connect", addresses=[])
        else:
            addresses: list[str] = []
            for worker in workers:
                addresses += worker.ask("connect", addresses=addresses)["addresses"]

        def average() -> Figures:
            for _ in range(AGAIN):
                answers = all_of(workers, "average")
                if all(answer["whole"] for answer in answers):
                    return {"seconds": max(answer["seconds"] for answer in answers)}
            raise RuntimeError(f"{kind}: not the mean of {members} vectors, {AGAIN} times")

        yield average


def measure(members: int, options: Options) -> dict[str, Any]:
    """All of it with so many replicas: for each codec, rounds in which all take their turn."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        ours = stack.enter_context(swarm(members))
        others: dict[str, Measure] = {}
        for kind in () if options.alone else (HIVEMIND, GLOO):
            others[kind] = stack.enter_context(other(kind, members))
        for codec in options.codecs:
            ours.use(codec)
            systems = {OURS: ours.average, FLOOR: ours.move, **others}
            found[codec] = in_turn(f"{members} replicas, {codec}", systems, options.runs)
    show(members, found)
    return found


def in_turn(what: str, systems: dict[str, Measure], runs: int) -> dict[str, Any]:
    rounds: list[dict[str, Figures]] = []
    progress = Progress(what)
    for turn in range(WARM_UP + runs):
        progress(f"round {turn + 1} of {WARM_UP + runs}")
        rounds.append({name: average() for name, average in systems.items()})
    progress.clear()
    rounds = rounds[WARM_UP:]
    return {
        "medians": {name: medians([r[name] for r in rounds]) for name in systems},
        "ours_by": {
            name: median([r[OURS]["seconds"] / r[name]["seconds"] for r in rounds])
            for name in systems
            if name != OURS
        },
        "rounds": rounds,
    }


def medians(figures: Sequence[Figures]) -> Figures:
    return {key: median([one[key] for one in figures]) for key in figures[0]}


def show(members: int, found: dict[str, Any]) -> None:
    """Milliseconds, and ours as a multiple of each of the others."""
    for codec, row in found.items():
        of, ours = row["medians"], row["medians"][OURS]
        to_vote = ours["prepare_s"] + ours["sum_s"]
        phases = f"{1e3 * to_vote:.0f} to the last vote, {1e3 * ours['decide_s']:.0f} to apply"
        print(f"\n{members} replicas, {codec}: {1e3 * ours['seconds']:.0f} ms ({phases})")
        cpu = ", {:.0f} ms of processor time".format
        for name, by in row["ours_by"].items():
            spent = cpu(1e3 * of[name]["cpu_s"]) if "cpu_s" in of[name] else ""
            print(f"  {by:5.2f} x {name} ({1e3 * of[name]['seconds']:.0f} ms{spent})")
        print(f"  {ours['cpu_s'] / of[FLOOR]['cpu_s']:5.2f} x the floor's processor time")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=whole, help="rounds [15; quick: 3]")
    parser.add_argument("--quick", action="store_true", help="3 rounds of fp32")
    parser.add_argument("--members", type=whole, action="append", help="repeatable [2 and 4]")
    parser.add_argument("--codec", action="append", choices=(*CODECS, "int64"), help="repeatable")
    parser.add_argument("--alone", action="store_true", help="without hivemind and gloo")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    usual = CODECS[:1] if flags.quick else CODECS
    options = Options(flags.runs or (3 if flags.quick else 15), flags.codec or usual, flags.alone)
    figures: dict[str, Any] = {"command": " ".join(sys.argv)}
    members = [str(number) for number in flags.members or (2, 4)]
    run_parts(members, lambda name: measure(int(name), options), figures, flags.json)


if __name__ == "__main__":
    main()
