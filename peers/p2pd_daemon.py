"""The p2pd child process: start it, speak to its control socket, end it.

p2pd is started here and not by ``hivemind.P2P.create``, for three reasons: all of its error text
is kept, Ctrl-C in a terminal does not end it before its node has left, and a start that fails or
is cancelled leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import anyio

from dht.hivemind_p2p import Multiaddr, PeerID, p2pd_pb2
from peers.p2pd_streams import SocketStream
from peers.streams import StreamCut, delimited, read_delimited
from swarm.types import PeerId

logger = logging.getLogger(__name__)
logging.getLogger("hivemind").setLevel(logging.ERROR)

MAX_REPLY_BYTES = 1 << 20
LAST_LINES = 5
MAX_SOCKET_PATH = 100
STOP_S = 5.0
NOT_SETTLED = "failed to find any peer in table"
SETTLE_S = 2.0
"""For some milliseconds after a connection is made p2pd cannot use it to look up others."""


class DaemonError(Exception):
    """p2pd did not start, or refused a request; ``str(error)`` is its own text."""


class Daemon:
    """A running p2pd and the folder (readable by its owner only) of its sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._child: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []
        self._stopping = False
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._settled_at = 0.0

    @classmethod
    async def start(cls, arguments: Sequence[str], *, timeout_s: float) -> Daemon:
        """Start p2pd with ``arguments`` and wait until it serves.

        Raises:
            DaemonError: with what p2pd printed, if it exits or needs more than ``timeout_s``.
        """
        daemon = cls(_socket_folder())
        try:
            async with asyncio.timeout(timeout_s):
                await daemon._launch(arguments)
        except TimeoutError:
            await daemon.stop()
            said = "; ".join(daemon._last_lines) or "nothing"
            raise DaemonError(f"no start within {timeout_s:g} s; p2pd said: {said}") from None
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def control_path(self) -> str:
        return str(self.folder / "control.sock")

    @property
    def control_address(self) -> Multiaddr:
        return Multiaddr(f"/unix{self.control_path}")

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to ``peer``, looked up if no addresses are given. Raises DaemonError."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=PeerID.from_base58(peer).to_bytes(),
                addrs=[Multiaddr(address).to_bytes() for address in addresses],
            ),
        )
        await self._ask(request)
        if addresses:
            self._settled_at = asyncio.get_running_loop().time() + SETTLE_S

    async def open_stream(self, peer: PeerId, protocol: str) -> SocketStream:
        """A stream to ``peer``, dialled if needed. Raises DaemonError: nobody got anything."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol]
            ),
        )
        stream, response = await self._exchange(request)
        stream.peer = PeerID(response.streamInfo.peer).to_base58()
        return stream

    async def register(self, protocol: str, path: str) -> None:
        """Have streams of ``protocol`` brought to our listening unix socket at ``path``."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{path}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        await self._ask(request)

    async def stop(self) -> None:
        """End p2pd, wait for it, remove its sockets. Cannot be cancelled; takes at most 6 s."""
        self._stopping = True
        with anyio.CancelScope(shield=True):
            if self._child is not None:
                await self._end(self._child)
            if self._drain is not None:
                await asyncio.wait([self._drain], timeout=1)
                self._drain.cancel()
                await asyncio.gather(self._drain, return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _launch(self, arguments: Sequence[str]) -> None:
        binary = str(files("hivemind.hivemind_cli") / "p2pd")
        # With a Go thread per core p2pd takes a third more processor time for small messages.
        threads = max(1, (os.cpu_count() or 1) // 4)
        defaults = {"GOLOG_LOG_LEVEL": "error", "GOMAXPROCS": str(threads)}
        try:
            self._child = await asyncio.create_subprocess_exec(
                binary,
                f"-listen=/unix{self.control_path}",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**defaults, **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise DaemonError(f"{binary} cannot be run: {error.strerror}") from error
        while not (await self._next_line()).startswith("Peer ID:"):
            pass
        self._drain = asyncio.create_task(self._drain_output())

    async def _next_line(self) -> str:
        """The next line that p2pd prints. Raises DaemonError with the last ones if it exits."""
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            raw = await self._child.stdout.readline()
        except ValueError:  # longer than the reader's limit, which has skipped it
            return ""
        if not raw:
            said = "; ".join(self._last_lines) or "nothing"
            raise DaemonError(f"p2pd exited and said: {said}")
        line = raw.decode(errors="replace").strip()
        self._last_lines = [*self._last_lines, line][-LAST_LINES:]
        return line

    async def _drain_output(self) -> None:
        try:
            while True:
                logger.debug("p2pd: %s", await self._next_line())
        except DaemonError as error:
            if not self._stopping:
                self._gone.set_result(str(error))

    async def gone(self) -> str:
        """Returns, with what p2pd said, once it has ended without being asked to."""
        return await asyncio.shield(self._gone)

    async def _ask(self, request: p2pd_pb2.Request) -> None:
        stream, _ = await self._exchange(request)
        stream.close()

    async def _exchange(self, request: p2pd_pb2.Request) -> tuple[SocketStream, p2pd_pb2.Response]:
        """Send a request on a connection of its own; the connection and p2pd's response."""
        while True:
            try:
                return await self._exchange_once(request)
            except DaemonError as error:
                if NOT_SETTLED not in str(error):
                    raise
                if asyncio.get_running_loop().time() >= self._settled_at:
                    raise
            await asyncio.sleep(0.02)

    async def _exchange_once(
        self, request: p2pd_pb2.Request
    ) -> tuple[SocketStream, p2pd_pb2.Response]:
        stream: SocketStream | None = None
        try:
            stream = await SocketStream.dial(self.control_path)
            data = request.SerializeToString()
            await stream.write([delimited(data)])
            response = p2pd_pb2.Response.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
            if response.type == p2pd_pb2.Response.ERROR:
                raise DaemonError(response.error.msg)
        except StreamCut as cut:
            if stream is not None:
                stream.close()
            raise DaemonError(f"p2pd: {cut}") from cut
        except BaseException:
            if stream is not None:
                stream.close()
            raise
        return stream, response


def _socket_folder() -> Path:
    """A new folder named by our pid, after the ones that dead processes left were swept away."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        _sweep(Path(place))
    prefix = f"swarm-p2pd-{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder)) + len("/control.sock") <= MAX_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


def _sweep(place: Path) -> None:
    """Remove our own folders in ``place`` whose process is gone: it was killed with SIGKILL."""
    for folder in place.glob("swarm-p2pd-*-*"):
        pid = folder.name.split("-")[2]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not _is_alive(int(pid)):
                shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
