"""Replicas that die, hang or refuse, and messages that get lost: it costs time, but no step."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import anyio
import pytest

from peers.faults import Cut, Delay, Drop, Duplicate, replies, requests
from tests.chaos.audit import Audit
from tests.chaos.harness import World, digits_manifest, reference, run_world

STEPS = 4
Scenario = Callable[[World], Awaitable[None]]
MANIFEST = digits_manifest(reproducible__enabled=True, start__replicas=2, periods__patience_s=1000)


@pytest.fixture(scope="module")
def expected():
    return reference(MANIFEST, STEPS)


def check(world: World, audit: Audit, expected) -> None:
    assert not audit.problems
    losses = [result.loss for result in expected.results]
    assert [done.loss for done in world.done] == pytest.approx(losses, rel=1e-5)
    assert world.sha256() == expected.sha256
    assert audit.applies >= 2 * STEPS


def run_with(trouble: Scenario, expected, *, replicas: int = 2, limit_s: float = 600.0) -> World:
    """Train while ``trouble`` runs beside it; it must end within ``limit_s`` of virtual time."""
    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=False))
        await world.start_all(replicas)
        world.tasks.start_soon(trouble, world)
        with anyio.fail_after(limit_s):
            await world.train(STEPS)

    world = run_world(MANIFEST, scenario)
    check(world, audits[0], expected)
    return world


@pytest.mark.parametrize("stage", [0, 1])
def test_a_replica_is_killed(stage: int, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        await world.kill(world.of_stage(stage)[0])

    world = run_with(trouble, expected)
    assert sum(done.resent for done in world.done) > 0
    assert any("was removed" in line for line in world.events)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_replica_is_killed_while_the_stage_averages(stage: int, expected) -> None:
    async def trouble(world: World) -> None:
        sent = anyio.Event()

        def seen(link, header) -> bool:
            if header["kind"] == "prepare" and header["stage"] == stage and len(world.done) == 1:
                sent.set()
            return False

        world.faults.add(seen, Drop())
        await sent.wait()
        await world.kill(world.of_stage(stage)[0])

    run_with(trouble, expected)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("seconds", [4.0, 60.0])
def test_a_replica_hangs_and_comes_back(stage: int, seconds: float, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        frozen = world.freeze(world.of_stage(stage)[0])
        await anyio.sleep(seconds)
        world.thaw(frozen)

    run_with(trouble, expected)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("seconds", [20.0, 200.0])
def test_a_whole_stage_hangs_and_comes_back(stage: int, seconds: float, expected) -> None:
    """All of it was removed; each is admitted to the step again, holding nothing."""

    async def trouble(world: World) -> None:
        await world.reaches(2)
        frozen = [world.freeze(peer) for peer in world.of_stage(stage)]
        await anyio.sleep(seconds)
        for rule in frozen:
            world.thaw(rule)

    run_with(trouble, expected)


@pytest.mark.parametrize("kind", ["decide", "vote", "prepare"])
def test_a_whole_stage_is_cut_off_at_the_end_of_a_step(kind: str, expected) -> None:
    async def trouble(world: World) -> None:
        first = anyio.Event()

        def seen(link, header) -> bool:
            if header["kind"] == kind and len(world.done) == 1:
                first.set()
            return False

        world.faults.add(seen, Drop())
        await first.wait()
        frozen = [world.freeze(peer) for peer in world.of_stage(1)]
        await anyio.sleep(60.0)
        for rule in frozen:
            world.thaw(rule)

    run_with(trouble, expected)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_replica_refuses(stage: int, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        await world.refuse(world.of_stage(stage)[0])

    run_with(trouble, expected)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_only_replica_of_a_stage_refuses_for_a_while(stage: int, expected) -> None:
    """Nobody asks and sends again without a pause."""

    async def trouble(world: World) -> None:
        await world.reaches(1)
        only = world.of_stage(stage)[0]
        await world.kill(world.of_stage(stage)[1])
        await world.refuse(only)
        await anyio.sleep(30.0)
        await world.obey(only)

    world = run_with(trouble, expected)
    assert sum(done.resent for done in world.done) < 8 * 40


LOSSES = {
    "a receipt is lost": (requests(kind="receipt"), 6),
    "a receipt's answer is lost": (replies(kind="receipt"), 6),
    "votes are lost": (requests(kind="vote"), 6),
    "the answer to a prepare is lost": (replies(kind="prepare"), 3),
    "a prepare is lost": (requests(kind="prepare"), 3),
    "a forward is lost": (requests(kind="forward"), 3),
    "the answer to a forward is lost": (replies(kind="forward"), 3),
    "a backward is lost": (requests(kind="backward"), 3),
    "the answer to a backward is lost": (replies(kind="backward"), 3),
    "parts are lost": (requests(kind="part"), 3),
    "sums are lost": (requests(kind="sum"), 3),
    "the answer to a sum is lost": (replies(kind="sum"), 3),
    "a decision is lost": (requests(kind="decide"), 1),
    "the answer to a decision is lost": (replies(kind="decide"), 1),
    "a cancel is lost": (requests(kind="cancel"), 1),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("action", [Drop(), Cut()], ids=["silently", "with a cut"])
def test_messages_are_lost(name: str, action: Drop | Cut, expected) -> None:
    matches, times = LOSSES[name]

    async def trouble(world: World) -> None:
        if "cancel" in name:
            world.faults.add(requests(kind="forward"), Drop(), times=2)
        world.faults.add(matches, action, times=times)

    run_with(trouble, expected)


LATE = ["prepare", "part", "sum", "decide", "reset", "cancel", "forward", "backward", "receipt"]


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("after_s", [0.02, 0.3])
def test_messages_come_twice_and_late(kind: str, after_s: float, expected) -> None:
    async def trouble(world: World) -> None:
        world.faults.add(requests(kind=kind), Duplicate(after_s), chance=0.5)
        world.faults.add(requests(kind=kind), Delay(after_s), chance=0.3)

    run_with(trouble, expected)


def test_adding_fails_half_way(expected) -> None:
    """The accumulators are dropped and it is reported; nothing is counted one and a half times."""
    failed: list[str] = []

    async def trouble(world: World) -> None:
        owner = world.of_stage(0)[0].stage
        add = owner._add
        calls = iter(range(1000))

        def half(book) -> None:
            if next(calls) == 5:
                owner.model.accumulators[: owner.model.length // 2] += 7
                failed.append("once")
                raise RuntimeError("out of memory")
            add(book)

        owner._add = half  # type: ignore[method-assign]

    run_with(trouble, expected)
    assert failed == ["once"]


@pytest.mark.parametrize("times", [0, 2])
def test_the_audit_sees_a_microbatch_that_is_not_counted_once(times: int) -> None:
    """Ledgers are right and all sums equal: only looking into them shows it."""

    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=True))
        await world.start_all(1)
        owner = world.of_stage(1)[0].stage
        add = owner._add

        def wrong(book) -> None:
            for _ in range(times if len(owner.ledger.held) == 3 else 1):
                gradients = owner.model._gradients
                add(book)
                owner.model._gradients = gradients

        owner._add = wrong  # type: ignore[method-assign]
        await world.train(1)

    run_world(digits_manifest(), scenario)
    assert audits[0].problems == ["stage 1: wrong sums of [3]"]


TRANSIENT = ["receipt", "vote", "prepare", "part", "sum", "forward", "backward", "decide", "cancel"]


def stir(world: World, rng: random.Random) -> None:
    """A mix of transient faults."""
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(TRANSIENT)
        way = rng.choice([requests, replies])
        delay = rng.choice([0.01, 0.1, 1.0, 7.0])
        action = rng.choice([Drop(), Cut(), Delay(delay), Duplicate(delay)])
        chance = rng.choice([0.05, 0.2])
        world.faults.add(way(kind=kind), action, chance=chance, times=rng.randint(1, 6))


@pytest.mark.parametrize("seed", range(30))
def test_a_mix_of_faults(seed: int, expected) -> None:
    """Odd seeds count microbatches in the sums, even ones compare bits with the reference."""
    counting = bool(seed % 2)
    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        rng = random.Random(seed)
        audits.append(Audit(world, counting=counting))
        await world.start_all(3)
        stir(world, rng)

        async def violence() -> None:
            for stage in range(2):
                await anyio.sleep(rng.random() * 0.3)
                victim = rng.choice(world.of_stage(stage))
                await rng.choice([freeze_for_a_while, world.kill, slow])(victim)

        async def freeze_for_a_while(victim) -> None:
            frozen = world.freeze(victim)
            await anyio.sleep(rng.choice([0.5, 8.0, 30.0]))
            world.thaw(frozen)

        async def slow(victim) -> None:
            victim.slow_down(rng.choice([3.0, 500.0]))

        world.tasks.start_soon(violence)
        with anyio.fail_after(3600):
            await world.train(STEPS)

    manifest = MANIFEST
    if counting:
        manifest = digits_manifest(start__replicas=3)
    world = run_world(manifest, scenario, seed=seed)
    assert not audits[0].problems
    assert audits[0].applies >= 2 * STEPS
    if not counting:
        check(world, audits[0], expected)


@pytest.mark.parametrize("step", [0, 2])
def test_a_replica_whose_optimizer_fails_joins_anew(step: int, expected) -> None:
    """Half of its weights may have moved, so it is at no mark any more; the others go on."""

    async def trouble(world: World) -> None:
        model = world.of_stage(1)[0].stage.model
        apply = model.apply
        calls = iter(range(1000))

        def half(total, update) -> None:
            if next(calls) == step:
                model.weights[: model.length // 2] += 1
                raise IndexError
            apply(total, update)

        model.apply = half  # type: ignore[method-assign]

    world = run_with(trouble, expected)
    failed = world.of_stage(1)[0]
    assert any("cannot apply" in line or "refused a decision" in line for line in world.events)
    assert failed.stage.mark in (None, world.trainer.mark)
