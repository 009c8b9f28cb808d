"""A stage's state over the network: from whichever replica gives it, checked on entry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch
import trio
import trio.testing

from peers import messages as msg
from peers.memory import MemoryNetwork, MemoryTransport
from peers.rpc import Caller
from peers.sources import digests
from peers.state import (
    PIECE,
    TRIES,
    DonorBusy,
    PieceSource,
    StateLost,
    Told,
    differing,
    fetch_digests,
    fetch_piece,
    fetch_state,
    fetch_sum,
)
from peers.tensors import RAW, pack
from peers.transport import Frame, Handler
from swarm.errors import BadInput, NotConnected, SwarmError
from swarm.types import Mark, Replica, Term

MARK, OTHER = Mark(Term(1, "t"), 4), Mark(Term(1, "t"), 3)
LENGTH = 2 * PIECE + 10
VECTORS = [torch.arange(LENGTH, dtype=torch.float32) + v for v in range(3)]
PLACE = slice(5, 12)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """On a virtual clock."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(main, backend="trio", backend_options={"clock": clock})


def donor(
    mark: Mark = MARK,
    vectors: list[torch.Tensor] = VECTORS,
    asked: list[msg.GetState] | None = None,
    busy: int = 0,
) -> Handler:
    """Gives pieces at ``mark``, after as many times ``busy``."""
    left = busy

    async def handle(sender: str, frame: Frame) -> Frame:
        nonlocal left
        message = msg.parse_request(frame.header)
        assert isinstance(message, msg.GetState)
        if asked is not None:
            asked.append(message)
        if left:
            left -= 1
            return Frame(msg.header(msg.Busy(reason="others are joining")))
        if message.mark not in (None, mark):
            return Frame(msg.header(msg.At(mark=mark)))
        given = vectors[:1] if message.weights_only else vectors
        stop = message.start + message.count
        metas, payload = pack([(vector[message.start : stop], RAW) for vector in given])
        return Frame(msg.header(msg.Piece(mark=mark, tensors=metas)), payload)

    return handle


def answering(reply: msg.Message, tensor: torch.Tensor | None = None) -> Handler:
    async def handle(sender: str, frame: Frame) -> Frame:
        payload = [] if tensor is None else pack([(tensor, RAW)])[1]
        return Frame(msg.header(reply), payload)

    return handle


def meta(tensor: torch.Tensor) -> list[msg.TensorMeta]:
    return pack([(tensor, RAW)])[0]


def asking(handler: Handler | None, ask: Callable[[PieceSource], Awaitable[Any]]) -> Any:
    """What ``ask`` gets from one that answers like that (None: from nobody)."""

    async def main() -> Any:
        async with MemoryNetwork() as network:
            if handler is not None:
                await MemoryTransport(network, "donor").serve(handler)
            caller = Caller(MemoryTransport(network, "me"), timeout_s=5)
            try:
                return await ask(PieceSource(caller, "run", Replica("donor", "b"), 1))
            except SwarmError as error:  # raised outside the network, which would wrap it
                return error

    found = run(main)
    if isinstance(found, SwarmError):
        raise found
    return found


# -- one piece ------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize("mark", [None, MARK])
def test_a_piece_comes_with_its_mark(vectors: int, mark: Mark | None) -> None:
    asked: list[msg.GetState] = []
    found, piece = asking(donor(asked=asked), lambda s: fetch_piece(s, PLACE, vectors, mark))
    assert found == MARK
    assert len(piece) == vectors
    for got, whole in zip(piece, VECTORS, strict=False):
        assert torch.equal(got, whole[PLACE])
    (question,) = asked
    assert (question.run, question.to, question.stage) == ("run", "b", 1)


SHORT = torch.zeros(3)


@pytest.mark.parametrize(
    ("reply", "tensor", "error", "why"),
    [
        (msg.At(mark=OTHER), None, BadInput, "is at step 3"),
        (msg.At(mark=None), None, BadInput, "is at no step"),
        (msg.Busy(reason="full"), None, DonorBusy, "full"),
        (msg.Refused(reason="no such stage"), None, BadInput, "no such stage"),
        (msg.Ok(), None, BadInput, "another piece"),
        (msg.Piece(mark=OTHER, tensors=meta(SHORT)), SHORT, BadInput, "another piece"),
        (msg.Piece(mark=MARK, tensors=meta(SHORT)), SHORT, BadInput, "expected float32"),
        (msg.Piece(mark=MARK, tensors=[]), None, BadInput, "0 tensors"),
    ],
)
def test_what_is_no_such_piece_is_refused_with_the_reason(reply, tensor, error, why) -> None:
    with pytest.raises(error, match=why):
        asking(answering(reply, tensor), lambda s: fetch_piece(s, PLACE, 1, MARK))


def test_one_that_cannot_be_reached_is_no_bad_input() -> None:
    with pytest.raises(NotConnected):
        asking(None, lambda s: fetch_piece(s, PLACE, 1, MARK))


