"""The transport on py-libp2p when its thread breaks: what was sent is in doubt, the rest is not."""

import asyncio

import pytest

from peers.pylibp2p import PyLibp2pTransport
from peers.transport import Frame
from swarm.errors import CallLost, NotConnected

pytestmark = pytest.mark.anyio

AMPLE_S = 60.0


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_a_call_under_way_when_the_thread_breaks_is_lost_and_later_ones_not_connected(
    tmp_path,
):
    bob = await PyLibp2pTransport.create(identity_path=tmp_path / "bob")
    alice = await PyLibp2pTransport.create(
        identity_path=tmp_path / "alice", initial_peers=bob.addresses()
    )

    async def break_thread():
        raise RuntimeError("out of cheese")

    async def break_it():
        alice._thread.nursery.start_soon(break_thread)

    async def handler(sender, request):
        with pytest.raises((CallLost, NotConnected)):
            await bob.call(alice.peer, Frame({}), timeout_s=AMPLE_S)
        await alice._thread.run(break_it)
        await asyncio.sleep(AMPLE_S)

    try:
        await bob.serve(handler)
        with pytest.raises(CallLost, match="no reply"):
            await alice.call(bob.peer, Frame({}), timeout_s=AMPLE_S)
        assert "out of cheese" in await alice.gone()
        with pytest.raises(NotConnected):
            await alice.call(bob.peer, Frame({}), timeout_s=AMPLE_S)
        await alice.on_exchange("/gone", None)
    finally:
        await alice.close()
        await bob.close()
