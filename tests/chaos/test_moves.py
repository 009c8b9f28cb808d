"""Replicas move to the stage that lacks them, on virtual time, with the real nodes and trainer."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from itertools import product

import anyio
import pytest
import trio

from dht.memory import MemoryDirectory
from dht.records import stage_key
from peers.faults import Drop, requests
from peers.leading import Start
from swarm.core.rebalancing import Need
from swarm.manifest import Manifest
from tests.chaos.audit import Audit
from tests.chaos.harness import Peer, World, digits_manifest, reference, run_world
from tests.chaos.realm import MemoryCheckpoints, Realm, run_realm

PERIOD_S = 1.0
EQUAL = [Need(1.0), Need(1.0)]


def manifest(**changes: object) -> Manifest:
    common: dict[str, object] = {
        "reproducible__enabled": True,
        "run__steps": 10_000,
        "rebalancing__period_s": PERIOD_S,
        "periods__announce_s": 0.5,
        "periods__watch_s": 0.2,
        "periods__renew_s": 1.0,
        "periods__lease_s": 3.0,
        "periods__patience_s": 6.0,
        "periods__drain_s": 10.0,
    }
    return digits_manifest(**(common | changes))


MANIFEST = manifest()


def counts(world: World) -> list[int]:
    return [len(world.trainer.ready(stage)) for stage in range(world.trainer.stages)]


def moves(world: World) -> list[str]:
    """As the trainer tells them."""
    return [e for e in world.events if " moves to stage " in e and not e.startswith("node ")]


def mover(world: World) -> Peer:
    """Who was let go last."""
    name = moves(world)[-1].split()[0]
    return next(peer for peer in world.peers.values() if peer.peer_id.endswith(name))


async def start(world: World, replicas: list[int], **how: float) -> None:
    world.may_move([Need(1.0)] * len(replicas))
    for stage, count in enumerate(replicas):
        for _ in range(count):
            await world.start(stage, **how)
    await world.trainer.wait_for_start()


async def train_until(world: World, condition: Callable[[], bool], *, limit: int = 400) -> None:
    for _ in range(limit):
        if condition():
            return
        await world.train(1)
    pytest.fail(f"after {limit} steps: {world.events[-20:]}")


async def train_for(world: World, seconds: float) -> None:
    until = anyio.current_time() + seconds
    await train_until(world, lambda: anyio.current_time() >= until)


def assert_equals_reference(world: World, m: Manifest) -> None:
    found = reference(m, len(world.done))
    assert [done.loss for done in world.done] == [step.loss for step in found.results]
    assert world.sha256() == found.sha256


def test_a_stage_that_lost_most_of_its_replicas_gets_one_from_another():
    async def scenario(world: World) -> None:
        await start(world, [3, 3])
        await world.train(3)
        for peer in world.of_stage(1)[:2]:
            await world.kill(peer)
        await train_until(world, lambda: counts(world) == [2, 2])
        await world.train(3)

    world = run_world(MANIFEST, scenario)
    assert len(moves(world)) == 1
    assert (
        "moves to stage 1 after this step: stage 1 does 133 samples/s, stage 0" in moves(world)[0]
    )
    assert_equals_reference(world, MANIFEST)


def test_two_nodes_both_begin_at_stage_0_and_one_moves():
    async def scenario(world: World) -> None:
        await start(world, [2, 0])
        await world.train(3)
        assert counts(world) == [1, 1]

    world = run_world(MANIFEST, scenario)
    assert len(moves(world)) == 1
    assert "moves to stage 1 now: stage 1 has 0 replicas, stage 0 2" in moves(world)[0]
    assert_equals_reference(world, MANIFEST)


# -- a directory that is wrong ---------------------------------------------------------------


def test_a_stale_directory_costs_no_move_that_is_undone():
    """Six over three stages, 4/1/1, by records that are 5 s old."""
    m = manifest(
        stages__count=3, rebalancing__period_s=10, periods__announce_s=2, periods__watch_s=2
    )
    settled_at: list[float] = []

    async def watch(world: World) -> None:
        while True:
            await anyio.sleep(0.5)
            trainer = world.trainer
            for stage in range(3):
                assert any(trainer.roster.ready(stage, mark) for mark in trainer.marks)

    async def scenario(world: World) -> None:
        await start(world, [4, 1, 1], unit_s=0.5)
        world.tasks.start_soon(watch, world)
        await train_until(world, lambda: counts(world) == [2, 2, 2])
        settled_at.append(anyio.current_time())
        assert len(moves(world)) == 2
        await train_for(world, 600.0)
        assert counts(world) == [2, 2, 2]

    world = run_world(m, scenario, staleness_s=5.0)
    assert settled_at[0] < 300
    assert len(moves(world)) == 2
    assert_equals_reference(world, m)


def test_a_stage_whose_records_are_hidden_is_not_empty():
    m = manifest(periods__record_ttl_s=5)
    hidden: list[str] = []
    done: list[int] = []

    async def scenario(world: World) -> None:
        shown = world.store.get
        world.store.get = lambda key, *, now: {} if key in hidden else shown(key, now=now)  # type: ignore[method-assign]
        await start(world, [3, 2], unit_s=0.05)
        await world.train(3)
        hidden.append(stage_key(world.manifest.run_id, 1))
        done.append(len(world.done))
        await train_for(world, 30.0)
        done.append(len(world.done))
        hidden.clear()
        await train_for(world, 10.0)
        assert counts(world) == [3, 2]

    world = run_world(m, scenario)
    assert moves(world) == []
    assert any("would move to stage 1 (stage 1 has nobody); not now" in e for e in world.events)
    assert done[1] - done[0] > 20
    assert_equals_reference(world, m)


def test_a_node_whose_record_vanishes_announces_itself_again(monkeypatch, caplog):
    """For ten minutes half of all that is asked of the directory fails, too."""
    m = manifest(rebalancing__period_s=10, periods__announce_s=2, periods__watch_s=2)

    async def scenario(world: World) -> None:
        store, coin = world.store, random.Random(0)
        await start(world, [2, 2], unit_s=0.5)
        await world.train(1)
        key, peer = stage_key(world.manifest.run_id, 1), world.of_stage(1)[0].peer_id
        del store._versions[key][peer]
        await train_for(world, 2.5)
        assert peer in store.get(key, now=anyio.current_time())
        get, announce = store.get, MemoryDirectory.announce

        async def half_announce(*args, **how) -> bool:
            return coin.random() < 0.5 and await announce(*args, **how)

        monkeypatch.setattr(MemoryDirectory, "announce", half_announce)
        store.get = lambda key, *, now: get(key, now=now) if coin.random() < 0.5 else {}
        await train_for(world, 600.0)
        assert counts(world) == [2, 2]

    world = run_world(m, scenario)
    assert moves(world) == []
    warnings = [r for r in caplog.records if "nobody stored our announcement" in r.getMessage()]
    assert 4 < len(warnings) <= 4 * 11, "of each node at most one a minute"
    assert_equals_reference(world, m)


# -- movers that come to grief ---------------------------------------------------------------


def train_meanwhile(world: World) -> None:
    world.tasks.start_soon(world.train, 10_000)


async def settle(world: World, want: list[int], *, seconds: float = 300.0) -> None:
    """The stages have ``want`` replicas in time, and the run goes on with them."""
    with anyio.fail_after(seconds):
        await world.until(lambda: counts(world) == want)
        await world.reaches(len(world.done) + 4)


def assert_losses_equal_reference(world: World) -> None:
    found = reference(MANIFEST, len(world.done))
    assert [done.loss for done in world.done] == [step.loss for step in found.results]


async def first_move(world: World) -> Peer:
    """Somebody has been let go; the step under way goes on."""
    await until_at_once(lambda: bool(moves(world)))
    return mover(world)


async def until_at_once(condition: Callable[[], bool]) -> None:
    """Look all the time, but not for ever."""
    with anyio.fail_after(60.0):
        while not condition():  # noqa: ASYNC110 (virtual time)
            await anyio.sleep(0.005)


def test_a_mover_is_killed_while_it_drains():
    async def scenario(world: World) -> None:
        await start(world, [4, 1])
        train_meanwhile(world)
        victim = await first_move(world)
        assert victim.node.stage == 0
        await world.kill(victim)
        await settle(world, [2, 2])
        assert len(moves(world)) == 2

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


def test_a_mover_is_killed_when_it_has_left_and_does_not_serve_yet():
    """It counts where it was going, until that has taken too long."""

    async def scenario(world: World) -> None:
        await start(world, [4, 1])
        train_meanwhile(world)
        victim = await first_move(world)
        await until_at_once(lambda: victim.node.stage == 1)
        assert victim.node.me not in world.trainer.ready(1)
        await world.kill(victim)
        await settle(world, [2, 2])

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


def test_a_mover_whose_goodbye_is_lost_counts_once():
    async def scenario(world: World) -> None:
        await start(world, [5, 1])
        world.faults.add(requests(kind="goodbye"), Drop())
        train_meanwhile(world)
        await settle(world, [3, 3])
        assert len(moves(world)) == 2

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


def test_one_that_has_not_heard_that_it_may_go_gets_work_again():
    """All answers to its wish are lost, and then it wants nothing any more."""

    async def scenario(world: World) -> None:
        await start(world, [3, 1])
        lost = world.faults.add(
            lambda link, header: header["kind"] == "leave" and link.is_reply, Drop()
        )
        train_meanwhile(world)
        deaf = await first_move(world)
        member = world.trainer.roster.get(deaf.node.me)
        assert member is not None
        assert member.leaving
        for peer in world.peers.values():
            peer.node._moving.cancel()
        with anyio.fail_after(60.0):
            await world.until(lambda: not member.leaving)
        world.faults.remove(lost)
        before = deaf.node.server.passes.counters.counted
        await settle(world, [3, 1])
        assert deaf.node.server.passes.counters.counted > before
        refused = world.trainer.moves.refusal(member, 1)
        assert "its last move came to nothing; not again for" in refused

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


def is_over(peer: Peer) -> bool:
    return peer.node.server is not None and peer.node.server.orders.finished.is_set()


def test_its_owner_wants_it_to_leave_while_it_drains_for_a_move():
    async def scenario(world: World) -> None:
        await start(world, [3, 1])
        train_meanwhile(world)
        leaver = await first_move(world)
        leaver.node.leave()
        with anyio.fail_after(MANIFEST.periods.drain_s):
            await world.until(lambda: is_over(leaver))
        assert leaver.node.moves_to is None
        assert leaver.node.stage == 0
        await settle(world, [2, 1])
        assert any("leaves after this step" in e for e in world.events)

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


def test_its_mates_die_while_it_drains_and_it_stays():
    async def scenario(world: World) -> None:
        await start(world, [3, 1])
        train_meanwhile(world)
        last = await first_move(world)
        for peer in world.of_stage(0):
            if peer is not last:
                await world.kill(peer)
        await settle(world, [1, 1])
        assert last.node.stage == 0
        assert not world.trainer.roster.get(last.node.me).leaving
        await world.reaches(len(world.done) + 2)
        assert last.peer_id in world.done[-1].counts[0]
        assert any(
            "stays after all: no other replica of its stage is there" in e for e in world.events
        )

    assert_losses_equal_reference(run_world(MANIFEST, scenario))


# -- trainers and stages that are lost ---------------------------------------------------------

STEPS = 12
REALM = manifest(run__steps=STEPS, run__checkpoint_every=3)


async def start_realm(
    realm: Realm,
    replicas: list[int],
    disk: MemoryCheckpoints | None = None,
    *,
    unit_s: float = 0.01,
) -> None:
    realm.needs = EQUAL
    realm.seat(disk=disk)
    for stage, count in enumerate(replicas):
        for _ in range(count):
            await realm.start(stage, unit_s=unit_s)


def run_to_its_end(scenario: Callable[[Realm], Awaitable[None]]) -> Realm:
    """All steps count once, and end in the bits of the reference."""
    audits: list[Audit] = []

    async def audited(realm: Realm) -> None:
        audits.append(Audit(realm, counting=False))
        await scenario(realm)
        with anyio.fail_after(600.0):
            await realm.finished.wait()

    realm = run_realm(REALM, audited)
    found = reference(REALM, STEPS)
    assert not audits[0].problems
    assert realm.weights == found.sha256
    assert [realm.losses[t] for t in range(STEPS)] == [step.loss for step in found.results]
    whole = REALM.batch.microbatches * STEPS
    assert [sum(of_stage.values()) for of_stage in realm.totals] == [whole] * 2
    return realm


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_stage_loses_its_only_peer_and_one_of_another_takes_its_place(with_checkpoint: bool):
    """What it held is gone: all go back to the checkpoint, or to the beginning."""

    async def scenario(realm: Realm) -> None:
        await start_realm(realm, [2, 1], MemoryCheckpoints() if with_checkpoint else None)
        await realm.reaches(5)
        await realm.kill(realm.of_stage(1)[0])

    realm = run_to_its_end(scenario)
    told = [event for event in realm.events if " seat 1: " in event]
    assert any("(stage 1) was removed" in event for event in told)
    assert any("moves to stage 1 now: " in event for event in told)
    assert any("stage 1 has lost all its replicas for 6 s" in event for event in told)
    assert [mark.t for mark in realm.seats[0].reigns] == [3 if with_checkpoint else 0]


def stages(realm: Realm) -> list[int]:
    return [len(realm.of_stage(stage)) for stage in range(2)]


def moves_of(realm: Realm) -> list[str]:
    return [e for e in realm.events if " seat " in e and " moves to stage " in e]


def test_the_trainer_is_killed_while_a_move_is_granted_and_a_standby_takes_over():
    async def scenario(realm: Realm) -> None:
        await start_realm(realm, [4, 1], unit_s=0.2)  # so that there is time for all that
        realm.seat(Start.STANDBY, key=2)
        await until_at_once(lambda: bool(moves_of(realm)))
        await realm.kill_seat(realm.seats[0])
        await realm.until(lambda: realm.leading() is realm.seats[1])
        await realm.until(lambda: stages(realm) == [3, 2])
        lost = realm.of_stage(1)[0]
        await realm.kill(lost)
        realm.peers = {name: one for name, one in realm.peers.items() if one is not lost}
        await realm.until(lambda: stages(realm) == [2, 2])

    realm = run_to_its_end(scenario)
    assert any(" seat 2: " in event for event in moves_of(realm))


# -- what fits ------------------------------------------------------------------------------


def test_one_with_too_little_memory_is_not_sent_where_it_does_not_fit():
    async def scenario(world: World) -> None:
        world.may_move([Need(1.0, 10), Need(1.0, 1000)])
        for memory in (100, 100, 100):
            await world.start(0, memory_bytes=memory)
        await world.start(1, memory_bytes=1000)
        await world.trainer.wait_for_start()
        await train_for(world, 10 * PERIOD_S)
        assert moves(world) == []
        large = await world.start(0, memory_bytes=1000)
        await train_until(world, lambda: counts(world) == [3, 2])
        assert mover(world) is large
        await train_for(world, 10 * PERIOD_S)
        assert len(moves(world)) == 1

    assert_equals_reference(run_world(MANIFEST, scenario), MANIFEST)


UNITS_S = [0.01, 0.015, 0.1, 0.02, 0.05, 0.04]


def rate(units_s: list[float], stages: tuple[int, ...]) -> float:
    """Of the slower of two stages, where the peer of each unit is at the stage beside it."""
    return min(sum(1 / u for u, s in zip(units_s, stages, strict=True) if s == i) for i in (0, 1))


def test_peers_of_which_some_are_ten_times_faster_end_at_a_good_assignment():
    async def scenario(world: World) -> None:
        world.may_move(EQUAL)
        for stage, unit_s in zip((0, 0, 1, 0, 1, 1), UNITS_S, strict=True):
            await world.start(stage, unit_s=unit_s)
        await world.trainer.wait_for_start()
        await train_for(world, 25.0)
        settled = len(moves(world))
        await train_for(world, 20.0)
        assert len(moves(world)) == settled
        found = tuple(peer.node.stage for peer in world.peers.values())
        best = max(rate(UNITS_S, stages) for stages in product((0, 1), repeat=len(UNITS_S)))
        assert rate(UNITS_S, found) >= 0.9 * best
        assert rate(UNITS_S, (0, 0, 1, 0, 1, 1)) < 0.6 * best

    world = run_world(manifest(batch__microbatches=16), scenario)
    assert 0 < len(moves(world)) <= 4


# -- nothing is left behind -------------------------------------------------------------------


def test_a_node_that_moves_twenty_times_leaves_nothing_behind():
    m = manifest(stages__count=3, rebalancing__period_s=0.5)
    owners: list[weakref.ref[object]] = []
    held: list[dict[str, int]] = []

    async def scenario(world: World) -> None:
        world.may_move([Need(1.0, 10)] * 3)
        for stage in (0, 1, 2):
            for _ in range(2):
                await world.start(stage, memory_bytes=1)  # fits nowhere else
        wanderer = await world.start(0, memory_bytes=10)
        await world.trainer.wait_for_start()
        at = 0
        for number in range(21):
            owners.append(weakref.ref(wanderer.stage))
            at = (at + 1 + number % 2) % 3
            for peer in world.peers.values():
                peer.unit_s = 0.03 if peer.node.stage == at else 0.01
            await train_until(world, lambda at=at: len(world.trainer.ready(at)) == 3)  # type: ignore[misc]
            await world.train(2)
            held.append(holds(world))

    world = run_world(m, scenario)
    gc.collect()
    assert len(moves(world)) == 21
    assert sum(ref() is not None for ref in owners) == 0
    assert held[-1] == held[0]
    assert_equals_reference(world, m)


def holds(world: World) -> dict[str, int]:
    """What the swarm holds on to, by name."""
    trainer = world.trainer
    return {
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "peers on the network": len(world.network._peers),
        "members": len(trainer.roster.all()),
        "records": len(trainer.moves._records),
        "servers": sum(len(trainer.wiring.loads(stage)) for stage in range(trainer.stages)),
    }
