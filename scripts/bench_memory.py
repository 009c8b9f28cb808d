#!/usr/bin/env python3
"""The memory of nodes at its peak, beside what the formula says (README, "Memory").

Each case is a swarm of real nodes that does some steps; a node's peak is its VmHWM. The formula:
a process that computes, the same for all, plus what ``swarm.model.memory`` counts for its stage.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import Progress, run_parts
from scripts._processes import Process, Swarm
from swarm.manifest import Manifest
from swarm.model.memory import MIB, Plan
from swarm.model.needs import stage_memories
from swarm.model.registry import model_spec

PROCESS = 400 * MIB
"""A node that serves nothing takes 355 MiB; torch's kernels are read in as it begins to compute."""
GRAPHS = 6
"""Kept at most: so few that they are in flight whatever the window."""
STEPS = 6
ASKED = 0.15


@dataclass(frozen=True, slots=True)
class Case:
    """A run. ``share``: of the memory that full speed takes, the budget; 0: no budget."""

    tree: dict[str, Any]
    replicas: int = 1
    share: float = 0.0
    quick: bool = field(default=False, compare=False)

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_tree({"name": "memory"}).changed(
            {"stages.count": 2, "run.steps": 100000, "run.eval_every": 0, "limits.graphs": GRAPHS}
            | self.tree
        )


ACTIVATIONS = {"model.d_model": 256, "model.layers": 8, "batch.microbatch": 8}
WEIGHTS = {
    "model.d_model": 640,
    "model.layers": 6,
    "model.heads": 8,
    "model.sequence": 64,
    "batch.microbatch": 2,
    "batch.microbatches": 8,
}
CASES = {
    "the default run": Case({}, quick=True),
    "activations": Case(ACTIVATIONS),
    "activations, half of the memory": Case(ACTIVATIONS, share=0.5),
    "activations, a sixth": Case(ACTIVATIONS, share=1 / 6, quick=True),
    "weights, 2 replicas": Case(WEIGHTS, replicas=2),
    "weights, 2 replicas, int8 averaging": Case({**WEIGHTS, "wire.averaging": "int8"}, replicas=2),
}


def measure(name: str) -> list[dict[str, Any]]:
    """One row for each node."""
    case = CASES[name]
    memories = stage_memories(case.manifest, model_spec(case.manifest))
    rows = []
    with Swarm(toml(case.manifest, case.replicas), Progress(name)) as swarm:
        out = swarm.folder / "out"
        swarm.follow(swarm.coordinator(swarm.manifest, "--out", out), out)
        swarm.wait_until_open()
        served: list[tuple[int, Plan, Process]] = []
        for _ in range(case.replicas):
            for stage, memory in enumerate(memories):
                plan, flags = memory.full, ()
                if case.share:
                    budget = max(memory.least, int(memory.total(memory.full) * case.share))
                    plan = memory.plan(budget) or plan
                    flags = ("--memory", budget / (1 << 30))
                served.append((stage, plan, swarm.node(stage, None, *flags)))
        swarm.wait_for_steps(STEPS, name)
        for stage, plan, process in served:
            peak, daemon = process.peaks
            told = PROCESS + memories[stage].total(plan)
            rows.append(
                {
                    "stage": stage,
                    "graphs": plan.graphs,
                    "checkpointing": plan.checkpointing,
                    "measured_bytes": peak,
                    "daemon_bytes": daemon,
                    "formula_bytes": told,
                    "ratio": peak / told,
                }
            )
    show(name, rows)
    return rows


def toml(manifest: Manifest, replicas: int) -> str:
    return manifest.changed({"start.replicas": replicas}).to_toml()


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(name)
    for row in rows:
        how = "checkpointing, " if row["checkpointing"] else ""
        print(
            f"  stage {row['stage']} ({how}{row['graphs']} graphs kept): "
            f"{row['measured_bytes'] / MIB:.0f} MiB, formula {row['formula_bytes'] / MIB:.0f}, "
            f"ratio {row['ratio']:.2f}; its p2pd {row['daemon_bytes'] / MIB:.0f} MiB",
            flush=True,
        )
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print(f"  {'within' if worst <= ASKED else 'NOT within'} {ASKED:.0%}: {worst:.1%} off at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two of the cases")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    names = [name for name, case in CASES.items() if case.quick or not options.quick]
    run_parts(names, measure, {}, options.json)


if __name__ == "__main__":
    main()
