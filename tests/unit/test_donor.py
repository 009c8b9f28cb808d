"""What a replica gives of its state, to whom, and how fast."""

from __future__ import annotations

import anyio
import pytest
import torch
from stage_bench import PIECE, STAGE, TERM, Bench, Peer, mark, with_bench

from peers import messages as msg
from peers.donor import ACTIVE_S, LONGEST_WAIT_S
from peers.sources import digests
from peers.tensors import RAW, Expected, unpack
from swarm.types import Mark, Stamp, Term
from tests.chaos.harness import identity

TRAINER = identity(1).peer_id
ELSEWHERE = Mark(Term(9, "ff"), 1)


def get_state(at: Mark | None = None, start: int = 0, count: int = 8, **more) -> msg.GetState:
    return msg.GetState(run="r", stage=STAGE, start=start, count=count, mark=at, **more)


def get_sum(at: Mark, start: int = 0, count: int = 8) -> msg.GetDecidedSum:
    return msg.GetDecidedSum(run="r", stage=STAGE, start=start, count=count, mark=at)


def get_digests(at: Mark) -> msg.GetDigests:
    return msg.GetDigests(run="r", stage=STAGE, mark=at)


def keep(at: Mark) -> msg.Keep:
    return msg.Keep(run="r", stamp=Stamp(TERM, 1), mark=at)


def tensors(metas, payload, *expected: Expected) -> list[torch.Tensor]:
    """What a receiver takes of an answer."""
    return unpack(metas, [memoryview(bytearray(b"".join(payload)))], expected)


def state_of(peer: Peer) -> list[torch.Tensor]:
    return [vector.clone() for vector in peer.stage.model.state().values()]


FLOATS = Expected((8,), "float32", RAW)


# -- pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, mark(1)])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_piece_is_labelled_with_the_mark_that_it_is_at(asked, weights_only: bool) -> None:
    @with_bench()
    async def main(bench: Bench) -> None:
        peer = await bench.member("a", steps=1)
        question = get_state(asked, 3, weights_only=weights_only)
        reply, payload = await peer.donor.state("joiner", question)
        assert isinstance(reply, msg.Piece)
        assert reply.mark == mark(1)
        whole = state_of(peer)[: 1 if weights_only else 3]
        found = tensors(reply.tensors, payload, *[FLOATS] * len(whole))
        for got, vector in zip(found, whole, strict=True):
            assert torch.equal(got, vector[3:11])

    main()


@with_bench()
async def test_what_is_given_does_not_change_with_the_next_step(bench: Bench) -> None:
    peer = await bench.member("a")
    before = peer.stage.model.weights[:8].clone()
    reply, payload = await peer.donor.state("joiner", get_state(weights_only=True))
    await peer.step()
    assert isinstance(reply, msg.Piece)
    assert torch.equal(tensors(reply.tensors, payload, FLOATS)[0], before)
    assert not torch.equal(peer.stage.model.weights[:8], before)


@with_bench()
async def test_another_mark_than_its_own_is_answered_with_where_it_is(bench: Bench) -> None:
    peer, empty = await bench.member("a", steps=1), await bench.replica("empty")
    for other in (mark(0), mark(2), ELSEWHERE):
        assert await peer.donor.state("j", get_state(other)) == (msg.At(mark=mark(1)), [])
        assert await peer.donor.digests(get_digests(other)) == (msg.At(mark=mark(1)), [])
    assert await empty.donor.state("j", get_state()) == (msg.At(mark=None), [])
    assert await empty.donor.digests(get_digests(mark(0))) == (msg.At(mark=None), [])


@with_bench()
async def test_values_beyond_the_end_are_refused_with_the_length(bench: Bench) -> None:
    peer = await bench.member("a", steps=1)
    length = peer.stage.model.length
    refused = msg.Refused(reason=f"the stage has {length} values")
    assert (await peer.donor.state("j", get_state(start=length - 8)))[0].kind == "piece"
    assert await peer.donor.state("j", get_state(start=length - 7)) == (refused, [])
    assert (await peer.donor.decided_sum(get_sum(mark(0), length - 8)))[0].kind == "ok"
    assert await peer.donor.decided_sum(get_sum(mark(0), length - 7)) == (refused, [])


