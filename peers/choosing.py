"""Which transport a process runs on: p2pd where that starts, else py-libp2p, or the one asked for.

Both speak the same protocol with the same key file, so it matters to nobody else.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from peers.transport import Transport, TransportKind
from peers.wire import Limits
from swarm.errors import IdentityError, NetworkError
from swarm.types import PeerId

if TYPE_CHECKING:
    from dht.hivemind_p2p import P2P

log = logging.getLogger("swarm")

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Opening:
    """How a transport is opened; ``twin``: our peer id, if a process elsewhere may have it too."""

    identity: Path
    listen: Sequence[str]
    announce: Sequence[str]
    join: Sequence[str]
    limits: Limits
    twin: PeerId | None = None


class NodeTransport(Transport, Protocol):
    """A transport that is a whole network node: the directory runs over it too."""

    p2p: P2P

    def addresses(self) -> list[str]:
        """Our full multiaddrs with ``/p2p/ID``; loopback ones only if there are no others."""
        ...

    def limit(self, limits: Limits) -> None:
        """Send and take no longer frames than these from now on."""
        ...

    async def gone(self) -> str:
        """Returns, with the reason, once nobody can be reached any more."""
        ...


@asynccontextmanager
async def opened(kind: TransportKind, opening: Opening) -> AsyncIterator[NodeTransport]:
    """Open a transport of ``kind``, and close it at the end. Says in the log which and why.

    Raises:
        IdentityError, AddressError, BootstrapError, NetworkError: one line that says what to do.
    """
    transport = await _open(kind, opening)
    try:
        yield transport
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
            await transport.close()


async def _open(kind: TransportKind, opening: Opening) -> NodeTransport:
    if kind is TransportKind.PYLIBP2P:
        transport = await _pylibp2p(opening)
        log.info("transport: py-libp2p, as asked")
        return transport
    try:
        transport = await _p2pd(opening)
    except NetworkError as error:
        if kind is TransportKind.P2PD:
            raise NetworkError(f"{error}; --transport pylibp2p does without it") from error
        transport = await _pylibp2p(opening)
        log.warning("transport: py-libp2p, since p2pd does not run here: %s", error)
        return transport
    log.info("transport: p2pd%s", "" if kind is TransportKind.AUTO else ", as asked")
    return transport


async def _p2pd(opening: Opening) -> NodeTransport:
    # Imported here: hivemind takes seconds, and errors in flags should not wait for it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peers.p2pd import P2pdTransport, identity_taken

    return await _alone(P2pdTransport.create, identity_taken, opening)


async def _pylibp2p(opening: Opening) -> NodeTransport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from peers.pylibp2p import PyLibp2pTransport, identity_taken
        except ImportError as error:
            raise NetworkError(f"py-libp2p cannot be imported: {error}") from error

    return await _alone(PyLibp2pTransport.create, identity_taken, opening)


async def _alone(
    create: Callable[..., Awaitable[Any]],
    identity_taken: Callable[[PeerId, Sequence[str]], Awaitable[bool]],
    opening: Opening,
) -> NodeTransport:
    """A transport whose identity no live process of the swarm has."""
    if opening.join and opening.twin and await identity_taken(opening.twin, opening.join):
        raise IdentityError(
            f"{opening.identity}: a live process elsewhere uses this key; stop it, or give "
            "this one a key of its own with --identity FILE"
        )
    transport: NodeTransport = await create(
        identity_path=opening.identity,
        listen=opening.listen,
        announce=opening.announce or None,
        initial_peers=opening.join,
        limits=opening.limits,
    )
    return transport
