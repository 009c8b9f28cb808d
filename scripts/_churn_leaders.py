"""How long a run stands still when its coordinator, a whole stage, or everything dies."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from scripts._bench import Progress, median
from scripts._churn import MICROBATCHES, Options, Part, manifest, spread
from scripts._processes import SERVES, Swarm
from scripts._steps import Step

AT_EASE_S = 3.0
"""A standby has looked at the run a few times by then."""


def takeover(options: Options) -> Part:
    """SIGKILL of the coordinator with a standby; the dead one comes back as the next standby."""
    rng = random.Random(options.seed)
    with Swarm(manifest(2), Progress("takeover")) as swarm:
        swarm.open(2, 2, "--trainer", swarm.peer_id("b"))
        rounds = [one_takeover(swarm, rng, turn) for turn in range(options.rounds)]
    totals, decided = ([one[name] for one in rounds] for name in ("total_s", "decided_s"))
    base = median([one["step_s"] for one in rounds])
    sent = ", ".join(str(one["resent"]) for one in rounds)
    rows = [
        ("SIGKILL to next finished step", spread(totals), f"lease 15 s; a step takes {base:.2f} s"),
        ("  of which until it takes over", spread(decided), ""),
        ("  sent again in that step", sent, f"of {MICROBATCHES} microbatches"),
    ]
    title = f"takeover: 2 stages x 2 replicas, default periods; {options.rounds} times"
    return Part(title, rows, {"rounds": rounds})


def one_takeover(swarm: Swarm, rng: random.Random, turn: int) -> dict[str, Any]:
    """A standby comes, the leader is killed in mid-step, the standby is the leader."""
    node = swarm.wait(lambda: known_node(swarm), "the address of a node")
    out = swarm.folder / f"out-{turn + 1}"
    standby = swarm.coordinator("--standby", "--join", node, "--out", out, key="ba"[turn % 2])
    at_ease = swarm.wait_until_says(standby, "standing by for run") + AT_EASE_S
    swarm.rest(AT_EASE_S, "the standby to look")
    swarm.wait_for_steps(4)
    steps = swarm.undisturbed((standby.began, at_ease))
    swarm.rest(rng.uniform(0, steps[-1].seconds), "a moment in mid-step")
    killed = swarm.kill(swarm.leader)
    swarm.follow(standby, out)
    step = swarm.next_step(killed)
    swarm.wait_for_steps(2)
    return {
        "total_s": step.ended - killed,
        "decided_s": swarm.wait_until_says(standby, "taking over") - killed,
        "resent": step.figures["resent"],
        "step_s": median([step.seconds for step in steps]),
    }


def known_node(swarm: Swarm) -> str | None:
    """The address of a node, as the leader has written it down."""
    path = swarm.out / "peers.json"
    found = json.loads(path.read_text()) if path.exists() else []
    return found[0] if found else None


# -- recovery and resume ---------------------------------------------------------------------------

CHECKPOINT_EVERY = 10


def open_with_checkpoint(swarm: Swarm, rng: random.Random) -> None:
    """A run that has a checkpoint, and up to one period of steps since."""
    swarm.open(2)
    swarm.wait(lambda: swarm.leader.said("checkpoint of step"), "a checkpoint")
    swarm.wait_for_steps(rng.randrange(1, CHECKPOINT_EVERY - 2), "steps after the checkpoint")


def back_again(swarm: Swarm, since: float, done: int) -> tuple[Step, Step]:
    """The first step that ends after ``since``, and the one by which nothing is lost any more."""
    first = swarm.next_step(since)

    def look() -> Step | None:
        later = (s for s in swarm.metrics.steps if s.ended > since)
        return next((s for s in later if s.number >= done), None)

    return first, swarm.wait(look, "the step of before")


def recovery(options: Options) -> Part:
    """All replicas of one stage are killed and replaced at once."""
    text = manifest(2, checkpoint_every=CHECKPOINT_EVERY, patience_s=options.patience_s)
    with Swarm(text, Progress("recovery")) as swarm:
        open_with_checkpoint(swarm, random.Random(options.seed))
        base = median([s.seconds for s in swarm.undisturbed()])
        swarm.metrics.look()
        done = len(swarm.metrics.current)
        killed = max(swarm.kill(node) for _, node in swarm.serving(1))
        for _ in range(2):
            swarm.node(1)
        first, again = back_again(swarm, killed, done)
        gave_up = (swarm.leader.said("the run goes back", killed) or killed) - killed
    lost = done - first.number
    rows = [
        (
            "SIGKILLs to next finished step",
            f"{first.ended - killed:.1f} s",
            f"patience {options.patience_s:g} s; a step takes {base:.2f} s",
        ),
        ("  of which until it goes back", f"{gave_up:.1f} s", ""),
        ("steps lost", str(lost), f"a checkpoint every {CHECKPOINT_EVERY} steps"),
        ("until these are done again", f"{again.ended - killed:.1f} s", ""),
    ]
    figures = {
        "next_step_s": first.ended - killed,
        "gave_up_s": gave_up,
        "steps_lost": lost,
        "again_s": again.ended - killed,
        "step_s": base,
    }
    return Part("recovery: 2 stages x 2 replicas, all of one stage killed", rows, figures)


def resume(options: Options) -> Part:
    """All processes are killed; the coordinator and the nodes are started again."""
    text = manifest(2, checkpoint_every=CHECKPOINT_EVERY)
    with Swarm(text, Progress("resume")) as swarm:
        open_with_checkpoint(swarm, random.Random(options.seed))
        base = median([s.seconds for s in swarm.undisturbed()])
        swarm.metrics.look()
        done, before = len(swarm.metrics.current), swarm.serving()
        swarm.kill(swarm.leader)
        for _, node in before:
            swarm.kill(node)
        leader = swarm.coordinator("--resume", swarm.out)
        swarm.follow(leader, swarm.out)
        swarm.wait_until_open()
        opened = time.monotonic() - leader.began
        for stage, node in before:
            swarm.node(stage, node.name)
        first, again = back_again(swarm, leader.began, done)
        last_serves = max(node.said(SERVES) or 0.0 for _, node in swarm.serving())
    lost, total = done - first.number, first.ended - leader.began
    rows = [
        ("start to next finished step", f"{total:.1f} s", f"lease 15 s; a step takes {base:.2f} s"),
        ("  of which until it is open", f"{opened:.1f} s", "then the nodes are started"),
        ("  until the last node serves", f"{last_serves - leader.began:.1f} s", ""),
        ("steps lost", str(lost), f"a checkpoint every {CHECKPOINT_EVERY} steps"),
        ("until these are done again", f"{again.ended - leader.began:.1f} s", ""),
    ]
    figures = {
        "next_step_s": total,
        "open_s": opened,
        "serve_s": last_serves - leader.began,
        "steps_lost": lost,
        "again_s": again.ended - leader.began,
        "step_s": base,
    }
    return Part("resume: 2 stages x 2 replicas, all processes killed", rows, figures)
