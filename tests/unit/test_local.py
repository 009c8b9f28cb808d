"""What ``swarm local`` decides by itself: whom it kills and when, and what it tells at the end."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import anyio
import pytest
import trio
import trio.testing

from peers.account import in_words, make_account
from peers.kills import REPLACE_S, WAIT_S, Killer, Kills, Living, check_kills, choose_victim
from peers.status import Seat
from peers.steps import StepDone
from swarm.errors import ConfigError
from swarm.manifest import default_manifest

# -- whom to kill ---------------------------------------------------------------------------------


def test_any_that_serves_beside_another_may_be_killed_but_no_other():
    living = [
        Living("a", 0, serves=True),
        Living("b", 0, serves=True),
        Living("c", 1, serves=True),
        Living("joins", 1, serves=False),
        Living("d", 2, serves=True),
        Living("e", 2, serves=True),
    ]
    rng = random.Random(0)
    killed = Counter(choose_victim(living, rng).name for _ in range(300))
    assert killed.keys() == {"a", "b", "d", "e"}
    assert min(killed.values()) > 40


def test_nobody_is_killed_where_no_stage_goes_on_without():
    living = [Living("a", 0, serves=True), Living("b", 1, serves=True), Living("c", 2, False)]
    assert choose_victim(living, random.Random(0)) is None
    assert choose_victim([], random.Random(0)) is None


def test_options_that_do_not_go_together_are_refused():
    assert check_kills(None, None, 1) is None
    assert check_kills(10, 3, 2) == Kills(10, 3)
    with pytest.raises(ConfigError, match="--kill-seed"):
        check_kills(None, 3, 2)
    with pytest.raises(ConfigError, match="--replicas: got 1; allowed: 2"):
        check_kills(10, None, 1)


# -- when -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A child process, its peer id being its name."""

    name: str
    stage: int
    killed: bool = False

    @property
    def peer(self) -> str:
        return self.name


@dataclass
class Twin:
    """The local swarm and its monitor: all nodes serve, but for ``strangers``."""

    children: dict[str, Node]
    under_way: bool = True
    strangers: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    moved: dict[str, int] = field(default_factory=dict)
    log: list[tuple[float, str]] = field(default_factory=list)

    def living(self) -> list[Node]:
        return [node for node in self.children.values() if node.name not in self.dead]

    def members(self) -> dict[str, Seat]:
        present = self.children.keys() - self.strangers
        return {name: Seat(self.at(name), serves=True) for name in present}

    def at(self, name: str) -> int:
        """The stage that it serves now."""
        return self.moved.get(name, self.children[name].stage)

    def stage_in_need(self, coming, gone, rng) -> int:
        """That with the fewest; by number among equals, so that the trials are the same."""
        del rng
        assert gone == self.dead
        counts = Counter(map(self.at, coming))
        return min({node.stage for node in self.children.values()}, key=lambda s: (counts[s], s))

    def kill(self, node: Node) -> None:
        node.killed = True
        self.dead.add(node.name)

    async def spawn(self, stage: int) -> Node:
        node = Node(f"new-{stage}", stage)
        self.children[node.name] = node
        self.strangers.add(node.name)
        return node

    def event(self, line: str) -> None:
        self.log.append((anyio.current_time(), line))


