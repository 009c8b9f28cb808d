"""Start p2pd and enter the swarm: whatever is wrong is said in one line, with what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial

from dht.identity import Identity
from peers.addresses import (
    check_announce,
    check_listen,
    enter,
    is_loopback,
    preflight,
    split_peer,
)
from peers.p2pd_daemon import Daemon, DaemonError
from peers.p2pd_words import explain
from swarm.errors import AddressError, NetworkError
from swarm.types import PeerId

CONNECT_S = 8.0
"""How long p2pd may take to connect to a bootstrap address that answers."""

STARTUP_S = 60.0
"""How long p2pd may take to start: much on an idle machine, not so on a busy one."""

_COMMON = ("-tls=1", "-relay=1", "-connManager=1", "-idleTimeout=60s")


async def start_node(
    identity_path: str | os.PathLike[str],
    listen: Sequence[str],
    announce: Sequence[str],
    initial_peers: Sequence[str],
    *,
    timeout_s: float,
) -> Daemon:
    """A p2pd that serves and is connected; see ``P2pdTransport.create`` for all else."""
    Identity.load_or_create(identity_path)
    check_listen(listen)
    check_announce(announce)
    for address in initial_peers:
        split_peer(address)
    daemon = await _start(_node_arguments(identity_path, listen, announce), timeout_s)
    try:
        await enter(initial_peers, partial(reach, daemon))
    except BaseException:
        await daemon.stop()
        raise
    return daemon


async def identity_taken(peer: PeerId, initial_peers: Sequence[str]) -> bool:
    """Whether another live process of the swarm already uses the identity ``peer``.

    An anonymous p2pd enters through ``initial_peers`` and dials the id.

    Raises:
        AddressError, BootstrapError, NetworkError: as ``P2pdTransport.create``.
    """
    daemon = await _start(["-dhtClient=1", "-hostAddrs=/ip4/127.0.0.1/tcp/0", *_COMMON], STARTUP_S)
    try:
        await enter(initial_peers, partial(reach, daemon))
        async with asyncio.timeout(CONNECT_S):
            await daemon.connect(peer, [])
        return True
    except (DaemonError, TimeoutError):
        return False
    finally:
        await daemon.stop()


async def reach(daemon: Daemon, address: str) -> str | None:
    """Connect to ``address`` within 13 s; why it failed and what to do, or None.

    Raises:
        AddressError: the address is malformed.
    """
    peer, transport = split_peer(address)
    problem = await preflight(transport)
    if problem is not None:
        return problem
    try:
        async with asyncio.timeout(CONNECT_S):
            await daemon.connect(peer, [transport])
    except TimeoutError:
        return f"answers TCP, but no swarm peer within {CONNECT_S:g} s; check host and port"
    except DaemonError as error:
        return explain(str(error))
    return None


def _node_arguments(
    identity_path: str | os.PathLike[str], listen: Sequence[str], announce: Sequence[str]
) -> list[str]:
    arguments = [*_COMMON, "-dhtServer=1", f"-id={os.fspath(identity_path)}"]
    arguments.append(f"-hostAddrs={','.join(listen)}")
    if announce:
        arguments.append(f"-announceAddrs={','.join(announce)}")
    outside = int(not all(is_loopback(address) for address in listen))
    return [*arguments, f"-natPortMap={outside}", f"-autonat={outside}"]


async def _start(arguments: Sequence[str], timeout_s: float) -> Daemon:
    try:
        return await Daemon.start(arguments, timeout_s=timeout_s)
    except DaemonError as error:
        kind = AddressError if "listen" in str(error) else NetworkError
        raise kind(f"the network daemon did not start: {error}") from error
