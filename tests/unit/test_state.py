"""Fetching a stage's weights in pieces, from whichever replica gives them."""

from __future__ import annotations

import anyio
import torch

from peers import messages as msg
from peers.memory import MemoryNetwork, MemoryTransport
from peers.rpc import Caller
from peers.state import PIECE, StateLost, fetch_weights
from peers.tensors import RAW, pack
from peers.transport import Frame
from swarm.types import Mark, Replica, Term

MARK = Mark(Term(1, "t"), 4)
LENGTH = 2 * PIECE + 10
WEIGHTS = torch.arange(LENGTH, dtype=torch.float32)


def donor(mark: Mark = MARK, weights: torch.Tensor = WEIGHTS, asked: list | None = None):
    async def handle(sender: str, frame: Frame) -> Frame:
        message = msg.parse_request(frame.header)
        assert isinstance(message, msg.GetState)
        if asked is not None:
            asked.append(message.start)
        if message.mark != mark:
            return Frame(msg.header(msg.At(mark=mark)))
        metas, payload = pack([(weights[message.start : message.start + message.count], RAW)])
        return Frame(msg.header(msg.Ok(tensors=metas)), payload)

    return handle


def fetch(donors: dict) -> torch.Tensor | str:
    """The weights, or why they could not be had."""

    async def main() -> torch.Tensor | str:
        async with MemoryNetwork() as network:
            for name, handler in donors.items():
                await MemoryTransport(network, name).serve(handler)
            caller = Caller(MemoryTransport(network, "me"), timeout_s=5)
            replicas = [Replica(name, "b") for name in (*donors, "gone")]
            try:
                return await fetch_weights(caller, "run", replicas, mark=MARK, length=LENGTH)
            except StateLost as error:
                return str(error)

    return anyio.run(main, backend="trio")


def test_every_piece_arrives_in_its_place_and_the_donors_share_the_work() -> None:
    asked_a: list[int] = []
    asked_b: list[int] = []
    weights = fetch({"a": donor(asked=asked_a), "b": donor(asked=asked_b)})
    assert torch.equal(weights, WEIGHTS)
    assert sorted(set(asked_a) | set(asked_b)) == [0, PIECE, 2 * PIECE]
    assert asked_a
    assert asked_b


def test_a_donor_at_another_mark_or_with_too_little_is_passed_over() -> None:
    other = donor(Mark(Term(1, "t"), 3))
    short = donor(weights=WEIGHTS[:5])
    assert torch.equal(fetch({"other": other, "short": short, "good": donor()}), WEIGHTS)


def test_if_nobody_gives_a_piece_it_says_why_for_each() -> None:
    why = fetch({"other": donor(Mark(Term(1, "t"), 3))})
    assert isinstance(why, str)
    assert "other: is at step 3" in why
    assert "gone" in why