@with_bench()
async def test_digests_are_those_of_all_pieces(bench: Bench) -> None:
    peer = await bench.member("a", steps=2)
    reply, payload = await peer.donor.digests(get_digests(mark(2)))
    assert isinstance(reply, msg.Digests)
    assert (reply.mark, reply.applied, reply.totals) == (mark(2), 2, [{}, {"p": 2}])
    own = digests(state_of(peer), PIECE)
    (found,) = tensors(reply.tensors, payload, Expected(tuple(own.shape), "uint8", RAW))
    assert torch.equal(found, own)


# -- how many, how fast ---------------------------------------------------------------------


async def kind_for(peer: Peer, sender: str) -> str:
    return (await peer.donor.state(sender, get_state()))[0].kind


@with_bench(limits__joiners=2, trainers=[TRAINER])
async def test_so_many_join_at_a_time_and_trainers_do_not_count(bench: Bench) -> None:
    peer = await bench.member("a")
    assert [await kind_for(peer, sender) for sender in ("x", "y", "x")] == ["piece"] * 3
    reply, _ = await peer.donor.state("z", get_state())
    assert reply == msg.Busy(reason="2 others are joining from here")
    assert await kind_for(peer, TRAINER) == "piece"


@with_bench(limits__joiners=1)
async def test_one_that_asks_no_more_gives_its_place_to_another(bench: Bench) -> None:
    peer = await bench.member("a")
    await kind_for(peer, "x")
    await anyio.sleep(ACTIVE_S / 2)
    await kind_for(peer, "x")
    await anyio.sleep(ACTIVE_S / 2)
    assert await kind_for(peer, "y") == "busy", "x asked for something not long ago"
    await anyio.sleep(ACTIVE_S / 2)
    assert await kind_for(peer, "y") == "piece"
    assert await kind_for(peer, "x") == "busy"


RATE = 1 << 10
PER_S = RATE // (4 * 8)
"""So many pieces of eight weights, as ``get_state`` asks for, go out in a second."""


@with_bench(limits__join_bytes_per_s=RATE)
async def test_state_goes_out_at_the_rate_of_the_manifest(bench: Bench) -> None:
    peer = await bench.member("a")
    began = anyio.current_time()
    for _ in range(10 * PER_S + 1):
        reply, _ = await peer.donor.state("x", get_state(weights_only=True))
        assert reply.kind == "piece"
    assert anyio.current_time() - began == pytest.approx(10.0)


@with_bench(limits__join_bytes_per_s=RATE)
async def test_who_would_have_to_wait_long_is_told_so_at_once(bench: Bench) -> None:
    peer = await bench.member("a")
    kinds: list[str] = []

    async def ask() -> None:
        reply, _ = await peer.donor.state("x", get_state(weights_only=True))
        kinds.append(reply.kind)
        if isinstance(reply, msg.Busy):
            assert "sends at most" in reply.reason

    async with anyio.create_task_group() as tasks:
        for _ in range(10 * PER_S):
            tasks.start_soon(ask)
    given = int(LONGEST_WAIT_S * PER_S) + 1
    assert (kinds.count("piece"), kinds.count("busy")) == (given, 10 * PER_S - given)
    assert kinds[0] == "busy"


@with_bench(limits__join_bytes_per_s=RATE)
async def test_a_sum_need_not_wait(bench: Bench) -> None:
    """In a step's time it is of no use any more."""
    peer = await bench.member("a", steps=1)
    await peer.donor.state("x", get_state(count=1024))
    assert await kind_for(peer, "x") == "busy"
    began = anyio.current_time()
    reply, payload = await peer.donor.decided_sum(get_sum(mark(0), 3))
    assert anyio.current_time() == began
    assert isinstance(reply, msg.Ok)
    kept = peer.stage.decided_sum(mark(0), slice(3, 11))
    assert kept is not None
    assert torch.equal(tensors(reply.tensors, payload, FLOATS)[0], kept)


@with_bench()
async def test_only_the_last_sum_is_there(bench: Bench) -> None:
    peer = await bench.member("a", steps=2)
    assert await peer.donor.decided_sum(get_sum(mark(0))) == (msg.At(mark=mark(2)), [])
    assert await peer.donor.decided_sum(get_sum(mark(2))) == (msg.At(mark=mark(2)), [])
    await peer.step(skip=True)
    assert await peer.donor.decided_sum(get_sum(mark(2))) == (msg.At(mark=mark(3)), [])


# -- decisions ------------------------------------------------------------------------------


def get_decision(at: Mark, wait_s: float = 30.0) -> msg.GetDecision:
    return msg.GetDecision(run="r", mark=at, wait_s=wait_s)