def watch_kills(swarm: Twin, kills: Kills, until_s: float, begins_s: float = 0.0) -> None:
    """Let nodes be killed for ``until_s`` of virtual time."""

    async def begin() -> None:
        await anyio.sleep(begins_s)
        swarm.under_way = True

    async def main() -> None:
        with anyio.move_on_at(until_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(begin)
                tasks.start_soon(Killer(kills, swarm, swarm).run)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def two_a_stage(stages: int) -> dict[str, Node]:
    nodes = [Node(f"node-{stage}-{i}", stage) for stage in range(stages) for i in range(2)]
    return {node.name: node for node in nodes}


def test_a_node_is_killed_every_so_often_and_another_comes_for_its_stage():
    swarm = Twin(two_a_stage(3), under_way=False)
    watch_kills(swarm, Kills(10, seed=1), until_s=42, begins_s=7)
    killed = [(at, line) for at, line in swarm.log if line.startswith("killed")]
    began = [at for at, line in swarm.log if line.startswith("started")]
    assert [at for at, _ in killed] == pytest.approx([17, 27, 37], abs=0.5)
    assert began == pytest.approx([22, 32], abs=0.5)
    assert len({line[-2] for _, line in killed}) == 3, "two of a stage died: the new one joins yet"
    assert REPLACE_S == 5
    first = killed[0][1]
    assert first == f"killed {first[7:15]} ({first[9:15]}, stage {first[12]})"


def test_a_node_that_has_moved_dies_and_is_replaced_where_it_is_now():
    """By what they were started for stage 0 could spare a node, and stage 1 would get another."""
    swarm = Twin(two_a_stage(2), moved={"node-0-1": 1})
    watch_kills(swarm, Kills(6, seed=0), until_s=11.9)
    (_, killed), (_, started) = swarm.log
    assert re.fullmatch(r"killed (node-0-1|node-1-.) \(\S{6}, stage 1\)", killed)
    assert started == "started new-0 (stage 0)"


def test_when_no_stage_can_spare_a_node_that_is_told_once():
    swarm = Twin(two_a_stage(1))
    watch_kills(swarm, Kills(2, seed=1), until_s=20)
    words = [line.split()[0] for _, line in swarm.log]
    assert words == ["killed", "nobody", "started"]
    assert swarm.log[1][0] == pytest.approx(4 + WAIT_S, abs=0.5)


def test_nobody_is_killed_while_no_steps_are_done():
    swarm = Twin(two_a_stage(2), under_way=False)
    watch_kills(swarm, Kills(1), until_s=20, begins_s=30)
    assert swarm.log == []


# -- the account ----------------------------------------------------------------------------------

MANIFEST = default_manifest().changed(
    {"run.steps": 3, "stages.count": 2, "batch.microbatches": 8, "batch.microbatch": 500}
)
COUNTS = ({"a": 8}, {"b": 3, "c": 5})


def done(step: int, *, resent: int = 0, skipped: bool = False, counts=COUNTS) -> StepDone:
    counts = ({}, {}) if skipped else counts
    return StepDone(step, 1.0, 4000, 1.0, 0.1, 1.0, skipped, resent, counts, {})


def test_a_whole_run_is_accounted_for():
    account = make_account([done(0), done(1, resent=2), done(2)], MANIFEST)
    assert account.wrong == ()
    assert in_words(account, killed=1) == (
        "1 node killed, 2 microbatches sent again, 12,000 samples counted; each of 3 steps counted "
        "every microbatch exactly once in each of 2 stages, by the replicas' ledgers"
    )
    assert in_words(account).startswith("2 microbatches sent again, 12,000")
    assert in_words(account, killed=0).startswith("0 nodes killed, 2")


def test_a_skipped_step_counts_nothing_and_is_told():
    account = make_account([done(0), done(1, skipped=True), done(2)], MANIFEST)
    assert account.wrong == ()
    assert account.samples == 8000
    assert "8,000 samples counted, 1 step skipped, which counted nothing; each of 2" in in_words(
        account
    )
    odd = replace(done(1), skipped=True)
    assert make_account([done(0), odd, done(2)], MANIFEST).wrong[0].startswith("step 1: stage 0")


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([done(0), done(2)], "step 1 is missing"),
        ([done(0), done(1), done(1), done(2)], "step 1 was done 2 times"),
        ([done(0), done(1), done(2), done(3)], "step 3 is none of the run's"),
        (
            [done(0), done(1, counts=({"a": 8}, {"b": 7})), done(2)],
            "step 1: stage 1 counted 7 microbatches instead of 8",
        ),
        (
            [done(0), done(1, counts=({"a": 4, "b": 5}, {"b": 8})), done(2)],
            "step 1: stage 0 counted 9 microbatches instead of 8",
        ),
        ([done(0), done(1, counts=({"a": 8},)), done(2)], "step 1: 1 of 2 stages counted"),
    ],
)
def test_what_was_not_counted_exactly_once_is_named(steps, wrong):
    account = make_account(steps, MANIFEST)
    assert account.wrong == (wrong,)
    assert "exactly once" not in in_words(account)
