"""Which run a swarm trains: by the word of the peers at hand, or by what is announced."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from peers import messages as msg
from peers.entering import Entered, find_run
from peers.rpc import Caller
from swarm.errors import BadInput, BootstrapError, ConfigError, TransportError
from swarm.manifest import Manifest
from swarm.types import PeerId

ASK_S = 5.0
"""How long a peer may take to say which run it belongs to."""


async def learn_run(swarm: Entered, join: Sequence[str], run_id: str = "") -> Manifest:
    """The run of the peers at the ``join`` addresses: their own word, else what is announced.

    A run is announced by those who can lead it alone; when they are gone, its nodes still know it.

    Raises:
        BootstrapError: none was found, or several.
    """
    caller = Caller(swarm.transport, timeout_s=ASK_S)
    peers = dict.fromkeys(address.rsplit("/p2p/", 1)[-1] for address in join)
    found: dict[str, Manifest] = {}

    async def one(peer: PeerId) -> None:
        manifest = await run_of(caller, peer)
        if manifest is not None and run_id in ("", manifest.run_id):
            found[manifest.run_id] = manifest

    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(one, peer)
    if len(found) > 1:
        names = ", ".join(sorted(found))
        raise BootstrapError(f"these peers belong to several runs; choose with --run: {names}")
    if found:
        return found.popitem()[1]
    return await find_run(swarm, join, run_id)


async def run_of(caller: Caller, peer: PeerId) -> Manifest | None:
    """The manifest of the run that ``peer`` belongs to; None if it does not say."""
    try:
        answer = await caller.call(peer, msg.Question(run=""))
        if not isinstance(answer.message, msg.Status):
            return None
        return Manifest.from_canonical(b"".join(answer.payload))
    except (TransportError, BadInput, ConfigError):
        return None
