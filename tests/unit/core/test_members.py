"""Who takes part, and the promise that the same object means that nothing has changed."""

from __future__ import annotations

from swarm.core.members import Members
from swarm.types import Replica

A, B, C = (Replica(name, "boot") for name in "abc")


def test_the_removed_are_no_members_until_they_are_admitted() -> None:
    members = Members(2, lambda stage: [[A, B], [C]][stage])
    assert members.of(0) == (A, B)
    assert members.remove(A)
    assert not members.remove(A)
    assert members.of(0) == (B,)
    assert not members.has(0, A)
    assert not members.anywhere(A)
    members.admit(A)
    members.admit(A)
    assert members.of(0) == (A, B)
    assert members.has(0, A)
    assert members.anywhere(C)


def test_a_stage_that_does_not_exist_has_no_members() -> None:
    members = Members(1, lambda stage: [[A]][stage])
    assert not members.has(1, A)
    assert not members.has(-1, A)


def test_a_tuple_that_is_the_same_object_is_not_looked_at_again() -> None:
    ready = (A, B)
    members = Members(1, lambda stage: ready)
    first = members.of(0)
    assert members.of(0) is first
    assert members.workers() == (first,)
    members.remove(A)
    assert members.of(0) == (B,)


def test_what_a_lookup_finds_anew_is_seen_even_if_its_list_is_the_same_object() -> None:
    ready = [A]
    members = Members(1, lambda stage: ready)
    assert members.of(0) == (A,)
    ready.append(B)
    assert members.of(0) == (A, B)
    assert members.workers() == ((A, B),)


def test_work_goes_to_those_that_stay_or_else_to_those_that_leave() -> None:
    serving = [[A], [C]]
    members = Members(2, lambda stage: [[A, B], [C]][stage], lambda stage: serving[stage])
    assert members.workers() == ((A,), (C,))
    members.remove(A)
    assert members.workers() == ((B,), (C,))
    members.admit(A)
    serving[0] = []
    assert members.workers() == ((A, B), (C,))


def test_the_workers_are_the_same_object_as_long_as_nothing_changes() -> None:
    ready = [[A, B], [C]]
    members = Members(2, lambda stage: list(ready[stage]))
    first = members.workers()
    assert members.workers() is first
    members.has(0, A)
    members.remove(B)
    members.has(0, A)
    second = members.workers()
    assert second == ((A,), (C,))
    assert members.workers() is second
    ready[1] = []
    assert members.workers() == ((A,), ())
