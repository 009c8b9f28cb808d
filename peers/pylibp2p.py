"""The transport over py-libp2p: the same calls on the same streams as over p2pd, without p2pd.

It runs in a thread of its own (see ``peers.trio_thread``) and needs asyncio outside of it. For the
DHT it is also the ``dht.hivemind_p2p.Exchanges`` of this process, through ``.p2p``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence

import anyio
import trio

from dht.hivemind_p2p import MAX_MESSAGE_BYTES, P2P, Answer, NoExchange, p2p_over
from dht.identity import Identity
from peers import wire
from peers.addresses import (
    check_announce,
    check_listen,
    enter,
    is_loopback,
    preflight,
    split_peer,
)
from peers.libp2p_host import Host, Unreachable
from peers.libp2p_parts import Keys, check_version
from peers.stream_client import StreamClient
from peers.stream_server import PROTOCOL, StreamServer
from peers.streams import Stream, StreamCut, Tuning, delimited, read_delimited
from peers.transport import Frame, Handler
from peers.trio_thread import Stopped, TrioThread
from swarm.errors import AddressError, BootstrapError, CallLost, NetworkError, NotConnected
from swarm.types import PeerId

CONNECT_S = 8.0
"""How long the handshake with a bootstrap peer may take that answers at its port."""
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class PyLibp2pTransport:
    """See ``peers.transport.Transport``. Make one with ``PyLibp2pTransport.create``."""

    def __init__(self, thread: TrioThread, host: Host, limits: wire.Limits, tuning: Tuning) -> None:
        self._thread = thread
        self._host = host
        self._client = StreamClient(self._open_stream, limits, tuning)
        self._server = StreamServer(limits, tuning)
        self._tuning = tuning
        self._closed = False
        self.p2p: P2P = p2p_over(self)

    @classmethod
    async def create(
        cls,
        *,
        identity_path: str | os.PathLike[str],
        listen: Sequence[str] = (LOOPBACK,),
        announce: Sequence[str] | None = None,
        initial_peers: Sequence[str] = (),
        limits: wire.Limits = wire.DEFAULT_LIMITS,
        tuning: Tuning | None = None,
    ) -> PyLibp2pTransport:
        """Start a node under the identity in the file ``identity_path`` (created if missing).

        Arguments and errors are those of ``peers.p2pd.P2pdTransport.create``; both take the same
        key file and have the same peer id.
        """
        try:
            check_version()
        except ImportError as error:
            raise NetworkError(str(error)) from error
        identity, _ = Identity.load_or_create(identity_path)
        check_listen(listen)
        check_announce(announce or ())
        for address in initial_peers:
            split_peer(address)
        try:
            thread = await TrioThread.start("libp2p")
        except Stopped as error:
            raise NetworkError(str(error)) from error
        try:
            keys = Keys(identity.seed)
            host = await thread.run(
                Host.start, keys, tuple(listen), tuple(announce or ()), thread.nursery
            )
            transport = cls(thread, host, limits, tuning or Tuning())
            await thread.run(transport._keep_going)
            await enter(initial_peers, transport._why_not)
        except (OSError, ValueError) as error:
            await thread.stop()
            raise AddressError(f"cannot listen on {', '.join(listen)}: {error}") from error
        except BaseException:
            await thread.stop()
            raise
        return transport

    @property
    def peer(self) -> PeerId:
        return self._host.peer

    def addresses(self) -> list[str]:
        """Our full multiaddrs with ``/p2p/ID``; loopback ones only if there are no others."""
        own = self._host.addresses()
        public = [address for address in own if not is_loopback(address)]
        return [f"{address}/p2p/{self.peer}" for address in public or own]

    async def gone(self) -> str:
        """Returns once the network thread has ended by itself: nobody can be reached any more."""
        return await self._thread.gone()

    def limit(self, limits: wire.Limits) -> None:
        """Send and take no longer frames than these from now on: a run's manifest says so."""
        self._client.limits = limits
        self._server.limits = limits

    async def serve(self, handler: Handler) -> None:
        async def handle(sender: PeerId, request: Frame) -> Frame:
            return await self._thread.run_in_loop(handler, sender, request)

        async def serve() -> None:
            self._server.handler = handle
            self._host.serve(PROTOCOL, self._server.serve)

        await self._thread.run(serve)

    async def connect(self, address: str) -> PeerId:
        try:
            peer, _ = split_peer(address)
        except AddressError as error:
            raise BootstrapError(str(error)) from error
        problem = await self._why_not(address)
        if problem is not None:
            raise BootstrapError(f"{address}: {problem}")
        return peer

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        has_begun = False

        async def call() -> Frame:
            nonlocal has_begun
            has_begun = True
            return await self._client.call(peer, request, timeout_s=timeout_s)

        try:
            return await self._thread.run(call)
        except Stopped as error:
            if has_begun:  # the thread broke: nobody knows any more what was sent
                raise CallLost(f"no reply from {peer}: {error}") from error
            raise NotConnected("this transport is closed") from error

    async def exchange(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        """See ``dht.hivemind_p2p.Exchanges.exchange``."""

        async def exchange() -> bytes:
            stream = await self._host.open_stream(peer, protocol)
            try:
                await stream.write([delimited(message)])
                return await read_delimited(stream, MAX_MESSAGE_BYTES)
            finally:
                stream.close()

        try:
            return await self._thread.run(exchange)
        except (Unreachable, StreamCut, Stopped) as error:
            raise NoExchange(f"no answer from {peer}: {error}") from error

    async def on_exchange(self, protocol: str, answer: Answer | None) -> None:
        """See ``dht.hivemind_p2p.Exchanges.on_exchange``."""

        async def serve(stream: Stream) -> None:
            assert answer is not None
            stream.underway = True
            try:
                async with trio.open_nursery() as tasks:
                    scope = tasks.cancel_scope
                    tasks.start_soon(_cancel_if_stalled, stream, scope, self._tuning.progress_s)
                    request = await read_delimited(stream, MAX_MESSAGE_BYTES)
                    stream.underway = False
                    tasks.start_soon(_cancel_at_end, stream, scope)
                    reply = await self._thread.run_in_loop(answer, stream.peer, request)
                    await stream.write([delimited(reply)])
                    scope.cancel()
            except* StreamCut:
                pass  # whoever asked has gone

        async def change() -> None:
            self._host.serve(protocol, None if answer is None else serve)

        try:
            await self._thread.run(change)
        except Stopped:
            if answer is not None:
                raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        with anyio.CancelScope(shield=True):
            with contextlib.suppress(Stopped):
                await self._thread.run(self._client.close)
            await self._thread.stop()

    async def _keep_going(self) -> None:
        self._thread.nursery.start_soon(self._client.keep_house)
        self._thread.nursery.start_soon(self._server.end_stalled)

    async def _open_stream(self, peer: PeerId) -> Stream:
        try:
            return await self._host.open_stream(peer, PROTOCOL)
        except Unreachable as error:
            raise NotConnected(f"no stream to {peer}: {error}") from error

    async def _why_not(self, address: str) -> str | None:
        """Connect to ``address`` within 13 s; why it failed and what to do, or None."""
        peer, transport = split_peer(address)
        problem = await preflight(transport)
        if problem is not None:
            return problem

        async def connect() -> None:
            with trio.fail_after(CONNECT_S):
                await self._host.dial(peer, transport)

        try:
            await self._thread.run(connect)
        except trio.TooSlowError:
            return f"answers TCP, but no swarm peer within {CONNECT_S:g} s; check host and port"
        except Unreachable as error:
            if "another peer" in str(error):
                return f"{error} there; ask for the current address"
            return f"no swarm peer answers there ({error}); check host and port"
        return None


async def identity_taken(peer: PeerId, initial_peers: Sequence[str]) -> bool:
    """Whether another live process of the swarm already uses the identity ``peer``.

    A node without a name of its own enters through ``initial_peers`` and dials the id.

    Raises:
        AddressError, BootstrapError: as ``PyLibp2pTransport.create``.
    """
    with tempfile.TemporaryDirectory() as folder:
        visitor = await PyLibp2pTransport.create(
            identity_path=os.path.join(folder, "key"), initial_peers=initial_peers
        )

    async def reached() -> bool:
        with trio.move_on_after(CONNECT_S):
            await visitor._host.connect(peer)
            return True
        return False

    try:
        return await visitor._thread.run(reached)
    except Unreachable:
        return False
    finally:
        await visitor.close()


async def _cancel_at_end(stream: Stream, scope: trio.CancelScope) -> None:
    """Cancel ``scope`` once the caller has given up: it closes its stream, or is gone."""
    with contextlib.suppress(StreamCut):
        await stream.fill(memoryview(bytearray(1)))
    scope.cancel()


async def _cancel_if_stalled(stream: Stream, scope: trio.CancelScope, limit_s: float) -> None:
    """Cancel ``scope`` once no byte has come or gone for so long inside a message."""
    while not (stream.underway and trio.current_time() - stream.progress_at > limit_s):  # noqa: ASYNC110
        await trio.sleep(limit_s / 4)
    scope.cancel()
