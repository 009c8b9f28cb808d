"""The p2pd transport where processes die, frames are broken and start-up input is wrong.

What does not depend on p2pd is tested on py-libp2p too.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from dht.identity import Identity
from peers import p2pd, pylibp2p, wire
from peers.p2pd import P2pdTransport, Tuning
from peers.pylibp2p import PyLibp2pTransport
from peers.streams import receive_frame
from peers.transport import Frame
from swarm.errors import (
    AddressError,
    BootstrapError,
    CallLost,
    IdentityError,
    NotConnected,
    UserError,
)

pytestmark = pytest.mark.anyio

AMPLE_S = 60.0
START_LIMIT_S = 20.0
PROTOCOL = f"/swarm/call/{wire.VERSION}"

SERVER = """
import asyncio, sys
from peers.p2pd import P2pdTransport
from peers.transport import Frame

async def handler(sender, frame):
    if frame.header["m"] == 0:
        print("got it", flush=True)
        await asyncio.sleep(3600)
    return Frame(frame.header, frame.payload)

async def main():
    transport = await P2pdTransport.create(identity_path=sys.argv[1])
    await transport.serve(handler)
    print(transport.addresses()[0], flush=True)
    print(transport.daemon_pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture
def anyio_backend():
    return "asyncio"


MODULES = {"p2pd": p2pd, "pylibp2p": pylibp2p}
TRANSPORTS = {"p2pd": P2pdTransport, "pylibp2p": PyLibp2pTransport}
on_both = pytest.mark.parametrize("kind", TRANSPORTS)


@asynccontextmanager
async def transport(path, kind="p2pd", **options):
    made = await TRANSPORTS[kind].create(identity_path=path, **options)
    try:
        yield made
    finally:
        await made.close()


async def echo(sender, frame):
    return Frame(frame.header, frame.payload)


async def line_of(process):
    """The next line that a child prints."""
    line = b""
    with anyio.fail_after(AMPLE_S):
        while not line.endswith(b"\n"):
            line += await process.stdout.receive(1)
    return line.decode().strip()


async def until(condition):
    with anyio.fail_after(AMPLE_S):
        while not condition():  # noqa: ASYNC110  # /proc sends no events
            await anyio.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def own_children():
    return {
        int(pid)
        for tasks in Path("/proc/self/task").glob("*/children")
        for pid in tasks.read_text().split()
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def head_of(header, payload_bytes=0):
    """The first bytes of a frame that announces so much payload."""
    frame = Frame(header, [memoryview(bytes(payload_bytes))])
    return wire.encode_head(frame, wire.DEFAULT_LIMITS)


@asynccontextmanager
async def server_process(tmp_path):
    command = [sys.executable, "-c", SERVER, str(tmp_path / "server")]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            yield process, await line_of(process), int(await line_of(process))
        finally:
            if process.returncode is None:
                process.kill()


async def test_sigkill_in_the_middle_of_a_call_loses_it_and_ends_the_daemon(tmp_path):
    async with (
        server_process(tmp_path) as (process, address, daemon_pid),
        transport(tmp_path / "client") as client,
    ):
        peer = await client.connect(address)
        assert (await client.call(peer, Frame({"m": 1}), timeout_s=AMPLE_S)).header["m"] == 1

        async def kill():
            assert await line_of(process) == "got it"
            process.send_signal(signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(CallLost, match=r"closed|cut"):
                await client.call(peer, Frame({"m": 0}), timeout_s=AMPLE_S)
        with pytest.raises((NotConnected, CallLost)):
            await client.call(peer, Frame({"m": 1}), timeout_s=AMPLE_S)
        await until(lambda: not is_alive(daemon_pid))
        with pytest.raises(NotConnected, match="no stream to"):
            await client.call(peer, Frame({"m": 1}), timeout_s=AMPLE_S)


async def test_sigkill_while_a_payload_is_on_its_way_loses_the_call(tmp_path):
    async with (
        server_process(tmp_path) as (process, address, _),
        transport(tmp_path / "client") as client,
    ):
        peer = await client.connect(address)
        await client.call(peer, Frame({"m": 1}), timeout_s=AMPLE_S)
        process.send_signal(signal.SIGSTOP)  # so that the payload cannot all be taken

        async def kill():
            await anyio.wait_all_tasks_blocked()
            process.send_signal(signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            payload = [memoryview(bytes(64 << 20))]
            with pytest.raises(CallLost):
                await client.call(peer, Frame({"m": 1}, payload), timeout_s=AMPLE_S)


@on_both
async def test_peer_that_restarts_is_reached_again(tmp_path, kind):
    listen = [f"/ip4/127.0.0.1/tcp/{free_port()}"]
    async with transport(tmp_path / "client", kind) as client:
        for _ in range(2):
            async with transport(
                tmp_path / "server", kind, listen=listen, initial_peers=client.addresses()
            ) as server:
                await server.serve(echo)
                reply = await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)
                assert reply.header["m"] == 1


async def test_close_leaves_no_process_no_task_and_no_file(tmp_path):
    before = asyncio.all_tasks()
    children = own_children()
    async with transport(tmp_path / "a") as a, transport(tmp_path / "b") as b:
        await a.serve(echo)
        await b.connect(a.addresses()[0])
        await b.call(a.peer, Frame({"m": 1}), timeout_s=AMPLE_S)
        pids = [a.daemon_pid, b.daemon_pid]
        folders = [Path(t.p2p.daemon_listen_maddr["unix"]).parent for t in (a, b)]
        assert all(is_alive(pid) for pid in pids)
        assert all(folder.is_dir() and folder.stat().st_mode & 0o77 == 0 for folder in folders)
        assert all(os.getsid(pid) != os.getsid(0) for pid in pids), "Ctrl-C would end p2pd first"
    assert not any(is_alive(pid) for pid in pids)
    assert not any(folder.exists() for folder in folders)
    assert asyncio.all_tasks() == before
    assert own_children() == children


async def test_cancelled_start_leaves_no_process(tmp_path):
    children = own_children()

    async def start():
        await P2pdTransport.create(identity_path=tmp_path / "a")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await until(lambda: own_children() != children)
        tasks.cancel_scope.cancel()
    assert own_children() == children


@on_both
async def test_peer_id_is_that_of_the_key_file_and_addresses_are_complete(tmp_path, kind):
    identity, _ = Identity.load_or_create(tmp_path / "key")
    async with transport(tmp_path / "key", kind, announce=["/ip4/1.2.3.4/tcp/31337"]) as made:
        assert made.peer == identity.peer_id
        assert made.addresses() == [f"/ip4/1.2.3.4/tcp/31337/p2p/{identity.peer_id}"]
    async with transport(tmp_path / "key", kind) as made:
        (address,) = made.addresses()
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{identity.peer_id}")


@on_both
async def test_identity_taken_is_seen_through_a_bootstrap_peer(tmp_path, kind):
    async with transport(tmp_path / "hub", kind) as hub:
        async with transport(tmp_path / "node", kind, initial_peers=hub.addresses()) as node:
            assert await MODULES[kind].identity_taken(node.peer, hub.addresses())
        assert not await MODULES[kind].identity_taken(node.peer, hub.addresses())


ID = "12D3KooWGRUYFnb8Vjk7MgWYVRJ3VY6aVGAyMzHhSXVXzpKfqYvW"
CLOSED = f"/ip4/127.0.0.1/tcp/1/p2p/{ID}"


@on_both
@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"listen": ["nonsense"]}, AddressError, "listen address 'nonsense': not a multiaddr"),
        ({"listen": ["/ip4/127.0.0.1/tcp/99999"]}, AddressError, "99999.*not in range"),
        ({"listen": ["/ip4/127.0.0.1"]}, AddressError, "needs an IP address and a port"),
        ({"listen": ["/ip4/192.0.2.1/tcp/0"]}, AddressError, "an address of this machine"),
        ({"announce": ["/ip4/1.2.3.4/tcp/0"]}, AddressError, "port 0 cannot be dialled"),
        ({"announce": ["1.2.3.4:80"]}, AddressError, "announce address '1.2.3.4:80'"),
        ({"initial_peers": ["nonsense"]}, AddressError, "peer address 'nonsense'"),
        ({"initial_peers": ["/ip4/1.2.3.4/tcp/80"]}, AddressError, "must end in /p2p/PEER_ID"),
        ({"initial_peers": [CLOSED]}, BootstrapError, f"{CLOSED}: connection refused: .* port 1 "),
        (
            {"initial_peers": [f"/dns4/no-such-host.invalid/tcp/80/p2p/{ID}"]},
            BootstrapError,
            "host name 'no-such-host.invalid' is not known",
        ),
    ],
)
async def test_bad_input_at_start_is_one_line_and_leaves_no_process(
    tmp_path, kind, options, error, reason
):
    children = own_children()
    with anyio.fail_after(START_LIMIT_S), pytest.raises(error, match=reason) as caught:
        await TRANSPORTS[kind].create(identity_path=tmp_path / "key", **options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)
    assert own_children() == children


