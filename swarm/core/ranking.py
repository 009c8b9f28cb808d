"""The servers of one stage in order of priority, ranked anew only where something has changed."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection

from swarm.core.alarms import Alarms
from swarm.core.server import HUNG, PROBING, SHUNNED, Entry, Server
from swarm.types import Replica

FIRST_GUESS_S = 1.0

Banned = Callable[[Replica], bool] | None
"""Who is banned now; None: nobody."""


class Ranking:
    """Machine of one stage: who is to serve the next attempt.

    Most servers stand in a sorted list, by their priority when they last changed. For one that is
    quiet for too long this is less than what it has by now, and more only if it changes: so it is
    moved down when somebody reads of it. Two kinds stand apart, and are few: the banned, and those
    that may be hung.

    ``floor``: the smallest priority when somebody was last chosen; newcomers begin there.
    """

    def __init__(self) -> None:
        self.servers: dict[Replica, Server] = {}
        self.floor = 0.0
        self._order: list[Entry] = []
        self._late: list[Entry] = []
        self._apart: dict[Replica, Server] = {}
        self._changed: list[Server] = []
        self._times: list[float] = []
        self._guessed: dict[Server, None] = {}
        self._guess_s = FIRST_GUESS_S
        self._hung: Alarms[Server] = Alarms(Server.hung_at)

    # -- who is there -----------------------------------------------------------------------

    def enter(self, server: Server) -> None:
        """Begin, or begin again, with the smallest priority of the stage, if not with more."""
        server.busy_s = max(server.busy_s, self.floor)
        self.servers[server.replica] = server
        server.here = True
        if server.service.value is not None:
            insort(self._times, server.service.value)
        self.touch(server)

    def leave(self, replica: Replica) -> Server:
        server = self.servers.pop(replica)
        if server.service.value is not None:
            self._forget_time(server.service.value)
        self._strike(server)
        self._hung.forget(server)
        server.here = False
        server.leave()
        return server

    def touch(self, server: Server) -> None:
        """What it has to do, or whether it is banned, has changed."""
        if not server.changed:
            server.changed = True
            self._changed.append(server)

    def done(self, server: Server, took_s: float, now: float) -> None:
        """It has done an attempt in ``took_s`` of work."""
        if server.service.value is not None:
            self._forget_time(server.service.value)
        server.done(took_s, now)
        assert server.service.value is not None
        insort(self._times, server.service.value)
        self.touch(server)

    def _forget_time(self, time_s: float) -> None:
        del self._times[bisect_left(self._times, time_s)]

    # -- what is expected -------------------------------------------------------------------

    def guess_s(self) -> float:
        """The median of the measured times, or a first guess."""
        times, half = self._times, len(self._times) // 2
        if not times:
            return FIRST_GUESS_S
        return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2

    def expected_s(self, server: Server | None) -> float:
        """Seconds of work for one microbatch: measured, else guessed."""
        if server is None or server.service.value is None:
            return self.guess_s()
        return server.service.value

    # -- the ranking ------------------------------------------------------------------------

    def choose(
        self,
        now: float,
        rng: random.Random,
        banned: Banned,
        *,
        shun: Collection[Replica],
        most: int,
    ) -> list[Server]:
        """Up to ``most``, best first: those in ``shun`` last, before them those being probed.

        ``now`` never goes back.
        """
        if not self.servers:
            return []
        self._settle(now, rng, banned)
        free = self._free(banned) if self._apart else []
        self._lift(free, now)
        best: list[Entry] = []
        for server in free:
            entry = self._entry(server, now, rng.random())
            insort(best, _shunned(entry) if server.replica in shun else entry)
        self._read(best, now, shun, most)
        return [entry[4] for entry in best[:most]]

    def _free(self, banned: Banned) -> list[Server]:
        """Those apart that are allowed; the banned too where the stage would have nobody else."""
        apart = list(self._apart.values())
        if banned is None:
            return apart
        free = [server for server in apart if not banned(server.replica)]
        return free if free or self._order else apart

    def _lift(self, free: list[Server], now: float) -> None:
        """Who is banned or hung keeps up with the others: it will not make up for that time."""
        order, late = self._order, self._late
        known = [order[0][1]] if order else []
        if late:
            known.append(late[0][1])
        if order and order[-1][0] == PROBING:  # of all that are probed the first has least
            known.append(order[bisect_left(order, (PROBING,))][1])
        if not self._apart:
            self.floor = min(known)
            return
        going = {server for server in free if server.slowdown(now) < HUNG}
        known += [self._plain(server) for server in going]
        self.floor = min(known or [self._plain(server) for server in free])
        for server in self._apart.values():
            if server not in going:
                server.busy_s += max(0.0, self.floor - self._plain(server))

    def _plain(self, server: Server) -> float:
        return server.priority(self.expected_s(server))

    def _entry(self, server: Server, now: float, tie: float) -> Entry:
        priority = server.priority(self.expected_s(server), server.slowdown(now))
        return server.tier, priority, tie, server.replica, server

    def _read(self, best: list[Entry], now: float, shun: Collection[Replica], most: int) -> None:
        """Put the servers of the list into ``best``, as far as they can be among the ``most``."""
        at, order = 0, self._order
        while at < len(order):
            entry = order[at]
            if len(best) >= most and entry > best[most - 1]:
                return
            server = entry[4]
            slowdown = server.slowdown(now)
            if slowdown > 1.0:
                slowed = server.priority(self.expected_s(server), slowdown)
                if slowed > entry[1]:
                    self._move_down(at, slowed)
                    continue
            insort(best, _shunned(entry) if shun and server.replica in shun else entry)
            at += 1

    def _move_down(self, at: int, priority: float) -> None:
        entry = self._order.pop(at)
        server = entry[4]
        if server.late is None:
            server.late = entry
            insort(self._late, entry)
        server.entry = (entry[0], priority, *entry[2:])
        insort(self._order, server.entry)

    # -- places -----------------------------------------------------------------------------

    def _settle(self, now: float, rng: random.Random, banned: Banned) -> None:
        """Give everybody its right place again; equals are drawn by lot, anew with each change."""
        for server in self._hung.due(now):
            self.touch(server)
        for server in self._apart.values():
            if server.hung_at() > now:  # its ban may be over
                self.touch(server)
        if self._guessed and self.guess_s() != self._guess_s:
            for server in self._guessed:
                self.touch(server)
            self._guessed = {}
        changed, self._changed = self._changed, []
        for server in changed:
            server.changed = False
            if server.here:
                self._strike(server)
                self._place(server, now, rng, banned)

    def _strike(self, server: Server) -> None:
        if server.entry is not None:
            del self._order[bisect_left(self._order, server.entry)]
            server.entry = None
            if server.late is not None:
                del self._late[bisect_left(self._late, server.late)]
                server.late = None
        elif server.apart:
            del self._apart[server.replica]
            server.apart = False

    def _place(self, server: Server, now: float, rng: random.Random, banned: Banned) -> None:
        if banned is not None and banned(server.replica):
            self._stand_apart(server)
            return
        if server.quiet_since is not None:
            hung_at = server.hung_at()
            if hung_at <= now:
                self._stand_apart(server)
                return
            self._hung.at(server, hung_at)
        expected_s = server.service.value
        if expected_s is None:
            expected_s = self.guess_s()
            if server.debts:
                self._guess_s = expected_s
                self._guessed[server] = None
        priority = server.busy_s + len(server.debts) * expected_s
        tier = 0 if server.served else server.tier
        server.entry = entry = (tier, priority, rng.random(), server.replica, server)
        insort(self._order, entry)

    def _stand_apart(self, server: Server) -> None:
        self._apart[server.replica] = server
        server.apart = True


def _shunned(entry: Entry) -> Entry:
    return (entry[0] + SHUNNED, *entry[1:])
