"""hivemind's unary calls over one who can exchange two messages: what goes, comes, and lies."""

import asyncio

import pytest

from dht.hivemind_p2p import (
    MAX_MESSAGE_BYTES,
    NoExchange,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    p2p_over,
    p2pd_pb2,
)
from dht.identity import Identity

ALICE, BOB = (Identity.generate().peer_id for _ in range(2))
NAME = "DHTProtocol.rpc_ping"


class Exchange:
    """Alice and Bob, joined by a dictionary. ``lie`` changes replies on their way."""

    def __init__(self, peer, others):
        self.peer, self._others, self.answers = peer, others, {}
        self.lie = lambda reply: reply
        others[peer] = self

    def addresses(self):
        return [f"/ip4/192.0.2.1/tcp/4001/p2p/{self.peer}"]

    async def exchange(self, peer, protocol, message):
        answer = self._others[peer].answers.get(protocol) if peer in self._others else None
        if answer is None:
            raise NoExchange("nobody there")
        return self.lie(await answer(self.peer, message))

    async def on_exchange(self, protocol, answer):
        self.answers[protocol] = answer
        if answer is None:
            del self.answers[protocol]


def run(test):
    async def main():
        others = {}
        alice, bob = Exchange(ALICE, others), Exchange(BOB, others)
        await test(alice, p2p_over(alice), bob, p2p_over(bob))

    asyncio.run(main())


async def call(p2p, peer=BOB, data=b"hello"):
    return await p2p._client.call_unary_handler(PeerID.from_base58(peer), NAME, data)


def test_a_call_brings_data_and_sender_and_takes_the_answer_back():
    async def test(alice, a, bob, b):
        async def handler(data, sender):
            assert sender.to_base58() == ALICE
            return data + b"!"

        await b._client.add_unary_handler(NAME, handler)
        assert await call(a) == b"hello!"
        await b._client.remove_unary_handler(NAME)
        with pytest.raises(P2PDaemonError, match="nobody there"):
            await call(a)
        for latest in (False, True):
            (address,) = await a.get_visible_maddrs(latest=latest)
            assert str(address) == alice.addresses()[0]
        assert a.peer_id.to_base58() == ALICE

    run(test)


def test_what_goes_wrong_there_is_told_here():
    async def test(alice, a, bob, b):
        async def handler(data, sender):
            raise ValueError("out of cheese")

        await b._client.add_unary_handler(NAME, handler)
        with pytest.raises(P2PHandlerError, match="out of cheese"):
            await call(a)

    run(test)


def test_messages_that_are_too_long_are_refused_on_both_sides():
    async def test(alice, a, bob, b):
        async def handler(data, sender):
            return bytes(MAX_MESSAGE_BYTES)

        await b._client.add_unary_handler(NAME, handler)
        with pytest.raises(P2PHandlerError, match="longer than allowed"):
            await call(a)
        with pytest.raises(P2PDaemonError, match=f"allowed are {MAX_MESSAGE_BYTES}"):
            await call(a, data=bytes(MAX_MESSAGE_BYTES))

    run(test)


OTHER = p2pd_pb2.PersistentConnectionRequest(
    callId=bytes(16), unaryResponse=p2pd_pb2.CallUnaryResponse(response=b"not yours")
)
NO_RESPONSE = p2pd_pb2.PersistentConnectionRequest(callId=bytes(16))


@pytest.mark.parametrize(
    "lie", [b"", b"\xff\xff", OTHER.SerializeToString(), NO_RESPONSE.SerializeToString()]
)
def test_a_reply_that_is_none_is_an_error(lie):
    async def test(alice, a, bob, b):
        async def handler(data, sender):
            return data

        await b._client.add_unary_handler(NAME, handler)
        alice.lie = lambda reply: lie
        with pytest.raises(P2PDaemonError):
            await call(a)

    run(test)


@pytest.mark.parametrize("message", [b"\xff\xff", b"", NO_RESPONSE.SerializeToString()])
def test_a_request_that_is_none_is_answered_and_calls_nobody(message):
    async def test(alice, a, bob, b):
        async def handler(data, sender):
            raise AssertionError("not to be called")

        await b._client.add_unary_handler(NAME, handler)
        reply = p2pd_pb2.PersistentConnectionRequest.FromString(
            await alice.exchange(BOB, NAME, message)
        )
        assert b"no PersistentConnectionRequest" in reply.unaryResponse.error

    run(test)
