"""A replica that copies its stage's state while the run goes on, from real donors."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
import torch
from stage_bench import PIECE, STAGE, TERM, Bench, Peer, mark, with_bench

from peers import messages as msg
from peers.joiner import WAIT_S, Joiner, Order
from peers.memory import MemoryTransport
from peers.pace import TooSlow
from peers.sources import Copy
from peers.transport import Frame
from swarm.types import FRESH, Mark, Stamp, Term

AGAIN = Term(2, "cc")


@dataclass
class Entrant:
    """One that joins; ``admit``: its trainer admits it when it says that it is ready there."""

    peer: Peer
    joiner: Joiner
    admit: Mark | None = None
    ready: list[Mark] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    moves: list[Mark | None] = field(default_factory=list)
    over: anyio.Event = field(default_factory=anyio.Event)

    async def handle(self, sender: str, frame: Frame) -> Frame:
        """The trainer's side."""
        message = msg.parse_request(frame.header)
        assert isinstance(message, msg.Ready)
        self.ready.append(message.mark)
        if message.mark == self.admit == self.peer.stage.mark:
            self.joiner.admitted = True
        return Frame(msg.header(msg.Ok()))

    async def run(self) -> None:
        await self.joiner.run()
        self.over.set()


async def joins(
    bench: Bench, order: Order, *, admit: Mark | None = None, peer: Peer | None = None
) -> Entrant:
    """It is under way when this returns."""
    entrant = await entering(bench, order, admit=admit, peer=peer)
    bench.tasks.start_soon(entrant.run)
    return entrant


async def entering(
    bench: Bench, order: Order, *, admit: Mark | None = None, peer: Peer | None = None
) -> Entrant:
    peer = peer or await bench.replica("new")
    said: list[str] = []
    moves: list[Mark | None] = []
    joiner = Joiner(
        peer.host,
        peer.lane,
        order,
        say=said.append,
        arrived=lambda: moves.append(peer.stage.mark),
        left=lambda: moves.append(peer.stage.mark),
    )
    entrant = Entrant(peer, joiner, admit, said=said, moves=moves)
    peer.host.trainer = "trainer"
    await MemoryTransport(bench.network, "trainer").serve(entrant.handle)
    return entrant


async def ends(entrant: Entrant) -> None:
    with anyio.fail_after(600):
        await entrant.over.wait()


def is_as(peer: Peer, other: Peer) -> bool:
    """Whether both hold the same bits, at the same mark, with the same books."""
    ours, theirs = peer.stage, other.stage
    same = all(
        torch.equal(a, b)
        for a, b in zip(ours.model.state().values(), theirs.model.state().values(), strict=True)
    )
    books = (ours.mark, ours.applied, ours.totals) == (theirs.mark, theirs.applied, theirs.totals)
    return same and books


@with_bench()
async def test_all_pieces_are_copied_compared_and_offered(bench: Bench) -> None:
    a, b = await bench.member("a", 3), await bench.member("b", 3)
    entrant = await joins(bench, Order(mark(3), [a.me, b.me]), admit=mark(3))
    await ends(entrant)
    assert is_as(entrant.peer, a)
    assert entrant.ready == [mark(3)]
    assert entrant.moves == [None, mark(3)]
    assert "get_state" in a.asked
    assert "get_state" in b.asked
    assert (a.asked + b.asked).count("get_digests") == 1