@on_both
async def test_port_in_use_is_named(tmp_path, kind):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port} is in use"):
            await TRANSPORTS[kind].create(
                identity_path=tmp_path / "key", listen=[f"/ip4/127.0.0.1/tcp/{port}"]
            )


@on_both
async def test_broken_key_file_is_an_identity_error(tmp_path, kind):
    (tmp_path / "key").write_bytes(b"nonsense")
    with pytest.raises(IdentityError):
        await TRANSPORTS[kind].create(identity_path=tmp_path / "key")


@on_both
async def test_wrong_peer_at_the_bootstrap_address_is_said(tmp_path, kind):
    async with transport(tmp_path / "hub", kind) as hub:
        wrong = hub.addresses()[0].replace(hub.peer, ID)
        with pytest.raises(BootstrapError, match="another peer, ") as caught:
            await TRANSPORTS[kind].create(identity_path=tmp_path / "key", initial_peers=[wrong])
        assert wrong in str(caught.value)
        assert hub.peer in str(caught.value)
        assert "\n" not in str(caught.value)


@on_both
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_bootstrap_address_of_something_else_is_said(tmp_path, kind, greeting):
    """Another program answers there, or accepts and keeps silent: known within the limit."""
    release = asyncio.Event()

    async def serve(_, writer):
        if greeting:
            writer.write(greeting)
            await writer.drain()
        else:
            await release.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/{ID}"
    try:
        with anyio.fail_after(START_LIMIT_S), pytest.raises(BootstrapError, match="no swarm peer"):
            await TRANSPORTS[kind].create(identity_path=tmp_path / "key", initial_peers=[address])
    finally:
        release.set()
        server.close()
        await server.wait_closed()


