"""What a SIGKILL costs a run, and whether its losses stay those of one process."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

from scripts._bench import Progress, median
from scripts._churn import MICROBATCHES, Options, Part, manifest, spread
from scripts._processes import Process, Swarm
from scripts._steps import Step

ENOUGH = 3
"""Undisturbed steps of one kind that make a median; if there are fewer, those of others too."""


def kills(options: Options) -> Part:
    """Time lost per SIGKILL, and whether the losses are those of one process."""
    stages, replace_s = 3, 5.0
    with Swarm(manifest(stages), Progress("kills")) as swarm:
        swarm.open(stages)
        killed = kill_for_a_while(swarm, options, replace_s)
        swarm.next_step(killed[-1], 120)
        swarm.leave(swarm.leader)
        swarm.metrics.look()
        per_kill = [price(swarm, at, killed) for at in killed]
        steps = swarm.metrics.current
        apart = compare(swarm, len(steps))
        summary = json.loads((swarm.out / "summary.json").read_text())
    totals = summary["microbatches_by_peer"]
    counted = [sum(counts.values()) for counts in totals]
    wanted = MICROBATCHES * len(steps)
    lost = [one["lost_s"] for one in per_kill]
    beyond = [one["beyond_repeated_s"] for one in per_kill]
    base = median([one["undisturbed_s"] for one in per_kill])
    rows = [
        ("time lost per kill", spread(lost), f"an undisturbed step takes {base:.2f} s"),
        ("beyond the repeated work", spread(beyond), "of whole microbatches; aim: under 2 s"),
        (
            "kills, steps",
            f"{len(killed)}, {len(steps)}",
            f"{sum(s['resent'] for s in steps)} resent",
        ),
        ("counted in each stage", ", ".join(map(str, counted)), f"of {wanted} microbatches"),
        ("largest relative difference", f"{apart:.1e}", "loss of one process; asked: 1e-5"),
    ]
    title = (
        f"kills: 3 stages x 2 replicas, AdamW, fp32; a SIGKILL every {options.period:g} s for "
        f"{options.seconds:g} s, replaced {replace_s:g} s later"
    )
    figures = {
        "kills": per_kill,
        "loss_apart": apart,
        "counted": counted,
        "wanted": wanted,
        "steps": [
            {name: step[name] for name in ("seconds", "replicas", "resent")} for step in steps
        ],
    }
    return Part(title, rows, figures)


def kill_for_a_while(swarm: Swarm, options: Options, replace_s: float) -> list[float]:
    """Kill and replace; returns when. A stage's last replica is spared: that is ``recovery``."""
    rng = random.Random(options.seed)
    killed: list[float] = []
    due: list[tuple[float, int]] = []
    now = time.monotonic()
    end, next_kill = now + options.seconds, now + options.period
    while now < end:
        swarm.look(f"{len(killed)} kills, {end - now:.0f} s to go")
        while due and due[0][0] <= now:
            swarm.node(due.pop(0)[1])
        if now >= next_kill and (victims := spare(swarm)):
            stage, victim = rng.choice(victims)
            killed.append(swarm.kill(victim))
            due.append((killed[-1] + replace_s, stage))
            next_kill = now + options.period
        time.sleep(0.01)
        now = time.monotonic()
    if not killed:
        raise RuntimeError("nobody was killed: give more --seconds or a shorter --period")
    return killed


def spare(swarm: Swarm) -> list[tuple[int, Process]]:
    """Nodes that serve a stage which another one serves too."""
    return [(stage, node) for stage, node in swarm.serving() if len(swarm.serving(stage)) > 1]


def price(swarm: Swarm, at: float, killed: Sequence[float]) -> dict[str, Any]:
    """What the kill at ``at`` cost: the step in which it fell, and the next one if that sent
    something again too, beside undisturbed steps of the same kind."""
    steps = swarm.metrics.steps
    first = next(i for i, step in enumerate(steps) if step.ended >= at)
    hit = [steps[first], *(s for s in steps[first + 1 : first + 2] if s.figures["resent"])]
    calm = [
        s for s in steps if not s.figures["resent"] and not any(s.overlaps(k, k) for k in killed)
    ]
    serving, starting = kind(swarm, hit[0])
    alike = [s.seconds for s in calm if kind(swarm, s) == (serving, starting)]
    if len(alike) < ENOUGH:
        alike = [s.seconds for s in calm if kind(swarm, s)[1] == starting]
    if len(alike) < ENOUGH:
        alike = [s.seconds for s in calm]
    if not alike:
        raise RuntimeError("no step was undisturbed: give a longer --period")
    base = median(alike)
    resent = sum(step.figures["resent"] for step in hit)
    lost = sum(step.seconds - base for step in hit)
    return {
        "steps": [step.number for step in hit],
        "seconds": [step.seconds for step in hit],
        "serving": serving,
        "starting": starting,
        "undisturbed_s": base,
        "undisturbed_steps": len(alike),
        "kills_in_them": sum(hit[0].began <= k <= hit[-1].ended for k in killed),
        "resent": resent,
        "coordinator_said": swarm.leader.said_between(at, hit[-1].ended),
        "lost_s": lost,
        # Each microbatch that was sent again is taken as a whole one: at most that was repeated.
        "beyond_repeated_s": lost - base * resent / MICROBATCHES,
    }


def kind(swarm: Swarm, step: Step) -> tuple[int, bool]:
    """How many nodes served to the end of ``step``, and whether one was starting meanwhile, which
    takes CPU time from the others."""
    starting = any(step.overlaps(*span) for span in swarm.starting())
    return len(swarm.serving_at(step.ended)), starting


def compare(swarm: Swarm, steps: int) -> float:
    """The largest relative difference between the losses of the swarm and of one process."""
    out = swarm.folder / "reference"
    words = ("reference", swarm.out / "run.toml", "--steps", steps, "--out", out)
    process = swarm.start("reference", *words)

    def is_done() -> bool:
        path = out / "metrics.jsonl"
        count = path.read_text().count("\n") if path.exists() else 0
        swarm.progress(f"the reference, step {count} of {steps}")
        return process.code is not None

    while not is_done():
        time.sleep(0.1)
    if process.code != 0:
        raise RuntimeError(f"the reference failed:\n{process.tail}")
    theirs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    pairs = zip(swarm.metrics.current, theirs, strict=True)
    return max(abs(mine["loss"] / one["loss"] - 1) for mine, one in pairs)
