"""What every directory must do: the twin on virtual and on real time, and hivemind's DHT."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
import pytest
import trio.testing

from dht.directory import Directory
from dht.hivemind_dht import HivemindDirectory
from dht.identity import Identity
from dht.memory import MemoryDirectory, MemoryDirectoryStore
from dht.records import PeerRecord, PeerState, Record, decode_all, encode, stage_key
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport

RUN_ID = "a" * 32
KEY = stage_key(RUN_ID, 0)
ALICE, BOB, CAROL = (Identity.generate() for _ in range(3))


def value_of(identity: Identity, sequence: int = 0, stage: int = 0) -> bytes:
    record = PeerRecord(
        peer=identity.peer_id,
        run_id=RUN_ID,
        boot="0" * 16,
        stage=stage,
        state=PeerState.READY,
        version="1",
        sequence=sequence,
    )
    return encode(record, identity)


def records_in(found: dict[str, bytes], key: str = KEY) -> dict[str, Record]:
    records, refused = decode_all(found, key=key)
    assert not refused
    return {record.peer: record for record in records}


@contextlib.asynccontextmanager
async def memory_swarm() -> AsyncIterator[list[Directory]]:
    store = MemoryDirectoryStore()
    yield [MemoryDirectory(store), MemoryDirectory(store)]


@contextlib.asynccontextmanager
async def hivemind_swarm(*kinds) -> AsyncIterator[list[Directory]]:
    """Two nodes on loopback, each with a transport of its own, of these kinds."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses: list[str] = []
        directories: list[Directory] = []
        for number, kind in enumerate(kinds):
            key = f"{folder}/{number}"
            transport = await kind.create(identity_path=key, initial_peers=addresses)
            stack.push_async_callback(transport.close)
            directory = await HivemindDirectory.create(transport.p2p, addresses)
            stack.push_async_callback(directory.close)
            directories.append(directory)
            addresses = transport.addresses()
        yield directories


@dataclass(frozen=True)
class Setup:
    """``run`` gives a test function the two directories of a new swarm, on the right backend."""

    swarm: Callable
    backend: str

    def run(self, test: Callable[[list[Directory]], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.swarm() as directories:
                with anyio.fail_after(1e6 if self.backend == "virtual" else 60):
                    await test(directories)

        if self.backend == "virtual":
            anyio.run(
                main,
                backend="trio",
                backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)},
            )
        else:
            anyio.run(main, backend=self.backend)


MEMORY = [Setup(memory_swarm, "virtual"), Setup(memory_swarm, "asyncio")]
NETWORKS = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}
HIVEMIND = {
    f"{first}+{second}": Setup(
        partial(hivemind_swarm, NETWORKS[first], NETWORKS[second]), "asyncio"
    )
    for first in NETWORKS
    for second in NETWORKS
}


@pytest.fixture(
    params=[*MEMORY, *HIVEMIND.values()], ids=["memory-trio", "memory-asyncio", *HIVEMIND]
)
def setup(request) -> Setup:
    return request.param


def test_what_one_announces_the_other_finds(setup):
    async def test(directories):
        here, there = directories
        assert await there.lookup(KEY) == {}
        assert await here.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        assert await there.announce(KEY, BOB.peer_id, value_of(BOB), ttl_s=60)
        for directory in directories:
            assert records_in(await directory.lookup(KEY)).keys() == {ALICE.peer_id, BOB.peer_id}

    setup.run(test)


def test_keys_are_apart(setup):
    async def test(directories):
        here, there = directories
        other = stage_key(RUN_ID, 1)
        await here.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        await here.announce(other, BOB.peer_id, value_of(BOB, stage=1), ttl_s=60)
        assert records_in(await there.lookup(KEY)).keys() == {ALICE.peer_id}
        assert records_in(await there.lookup(other), other).keys() == {BOB.peer_id}
        assert await there.lookup(stage_key(RUN_ID, 2)) == {}

    setup.run(test)