@with_bench()
async def test_who_asks_for_the_next_decision_waits_until_it_is_applied(bench: Bench) -> None:
    peer = await bench.member("a")
    answers: list[msg.Message] = []

    async def ask() -> None:
        answers.append(await peer.donor.decision(get_decision(mark(0))))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(20)
        peer.donor.advanced()  # to the same mark: no news
        await anyio.sleep(5)
        assert answers == []
        decision = await peer.step()
    assert answers == [msg.Decided(decision=msg.WireDecision.of(decision))]


@with_bench()
async def test_a_decision_that_does_not_come_in_time_is_answered_with_the_mark(bench) -> None:
    peer = await bench.member("a")
    began = anyio.current_time()
    assert await peer.donor.decision(get_decision(mark(0))) == msg.At(mark=mark(0))
    assert anyio.current_time() - began == 30.0
    assert await peer.donor.decision(get_decision(mark(0), 0.0)) == msg.At(mark=mark(0))


@with_bench()
async def test_a_decision_that_is_there_is_told_at_once_and_an_older_one_is_not(bench) -> None:
    peer = await bench.member("a")
    first = await peer.step()
    began = anyio.current_time()
    answer = await peer.donor.decision(get_decision(mark(0)))
    assert answer == msg.Decided(decision=msg.WireDecision.of(first))
    await peer.step(skip=True)
    assert await peer.donor.decision(get_decision(mark(0))) == msg.At(mark=mark(2))
    skipped = await peer.donor.decision(get_decision(mark(1)))
    assert isinstance(skipped, msg.Decided)
    assert skipped.decision.skip
    assert await peer.donor.decision(get_decision(ELSEWHERE)) == msg.At(mark=mark(2))
    assert anyio.current_time() == began


@with_bench()
async def test_one_that_has_left_its_mark_leads_nowhere(bench: Bench) -> None:
    peer = await bench.member("a", steps=1)
    peer.stage.leave_mark()
    assert await peer.donor.decision(get_decision(mark(0))) == msg.At(mark=None)


# -- a copy set aside -----------------------------------------------------------------------


async def kept_weights(peer: Peer, at: Mark) -> torch.Tensor:
    reply, payload = await peer.donor.state("x", get_state(at, weights_only=True))
    assert isinstance(reply, msg.Piece)
    assert reply.mark == at
    return tensors(reply.tensors, payload, FLOATS)[0]


@with_bench()
async def test_a_copy_set_aside_is_given_while_the_run_goes_on(bench: Bench) -> None:
    peer = await bench.member("a", steps=1)
    before = state_of(peer)
    assert await peer.donor.keep(keep(mark(1))) == msg.At(mark=mark(1))
    await peer.step()
    assert torch.equal(await kept_weights(peer, mark(1)), before[0][:8])
    assert torch.equal(await kept_weights(peer, mark(2)), state_of(peer)[0][:8])
    reply, payload = await peer.donor.digests(get_digests(mark(1)))
    assert isinstance(reply, msg.Digests)
    assert (reply.applied, reply.totals) == (1, [{}, {"p": 1}])
    own = digests(before, PIECE)
    (found,) = tensors(reply.tensors, payload, Expected(tuple(own.shape), "uint8", RAW))
    assert torch.equal(found, own)
    assert (await peer.donor.state("x", get_state()))[0].mark == mark(2)


@with_bench()
async def test_there_is_one_copy_and_the_next_takes_its_place(bench: Bench) -> None:
    peer = await bench.member("a", steps=1)
    await peer.donor.keep(keep(mark(1)))
    first = peer.donor.kept
    assert await peer.donor.keep(keep(mark(1))) == msg.At(mark=mark(1))
    assert peer.donor.kept is first
    await peer.step()
    assert await peer.donor.keep(keep(mark(2))) == msg.At(mark=mark(2))
    assert peer.donor.kept is not None
    assert peer.donor.kept.mark == mark(2)
    assert await peer.donor.state("x", get_state(mark(1))) == (msg.At(mark=mark(2)), [])


@with_bench()
async def test_a_mark_that_it_is_not_at_cannot_be_kept_and_costs_no_copy(bench: Bench) -> None:
    peer = await bench.member("a", steps=1)
    await peer.donor.keep(keep(mark(1)))
    for other in (mark(2), ELSEWHERE):
        assert await peer.donor.keep(keep(other)) == msg.At(mark=mark(1))
    assert peer.donor.kept is not None
    assert peer.donor.kept.mark == mark(1)