@pytest.mark.parametrize("skip", [False, True])
def test_what_is_there_is_stepped_while_the_rest_comes(skip: bool) -> None:
    """Each donor gives at a rate at which the whole takes many steps."""

    @with_bench(limits__join_bytes_per_s=1 << 10)
    async def main(bench: Bench) -> None:
        a, b = await bench.member("a", 1), await bench.member("b", 1)
        entrant = await joins(bench, Order(mark(1), [a.me, b.me]), admit=mark(9))
        for t in range(1, 9):
            await anyio.sleep(3)
            if t == 2:
                assert entrant.joiner.progress.startswith("downloading the state of stage 1:")
            await a.step(skip=skip and t % 2 == 0)
            await b.step(skip=skip and t % 2 == 0)
        await ends(entrant)
        assert is_as(entrant.peer, a)
        assert entrant.ready[-1] == mark(9)
        pieces = -(-a.stage.model.length // PIECE)
        assert (a.gave + b.gave).count("piece") == pieces, "none was copied twice"

    main()


@with_bench()
async def test_who_is_ready_says_so_again_until_it_is_admitted(bench: Bench) -> None:
    a = await bench.member("a", 1)
    entrant = await joins(bench, Order(mark(1), [a.me]))
    await anyio.sleep(4 * WAIT_S)
    assert len(entrant.ready) > 1
    assert set(entrant.ready) == {mark(1)}
    entrant.joiner.admitted = True
    await ends(entrant)


@with_bench()
async def test_who_was_not_admitted_in_time_goes_on_with_the_next_step(bench: Bench) -> None:
    a = await bench.member("a", 1)
    entrant = await joins(bench, Order(mark(1), [a.me]), admit=mark(2))
    await anyio.sleep(1)
    assert entrant.peer.stage.mark == mark(1)
    copies = a.asked.count("get_state")
    await a.step()
    await ends(entrant)
    assert is_as(entrant.peer, a)
    assert entrant.moves == [None, mark(1), None, mark(2)]
    assert a.asked.count("get_state") == copies, "one sum was enough"


@with_bench()
async def test_a_member_that_fell_behind_steps_what_it_has(bench: Bench) -> None:
    """It knows its mark, so a decision that leads on from there needs no copies."""
    a, behind = await bench.member("a", 2), await bench.member("behind", 2)
    entrant = await joins(bench, Order(mark(2), [a.me]), peer=behind)
    await anyio.sleep(1)
    await a.step()
    await anyio.sleep(1)
    assert is_as(behind, a)
    assert "get_state" not in a.asked
    entrant.joiner.admitted = True
    await ends(entrant)


@with_bench()
async def test_pieces_whose_sum_nobody_gives_are_copied_anew(bench: Bench) -> None:
    a = await bench.member("a", 1)
    a.sums = False
    entrant = await joins(bench, Order(mark(1), [a.me]), admit=mark(2))
    await anyio.sleep(1)
    await a.step()
    await ends(entrant)
    assert is_as(entrant.peer, a)


def spoil_pieces(peer: Peer) -> None:
    """One bit of one piece is another in all that it gives, though not in what it has."""
    give = peer.donor.state

    async def state(sender: str, message: msg.GetState) -> tuple[msg.Message, list[memoryview]]:
        reply, payload = await give(sender, message)
        if payload and message.start == PIECE:
            payload[0][24] ^= 1
        return reply, payload

    peer.donor.state = state


@with_bench(limits__joiners=1)
async def test_a_wrong_piece_is_found_and_copied_from_one_that_gave_none(bench: Bench) -> None:
    good, bad = await bench.member("good", 2), await bench.member("bad", 2)
    spoil_pieces(bad)
    question = msg.GetState(run="r", stage=STAGE, start=0, count=1)
    assert (await good.donor.state("another joiner", question))[0].kind == "piece"
    entrant = await joins(bench, Order(mark(2), [bad.me, good.me]), admit=mark(2))
    await ends(entrant)
    assert is_as(entrant.peer, good)
    assert good.gave.count("piece") == 1, "all others came from the bad one, as good was busy"
    assert any("1 of 22 pieces differ from those of good" in line for line in entrant.said)


@with_bench()
async def test_with_nobody_to_copy_from_it_waits_until_there_is_one(bench: Bench) -> None:
    entrant = await joins(bench, Order(mark(2), []), admit=mark(2))
    await anyio.sleep(30)
    assert entrant.joiner.progress == f"downloading the state of stage {STAGE}: 0%"
    a = await bench.member("a", 2)
    entrant.joiner.update(Order(mark(2), [a.me]))
    await ends(entrant)
    assert is_as(entrant.peer, a)


@with_bench()
async def test_who_is_a_member_already_is_not_copied_over(bench: Bench) -> None:
    """The reset that admits it may be there before a copy that was on its way."""
    a, member = await bench.member("a", 2), await bench.member("member", 1)
    before = member.stage.model.weights.clone()
    entrant = await joins(bench, Order(mark(2), [a.me]), peer=member)
    entrant.joiner.admitted = True
    await ends(entrant)
    assert member.stage.mark == mark(1)
    assert torch.equal(member.stage.model.weights, before)
    assert entrant.moves == []


# -- from a checkpoint ----------------------------------------------------------------------


@with_bench()
async def test_a_checkpoints_state_takes_the_name_of_the_new_term(bench: Bench) -> None:
    a = await bench.member("a", 2)
    await a.donor.keep(msg.Keep(run="r", stamp=Stamp(TERM, 1), mark=mark(2)))
    kept = a.donor.kept
    assert isinstance(kept, Copy)
    await a.step()
    to = Mark(AGAIN, 2)
    order = Order(to, [a.me], copies=mark(2), applied=2, totals=({}, {"p": 2}))
    entrant = await joins(bench, order, admit=to)
    await ends(entrant)
    stage = entrant.peer.stage
    assert (stage.mark, stage.applied, stage.totals) == (to, 2, ({}, {"p": 2}))
    assert torch.equal(stage.model.weights, kept.vectors["weights"])
    assert "get_decision" not in a.asked


@with_bench()
async def test_the_initial_weights_need_nobody(bench: Bench) -> None:
    fresh, used = await bench.member("fresh"), await bench.member("used", 3)
    to = Mark(AGAIN, 0)
    order = Order(to, [], copies=FRESH, applied=0, totals=({}, {}))
    entrant = await joins(bench, order, admit=to, peer=used)
    await ends(entrant)
    assert (used.stage.mark, used.stage.applied, used.stage.totals) == (to, 0, ({}, {}))
    assert torch.equal(used.stage.model.weights, fresh.stage.model.weights)


# -- a link that cannot keep up --------------------------------------------------------------


@with_bench(limits__join_bytes_per_s=4 << 10)
async def test_a_link_that_never_keeps_up_is_told_with_figures(bench: Bench) -> None:
    a = await bench.member("a", 1)
    a.sums = False  # as if each were too late
    entrant = await entering(bench, Order(mark(1), [a.me]))

    async def steps() -> None:
        while True:
            await anyio.sleep(1)
            await a.step()

    bench.tasks.start_soon(steps)
    with anyio.fail_after(600):
        try:
            await entrant.joiner.run()
        except* TooSlow as group:
            (error,) = group.exceptions
            said = str(error)
    assert f"stage {STAGE} needs" in said
    assert "/s" in said
    assert "--stage" in said
