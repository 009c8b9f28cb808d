"""A stage within a budget of memory: which plan, what is said, and the same bits."""

from __future__ import annotations

import pytest
import torch

from peers.budget import enough, planned
from peers.stage import StageOwner
from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.memory import MIB, Plan, StageMemory
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel
from swarm.types import FRESH, Attempt, Stamp, Term

MEMORY = StageMemory(
    vectors=100 * MIB,
    inputs=10 * MIB,
    graphs=4,
    saved=40 * MIB,
    layer_inputs=4 * MIB,
    largest=10 * MIB,
)
LAST = StageMemory(
    vectors=50 * MIB, inputs=10 * MIB, graphs=0, saved=40 * MIB, layer_inputs=4 * MIB, largest=MIB
)


@pytest.mark.parametrize(
    ("mib", "plan"),
    [
        (100 + 10 + 4 * 40 + 50, Plan(4)),
        (100 + 10 + 4 * 40 + 49, Plan(3)),
        (100 + 10 + 50, Plan(0)),
        (100 + 10 + 49, Plan(3, checkpointing=True)),
        (100 + 10 + 34 + 7, Plan(1, checkpointing=True)),
        (100 + 10 + 34, Plan(0, checkpointing=True)),
        (100 + 10 + 33, None),
    ],
)
def test_the_plan_computes_as_little_twice_as_fits(mib: int, plan: Plan | None):
    assert MEMORY.plan(mib * MIB) == plan
    if plan is not None:
        assert MEMORY.total(plan) <= mib * MIB


def test_the_least_is_where_plans_begin():
    for memory in (MEMORY, LAST):
        assert memory.plan(memory.least) is not None
        assert memory.plan(memory.least - 1) is None


def test_where_checkpointing_saves_nothing_it_is_not_the_least():
    one_layer = StageMemory(0, 0, 1, saved=10, layer_inputs=10, largest=10)
    assert one_layer.least == one_layer.total(Plan(0)) == 20
    assert one_layer.plan(20) == Plan(0)


def test_enough_memory_needs_no_word():
    said: list[str] = []
    assert planned(0, [MEMORY], 1000 * MIB, said.append) == MEMORY.full
    assert said == []


def test_fewer_graphs_and_checkpointing_are_said_with_figures():
    said: list[str] = []
    planned(0, [MEMORY], 290 * MIB, said.append)
    planned(1, [MEMORY, LAST], 80 * MIB, said.append)
    assert said == [
        "keeps 3 graphs of 4, the others are computed again: stage 0 would take 320 MiB: weights, "
        "optimizer and sums 100 MiB, inputs 10.0 MiB, 4 graphs of 40.0 MiB, a pass 50.0 MiB",
        "activation checkpointing is on: stage 1 would take 101 MiB: weights, optimizer and sums "
        "50.0 MiB, inputs 10.0 MiB, 0 graphs of 40.0 MiB, a pass 41.0 MiB; now 67.0 MiB: weights, "
        "optimizer and sums 50.0 MiB, inputs 10.0 MiB, 0 graphs of 4.0 MiB, a pass 7.0 MiB",
    ]


def test_a_stage_that_cannot_fit_is_refused_with_figures():
    with pytest.raises(ConfigError) as caught:
        planned(0, [MEMORY, LAST], 100 * MIB, print)
    assert str(caught.value) == (
        "--memory: got '100 MiB'; allowed: stage 0 takes at least 144 MiB: weights, optimizer and "
        "sums 100 MiB, inputs 10.0 MiB, 0 graphs of 4.0 MiB, a pass 34.0 MiB; give it more with "
        "--memory, or the run more stages or a smaller batch.microbatch"
    )


def test_who_fits_nowhere_is_told_the_smallest_stage():
    assert enough([MEMORY, LAST], LAST.least) == LAST.least
    with pytest.raises(ConfigError, match="enough for a stage; the smallest, stage 1 takes at"):
        enough([MEMORY, LAST], LAST.least - 1)


# -- the same bits ----------------------------------------------------------------------------


def manifest(**more: object) -> Manifest:
    small = {"model.layers": 2, "model.d_model": 16, "model.heads": 2, "model.sequence": 8}
    return Manifest.from_tree({}).changed(
        {**small, "batch.microbatch": 2, "batch.microbatches": 2, "stages.count": 2, **more}
    )


@pytest.mark.parametrize("more", [{}, {"reproducible.enabled": True}, {"model.autocast": "bf16"}])
def test_checkpointing_changes_no_bit(more: dict[str, object]):
    m = manifest(**more)
    spec = model_spec(m)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (2, 8), generator=random).to(torch.uint8)
    found = []
    for checkpointing in (False, True):
        first, last = (StageModel(m, spec, s, checkpointing=checkpointing) for s in (0, 1))
        hidden, graph = first.forward(tokens)
        loss, end = last.forward_loss(hidden, tokens)
        gradient = last.backward(end, None)
        last.accumulate()
        first.backward(graph, gradient)
        first.accumulate()
        assert gradient is not None
        found.append((loss, hidden, gradient, first.accumulators, last.accumulators))
    plain, again = found
    assert plain[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], again[1:], strict=True))
    assert plain[3].abs().sum() > 0


def test_checkpointing_saves_the_inputs_of_layers_only():
    m, kept = manifest(), []
    spec = model_spec(m)
    tokens = torch.zeros(2, 8, dtype=torch.uint8)
    for checkpointing in (False, True):
        saved: dict[int, tuple[torch.Tensor, int]] = {}
        model = StageModel(m, spec, 0, checkpointing=checkpointing)

        def keep(tensor: torch.Tensor, saved: dict[int, tuple[torch.Tensor, int]] = saved):
            saved[tensor.data_ptr()] = tensor, tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model.forward(tokens)
        kept.append(sum(size for _, size in saved.values()))
    assert kept[1] < kept[0] / 4


def test_a_stage_keeps_as_many_graphs_as_planned_and_computes_the_others_again():
    m = manifest(**{"batch.microbatches": 3})
    spec = model_spec(m)
    tokens = torch.zeros(2, 8, dtype=torch.uint8)
    attempts = [Attempt(Stamp(Term(1, "00" * 8), n), FRESH, n, frozenset({0, 1})) for n in range(3)]
    sums = []
    for plan in (None, Plan(1), Plan(0, checkpointing=True)):
        owner = StageOwner(m, spec, 0, plan=plan)
        owner.begin()
        for attempt in attempts:
            passed = owner.forward(attempt, tokens, keep=True)
            assert passed.output is not None
        for attempt in attempts:
            assert owner.backward(attempt, torch.ones_like(passed.output)).verdict == "counted"
        sums.append(owner.model.accumulators)
    assert all(torch.equal(total, sums[0]) for total in sums[1:])
