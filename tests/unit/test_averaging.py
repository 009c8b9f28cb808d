"""Pieces of a vector among members: all of it, once, in the order of the members; lossy or not."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import pytest
import torch
from torch import Tensor

from peers import messages as msg
from peers.averaging import PIECES_PER_MEMBER, Averager, cut_pieces, owners_of
from peers.executor import InlineExecutor
from peers.host import Host
from peers.lane import Lane
from peers.memory import MemoryNetwork, MemoryTransport
from peers.residual import Residual
from peers.rpc import Caller
from peers.stage import PIECE, StageOwner
from peers.summing import Summing
from peers.tensors import RAW, Expected, unpack
from peers.transport import Frame
from scripts._replicas_in_one import ReplicasInOne
from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.manifest import Manifest
from swarm.model.look import Look, look_at
from swarm.model.registry import model_spec
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term
from tests.chaos.harness import DIGITS, digits_manifest, run_on_virtual_time

MEMBERS = [Replica(f"peer{n}", "aa") for n in range(5)]
TERM = Term(1, "aa")
LOSSY = ["bf16", "int8"]
ALL = slice(0, None)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000, PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_pieces_cover_the_vector_once(length: int, members: int) -> None:
    pieces = cut_pieces(length, members)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == length
    assert all(piece.start < piece.stop for piece in pieces)
    if members > 1:
        assert all(piece.stop - piece.start <= PIECE for piece in pieces)
    owners = owners_of(len(pieces), MEMBERS[:members])
    assert owners == sorted(owners)
    counts = [owners.count(member) for member in MEMBERS[:members]]
    assert max(counts) - min(counts) <= 1


def test_a_long_vector_gives_each_member_several_pieces() -> None:
    assert len(cut_pieces(10 * PIECE, 2)) >= 2 * PIECES_PER_MEMBER


def test_no_piece_is_longer_than_a_message_may_be() -> None:
    assert max(p.stop - p.start for p in cut_pieces(100_000, 2, most=1000)) <= 1000


# -- one piece ------------------------------------------------------------------------------


def look(sums: Tensor) -> Look:
    return look_at(sums, None)


def summing(gradient: Tensor, codec: str) -> Summing:
    """Two pieces: the first is our own."""
    half = len(gradient) // 2
    cuts = [slice(0, half), slice(half, len(gradient))]
    made = Summing(cuts, gradient, torch.empty_like(gradient), codec, look)
    if codec in LOSSY:
        made.lost = torch.empty_like(gradient)
    return made


def received(metas, payload, codec: str, dtype: str, length: int) -> Tensor:
    data = [memoryview(bytearray(b"".join(payload)))]
    return unpack(metas, data, [Expected((length,), dtype, codec)])[0]


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_the_owner_keeps_exactly_what_the_others_decode(codec: str, own: int) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(100, generator=generator) for _ in range(3)]
    kept = [part.clone() for part in parts]
    owner = summing(torch.cat([parts[own], torch.zeros(100)]), codec)
    given = [None if n == own else part for n, part in enumerate(parts)]
    metas, payload = owner.add(0, given)
    total = owner.sum_of(0)
    assert torch.equal(received(metas, payload, codec, "float32", 100), total)
    assert not owner.looks, "the others wait for the sum, nobody for the look"
    owner.put(1, total.new_zeros(100))
    assert owner.looks == {0: look(total), 1: look(total.new_zeros(100))}
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))
    exact = (kept[0] + kept[1]) + kept[2]
    if codec == "fp32":
        assert torch.equal(total, exact)
    else:
        assert torch.allclose(total, exact, atol=float(exact.abs().max()) / 100)
        assert owner.lost is not None
        assert torch.equal(owner.lost[:100], exact - total)


def test_integers_are_summed_exactly_in_any_order() -> None:
    parts = [torch.tensor([2**61, -5, 7]), torch.tensor([-(2**60), 5, 1]), torch.tensor([1, 1, 1])]
    found = []
    for order in ([0, 1, 2], [2, 1, 0]):
        owner = Summing(
            [ALL], parts[0], torch.empty(3, dtype=torch.int64), RAW, lambda sums: look_at(sums, 1.0)
        )
        metas, payload = owner.add(0, [parts[i] for i in order])
        assert torch.equal(received(metas, payload, RAW, "int64", 3), owner.sum_of(0))
        found.append(owner.sum_of(0))
    assert torch.equal(found[0], found[1])
    assert found[0].tolist() == [2**61 - 2**60 + 1, 1, 9]


def test_a_sum_that_was_looked_at_is_not_written_again() -> None:
    """Its owner could send another one, after the look, that nobody would see."""
    mine = summing(torch.zeros(8), "fp32")
    mine.put(1, torch.ones(4))
    mine.put(1, torch.full((4,), 2.0))
    assert mine.sum_of(1).tolist() == [1.0] * 4
    assert mine.looks[1] == look(torch.ones(4))


def test_before_the_vote_every_sum_has_been_looked_at_once() -> None:
    seen: list[int] = []
    gradient = torch.ones(3)
    cuts = [slice(n, n + 1) for n in range(3)]

    def noted(sums: Tensor) -> Look:
        seen.append(int(sums))
        return look(sums)

    owner = Summing(cuts, gradient, torch.empty(3), "fp32", noted)
    owner.add(0, [None])
    owner.add(1, [None, torch.ones(1)])
    owner.put(2, torch.full((1,), 3.0))
    assert owner.look_at_all()
    assert owner.look_at_all()
    assert sorted(seen) == [1, 2, 3]
    assert owner.looks == {n: look(torch.full((1,), n + 1.0)) for n in range(3)}


# -- what was lost --------------------------------------------------------------------------


def test_what_a_round_lost_is_kept_once_it_is_applied_and_not_before() -> None:
    memory, like = Residual(), torch.zeros(4)
    memory.begin(like).fill_(1.0)
    assert memory.kept is None
    memory.apply()
    assert memory.kept is not None
    memory.begin(like).fill_(2.0)
    memory.end()  # dead
    assert memory.kept.tolist() == [1.0] * 4
    memory.begin(like).fill_(3.0)  # in the room of the dead one
    assert memory.kept.tolist() == [1.0] * 4
    memory.apply()
    assert memory.kept.tolist() == [3.0] * 4
    memory.apply()  # a round in which nothing could be lost
    assert memory.kept.tolist() == [3.0] * 4
    memory.begin(like)
    memory.settle()
    memory.apply()
    assert memory.kept is None


def test_a_dead_round_that_would_have_settled_settles_nothing() -> None:
    memory, like = Residual(), torch.zeros(4)
    memory.begin(like).fill_(1.0)
    memory.apply()
    memory.begin(like)
    memory.settle()
    memory.begin(like).fill_(2.0)  # a mate is back
    memory.apply()
    assert memory.kept is not None
    assert memory.kept.tolist() == [2.0] * 4


def test_nothing_is_kept_of_what_was_forgotten_in_a_round() -> None:
    memory, like = Residual(), torch.zeros(4)
    memory.begin(like).fill_(1.0)
    memory.forget()
    memory.apply()
    assert memory.kept is None


# -- whole rounds ---------------------------------------------------------------------------


@dataclass
class Member:
    """One replica of a stage: its round, and no more."""

    host: Host
    lane: Lane
    averager: Averager

    @property
    def stage(self) -> StageOwner:
        return self.host.stage

    async def handle(self, sender: str, frame: Frame) -> Frame:
        message = msg.parse_request(frame.header)
        payload = list(frame.payload)
        match message:
            case msg.Part():
                return Frame(msg.header(await self.averager.part(message, payload)))
            case msg.Sum():
                return Frame(msg.header(await self.averager.sum(message, payload)))
            case msg.GetSum():
                reply, given = await self.averager.get_sum(message)
                return Frame(msg.header(reply), given)
        return Frame(msg.header(msg.Refused(reason="not here")))


@dataclass
class Group:
    """Replicas of one stage, and what a trainer does with them."""

    manifest: Manifest
    members: list[Member] = field(default_factory=list)
    n: int = 0
    votes: dict[str, msg.Vote] = field(default_factory=dict)
    heard: anyio.Event = field(default_factory=anyio.Event)

    def stamp(self) -> Stamp:
        self.n += 1
        return Stamp(TERM, self.n)

    async def hear(self, sender: str, frame: Frame) -> Frame:
        message = msg.parse_request(frame.header)
        if isinstance(message, msg.Vote):
            self.votes[sender] = message
            self.heard.set()
        return Frame(msg.header(msg.Ok()))

    def hold(self, seed: int, holders: Sequence[int]) -> Tensor:
        """Each of these counts one microbatch; returns the exact sum of what they hold, float64."""
        exact = torch.zeros(self.members[0].stage.model.length, dtype=torch.float64)
        for number in holders:
            stage = self.members[number].stage
            generator = torch.Generator().manual_seed(100 * seed + number)
            gradient = torch.randn(len(exact), generator=generator)
            if stage.model.accumulators.dtype == torch.int64:
                gradient = (gradient * 1000).round()
            stage.model.accumulators.copy_(gradient)
            assert stage.mark is not None
            stage.ledger.count(Attempt(self.stamp(), stage.mark, number, frozenset({1})))
            exact += gradient
        return exact

    async def round(self, numbers: Sequence[int]) -> list[msg.Vote]:
        """Until all of these have voted."""
        stamp, who = self.stamp(), [self.members[number] for number in numbers]
        self.votes = {}
        for member in who:
            held = frozenset(member.stage.ledger.held)
            answer = await member.averager.prepare(
                msg.Prepare(
                    run=self.manifest.run_id,
                    to=member.host.me.boot,
                    stamp=stamp,
                    mark=member.stage.mark or FRESH,
                    stage=1,
                    members=[m.host.me for m in who],
                    contributors=[m.host.me for m in who if m.stage.ledger.held],
                    expected=held,
                )
            )
            assert isinstance(answer, msg.Prepared)
            assert answer.takes_part
        with anyio.fail_after(60):
            while len(self.votes) < len(who):
                self.heard = anyio.Event()
                await self.heard.wait()
        return [self.votes[member.host.me.peer] for member in who]

    async def decide(self, numbers: Sequence[int], *, skip: bool = False) -> Tensor | None:
        """Apply what was voted for; the sum that was applied."""
        vote = next(iter(self.votes.values()))
        stages = [self.members[number].stage for number in numbers]
        before = stages[0].mark
        assert before is not None
        decision = Decision(
            before,
            Mark(TERM, before.t + 1),
            ((vote.round, "of stage 0"), (vote.round, vote.digest)),
            Update(0.0, 1.0, 1.0, 1.0, skip),
            ({}, {}),
            1.0,
            1.0,
            before.t + 1,
        )
        for number in numbers:
            member = self.members[number]
            apply = functools.partial(member.stage.decide, decision)
            assert await member.lane.control("apply", apply) == decision.to
            member.averager.end()
        return stages[0].decided_sum(before, ALL)

    async def step(self, seed: int, members: Sequence[int], holders: Sequence[int]) -> Tensor:
        """One whole step; returns the exact sum less the one that was applied, float64."""
        exact = self.hold(seed, holders)
        await self.round(members)
        applied = await self.decide(members)
        assert applied is not None
        return exact - applied

    def kept(self, number: int) -> Tensor:
        kept = self.members[number].stage.residual.kept
        length = self.members[number].stage.model.length
        return torch.zeros(length, dtype=torch.float64) if kept is None else kept.double()

    def all_kept(self, numbers: Sequence[int]) -> Tensor:
        return torch.stack([self.kept(number) for number in numbers]).sum(dim=0)


def with_group(test: Callable[[Group], Awaitable[None]], members: int, **changes: object) -> None:
    manifest = digits_manifest(**changes)

    async def main() -> None:
        async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
            group = Group(manifest)
            trainer = MemoryTransport(network, "trainer")
            await trainer.serve(group.hear)
            for number in range(members):
                stage = StageOwner(manifest, model_spec(manifest, {DIGITS}), 1)
                stage.begin()
                transport = MemoryTransport(network, f"peer{number}")
                executor = InlineExecutor(lambda work: 0.0)
                host = Host(
                    manifest,
                    stage,
                    MEMBERS[number],
                    Caller(transport, timeout_s=5.0),
                    executor,
                    tasks,
                    random.Random(number),
                    "trainer",
                )
                lane = Lane(executor, lambda: None)
                tasks.start_soon(lane.run)
                group.members.append(Member(host, lane, Averager(host, lane)))
                await transport.serve(group.members[-1].handle)
            await test(group)
            tasks.cancel_scope.cancel()

    run_on_virtual_time(main, seed=0)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_all_members_hold_equal_bits_and_vote_alike(codec: str, members: int) -> None:
    async def test(group: Group) -> None:
        everyone = range(members)
        for step in range(3):
            exact = group.hold(step, everyone)
            votes = await group.round(everyone)
            assert len({vote.digest for vote in votes}) == 1
            assert len({vote.squared_norm for vote in votes}) == 1
            before = group.members[0].stage.mark
            assert before is not None
            await group.decide(everyone)
            sums = [member.stage.decided_sum(before, ALL) for member in group.members]
            assert all(torch.equal(one, sums[0]) for one in sums)
            assert torch.allclose(sums[0].double(), exact, atol=0.2 if codec in LOSSY else 1e-5)
            assert votes[0].squared_norm == pytest.approx(float(sums[0].double().square().sum()))

    with_group(test, members, wire__averaging=codec)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_replicas_in_one_process_sum_to_the_bits_of_real_rounds(codec: str, members: int) -> None:
    """What ``scripts/convergence.py`` trains with; error feedback and a skipped step included."""

    async def test(group: Group) -> None:
        model, everyone = ReplicasInOne(members, codec), range(members)
        for step, skip in enumerate([False, False, True, False]):
            group.hold(step, everyone)
            held = [member.stage.model.accumulators.clone() for member in group.members]
            expected = model.sum(1, held)
            await group.round(everyone)
            applied = await group.decide(everyone, skip=skip)
            model.decided(applied=not skip)
            if not skip:
                assert applied is not None
                assert torch.equal(applied, expected)

    with_group(test, members, wire__averaging=codec)


def test_one_replica_does_not_average() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ReplicasInOne(1, "fp32")


def test_reproducible_rounds_sum_integers_exactly() -> None:
    async def test(group: Group) -> None:
        exact = group.hold(0, range(3))
        votes = await group.round(range(3))
        assert len({(vote.digest, vote.squared_norm) for vote in votes}) == 1
        applied = await group.decide(range(3))
        assert applied is not None
        assert torch.equal(applied.double(), exact)

    with_group(test, 3, reproducible__enabled=True)


@pytest.mark.parametrize("codec", LOSSY)
def test_over_many_steps_no_more_is_lost_than_in_the_last_one(codec: str) -> None:
    async def test(group: Group) -> None:
        everyone = range(3)
        lost = torch.zeros(group.members[0].stage.model.length, dtype=torch.float64)
        worst = 0.0
        for step in range(40):
            lost += await group.step(step, everyone, everyone)
            worst = max(worst, float(group.all_kept(everyone).abs().max()))
            assert torch.allclose(lost, group.all_kept(everyone), atol=1e-4)
        assert float(lost.abs().max()) <= worst + 1e-4
        assert worst > 1e-3, "this codec loses something"

    with_group(test, 3, wire__averaging=codec)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_round_that_is_repeated_gives_nothing_back_twice(codec: str) -> None:
    found: list[tuple[Tensor, list[Tensor]]] = []

    def run(rounds: int) -> None:
        async def test(group: Group) -> None:
            await group.step(0, range(3), range(3))
            group.hold(1, range(3))
            for _ in range(rounds):
                await group.round(range(3))  # all have voted, and it is dead all the same
            applied = await group.decide(range(3))
            assert applied is not None
            found.append((applied, [group.kept(number) for number in range(3)]))

        with_group(test, 3, wire__averaging=codec)

    run(1)
    run(3)
    (once, kept_once), (again, kept_again) = found
    assert torch.equal(once, again)
    assert all(torch.equal(a, b) for a, b in zip(kept_once, kept_again, strict=True))
    assert any(kept.any() for kept in kept_once)


def test_a_skipped_step_and_a_reset_leave_the_memory_as_it_is_and_leaving_ends_it() -> None:
    async def test(group: Group) -> None:
        await group.step(0, range(2), range(2))
        before = [group.kept(number) for number in range(2)]
        assert before[0].any()
        group.hold(1, range(2))
        await group.round(range(2))
        await group.decide(range(2), skip=True)
        group.members[0].stage.reset(group.stamp())
        assert all(torch.equal(group.kept(number), before[number]) for number in range(2))
        group.members[0].stage.leave_mark()
        assert group.members[0].stage.residual.kept is None

    with_group(test, 2, wire__averaging="int8")


@pytest.mark.parametrize("codec", LOSSY)
def test_what_was_lost_is_given_back_whoever_holds_and_whoever_sums(codec: str) -> None:
    async def test(group: Group) -> None:
        lost = await group.step(5, range(3), [0, 2])  # one holds nothing: it only sums
        lost += await group.step(0, range(3), range(3))
        lost += await group.step(1, range(3), [0, 2])
        lost += await group.step(2, range(3), [1])
        assert torch.allclose(lost, group.all_kept(range(3)), atol=1e-4)
        gone = group.kept(2)
        assert gone.any()
        lost += await group.step(3, range(2), range(2))  # others own the pieces now
        assert torch.allclose(lost, group.all_kept(range(2)) + gone, atol=1e-4)

    with_group(test, 3, wire__averaging=codec)


def test_who_is_left_alone_gives_back_all_that_it_lost() -> None:
    async def test(group: Group) -> None:
        await group.step(0, range(2), range(2))
        kept = group.kept(0)
        assert kept.any()
        lost = await group.step(1, [0], [0])
        assert torch.allclose(lost, -kept, atol=1e-6)
        assert group.members[0].stage.residual.kept is None
        assert not (await group.step(2, [0], [0])).abs().max() > 1e-6

    with_group(test, 2, wire__averaging="int8")


def test_pieces_that_were_fetched_give_the_same_digest() -> None:
    async def test(group: Group) -> None:
        group.hold(0, range(2))
        mute, whole = group.members[1].averager, group.members[0]
        taken = mute.sum

        async def deaf(message: msg.Sum, payload: list[memoryview]) -> msg.Message:
            return msg.Ok()

        mute.sum = deaf  # type: ignore[method-assign]
        with anyio.move_on_after(5) as late:
            await group.round(range(2))
        assert late.cancelled_caught
        assert list(group.votes) == [whole.host.me.peer]
        mute.sum = taken  # type: ignore[method-assign]
        stamp = group.votes[whole.host.me.peer].round
        fetch = msg.Fetch(run=group.manifest.run_id, round=stamp, source=whole.host.me)
        assert await mute.fetch(fetch) == msg.Ok()
        with anyio.fail_after(60):
            await group.heard.wait()
        assert len({vote.digest for vote in group.votes.values()}) == 1
        assert len(group.votes) == 2

    with_group(test, 2, wire__averaging="int8")
