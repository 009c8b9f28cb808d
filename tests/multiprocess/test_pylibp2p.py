"""The transport on py-libp2p where processes die: who is left hears of it within seconds."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import anyio
import psutil
import pytest
import trio

from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame
from swarm.errors import CallLost, NotConnected

pytestmark = pytest.mark.anyio

AMPLE_S = 60.0
NOTICED_S = 5.0
KINDS = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}

SERVER = """
import asyncio, sys
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame

async def handler(sender, frame):
    print(frame.header["m"], flush=True)
    if frame.header["m"] == "wait":
        await asyncio.sleep(3600)
    if frame.header["m"] == "much":
        return Frame({}, [memoryview(bytes(512 << 20))])
    return Frame(frame.header, frame.payload)

async def main():
    kind = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}[sys.argv[1]]
    transport = await kind.create(identity_path=sys.argv[2])
    await transport.serve(handler)
    print(transport.addresses()[0], flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Server:
    """A process that answers calls; ``address`` is where."""

    def __init__(self, process):
        self._process = process
        self.address = ""

    async def line(self):
        """The next line that it prints."""
        line = b""
        with anyio.fail_after(AMPLE_S):
            while not line.endswith(b"\n"):
                line += await self._process.stdout.receive(1)
        return line.decode().strip()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def server(kind, key):
    command = [sys.executable, "-W", "ignore", "-c", SERVER, kind, str(key)]
    async with await anyio.open_process(command, stderr=None) as process:
        made = Server(process)
        try:
            made.address = await made.line()
            yield made
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def client(kind, key):
    transport = await KINDS[kind].create(identity_path=key)
    try:
        yield transport
    finally:
        await transport.close()


# Who waits for p2pd to notice is tested in test_p2pd.py; one end at least is py-libp2p here.
PAIRS = [("pylibp2p", "pylibp2p"), ("pylibp2p", "p2pd"), ("p2pd", "pylibp2p")]


REQUESTS = {
    "wait": Frame({"m": "wait"}),
    "much": Frame({"m": "much"}),
    "write": Frame({"m": "echo"}, [memoryview(bytes(512 << 20))]),
}


@pytest.mark.parametrize(("near", "far"), PAIRS)
async def test_a_kill_is_noticed_by_who_waits_who_reads_and_who_writes(tmp_path, near, far):
    async with client(near, tmp_path / "near") as one:
        before = await held(one)
        for name in REQUESTS:
            async with server(far, tmp_path / "far") as other:
                peer = await one.connect(other.address)
                reply = await one.call(peer, Frame({"m": "hello"}), timeout_s=AMPLE_S)
                assert reply.header == {"m": "hello"}
                assert await other.line() == "hello"
                await lose(one, peer, other, name)
            with pytest.raises((NotConnected, CallLost)):
                await one.call(peer, Frame({"m": "hello"}), timeout_s=AMPLE_S)
        with anyio.fail_after(AMPLE_S):
            while await has_more(one, before):  # noqa: ASYNC110  # no event tells of it
                await anyio.sleep(0.01)


async def held(transport):
    """What there is: asyncio's tasks, and in py-libp2p trio's tasks and connections."""
    if isinstance(transport, P2pdTransport):
        return (len(asyncio.all_tasks()),)

    async def there():
        return trio.lowlevel.current_statistics().tasks_living, len(transport._host.peers())

    return *await transport._thread.run(there), len(asyncio.all_tasks())


async def has_more(transport, before):
    return any(now > then for now, then in zip(await held(transport), before, strict=True))


async def lose(one, peer, other, name):
    """Kill ``other`` in the middle of a call, which is lost soon after."""
    scope = anyio.CancelScope()

    async def kill():
        if name == "write":
            await anyio.sleep(0.05)  # into the transfer, whatever the pace
        else:
            assert await other.line() == name
        other.kill()
        await anyio.sleep(NOTICED_S)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with scope, pytest.raises(CallLost, match=r"cut|closed"):
            await one.call(peer, REQUESTS[name], timeout_s=AMPLE_S)
        assert not scope.cancelled_caught, f"{name}: not noticed in {NOTICED_S:g} s"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("near", "far"), PAIRS[:2])
async def test_a_peer_that_starts_again_with_its_key_is_reached_again(tmp_path, near, far):
    async with client(near, tmp_path / "near") as one:
        for _ in range(2):
            async with server(far, tmp_path / "far") as other:
                peer = await one.connect(other.address)
                reply = await one.call(peer, Frame({"m": "hello"}), timeout_s=AMPLE_S)
                assert reply.header == {"m": "hello"}
                other.kill()


async def test_a_process_on_py_libp2p_has_no_child_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with server("pylibp2p", tmp_path / "key") as other:
        pid = other._process.pid
        assert os.listdir(tmp_path) == ["key"]
        assert psutil.Process(pid).children() == []
