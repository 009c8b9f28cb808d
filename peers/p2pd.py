"""The transport over hivemind's libp2p daemon: calls on pooled, persistent binary streams.

It owns the one ``hivemind.P2P`` object of the process (``.p2p``), which the DHT adapter shares.
Needs asyncio.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import anyio

from dht.hivemind_p2p import P2P
from peers import wire
from peers.addresses import is_loopback, split_peer
from peers.p2pd_daemon import Daemon, DaemonError
from peers.p2pd_server import P2pdServer
from peers.p2pd_start import identity_taken, reach, start_node
from peers.p2pd_words import why_not_dialled
from peers.stream_client import StreamClient
from peers.stream_server import PROTOCOL
from peers.streams import Stream, Tuning
from peers.transport import Frame, Handler
from swarm.errors import AddressError, BootstrapError, NotConnected
from swarm.types import PeerId

__all__ = ["P2pdTransport", "Tuning", "identity_taken"]


class P2pdTransport:
    """See ``peers.transport.Transport``. Make one with ``P2pdTransport.create``."""

    def __init__(
        self,
        daemon: Daemon,
        p2p: P2P,
        addresses: Sequence[str],
        limits: wire.Limits,
        tuning: Tuning,
    ) -> None:
        self.p2p = p2p
        self._peer: PeerId = p2p.peer_id.to_base58()
        self._daemon = daemon
        self._addresses = list(addresses)
        self._client = StreamClient(self._open_stream, limits, tuning)
        self._server = P2pdServer(daemon, limits, tuning)
        self._closed = False
        self._housekeeping = asyncio.create_task(self._client.keep_house())

    @classmethod
    async def create(
        cls,
        *,
        identity_path: str | os.PathLike[str],
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] | None = None,
        initial_peers: Sequence[str] = (),
        limits: wire.Limits = wire.DEFAULT_LIMITS,
        tuning: Tuning | None = None,
    ) -> P2pdTransport:
        """Start p2pd under the identity in the file ``identity_path`` (created if missing).

        Args:
            listen: multiaddrs to listen on; port 0 takes a free one.
            announce: multiaddrs to tell others instead of those.
            initial_peers: full addresses of peers to enter the swarm through; one that works is
                enough, a warning is logged for each of the others.

        Raises:
            IdentityError: the key file cannot be used.
            AddressError: an address is malformed, or cannot be listened on.
            BootstrapError: none of ``initial_peers`` could be reached (known within 15 s).
            NetworkError: p2pd did not start for another reason; has p2pd's own words.
        """
        tuning = tuning or Tuning()
        daemon = await start_node(
            identity_path, listen, announce or (), initial_peers, timeout_s=tuning.startup_s
        )
        try:
            p2p = await P2P.replicate(daemon.control_address)
            own = [str(address) for address in await p2p.get_visible_maddrs()]
        except BaseException:
            await daemon.stop()
            raise
        public = [address for address in own if not is_loopback(address)]
        return cls(daemon, p2p, public or own, limits, tuning)

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    def addresses(self) -> list[str]:
        """Our full multiaddrs with ``/p2p/ID``; loopback ones only if there are no others."""
        return list(self._addresses)

    async def gone(self) -> str:
        """Returns once p2pd has ended by itself: nobody can be reached any more."""
        return await self._daemon.gone()

    def limit(self, limits: wire.Limits) -> None:
        """Send and take no longer frames than these from now on: a run's manifest says so."""
        self._client.limits = limits
        self._server.streams.limits = limits

    async def serve(self, handler: Handler) -> None:
        await self._server.start(handler)

    async def connect(self, address: str) -> PeerId:
        try:
            peer, _ = split_peer(address)
        except AddressError as error:
            raise BootstrapError(str(error)) from error
        problem = await reach(self._daemon, address)
        if problem is not None:
            raise BootstrapError(f"{address}: {problem}")
        return peer

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        return await self._client.call(peer, request, timeout_s=timeout_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._client.close()
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
            await self._server.stop()
            await self.p2p.shutdown()
            await self._daemon.stop()

    async def _open_stream(self, peer: PeerId) -> Stream:
        try:
            return await self._daemon.open_stream(peer, PROTOCOL)
        except DaemonError as error:
            why = why_not_dialled(str(error))
            raise NotConnected(f"no stream to {peer}: {why}") from error
