"""The transport over hivemind's libp2p daemon: calls on pooled, persistent binary streams.

It owns the one ``hivemind.P2P`` object of the process (``.p2p``), which the DHT adapter shares.
Needs asyncio. A stream carries one call at a time and is never half-closed; whatever goes wrong in
a call ends its stream. The end of a stream inside a message is how a dead peer shows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

import dht.protobufs  # noqa: F401  # before hivemind: see there

# isort: split
from hivemind.p2p import P2P

from peers import wire
from peers.p2pd_addresses import is_loopback, split_peer, why_not_dialled
from peers.p2pd_daemon import Daemon, DaemonError
from peers.p2pd_server import StreamServer
from peers.p2pd_start import identity_taken, reach, start_node
from peers.p2pd_streams import SocketStream, StreamCut, Tuning, WriteCut, receive_frame
from peers.transport import Frame, Handler
from swarm.errors import AddressError, BootstrapError, CallLost, NotConnected
from swarm.types import PeerId

__all__ = ["P2pdTransport", "Tuning", "identity_taken"]


@dataclass(eq=False)
class _Pool:
    """The streams to one peer: idle ones, last used last, and a slot for each in all."""

    slots: asyncio.Semaphore
    idle: list[SocketStream] = field(default_factory=list)
    users: int = 0

    def take(self) -> SocketStream | None:
        """An idle stream whose other side is still there."""
        while self.idle:
            stream = self.idle.pop()
            if stream.is_silent():
                return stream
            stream.close()
        return None

    def close_idle(self, before: float) -> None:
        """Close the streams that were last used before this time of the loop's clock."""
        for stream in [stream for stream in self.idle if stream.progress_at < before]:
            self.idle.remove(stream)
            stream.close()


@dataclass(eq=False)
class _Call:
    scope: anyio.CancelScope
    sending: bool = False
    """Whether the peer may have got something."""


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
        self._limits = limits
        self._tuning = tuning
        self._pools: dict[PeerId, _Pool] = {}
        self._calls: set[_Call] = set()
        self._server = StreamServer(daemon, limits, tuning)
        self._closed = False
        self._housekeeping = asyncio.create_task(self._keep_house())

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
            UserError: p2pd did not start for another reason; has p2pd's own words.
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
        self._limits = limits
        self._server.limits = limits

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
        buffers: list[bytes | memoryview] = [wire.encode_head(request, self._limits)]
        buffers += wire.payload_parts(request)
        if self._closed:
            raise NotConnected("this transport is closed")
        pool = self._pools.get(peer)
        if pool is None:
            pool = _Pool(asyncio.Semaphore(self._tuning.streams_per_peer))
            self._pools[peer] = pool
        pool.users += 1
        call = _Call(anyio.CancelScope(deadline=anyio.current_time() + timeout_s))
        self._calls.add(call)
        try:
            with call.scope:
                async with pool.slots:
                    return await self._exchange(peer, pool, buffers, call)
        finally:
            self._calls.discard(call)
            pool.users -= 1
        why = "this transport was closed" if self._closed else f"time is up ({timeout_s:g} s)"
        if call.sending:
            raise CallLost(f"no reply from {peer}: {why}")
        raise NotConnected(f"no stream to {peer}: {why}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for call in self._calls:
            call.scope.cancel()
        with anyio.CancelScope(shield=True):
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
            await self._server.stop()
            for pool in self._pools.values():
                pool.close_idle(before=float("inf"))
            await self.p2p.shutdown()
            await self._daemon.stop()

    async def _exchange(
        self, peer: PeerId, pool: _Pool, buffers: list[bytes | memoryview], call: _Call
    ) -> Frame:
        stream = await self._send(peer, pool, buffers, call)
        reusable = False
        try:
            reply = await receive_frame(stream, self._limits)
            if reply is None:
                raise CallLost(f"no reply from {peer}: the stream was closed")
            reusable = not (stream.broken or reply.header.get("closing") or self._closed)
            return reply
        except StreamCut as cut:
            raise CallLost(f"no reply from {peer}: {cut}") from cut
        finally:
            if reusable:
                pool.idle.append(stream)
            else:
                stream.close()

    async def _send(
        self, peer: PeerId, pool: _Pool, buffers: list[bytes | memoryview], call: _Call
    ) -> SocketStream:
        """Send a request; returns the stream on which the reply will come, if any comes."""
        while True:
            stream = pool.take()
            is_new = stream is None
            if stream is None:
                try:
                    stream = await self._daemon.open_stream(peer, StreamServer.PROTOCOL)
                except DaemonError as error:
                    why = why_not_dialled(str(error))
                    raise NotConnected(f"no stream to {peer}: {why}") from error
            call.sending = True
            try:
                await stream.write(buffers)
            except WriteCut as cut:
                if cut.sent == 0:
                    call.sending = False
                    stream.close()
                    if is_new:
                        raise NotConnected(f"no stream to {peer}: {cut}") from cut
                    continue
                stream.broken = True  # a refusal may have come before the end
            except BaseException:
                stream.close()
                raise
            return stream

    async def _keep_house(self) -> None:
        """Close pooled streams that nobody has used for a while, and forget empty pools."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._tuning.idle_s / 4)
            for peer, pool in list(self._pools.items()):
                pool.close_idle(before=loop.time() - self._tuning.idle_s)
                if not pool.idle and not pool.users:
                    del self._pools[peer]
