"""Does to a realm what a fault says, and sees to it that it is over in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from peers.faults import (
    Action,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Link,
    Matches,
    Unreachable,
    across,
)
from peers.leading import Start
from swarm.core.books import Book
from swarm.core.step import Step
from tests.chaos.chaos import TRAINERS, ChaosRealm, lives
from tests.chaos.eye import Eye
from tests.chaos.harness import Peer
from tests.chaos.realm import Seat
from tests.chaos.schedule import OF_MESSAGES, Fault, What

Who = Peer | Seat


class Violence:
    """``befell`` gets a line for each fault that had an effect."""

    def __init__(self, realm: ChaosRealm, eye: Eye, befell: list[str]) -> None:
        self._realm, self._eye, self._befell = realm, eye, befell
        eye.steps_done = lambda: len(realm.losses)
        eye.befalls = self._befalls

    def expect(self, fault: Fault) -> None:
        self._eye.wait_for(fault)

    def _befalls(self, fault: Fault, link: Link, header: Mapping[str, Any]) -> None:
        """At once, before the message goes on."""
        if self._realm.resting:
            return
        self._befell.append(f"{anyio.current_time():.3f} {fault}")
        if fault.what in OF_MESSAGES:
            self._message(fault, link, header)
        elif fault.what in _WITHOUT_WHOM:
            _WITHOUT_WHOM[fault.what](self, fault, link)
        else:
            who = self._whom(fault, link)
            if isinstance(who, Peer):
                _TO_NODES[fault.what](self, fault, who)
            elif isinstance(who, Seat):
                _TO_SEATS.get(fault.what, Violence._freeze)(self, fault, who)

    def _whom(self, fault: Fault, link: Link) -> Who | None:
        if fault.whom == "leader":
            return self._realm.leading()
        if fault.whom in ("source", "target"):
            return self._find(link.source if fault.whom == "source" else link.target)
        stage, number = (int(part) for part in fault.whom.split("."))
        living = self._realm.living(stage)
        return living[number % len(living)] if living else None

    def _find(self, peer_id: str) -> Who | None:
        for peer in self._realm.peers.values():
            if peer.peer_id == peer_id and lives(peer):
                return peer
        for seat in self._realm.seats:
            if seat.peer_id == peer_id and not seat.scope.cancel_called:
                return seat
        return None

    def _later(self, seconds: float, then: Callable[[], Any]) -> None:
        """``then`` may be a coroutine function. The run does not end before."""
        self._realm.busy += 1

        async def wait() -> None:
            await anyio.sleep(seconds)
            result = then()
            if result is not None:
                await result
            self._realm.busy -= 1

        self._realm.tasks.start_soon(wait)

    # -- messages ---------------------------------------------------------------------------

    def _message(self, fault: Fault, link: Link, header: Mapping[str, Any]) -> None:
        if fault.what is What.LATE:
            self._eye.hold(link, header)
            if fault.how == "again":
                return
        actions: dict[What, Action] = {
            What.DROP: Drop(),
            What.CUT: Cut(),
            What.DELAY: Delay(fault.seconds),
            What.DUPLICATE: Duplicate(fault.seconds),
            What.LATE: Cut(),
        }

        def is_it(other: Link, head: Mapping[str, Any]) -> bool:
            return head is header and other == link

        self._eye.add(is_it, actions[fault.what], times=1)

    def _block(self, fault: Fault, matches: Matches, action: Action | None = None) -> None:
        rule = self._eye.add(matches, action or Drop())
        self._later(fault.seconds, lambda: self._eye.remove(rule))

    def _freeze(self, fault: Fault, who: Who) -> None:
        ends = who.peer_id
        if fault.what is What.MUTE:
            self._block(fault, lambda link, _: link.source == ends)
        elif fault.what is What.DEAFEN:
            self._block(fault, lambda link, _: link.target == ends)
        else:
            self._block(fault, lambda link, _: ends in (link.source, link.target))

    def _break(self, fault: Fault, link: Link) -> None:
        ends = {link.source, link.target}
        self._block(fault, lambda other, _: {other.source, other.target} == ends, Unreachable())

    def _partition(self, fault: Fault, link: Link) -> None:
        del link
        rng = random.Random(int(fault.how))
        realm = self._realm
        everybody = dict.fromkeys([p.peer_id for p in realm.peers.values()])
        everybody |= dict.fromkeys([seat.peer_id for seat in realm.seats])
        sides: list[list[str]] = [[], []]
        for peer_id in everybody:
            sides[rng.randrange(2)].append(peer_id)
        self._block(fault, across(sides))

    # -- nodes ------------------------------------------------------------------------------

    def _kill(self, fault: Fault, peer: Peer) -> None:
        self._end(peer)
        key = peer.key if fault.how == "same key" else None
        self._come(peer.node.stage, fault.seconds, key)

    def _end(self, peer: Peer) -> None:
        self._realm.network.kill(peer.peer_id)
        assert peer.node.server is not None
        peer.node.server.host.trainer = None  # no goodbye
        peer.scope.cancel()

    def _come(self, stage: int, seconds: float, key: int | None) -> None:
        async def come() -> None:
            await self._realm.node(stage, key=key)

        self._later(seconds, come)

    def _kill_stage(self, fault: Fault, peer: Peer) -> None:
        for mate in self._realm.living(peer.node.stage):
            self._kill(fault, mate)

    def _tamper_with_adding(self, fault: Fault, peer: Peer) -> None:
        stage = peer.stage
        add = stage._add

        def half(book: Book) -> None:
            stage._add = add  # type: ignore[method-assign]
            sums = stage.model._ahead if book is Book.AHEAD else stage.model.accumulators
            assert sums is not None
            sums[: stage.model.length // 2] += 7
            if fault.what is What.KILL_WHILE_ADDING:
                self._kill(fault, peer)
            raise RuntimeError("out of memory")

        stage._add = half  # type: ignore[method-assign]

    def _join(self, fault: Fault, peer: Peer) -> None:
        self._come(peer.node.stage, fault.seconds, None)

    def _leave(self, fault: Fault, peer: Peer) -> None:
        """It goes, and another comes some time later."""
        peer.node.leave()
        server = peer.node.server
        assert server is not None

        async def gone() -> None:
            if not peer.scope.cancel_called:
                with anyio.move_on_after(self._realm.manifest.periods.drain_s + 5):
                    await server.orders.finished.wait()
            await self._realm.node(peer.node.stage)

        self._later(fault.seconds, gone)

    def _suspect(self, fault: Fault, peer: Peer) -> None:
        del fault
        seat = self._realm.leading()
        if seat is not None and seat.leader is not None and seat.leader.trainer is not None:
            seat.leader.trainer.lose(peer.node.me, "is suspected")

    def _slow(self, fault: Fault, peer: Peer) -> None:
        factor = float(fault.how)
        factor = min(factor, 3.0 / peer.unit_s)  # slowed twice, one pass would outlast the run
        peer.slow_down(factor)
        self._later(10.0, lambda: peer.slow_down(1 / factor))

    # -- trainers ---------------------------------------------------------------------------

    def _kill_seat(self, fault: Fault, seat: Seat) -> None:
        realm = self._realm
        realm.network.kill(seat.peer_id)
        seat.scope.cancel()
        start = Start(fault.how) if fault.how in list(Start) else Start.STANDBY
        disk, key = seat.disk, seat.name

        def again() -> None:
            if key in self._free_seats():  # no rival has come with that key meanwhile
                realm.seat(start, key=key, disk=disk)

        self._later(fault.seconds, again)

    def _hurry(self, fault: Fault, seat: Seat) -> None:
        """All attempts under way are late."""
        del fault
        trainer = None if seat.leader is None else seat.leader.trainer
        if trainer is None or not isinstance(trainer.work, Step):
            return
        now = anyio.current_time()
        for m, trip in sorted(trainer.work.flight.journeys.items()):
            if trip.stamp is not None:
                trainer.work.failed(m, trip.stamp, "its time is up", now)
        trainer.wake()

    def _decide_one(self, fault: Fault, link: Link) -> None:
        """The leader's decisions reach one replica only; it dies when that one has applied."""
        realm, seat = self._realm, self._realm.leading()
        stage, number = (int(part) for part in fault.whom.split("."))
        living = realm.living(stage)
        if seat is None or not living:
            return
        leader, victim = seat.peer_id, living[number % len(living)].peer_id
        fired: list[bool] = []

        def others(link: Link, header: Mapping[str, Any]) -> bool:
            if header["kind"] != "decide":
                return False
            if link.is_reply and link.source == victim and link.target == leader and not fired:
                fired.append(True)
                if not seat.scope.cancel_called:
                    self._kill_seat(fault, seat)
            return not link.is_reply and link.source == leader and link.target != victim

        rule = self._eye.add(others, Drop())
        self._later(10.0, lambda: self._eye.remove(rule))

    def _rival(self, fault: Fault, link: Link) -> None:
        del link
        free = self._free_seats()
        if free:
            self._realm.seat(Start(fault.how), key=free[0])

    def _free_seats(self) -> list[int]:
        """The keys of trainers with which nobody runs."""
        taken = {seat.name for seat in self._realm.seats if not seat.scope.cancel_called}
        return [key + 1 for key in range(TRAINERS) if key + 1 not in taken]


_WITHOUT_WHOM: dict[What, Callable[[Violence, Fault, Link], None]] = {
    What.BREAK: Violence._break,
    What.PARTITION: Violence._partition,
    What.DECIDE_ONE: Violence._decide_one,
    What.RIVAL: Violence._rival,
}
_TO_NODES: dict[What, Callable[[Violence, Fault, Peer], None]] = {
    What.KILL: Violence._kill,
    What.KILL_STAGE: Violence._kill_stage,
    What.KILL_WHILE_ADDING: Violence._tamper_with_adding,
    What.FAIL_TO_ADD: Violence._tamper_with_adding,
    What.FREEZE: Violence._freeze,
    What.MUTE: Violence._freeze,
    What.DEAFEN: Violence._freeze,
    What.JOIN: Violence._join,
    What.LEAVE: Violence._leave,
    What.SUSPECT: Violence._suspect,
    What.SLOW: Violence._slow,
}
_TO_SEATS: dict[What, Callable[[Violence, Fault, Seat], None]] = {
    What.KILL: Violence._kill_seat,
    What.HURRY: Violence._hurry,
}