@on_both
async def test_one_bootstrap_peer_that_works_is_enough(tmp_path, kind, caplog):
    async with transport(tmp_path / "hub", kind) as hub:
        await hub.serve(echo)
        with caplog.at_level(logging.WARNING):
            async with transport(
                tmp_path / "node", kind, initial_peers=[CLOSED, *hub.addresses()]
            ) as node:
                await node.call(hub.peer, Frame({"m": 1}), timeout_s=AMPLE_S)
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert CLOSED in warning
    assert "connection refused" in warning


@asynccontextmanager
async def raw_stream(tmp_path, **tuning):
    """A serving transport, a client, and a bare stream from that client to it."""
    async with transport(tmp_path / "server", tuning=Tuning(**tuning)) as server:
        await server.serve(echo)
        async with transport(tmp_path / "client", initial_peers=server.addresses()) as client:
            stream = await client._daemon.open_stream(server.peer, PROTOCOL)
            try:
                yield server, client, stream
            finally:
                stream.close()


def served(transport):
    """The streams on which it answers calls."""
    server = transport._server
    return server._streams if isinstance(transport, PyLibp2pTransport) else server.streams._streams


async def ended(stream):
    """Whether the other side closes the stream without a word."""
    with anyio.fail_after(AMPLE_S):
        return await stream.fill(memoryview(bytearray(1))) == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a swarm peer"),
        (b"SWRM\x03" + bytes(12), "wire version: got 3, this peer speaks 2; upgrade this peer"),
        (b"SWRM\x02" + b"\xff" * 12, "header too long"),
        (b"SWRM\x02\x01\0\0\0" + bytes(8) + b"\xc1", "header: not valid msgpack"),
    ],
)
async def test_broken_frame_is_refused_with_a_reason_and_its_stream_ends(tmp_path, data, reason):
    async with raw_stream(tmp_path, discard_s=0.1) as (server, client, stream):
        await stream.write([data])
        with anyio.fail_after(AMPLE_S):
            refused = await receive_frame(stream, wire.DEFAULT_LIMITS)
        assert refused.header["kind"] == "refused"
        assert reason in refused.header["reason"]
        assert await ended(stream)
        await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)


@pytest.mark.parametrize(
    "data", [b"SWRM", head_of({"m": 1})[:20], head_of({"m": 1}, 100), head_of({"m": 1}, 9) + b"x"]
)
async def test_frame_that_is_cut_does_no_harm(tmp_path, data):
    async with raw_stream(tmp_path) as (server, client, stream):
        await stream.write([data])
        stream.close()
        await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)


