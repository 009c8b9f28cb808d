"""One round, one sum: every piece is added once, in the order of the members, by its owner."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.rounds import AddUp, Complete, Instruction, Round, SendPart, SendSum
from swarm.types import Replica, Stamp, Term

ROUND = Stamp(Term(1, "aa"), 9)
A, B, C = (Replica(name, "b0") for name in "ABC")


def two(me: Replica, *, contributors: tuple[Replica, ...] = (A, B)) -> Round:
    """Pieces 0 and 1 are A's, piece 2 is B's."""
    return Round(ROUND, me, (A, B), contributors, (A, A, B))


def test_a_member_sends_each_piece_to_its_owner_and_keeps_its_own() -> None:
    assert two(A).begin() == [SendPart(2, B)]
    assert two(B).begin() == [SendPart(0, A), SendPart(1, A)]


def test_parts_go_to_one_owner_after_the_other_from_the_neighbour_on() -> None:
    owners = (A, A, B, B, C)
    sent = {
        me: [do.piece for do in Round(ROUND, me, (A, B, C), (A, B, C), owners).begin()]
        for me in (A, B, C)
    }
    assert sent == {A: [2, 4, 3], B: [4, 0, 1], C: [0, 2, 1, 3]}
    assert Round(ROUND, B, (A, B, C), (A,), owners).pieces_of_others == [4, 0, 1]


def test_the_owner_adds_when_all_parts_are_there_and_sends_the_sum_to_all_others() -> None:
    round_ = Round(ROUND, B, (C, B, A), (A, B, C), (B, C))
    assert round_.begin() == [SendPart(1, C)]
    assert round_.part(0, A) == []
    assert round_.part(0, C) == [AddUp(0, (C, B, A))]
    assert round_.added(0) == [SendSum(0, (C, A))]
    assert round_.sum_piece(1) == [Complete()]


def test_a_member_alone_has_its_sum_at_once() -> None:
    round_ = Round(ROUND, A, (A,), (A,), (A, A))
    assert round_.begin() == [AddUp(0, (A,)), AddUp(1, (A,))]
    assert round_.added(1) == []
    assert round_.added(0) == [Complete()]


def test_who_holds_nothing_sends_nothing_but_sums_for_the_others() -> None:
    idle = two(A, contributors=(B,))
    assert idle.begin() == []
    assert idle.part(0, B) == [AddUp(0, (B,))]
    busy = two(B, contributors=(B,))
    assert busy.begin() == [SendPart(0, A), SendPart(1, A), AddUp(2, (B,))]


def test_a_part_that_comes_before_the_beginning_is_not_lost() -> None:
    round_ = two(B)
    assert round_.part(2, A) == []
    assert AddUp(2, (A, B)) in round_.begin()


def test_a_sum_that_was_added_before_the_beginning_is_not_added_again() -> None:
    round_ = two(A, contributors=(B,))
    assert round_.part(1, B) == [AddUp(1, (B,))]
    assert round_.begin() == []


def test_a_member_whose_sums_come_before_the_beginning_votes_once() -> None:
    round_ = Round(ROUND, B, (A, B), (A,), (A,))
    assert round_.sum_piece(0) == [Complete()]
    assert round_.begin() == []


def test_a_stage_without_weights_is_complete_at_once() -> None:
    assert Round(ROUND, A, (A, B), (A, B), ()).begin() == [Complete()]


def test_only_parts_that_belong_here_are_wanted_and_only_once() -> None:
    round_ = Round(ROUND, A, (A, B, C), (A, B), (A, B))
    round_.begin()
    assert round_.wants_part(0, B)
    assert not round_.wants_part(0, C)
    assert not round_.wants_part(0, A)
    assert not round_.wants_part(1, B)
    assert not round_.wants_part(2, B)
    assert not round_.wants_part(-1, B)
    assert not round_.wants_part(0, Replica("B", "another boot"))
    round_.part(0, B)
    assert not round_.wants_part(0, B)


def test_a_part_that_comes_twice_at_once_is_added_once() -> None:
    round_ = two(B)
    round_.begin()
    assert round_.part(2, A) == [AddUp(2, (A, B))]
    assert round_.part(2, A) == []


def test_only_sums_of_others_are_wanted_and_only_once() -> None:
    round_ = two(A)
    round_.begin()
    assert round_.wants_sum(2)
    assert not any(round_.wants_sum(piece) for piece in (0, 1, 3, -1))
    round_.sum_piece(2)
    assert not round_.wants_sum(2)


def test_what_is_missing_is_told_by_piece_and_by_member() -> None:
    round_ = Round(ROUND, A, (A, B, C), (A, B), (A, B, C))
    round_.begin()
    assert round_.missing_pieces() == [0, 1, 2]
    assert round_.missing_members() == [B, C]
    round_.sum_piece(1)
    assert round_.missing_members() == [B, C], "B's part of piece 0 is missing still"
    round_.part(0, B)
    assert round_.missing_members() == [C]
    round_.added(0)
    round_.sum_piece(2)
    assert (round_.missing_pieces(), round_.missing_members()) == ([], [])


def test_a_round_knows_its_name_members_and_owners() -> None:
    round_ = two(A)
    assert (round_.stamp, round_.members, round_.owners) == (ROUND, (A, B), (A, A, B))


class World:
    """Members, and the messages between them, delivered in an order that the test draws."""

    def __init__(
        self, members: list[Replica], contributors: list[Replica], owners: list[Replica]
    ) -> None:
        self.members = members
        self.rounds = {me: Round(ROUND, me, members, contributors, owners) for me in members}
        self.events: list[tuple[str, Replica, int, Replica]] = [
            ("begin", me, 0, me) for me in members
        ]
        self.added: list[tuple[int, tuple[Replica, ...]]] = []
        self.complete: list[Replica] = []

    def carry_out(self, me: Replica, todo: list[Instruction]) -> None:
        for work in todo:
            match work:
                case SendPart(piece=piece, to=to):
                    self.events.append(("part", to, piece, me))
                case AddUp(piece=piece, order=order):
                    self.added.append((piece, order))
                    self.events.append(("added", me, piece, me))
                case SendSum(piece=piece, to=to_all):
                    self.events += [("sum", to, piece, me) for to in to_all]
                case Complete():
                    self.complete.append(me)

    def deliver(self, index: int, *, silent: Replica | None = None) -> None:
        event = self.events.pop(index)
        kind, to, piece, sender = event
        if silent in (to, sender):
            return
        round_ = self.rounds[to]
        if kind == "begin":
            self.carry_out(to, round_.begin())
        elif kind == "added":
            self.carry_out(to, round_.added(piece))
        elif kind == "part" and round_.wants_part(piece, sender):
            self.carry_out(to, round_.part(piece, sender))
        elif kind == "sum" and round_.wants_sum(piece):
            self.carry_out(to, round_.sum_piece(piece))

    def run(self, data: st.DataObject, *, silent: Replica | None = None) -> None:
        seen: deque[tuple[str, Replica, int, Replica]] = deque(maxlen=3)
        while self.events:
            index = data.draw(st.integers(0, len(self.events) - 1), label="delivered")
            seen.append(self.events[index])
            self.deliver(index, silent=silent)
            if data.draw(st.integers(0, 9), label="repeat") == 0 and seen[0][0] in ("part", "sum"):
                self.events.append(seen[0])


@st.composite
def worlds(draw: st.DrawFn, least: int = 1) -> tuple[World, list[Replica], list[Replica]]:
    names = draw(st.permutations("ABCDE"))
    members = [Replica(name, "b0") for name in names[: draw(st.integers(least, 5))]]
    holds = draw(st.lists(st.booleans(), min_size=len(members), max_size=len(members)))
    contributors = [member for member, some in zip(members, holds, strict=True) if some]
    owners = draw(st.lists(st.sampled_from(members), min_size=1, max_size=7))
    return World(members, contributors, owners), contributors, owners


@settings(deadline=None, derandomize=True)
@given(worlds(), st.data())
def test_in_any_order_of_delivery_all_complete_and_each_piece_is_added_once_in_member_order(
    drawn: tuple[World, list[Replica], list[Replica]], data: st.DataObject
) -> None:
    world, contributors, owners = drawn
    world.run(data)
    assert sorted(world.complete) == sorted(world.members)
    assert Counter(piece for piece, _ in world.added) == Counter(range(len(owners)))
    assert {order for _, order in world.added} == {tuple(contributors)}
    for round_ in world.rounds.values():
        assert (round_.missing_pieces(), round_.missing_members()) == ([], [])


@settings(deadline=None, derandomize=True)
@given(worlds(least=2), st.data())
def test_whoever_waits_when_one_member_is_silent_names_it(
    drawn: tuple[World, list[Replica], list[Replica]], data: st.DataObject
) -> None:
    world, contributors, owners = drawn
    silent = data.draw(st.sampled_from(world.members), label="silent")
    world.run(data, silent=silent)
    needed = silent in contributors or silent in owners
    for me in world.members:
        if me == silent:
            continue
        missed = world.rounds[me].missing_members()
        complete = me in world.complete
        assert complete == (not missed)
        if silent in owners or (silent in contributors and me in owners):
            assert silent in missed
        if not needed:
            assert complete


@pytest.mark.parametrize("silent", [A, B, C])
def test_with_a_member_of_three_silent_both_others_miss_it(silent: Replica) -> None:
    world = World([A, B, C], [A, B, C], [A, B, C])
    while world.events:
        world.deliver(0, silent=silent)
    assert world.complete == []
    for me in {A, B, C} - {silent}:
        assert silent in world.rounds[me].missing_members()