def test_a_newer_value_replaces_the_older(setup):
    async def test(directories):
        here, _ = directories
        for sequence in range(5):
            value = value_of(ALICE, sequence)
            assert await here.announce(KEY, ALICE.peer_id, value, ttl_s=60)
            for directory in directories:
                assert await directory.lookup(KEY) == {ALICE.peer_id: value}

    setup.run(test)


def test_a_newer_value_with_a_shorter_life_replaces_the_older_too(setup):
    async def test(directories):
        here, there = directories
        await here.announce(KEY, ALICE.peer_id, value_of(ALICE, 0), ttl_s=60)
        last = value_of(ALICE, 1)
        assert await here.announce(KEY, ALICE.peer_id, last, ttl_s=5)
        assert await there.lookup(KEY) == {ALICE.peer_id: last}

    setup.run(test)


def test_values_expire_each_in_its_time(setup):
    async def test(directories):
        here, there = directories
        await here.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=0.5)
        await here.announce(KEY, BOB.peer_id, value_of(BOB), ttl_s=60)
        async with contextlib.aclosing(there.watch(KEY, period_s=0.05)) as views:
            async for found in views:  # until the limit of the whole test
                if records_in(found).keys() == {BOB.peer_id}:
                    break

    setup.run(test)


def test_watch_shows_what_changes(setup):
    async def test(directories):
        here, there = directories
        first, second = value_of(ALICE, 0), value_of(ALICE, 1)
        async with contextlib.aclosing(there.watch(KEY, period_s=0.01)) as views:
            assert await anext(views) == {}
            await here.announce(KEY, ALICE.peer_id, first, ttl_s=60)
            assert await anext(views) == {ALICE.peer_id: first}
            await here.announce(KEY, ALICE.peer_id, second, ttl_s=60)
            assert await anext(views) == {ALICE.peer_id: second}

    setup.run(test)


def test_a_closed_directory_finds_and_stores_nothing(setup):
    async def test(directories):
        here, there = directories
        await here.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        await here.close()
        await here.close()
        assert await here.lookup(KEY) == {}
        assert not await here.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        assert records_in(await there.lookup(KEY)).keys() == {ALICE.peer_id}

    setup.run(test)


def test_the_twin_on_virtual_time_expires_to_the_second():
    async def test(directories):
        here, there = directories
        await here.announce(KEY, "alice", b"1", ttl_s=3600)
        await anyio.sleep(3599)
        assert await there.lookup(KEY) == {"alice": b"1"}
        await anyio.sleep(1)
        assert await there.lookup(KEY) == {}

    MEMORY[0].run(test)


def test_a_stale_twin_shows_what_was_true_that_long_ago():
    @contextlib.asynccontextmanager
    async def stale_swarm():
        store = MemoryDirectoryStore(staleness_s=10.0)
        yield [MemoryDirectory(store), MemoryDirectory(store)]

    async def test(directories):
        here, there = directories
        seen = {}
        for second in range(40):
            if second in (0, 5, 6):
                await here.announce(KEY, "alice", b"%d" % second, ttl_s=20)
            seen[second] = (await there.lookup(KEY)).get("alice")
            await anyio.sleep(1)
        shown = [None] * 10 + [b"0"] * 5 + [b"5"] + [b"6"] * 20 + [None] * 4
        assert list(seen.values()) == shown

    Setup(stale_swarm, "virtual").run(test)


def test_the_twin_forgets_what_nobody_can_see_any_more():
    async def test(directories):
        here, _ = directories
        for _ in range(1000):
            await here.announce(KEY, "alice", b"x", ttl_s=1)
            await anyio.sleep(1)
        await here.announce(KEY, "bob", b"x", ttl_s=1000)
        assert await here.lookup(KEY) == {"bob": b"x"}
        versions = here._store._versions[KEY]
        assert versions.keys() == {"bob"}

    MEMORY[0].run(test)
