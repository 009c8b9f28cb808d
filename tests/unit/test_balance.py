"""What directory records make of the swarm, how a newcomer chooses, what a node says of itself."""

from __future__ import annotations

import random

import anyio
import pytest

from dht.identity import Identity
from dht.memory import MemoryDirectory, MemoryDirectoryStore
from dht.records import PeerRecord, PeerState, TrainerRecord, TrainerState, encode, stage_key
from peers.balance import GIB, Meter, choose_stage, free_memory, look, settings_of, view_of
from peers.passes import Counters
from swarm.core.rebalancing import Move, Need, Settings, Stay, best_move
from swarm.manifest import Manifest

KEYS = [Identity.generate() for _ in range(4)]
MANIFEST = Manifest.from_tree({}).changed(
    {"stages.count": 2, "start.replicas": 2, "rebalancing.gain": 0.2}
)
BOOT = "00ff" * 4
NEEDS = [Need(1.0, 3 * GIB), Need(1.0, 2 * GIB)]
STATES = (PeerState.WAITING, PeerState.JOINING, PeerState.READY, PeerState.DRAINING)


def record(number: int, stage: int, **changes: object) -> PeerRecord:
    fields: dict[str, object] = {
        "peer": KEYS[number].peer_id,
        "run_id": MANIFEST.run_id,
        "boot": BOOT,
        "stage": stage,
        "state": PeerState.READY,
        "version": "1",
    }
    return PeerRecord(**(fields | changes))  # type: ignore[arg-type]


def run(function, *args: object):
    return anyio.run(function, *args, backend="trio")


async def directory_with(*records: PeerRecord) -> MemoryDirectory:
    directory = MemoryDirectory(MemoryDirectoryStore())
    for one in records:
        identity = next(key for key in KEYS if key.peer_id == one.peer)
        await directory.announce(one.key, one.peer, encode(one, identity), ttl_s=60)
    return directory


# -- the view ---------------------------------------------------------------------------------


def test_who_drains_does_not_count_and_who_joins_counts_but_stays():
    view = view_of(NEEDS, [record(n, 0, state=state) for n, state in enumerate(STATES)])
    assert [(p.peer, p.settled) for p in view.peers] == [
        (KEYS[0].peer_id, True),
        (KEYS[1].peer_id, False),
        (KEYS[2].peer_id, True),
    ]


def test_a_view_has_what_peers_tell_of_themselves():
    (peer,) = view_of(NEEDS, [record(0, 1, samples_per_s=3.0, queued=0.5, memory_bytes=GIB)]).peers
    assert (peer.stage, peer.samples_per_s, peer.queued, peer.memory_bytes) == (1, 3.0, 0.5, GIB)
    (peer,) = view_of(NEEDS, [record(0, 1)]).peers
    assert peer.memory_bytes is None, "it does not say"


def test_one_that_has_moved_counts_where_it_is_now():
    old, new = record(0, 0, sequence=1), record(0, 1, sequence=2)
    for records in ([old, new], [new, old]):
        assert [len(members) for members in view_of(NEEDS, records).members] == [0, 1]
    left = record(0, 1, sequence=3, state=PeerState.DRAINING)
    assert view_of(NEEDS, [old, left]).peers == ()


def test_whoever_stays_counts_and_is_never_the_one_to_move():
    """Else all would wait for it to move."""
    rule = Settings(least=1)
    records = [record(n, 0, samples_per_s=10 - n) for n in range(3)]
    first = best_move(view_of(NEEDS, records), rule)
    assert isinstance(first, Move)

    stays = [one.model_copy(update={"stays": one.peer == first.peer}) for one in records]
    view = view_of(NEEDS, stays)
    assert len(view.members[0]) == 3
    second = best_move(view, rule)
    assert isinstance(second, Move)
    assert (second.stage, second.peer != first.peer) == (1, True)

    all_stay = view_of(NEEDS, [one.model_copy(update={"stays": True}) for one in records])
    assert isinstance(best_move(all_stay, rule), Stay)


def test_the_rule_follows_the_manifest():
    assert settings_of(MANIFEST) == Settings(gain=0.2, least=2)


def test_a_look_finds_the_peers_of_all_stages_and_nothing_else():
    async def main() -> None:
        first, second = record(0, 0), record(1, 1)
        directory = await directory_with(first, second, record(2, 5))
        key = stage_key(MANIFEST.run_id, 1)
        await directory.announce(key, "nonsense", b"nonsense", ttl_s=60)
        trainer = TrainerRecord(
            peer=KEYS[3].peer_id,
            run_id=MANIFEST.run_id,
            boot=BOOT,
            term=1,
            state=TrainerState.TRAINING,
        )
        await directory.announce(key, trainer.peer, encode(trainer, KEYS[3]), ttl_s=60)
        assert await look(directory, MANIFEST) == [first, second]

    run(main)


# -- a newcomer -------------------------------------------------------------------------------


def test_a_newcomer_goes_where_fewest_are_and_does_not_count_itself():
    async def main() -> None:
        directory = await directory_with(record(0, 0), record(1, 1), record(2, 1))
        me = KEYS[2].peer_id
        found = await choose_stage(
            directory, MANIFEST, NEEDS, KEYS[3].peer_id, 4 * GIB, random.Random(0)
        )
        assert found == (0, [1, 2])
        found = await choose_stage(directory, MANIFEST, NEEDS, me, 4 * GIB, random.Random(0))
        assert found[1] == [1, 1]

    run(main)


def test_a_newcomer_goes_only_where_it_fits():
    async def main() -> None:
        directory = await directory_with(record(0, 1), record(1, 1))
        found = await choose_stage(
            directory, MANIFEST, NEEDS, KEYS[3].peer_id, 2 * GIB, random.Random(0)
        )
        assert found == (1, [0, 2])

    run(main)


def test_this_machine_has_some_memory():
    assert 0 < free_memory() < 1 << 50


# -- what a node measures ----------------------------------------------------------------------


def test_a_meter_tells_nothing_before_anything_was_counted():
    meter = Meter(Counters(), microbatch=4)
    meter.read(0.0)
    meter.read(10.0)
    assert (meter.samples_per_s, meter.queued) == (0.0, 0.0)


def test_a_meter_tells_what_a_replica_does_when_it_never_waits():
    counters = Counters()
    meter = Meter(counters, microbatch=4)
    meter.read(0.0)
    counters.counted, counters.busy_s = 5, 1.0
    meter.read(100.0)
    assert meter.samples_per_s == pytest.approx(4 / 0.2)
    meter.read(200.0)
    assert meter.samples_per_s == pytest.approx(4 / 0.2), "idle time changes nothing"


def test_a_meter_follows_a_machine_that_becomes_slower():
    counters = Counters()
    meter = Meter(counters, microbatch=1)
    for n in range(1, 60):
        counters.counted, counters.busy_s = n, n * 1.0 if n < 10 else 10.0 + (n - 10) * 4.0
        meter.read(float(n))
    assert meter.samples_per_s == pytest.approx(1 / 4, rel=0.05)


def test_a_meter_tells_how_many_wait_on_average():
    counters = Counters()
    meter = Meter(counters, microbatch=1)
    meter.read(0.0)
    counters.queue_s = 30.0  # three waited all the time
    meter.read(10.0)
    assert meter.queued == pytest.approx(3.0)
    meter.read(10.0)
    assert meter.queued == pytest.approx(3.0), "no time has passed"
    meter.read(20.0)
    assert meter.queued == 0.0