@pytest.mark.parametrize("data", [b"S", head_of({"m": 1}, 100)])
async def test_caller_that_stalls_in_a_message_is_dropped(tmp_path, data):
    async with raw_stream(tmp_path, progress_s=0.2) as (server, client, stream):
        await stream.write([data])
        assert await ended(stream)
        await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)


async def test_caller_that_does_not_read_its_reply_is_dropped(tmp_path):
    async with raw_stream(tmp_path, progress_s=0.2) as (server, _, stream):

        async def handler(sender, frame):
            return Frame({}, [memoryview(bytes(64 << 20))])

        server._server.streams.handler = handler
        await stream.write([head_of({"m": 1})])
        await until(lambda: len(server._server.streams._streams) == 1)
        await until(lambda: not server._server.streams._streams)


async def test_slow_handler_is_no_stall(tmp_path):
    async with raw_stream(tmp_path, progress_s=0.1) as (server, client, _):

        async def handler(sender, frame):
            await anyio.sleep(1.0)  # many times the limit for progress
            return Frame({"kind": "late"})

        server._server.streams.handler = handler
        reply = await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)
        assert reply.header == {"kind": "late"}


@pytest.mark.parametrize("bound", ["inbound_streams", "inbound_streams_per_peer"])
async def test_streams_beyond_the_bound_are_refused(tmp_path, bound):
    async with raw_stream(tmp_path, **{bound: 1}) as (server, client, first):
        await first.write([head_of({"m": 1})])
        assert (await receive_frame(first, wire.DEFAULT_LIMITS)).header == {"m": 1}
        second = await client._daemon.open_stream(server.peer, PROTOCOL)
        assert await ended(second)
        second.close()
        await first.write([head_of({"m": 2})])
        assert (await receive_frame(first, wire.DEFAULT_LIMITS)).header == {"m": 2}
        first.close()
        await until(lambda: not server._server.streams._streams)
        await client.call(server.peer, Frame({"m": 3}), timeout_s=AMPLE_S)


@on_both
async def test_streams_are_reused_pooled_up_to_the_bound_and_closed_when_idle(tmp_path, kind):
    async with (
        transport(tmp_path / "server", kind) as server,
        transport(
            tmp_path / "client", kind, tuning=Tuning(streams_per_peer=3, idle_s=0.5)
        ) as client,
    ):
        most = 0

        async def handler(sender, frame):
            nonlocal most
            most = max(most, len(served(server)))
            return Frame({})

        await server.serve(handler)
        await client.connect(server.addresses()[0])
        async with anyio.create_task_group() as tasks:
            for m in range(30):
                tasks.start_soon(
                    lambda m=m: client.call(server.peer, Frame({"m": m}), timeout_s=AMPLE_S)
                )
        assert 1 <= most <= 3
        await until(lambda: not client._client._pools)
        await until(lambda: not served(server))


async def test_daemon_that_died_is_not_connected(tmp_path):
    async with transport(tmp_path / "a") as a:
        os.kill(a.daemon_pid, signal.SIGKILL)
        await until(lambda: not is_alive(a.daemon_pid))
        with pytest.raises(NotConnected, match="p2pd"):
            await a.call(ID, Frame({}), timeout_s=AMPLE_S)
        with anyio.fail_after(AMPLE_S):
            assert "p2pd exited" in await a.gone()


@pytest.mark.parametrize("seen_in_time", [True, False])
async def test_pooled_stream_that_died_is_replaced(tmp_path, monkeypatch, seen_in_time):
    """Nothing was sent on it, so the call goes out on another; also if only the write shows it."""
    async with (
        transport(tmp_path / "server") as server,
        transport(tmp_path / "client", initial_peers=server.addresses()) as client,
    ):
        await server.serve(echo)
        await client.call(server.peer, Frame({"m": 1}), timeout_s=AMPLE_S)
        (pooled,) = client._client._pools[server.peer].idle
        (scope,) = server._server.streams._streams.values()
        scope.cancel()
        await until(lambda: not pooled.is_silent())
        if not seen_in_time:
            monkeypatch.setattr(pooled, "is_silent", lambda: True)
        reply = await client.call(server.peer, Frame({"m": 2}), timeout_s=AMPLE_S)
        assert reply.header == {"m": 2}
        assert pooled not in client._client._pools[server.peer].idle