# -- sums and digests -----------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_sum_is_taken_in_the_type_of_the_run_alone(exact: bool) -> None:
    right = torch.arange(7, dtype=torch.int64 if exact else torch.float32)
    wrong = torch.arange(7, dtype=torch.float32 if exact else torch.int64)

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        handler = answering(msg.Ok(tensors=meta(tensor)), tensor)
        found: torch.Tensor = asking(handler, lambda s: fetch_sum(s, MARK, PLACE, exact=exact))
        return found

    assert torch.equal(fetch(right), right)
    with pytest.raises(BadInput, match="expected"):
        fetch(wrong)


def test_a_sum_that_is_not_kept_is_refused() -> None:
    for reply in (msg.At(mark=MARK), msg.Piece(mark=MARK, tensors=[])):
        with pytest.raises(BadInput):
            asking(answering(reply), lambda s: fetch_sum(s, MARK, PLACE, exact=False))


def told(mark: Mark, found: torch.Tensor) -> msg.Digests:
    return msg.Digests(mark=mark, applied=3, totals=[{"p": 1}, {}], tensors=meta(found))


def test_digests_come_with_what_else_belongs_to_the_mark() -> None:
    found = digests([vector[:20] for vector in VECTORS], 8)
    got = asking(answering(told(MARK, found), found), lambda s: fetch_digests(s, MARK, 3, stages=2))
    assert torch.equal(got.digests, found)
    assert (got.applied, got.totals) == (3, ({"p": 1}, {}))


@pytest.mark.parametrize(("mark", "pieces", "stages"), [(OTHER, 3, 2), (MARK, 2, 2), (MARK, 3, 1)])
def test_digests_of_another_mark_or_number_are_refused(
    mark: Mark, pieces: int, stages: int
) -> None:
    found = digests([vector[:20] for vector in VECTORS], 8)
    fetch = partial(fetch_digests, mark=MARK, pieces=pieces, stages=stages)
    with pytest.raises(BadInput):
        asking(answering(told(mark, found), found), fetch)


def test_the_pieces_that_differ_are_named() -> None:
    vectors = [vector[:20].clone() for vector in VECTORS]
    found = Told(digests(vectors, 8), 0, ())
    assert differing(vectors, found, 8) == []
    vectors[2][9] += 1
    vectors[0][19] += 1
    assert differing(vectors, found, 8) == [1, 2]


# -- all of it ------------------------------------------------------------------------------


def fetch(donors: dict[str, Handler], *, gone: bool = True, vectors: int = 3) -> Any:
    """The vectors, or why they could not be had."""

    async def main() -> list[torch.Tensor] | str:
        async with MemoryNetwork() as network:
            for name, handler in donors.items():
                await MemoryTransport(network, name).serve(handler)
            caller = Caller(MemoryTransport(network, "me"), timeout_s=5)
            names = [*donors, "gone"] if gone else list(donors)
            sources = [PieceSource(caller, "run", Replica(name, "b"), 0) for name in names]
            try:
                return await fetch_state(sources, mark=MARK, length=LENGTH, vectors=vectors)
            except StateLost as error:
                return str(error)

    return run(main)


def is_whole(found: list[torch.Tensor] | str) -> bool:
    return isinstance(found, list) and all(
        torch.equal(got, whole) for got, whole in zip(found, VECTORS, strict=True)
    )


def test_every_piece_arrives_in_its_place_and_the_donors_share_the_work() -> None:
    asked_a: list[msg.GetState] = []
    asked_b: list[msg.GetState] = []
    assert is_whole(fetch({"a": donor(asked=asked_a), "b": donor(asked=asked_b)}))
    starts = [message.start for message in asked_a + asked_b]
    assert sorted(starts) == [0, PIECE, 2 * PIECE]
    assert asked_a
    assert asked_b


def test_a_donor_at_another_mark_or_with_too_little_is_passed_over() -> None:
    short = donor(vectors=[vector[:5] for vector in VECTORS])
    assert is_whole(fetch({"other": donor(OTHER), "short": short, "good": donor()}))


def test_a_donor_that_is_busy_is_asked_again() -> None:
    assert is_whole(fetch({"busy": donor(busy=5)}))


def test_a_donor_that_stays_busy_is_given_up() -> None:
    asked: list[msg.GetState] = []
    why = fetch({"busy": donor(busy=1 << 20, asked=asked)}, gone=False)
    assert "busy: others are joining" in why
    assert max(sum(m.start == start for m in asked) for start in (0, PIECE)) == TRIES


def test_if_nobody_gives_a_piece_it_says_why_for_each() -> None:
    why = fetch({"other": donor(OTHER)})
    assert isinstance(why, str)
    assert "other: is at step 3" in why
    assert "gone" in why


def test_without_anybody_to_ask_it_says_so() -> None:
    assert fetch({}, gone=False) == "the state could not be fetched: nobody is left to ask"


def test_the_weights_alone_can_be_had_and_progress_is_told() -> None:
    values: list[int] = []

    async def main() -> list[torch.Tensor]:
        async with MemoryNetwork() as network:
            await MemoryTransport(network, "a").serve(donor())
            caller = Caller(MemoryTransport(network, "me"), timeout_s=5)
            sources = [PieceSource(caller, "run", Replica("a", "b"), 0)]
            return await fetch_state(
                sources, mark=MARK, length=LENGTH, vectors=1, progress=values.append
            )

    (weights,) = run(main)
    assert torch.equal(weights, VECTORS[0])
    assert sum(values) == LENGTH
    assert len(values) == 3
