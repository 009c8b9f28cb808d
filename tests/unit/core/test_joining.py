"""Pieces of a state on their way to one mark while the run goes on."""

from __future__ import annotations

import random

import pytest

from swarm.core.joining import Joining, runs
from swarm.types import Mark, Term

TERM = Term(1, "trainer")
MARKS = [Mark(TERM, t) for t in range(6)]


def joining(*steps: int | None, head: int = 1) -> Joining:
    """Pieces at the marks of ``steps``."""
    return Joining([None if t is None else MARKS[t] for t in steps], MARKS[head])


def taken(machine: Joining) -> list[int]:
    """All that can be taken now, in order."""
    found = []
    while (piece := machine.take()) is not None:
        found.append(piece)
    return found


# -- copies ---------------------------------------------------------------------------------


def test_each_piece_is_taken_once_until_it_is_copied_or_failed() -> None:
    machine = joining(None, None, None)
    assert taken(machine) == [0, 1, 2]
    machine.copied(0, MARKS[1])
    machine.failed(1)
    assert taken(machine) == [1]


def test_pieces_of_no_version_go_before_those_that_may_yet_be_stepped() -> None:
    assert taken(joining(0, None, 1, 0, None)) == [1, 4, 0, 3]


def test_what_is_at_the_newest_mark_or_beyond_is_not_copied() -> None:
    assert taken(joining(1, 2)) == []


def test_a_copy_may_bring_a_mark_that_nobody_has_told_of() -> None:
    machine = joining(None)
    machine.take()
    machine.copied(0, MARKS[3])
    assert machine.marks == [MARKS[3]]
    assert machine.take() is None
    assert not machine.whole
    machine.moved(MARKS[3])
    assert machine.whole


# -- steps ----------------------------------------------------------------------------------


def test_a_decision_steps_the_pieces_that_are_where_it_begins() -> None:
    machine = joining(0, 1, 0, None)
    assert machine.at(MARKS[0]) == [0, 2]
    machine.stepped([0, 2], MARKS[1])
    assert machine.marks == [MARKS[1], MARKS[1], MARKS[1], None]
    assert machine.at(MARKS[0]) == []


def test_what_the_last_decision_can_step_is_not_copied() -> None:
    machine = joining(1, 0, head=1)
    machine.decided(MARKS[1], MARKS[2])
    assert machine.head == MARKS[2]
    assert taken(machine) == [1]


def test_what_cannot_be_stepped_any_more_is_copied() -> None:
    machine = joining(1, head=1)
    machine.decided(MARKS[1], MARKS[2])
    machine.decided(MARKS[0], MARKS[1])  # old news
    assert taken(machine) == []
    machine.moved(MARKS[3])  # nobody told us of the decision in between
    assert taken(machine) == [0]


def test_a_piece_whose_copy_is_on_its_way_is_not_stepped() -> None:
    machine = joining(0, 0)
    assert machine.take() == 0
    assert machine.at(MARKS[0]) == [1]
    machine.failed(0)
    assert machine.at(MARKS[0]) == [0, 1]


def test_pieces_whose_sum_was_missed_are_copied_anew() -> None:
    machine = joining(1, 1)
    machine.lost(range(1, 2))
    assert (machine.marks, machine.whole) == ([MARKS[1], None], False)
    assert taken(machine) == [1]


def test_the_newest_mark_never_goes_back() -> None:
    machine = joining(1)
    machine.moved(MARKS[3])
    machine.moved(MARKS[2])
    assert machine.head == MARKS[3]


# -- how far --------------------------------------------------------------------------------


def test_it_is_whole_when_all_pieces_are_at_the_newest_mark() -> None:
    machine = joining(1, 0)
    assert not machine.whole
    assert machine.take() == 1
    machine.copied(1, MARKS[1])
    assert machine.whole
    machine.moved(MARKS[2])
    assert not machine.whole


def test_it_is_not_whole_while_a_copy_is_on_its_way() -> None:
    machine = joining(0)
    machine.take()
    machine.marks[0] = MARKS[1]
    assert not machine.whole
    machine.failed(0)
    assert machine.whole


def test_pieces_that_are_being_stepped_are_not_copied_meanwhile() -> None:
    machine = joining(0, 0)
    machine.decided(MARKS[0], MARKS[1])
    assert machine.take_at(MARKS[0]) == [0, 1]
    assert machine.at(MARKS[0]) == []
    machine.moved(MARKS[2])
    assert machine.take() is None
    machine.stepped([0], MARKS[1])
    machine.lost([1])
    assert {machine.take(), machine.take()} == {0, 1}


@pytest.mark.parametrize(
    ("steps", "share"), [((), 0.0), ((None, None), 0.0), ((None, 0, 1, 1), 0.75), ((0,), 1.0)]
)
def test_the_share_counts_pieces_of_any_version(steps: tuple[int | None, ...], share: float):
    assert joining(*steps).share == share


def test_a_donor_that_gives_one_piece_a_step_brings_all_to_the_head() -> None:
    """Copies at rising marks, a step after each: at the end all have met."""
    machine = joining(*[None] * 4)
    for step in range(1, 5):
        piece = machine.take()
        assert piece == step - 1
        machine.copied(piece, MARKS[step])
        machine.moved(MARKS[step + 1])
        machine.stepped(machine.at(MARKS[step]), MARKS[step + 1])
    assert machine.whole


# -- runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "longest", "expected"),
    [
        ([], 4, []),
        ([7], 4, [range(7, 8)]),
        ([0, 1, 2], 4, [range(3)]),
        ([0, 1, 3, 4, 9], 4, [range(2), range(3, 5), range(9, 10)]),
        ([2, 3, 4, 5, 6], 2, [range(2, 4), range(4, 6), range(6, 7)]),
        ([0, 1, 2, 3], 4, [range(4)]),
    ],
)
def test_neighbours_are_put_together(pieces: list[int], longest: int, expected: list) -> None:
    assert runs(pieces, longest) == expected


def test_runs_hold_each_piece_once_and_none_is_too_long() -> None:
    rng = random.Random(1)
    for _ in range(200):
        pieces = sorted(rng.sample(range(40), rng.randrange(1, 30)))
        longest = rng.randrange(1, 6)
        found = runs(pieces, longest)
        assert [piece for run in found for piece in run] == pieces
        assert all(0 < len(run) <= longest for run in found)
