"""What a lookup in the real directory brings along: measured on a small swarm of DHT nodes."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio

from dht.hivemind_dht import P2P, HivemindDirectory
from dht.identity import Identity
from dht.records import PeerRecord, PeerState, encode, stage_key
from swarm.types import Mark, Term

NODES = 12
RECORDS = 64
RUN = "0" * 32
BOOT = "0123456789abcdef"


def sample_record(identity: Identity, stage: int = 5) -> PeerRecord:
    return PeerRecord(
        peer=identity.peer_id,
        run_id=RUN,
        boot=BOOT,
        stage=stage,
        state=PeerState.READY,
        mark=Mark(Term(3, BOOT), 1234),
        samples_per_s=3.25,
        version="0.1.0",
        sequence=1,
    )


def measure_lookup() -> dict[str, float]:
    """Of one lookup among ``NODES`` nodes: bytes of values received, by bytes of values found."""
    return anyio.run(_measure, backend="asyncio")


async def _measure() -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        directories: list[HivemindDirectory] = []
        for _ in range(NODES):
            p2p = await P2P.create(initial_peers=addresses, nat_port_map=False, auto_nat=False)
            stack.push_async_callback(p2p.shutdown)
            directory = await HivemindDirectory.create(p2p, addresses)
            stack.push_async_callback(directory.close)
            directories.append(directory)
            addresses = addresses or [str(a) for a in await p2p.get_visible_maddrs()]
        key, sizes = stage_key(RUN, 5), 0
        for n in range(RECORDS):
            identity = Identity.generate()
            value = encode(sample_record(identity), identity)
            sizes += len(value)
            if not await directories[n % NODES].announce(key, identity.peer_id, value, ttl_s=60):
                raise RuntimeError("a record was not stored")
        return await _count(directories, key, sizes)


async def _count(directories: list[HivemindDirectory], key: str, sizes: int) -> dict[str, float]:
    """Looks up from each node, counting what every answer weighs."""
    received = answers = 0

    for directory in directories:
        node: Any = directory._node
        ask = node.protocol.call_find

        async def counted(peer: Any, keys: Any, ask: Any = ask) -> Any:
            nonlocal received, answers
            found = await ask(peer, keys)
            for value, _ in (found or {}).values():
                if value is not None:
                    answers += 1
                    received += sum(len(item.value) for item in value.value.data.values())
            return found

        node.protocol.call_find = counted
        found = await directory.lookup(key)
        if len(found) != RECORDS:
            raise RuntimeError(f"{len(found)} of {RECORDS} records were found")
    lookups = len(directories)
    return {
        "answers_per_lookup": answers / lookups,
        "received_by_found": received / lookups / sizes,
    }
