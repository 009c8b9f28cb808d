"""Replicas that come in the middle of a run: they copy the state piece by piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from peers import messages as msg
from peers.faults import Delay, Drop, Rate, requests
from peers.transport import Frame
from swarm.types import Stamp
from tests.chaos.harness import World, digits_manifest, reference, run_world
from tests.chaos.trouble import run_world_in

STEPS = 12
MANIFEST = digits_manifest(reproducible__enabled=True, limits__state_piece=64)
Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture(scope="module")
def expected():
    return reference(MANIFEST, STEPS)


def run_with(trouble: Scenario, expected, *, manifest=MANIFEST, steps: int = STEPS) -> World:
    return run_world_in(trouble, expected, manifest, steps=steps, replicas=1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_joiner_gets_in_and_counts_and_changes_no_result(stage: int, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(2)
        await world.start(stage)

    world = run_with(trouble, expected)
    new = world.of_stage(stage)[1]
    assert new.stage.mark == world.trainer.mark
    assert new.node.server.passes.counters.counted > 0
    assert new.stage.totals == world.trainer.totals
    assert new.stage.applied == world.trainer.applied


def state_for(peer: str):
    """What ``peer`` gets of the state and of sums."""
    kinds = ("get_state", "get_decided_sum", "get_digests")
    return lambda link, header: link.target == peer and link.is_reply and header["kind"] in kinds


def first_step_of(world: World, peer: str) -> int:
    """The first step in which ``peer`` has counted anything."""
    steps = [done.step for done in world.done if any(peer in counts for counts in done.counts)]
    return min(steps)


def counted_by(world: World, peer: str) -> int:
    return sum(counts.get(peer, 0) for counts in world.trainer.totals)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_joiner_whose_download_takes_20_steps_gets_in(stage: int) -> None:
    """Donors give slowly; the pieces that are there are kept up meanwhile."""
    rate, steps = 2800, 70
    manifest = digits_manifest(
        reproducible__enabled=True, limits__state_piece=64, limits__join_bytes_per_s=rate
    )

    async def trouble(world: World) -> None:
        await world.reaches(2)
        await world.start(stage)

    world = run_with(trouble, reference(manifest, steps), manifest=manifest, steps=steps)
    late = world.of_stage(stage)[1]
    download_s = 4 * 3 * late.stage.model.length / rate
    assert download_s > 20 * world.done[1].seconds
    assert first_step_of(world, late.peer_id) > 20
    assert late.stage.mark == world.trainer.mark


def test_a_joiner_with_too_slow_a_link_says_so_with_figures(expected) -> None:
    ends: list[str] = []

    async def trouble(world: World) -> None:
        await world.reaches(1)
        slow = await world.start(0, may_fail=ends)
        sum_bytes = 8 * slow.stage.model.length
        world.faults.add(state_for(slow.peer_id), Rate(0.6 * sum_bytes / world.done[0].seconds))

    many = 80
    run_with(trouble, reference(MANIFEST, many), steps=many)
    assert len(ends) == 1
    assert "kB/s" in ends[0]
    assert "cannot keep up" in ends[0]


def test_a_donor_that_dies_in_mid_download_costs_only_what_was_on_its_way() -> None:
    steps = 40
    manifest = MANIFEST.changed({"limits.join_bytes_per_s": 12000})

    async def trouble(world: World) -> None:
        await world.start(0)
        await world.start(0)
        await world.wait_for(0, 3)
        await world.reaches(2)
        await world.start(0)
        await anyio.sleep(1.0)
        await world.kill(world.of_stage(0)[1])

    world = run_with(trouble, reference(manifest, steps), manifest=manifest, steps=steps)
    late = world.of_stage(0)[3]
    assert counted_by(world, late.peer_id) > 0
    assert late.stage.mark == world.trainer.mark


def test_a_wrong_piece_is_found_and_taken_elsewhere(expected) -> None:
    """One donor gives wrong weights: digests of another replica show it."""
    spoilt: list[int] = []

    async def trouble(world: World) -> None:
        await world.start(0)
        await world.wait_for(0, 2)
        await world.reaches(1)
        donor = world.of_stage(0)[0].node.server.donor
        honest = donor._copy

        def lie(mark, place):
            found = honest(mark, place)
            if found is not None and place.start >= 64:
                spoilt.append(place.start)
                found[1][0][3] += 1
            return found

        donor._copy = lie  # type: ignore[method-assign]
        await world.start(0)

    many = 60
    world = run_with(trouble, reference(MANIFEST, many), steps=many)
    late = world.of_stage(0)[2]
    assert spoilt
    assert counted_by(world, late.peer_id) > 0
    assert late.stage.mark == world.trainer.mark
    assert any("pieces differ" in line for line in world.events)


@pytest.mark.parametrize("seconds", [0.4, 8.0])
def test_one_that_missed_a_decision_joins_anew(seconds: float, expected) -> None:
    """Deaf to everything at the end of a step: it is left behind, and is back soon."""

    async def trouble(world: World) -> None:
        await world.start(1)
        await world.wait_for(1, 2)
        await world.reaches(2)
        deaf = world.of_stage(1)[0]
        decided = anyio.Event()

        def seen(link, header) -> bool:
            if header["kind"] == "decide" and link.target == deaf.peer_id:
                decided.set()
                return True
            return False

        rule = world.faults.add(seen, Drop())
        await decided.wait()
        frozen = world.freeze(deaf)
        world.faults.remove(rule)
        await anyio.sleep(seconds)
        world.thaw(frozen)

    many = 60
    world = run_with(trouble, reference(MANIFEST, many), steps=many)
    deaf = world.of_stage(1)[0]
    assert deaf.stage.mark == world.trainer.mark
    assert any(deaf.peer_id in counts for counts in world.done[-1].counts)


def test_many_join_at_once_and_each_donor_gives_to_two(expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(world.start, 0)

    many = 60
    world = run_with(trouble, reference(MANIFEST, many), steps=many)
    for peer in world.of_stage(0):
        assert peer.stage.mark == world.trainer.mark
        assert counted_by(world, peer.peer_id) > 0


def test_restarted_with_the_same_key_it_is_a_member_again_within_30_s(expected) -> None:
    took: list[float] = []

    async def trouble(world: World) -> None:
        first = await world.start(0)
        await world.wait_for(0, 2)
        await world.reaches(1)
        await world.kill(first)
        again = await world.start(0, key=first.key)
        began = anyio.current_time()
        await world.until(lambda: again.node.me in world.trainer.ready(0))
        took.append(anyio.current_time() - began)

    many = 60
    run_with(trouble, reference(MANIFEST, many), steps=many)
    assert took[0] < 30


@pytest.mark.parametrize("phase", ["get_state", "get_decided_sum", "get_digests", "ready", "reset"])
def test_a_joiner_is_killed_at_any_point(phase: str, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        joiner = await world.start(1)
        reached = anyio.Event()

        def seen(link, header) -> bool:
            if header["kind"] == phase and joiner.peer_id in (link.source, link.target):
                reached.set()
            return False

        world.faults.add(seen, Drop())
        await reached.wait()
        await world.kill(joiner)

    manifest = MANIFEST.changed({"limits.join_bytes_per_s": 40000})
    many = 30
    run_with(trouble, reference(manifest, many), manifest=manifest, steps=many)


@pytest.mark.parametrize("kind", ["get_state", "get_decided_sum", "get_decision", "ready", "join"])
def test_what_a_joiner_needs_gets_lost_and_comes_late(kind: str, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        world.faults.add(requests(kind=kind), Drop(), times=3)
        world.faults.add(requests(kind=kind), Delay(0.5), chance=0.3, times=20)
        await world.start(0)

    many = 60
    world = run_with(trouble, reference(MANIFEST, many), steps=many)
    late = world.of_stage(0)[1]
    assert counted_by(world, late.peer_id) > 0


def test_a_join_that_comes_late_takes_nothing_from_a_member(expected) -> None:
    """It was sent before the reset that admitted it."""
    replies: list[dict] = []

    async def trouble(world: World) -> None:
        await world.reaches(3)
        server = world.of_stage(1)[0].node.server
        held, mark = set(server.host.stage.ledger.held), server.mark
        old = msg.Join(
            run=world.manifest.run_id,
            to=server.host.me.boot,
            stamp=Stamp(world.trainer.term, 1),
            mark=mark,
            members=[],
        )
        reply = await server.handle(world.trainer.me.peer, Frame(msg.header(old)))
        replies.append(dict(reply.header))
        assert server.mark == mark
        assert server.orders.joiner is None
        assert held <= set(server.host.stage.ledger.held)

    run_with(trouble, expected)
    assert replies[0]["kind"] == "at"


def test_an_admission_that_is_answered_after_the_decision_costs_nobody_a_removal():
    """Decisions are on their way for as long as such answers: one in some meets the other."""
    m = digits_manifest(stages__count=1)

    async def scenario(world: World) -> None:
        await world.start_all(2)
        lead = world.trainer.me.peer
        world.faults.add(lambda link, _: lead in (link.source, link.target), Delay(0.2))
        for _ in range(12):
            world.tasks.start_soon(world.start, 0)
            await world.train(4)

    world = run_world(m, scenario)
    assert sum("serves stage 0 at step" in event for event in world.events) > 10
    assert not [event for event in world.events if "removed" in event]
