"""The in-process twin of the transport: same contract, no sockets, any anyio backend.

On trio with ``MockClock`` it runs in virtual time. Messages go through ``peers.wire`` and payloads
are copied, so that nothing is shared by reference and what passes here passes on a real network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from peers import wire
from peers.transport import Frame, Handler, answer, refusal
from swarm.errors import BadFrame, BootstrapError, CallLost, NotConnected
from swarm.types import PeerId


class MemoryNetwork:
    """Where memory transports find each other; an async context that owns all handlers.

    A handler runs in the network's scope, not in its caller's: like on a real network, a caller
    that gives up does not stop it.
    """

    def __init__(self) -> None:
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> MemoryNetwork:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._tasks is not None
        for peer in list(self._peers):
            self.kill(peer)
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    def kill(self, peer: PeerId) -> None:
        """End ``peer`` as SIGKILL would: its handlers stop, calls from and to it are lost."""
        transport = self._peers.pop(peer, None)
        if transport is not None:
            transport._stop()

    def _join(self, transport: MemoryTransport) -> None:
        if transport.peer in self._peers:
            raise ValueError(f"{transport.peer} is on this network already; kill or close it first")
        self._peers[transport.peer] = transport

    def _find(self, peer: PeerId) -> MemoryTransport | None:
        return self._peers.get(peer)

    @property
    def tasks(self) -> TaskGroup:
        assert self._tasks is not None, "use MemoryNetwork as an async context manager"
        return self._tasks


Packet = tuple[bytes, memoryview]
"""Prefix and header, and the payload: what would be on the wire."""


@dataclass(eq=False)
class _Exchange:
    """One call under way: the scope that serves it, and the reply once there is one."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    reply: Packet | None = None


class MemoryTransport:
    """A peer on a ``MemoryNetwork``. See ``peers.transport.Transport`` for the contract.

    Args:
        limits: the longest header and payload, in bytes, that this peer sends or takes.
    """

    def __init__(
        self, network: MemoryNetwork, peer: PeerId, limits: wire.Limits = wire.DEFAULT_LIMITS
    ) -> None:
        self._network = network
        self._peer = peer
        self._limits = limits
        self._handler: Handler | None = None
        self._closed = False
        self._serving: set[_Exchange] = set()
        self._calling: set[_Exchange] = set()
        network._join(self)

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def serve(self, handler: Handler) -> None:
        self._handler = handler

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        packet = _pack(request, self._limits)
        await anyio.lowlevel.checkpoint()
        target = self._network._find(peer)
        if self._closed or target is None or target is self or target._handler is None:
            raise NotConnected(f"{peer} cannot be reached")
        exchange = _Exchange()
        self._calling.add(exchange)
        target._serving.add(exchange)
        self._network.tasks.start_soon(target._serve_one, self._peer, packet, exchange)
        try:
            with anyio.move_on_after(timeout_s) as waiting:
                await exchange.done.wait()
        finally:
            self._calling.discard(exchange)
        if exchange.reply is None:
            why = f"silent for {timeout_s:g} s" if waiting.cancelled_caught else "connection cut"
            raise CallLost(f"no reply from {peer}: {why}")
        return _unpack(exchange.reply, self._limits)

    async def connect(self, address: str) -> PeerId:
        await anyio.lowlevel.checkpoint()
        peer = address.rpartition("/p2p/")[2]
        if self._network._find(peer) is None:
            raise BootstrapError(f"{address}: nobody is there; check the address")
        return peer

    async def close(self) -> None:
        if self._network._find(self._peer) is self:
            self._network.kill(self._peer)
        await anyio.lowlevel.checkpoint()

    def _stop(self) -> None:
        self._closed = True
        for exchange in self._serving:
            exchange.scope.cancel()
            exchange.done.set()
        for exchange in self._calling:
            exchange.done.set()

    async def _serve_one(self, sender: PeerId, packet: Packet, exchange: _Exchange) -> None:
        if self._closed or self._handler is None:
            return
        with exchange.scope:
            try:
                request = _unpack(packet, self._limits)
            except BadFrame as error:
                reply = refusal(str(error))
            else:
                reply = await answer(self._handler, sender, request)
            try:
                exchange.reply = _pack(reply, self._limits)
            except BadFrame as error:
                exchange.reply = _pack(refusal(f"internal error: reply: {error}"), self._limits)
        self._serving.discard(exchange)
        exchange.done.set()


def _pack(frame: Frame, limits: wire.Limits) -> Packet:
    head = wire.encode_head(frame, limits)
    payload = wire.aligned_buffer(frame.payload_bytes)
    start = 0
    for part in wire.payload_parts(frame):
        payload[start : start + part.nbytes] = part
        start += part.nbytes
    return head, payload


def _unpack(packet: Packet, limits: wire.Limits) -> Frame:
    head, payload = packet
    wire.decode_prefix(head[: wire.PREFIX_BYTES], limits)
    header = wire.decode_header(head[wire.PREFIX_BYTES :])
    return Frame(header, (payload,) if payload.nbytes else ())
