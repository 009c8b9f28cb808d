"""Who takes part in the work under way, by stage; looked up again only when that has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.types import Replica

Lookup = Callable[[int], Sequence[Replica]]
"""Stage -> replicas, in a fixed order. A tuple that is the same object is taken for unchanged."""


@dataclass(slots=True)
class _View:
    """What a lookup has ``found`` last, and who of them is not removed."""

    found: tuple[Replica, ...] = ()
    removals: int = 0
    members: tuple[Replica, ...] = ()
    known: frozenset[Replica] = frozenset()


class Members:
    """The replicas that are READY, less those that were removed.

    Args:
        stages: how many there are.
        ready: who is READY for the work, by stage.
        serving: those of them that get new work; None: all.
    """

    def __init__(self, stages: int, ready: Lookup, serving: Lookup | None = None) -> None:
        self.removed: set[Replica] = set()
        self._ready = ready
        self._serving = serving or ready
        self._members = [_View() for _ in range(stages)]
        self._workers = [_View() for _ in range(stages)] if serving else self._members
        self._removals = self._changes = 0
        self._seen = -1
        self._last: tuple[tuple[Replica, ...], ...] = ()

    def remove(self, replica: Replica) -> bool:
        """False if it was removed before."""
        if replica in self.removed:
            return False
        self.removed.add(replica)
        self._removals += 1
        return True

    def admit(self, replica: Replica) -> None:
        """It is no longer removed, if it was."""
        if replica in self.removed:
            self.removed.discard(replica)
            self._removals += 1

    def of(self, stage: int) -> tuple[Replica, ...]:
        """The members of ``stage``; the same object as long as nothing changes."""
        return self._look(self._members[stage], self._ready(stage)).members

    def has(self, stage: int, replica: Replica) -> bool:
        """Whether ``replica`` is a member of ``stage``; False for a stage that does not exist."""
        if not 0 <= stage < len(self._members):
            return False
        return replica in self._look(self._members[stage], self._ready(stage)).known

    def returned(self, stage: int) -> list[Replica]:
        """Who was removed, and is READY again."""
        return [replica for replica in self._ready(stage) if replica in self.removed]

    def anywhere(self, replica: Replica) -> bool:
        return any(self.has(stage, replica) for stage in range(len(self._members)))

    def workers(self) -> tuple[tuple[Replica, ...], ...]:
        """Who gets new work, by stage: if all that stay are gone, those that leave.

        The same object as long as nothing changes.
        """
        for stage, view in enumerate(self._workers):
            found = self._serving(stage)
            if found is not view.found or view.removals != self._removals:
                self._look(view, found)
            if not view.members:
                self.of(stage)
        if self._changes != self._seen:
            views = zip(self._workers, self._members, strict=True)
            self._last = tuple([view.members or member.members for view, member in views])
            self._seen = self._changes
        return self._last

    def _look(self, view: _View, found: Sequence[Replica]) -> _View:
        if found is view.found and view.removals == self._removals:
            return view
        found = tuple(found)
        if found != view.found or view.removals != self._removals:
            view.members = tuple(replica for replica in found if replica not in self.removed)
            view.known = frozenset(view.members)
            view.removals = self._removals
            self._changes += 1
        view.found = found
        return view
