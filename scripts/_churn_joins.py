"""How long joins and drains take, and what a download costs the others."""

from __future__ import annotations

import os
import random
from typing import Any

from scripts._bench import Progress, median
from scripts._churn import Options, Part, manifest, spread
from scripts._processes import SERVES, Process, Swarm
from scripts._steps import Step, rate

COPIES = "it copies the state"

JOIN = (
    ("process and imports", "entering the swarm"),
    ("entering", "this is 12D3"),
    ("building its stage", "waits for a trainer"),
    ("until the trainer knows it", COPIES),
    ("download, until work comes", SERVES),
)
"""The phases of a join, and what a node says at the end of each."""


def visits(options: Options) -> Part:
    """A third replica comes, serves, and leaves on SIGINT, again and again."""
    phases: dict[str, list[float]] = {}
    drains: list[float] = []
    spans: list[tuple[float, float]] = []
    rng = random.Random(options.seed)
    with Swarm(manifest(2), Progress("visits")) as swarm:
        swarm.open(2)
        for turn in range(options.rounds):
            stage = turn % 2
            for name, seconds in join_phases(swarm, swarm.node(stage), stage).items():
                phases.setdefault(name, []).append(seconds)
            swarm.wait_for_steps(2)
            swarm.rest(rng.uniform(0, swarm.metrics.steps[-1].seconds), "a moment in mid-step")
            spans.append(swarm.leave(swarm.nodes[-1][1]))
            drains.append(spans[-1][1] - spans[-1][0])
            swarm.wait_for_steps(3)
        step = median([s.seconds for s in swarm.undisturbed(*spans)])
    rows = [("start to serving", spread(phases["serving"]), f"a step takes {step:.2f} s")]
    rows += [(f"  {name}", spread(phases[name]), "") for name, _ in JOIN]
    counted = "end of the first step in which it counted"
    rows += [
        ("start to first counted", spread(phases["counted"]), counted),
        ("SIGINT to exit (drain)", spread(drains), f"a step takes {step:.2f} s"),
    ]
    title = f"visits: 2 stages x 2 replicas, a third comes and leaves; {options.rounds} times"
    return Part(title, rows, {"join_s": phases, "drain_s": drains, "step_s": step})


def join_phases(swarm: Swarm, node: Process, stage: int) -> dict[str, float]:
    """Seconds of each phase, until it serves, and until a step ended in which it has counted."""
    swarm.wait_until_says(node, SERVES)
    phases, last = {}, node.began
    for name, text in JOIN:
        at = node.said(text)
        if at is None:
            raise RuntimeError(f"{node.name} did not say {text!r}:\n{node.tail}")
        phases[name], last = at - last, at

    def counted() -> Step | None:
        later = (s for s in swarm.metrics.steps if s.ended > last)
        return next((s for s in later if s.figures["replicas"][stage] > 2), None)

    first = swarm.wait(counted, f"{node.name} to count")
    return {**phases, "serving": last - node.began, "counted": first.ended - node.began}


# -- download --------------------------------------------------------------------------------------

LARGE = """
[model]
d_model = 512
layers = 8
heads = 8
sequence = 64
"""
"""25 million parameters: a stage of two has a state of 150 MB, which is several steps' download."""


CALM = 4
"""Undisturbed steps before and after, of the same replicas."""


def download(options: Options) -> Part:
    """Throughput of the others in the steps during a download, and before and after it."""
    with Swarm(manifest(2, model=LARGE, batch=(1, 8)), Progress("download")) as swarm:
        swarm.open(2)
        swarm.wait_for_steps(CALM)
        rounds = [one_download(swarm) for _ in range(options.rounds)]
    ratios = [one["ratio"] for one in rounds if "ratio" in one]
    if not ratios:
        raise RuntimeError("no step lay within a download: the model is too small for this machine")
    steps = ", ".join(str(one["steps"]) for one in rounds)
    calm = median([one["calm"] for one in rounds])
    rows = [
        (
            "samples/s during a download",
            f"{median(ratios):.2f} (worst {min(ratios):.2f})",
            f"of {calm:.1f} samples/s right before and after; asked: at least 0.90",
        ),
        ("order to copy until it serves", spread([one["download_s"] for one in rounds]), ""),
        ("  whole steps in that time", steps, ""),
        (
            "  cores that the joiner took",
            f"{median([one['cores'] for one in rounds]):.2f}",
            f"of the {os.cpu_count()} that all share here",
        ),
    ]
    title = f"download: 2 stages x 2 replicas, 25 million parameters; {options.rounds} joiners"
    return Part(title, rows, {"ratios": ratios, "rounds": rounds})


def one_download(swarm: Swarm) -> dict[str, Any]:
    """A joiner comes, serves, and leaves. ``ratio`` is left out if no step fits in."""
    before = swarm.undisturbed()[-CALM:]
    node = swarm.node(0)
    began, cpu_s = swarm.wait_until_says(node, COPIES), node.cpu_s
    ended = swarm.wait_until_says(node, SERVES)
    cores = (node.cpu_s - cpu_s) / (ended - began)
    swarm.metrics.look()
    during = [s for s in swarm.metrics.steps if s.began >= began and s.ended <= ended]
    _, left = swarm.leave(node)
    swarm.wait_for_steps(CALM + 1)
    after = [s for s in swarm.undisturbed() if s.began > left][:CALM]
    calm = (rate(before) + rate(after)) / 2
    found = {"download_s": ended - began, "steps": len(during), "calm": calm, "cores": cores}
    return found | ({"ratio": rate(during) / calm, "during": rate(during)} if during else {})
