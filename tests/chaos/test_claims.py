"""Whoever claims that another trainer leads the run: one liar must not end it."""

from __future__ import annotations

import itertools

import anyio
import pytest

from peers import messages as msg
from peers.faults import Drop
from peers.reign import MAX_TERM, Superseded
from peers.transport import Frame
from swarm.types import Term
from tests.chaos.harness import World, digits_manifest, run_world


async def claim(world: World, peer, term: int, *, kinds: tuple[str, ...] = ("prepare",)) -> None:
    """From now on ``peer`` refuses messages of ``kinds``, naming ``term``."""
    honest = peer.node.server.handle

    async def lie(sender: str, frame: Frame) -> Frame:
        if frame.header.get("kind") in kinds:
            return Frame(msg.header(msg.Refused(reason="no", term=term)))
        return await honest(sender, frame)

    await peer.transport.serve(lie)


@pytest.mark.parametrize("term", [7, MAX_TERM + 1])
def test_one_that_obeys_another_is_left_out_and_the_run_goes_on(term: int) -> None:
    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(1)
        await claim(world, world.of_stage(0)[0], term, kinds=("prepare", "reset", "cancel"))
        await world.train(3)

    world = run_world(digits_manifest(), scenario)
    assert [done.step for done in world.done] == [0, 1, 2, 3]
    assert world.trainer.term.number == 1


def test_if_a_stage_has_nobody_else_the_run_ends_and_says_so() -> None:
    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(1)
        for peer in world.of_stage(0):
            await claim(world, peer, 7, kinds=("prepare", "reset", "cancel"))
        with pytest.raises(Superseded, match=r"term 7, ours is 1.*stage 0"):
            await world.train(1)

    run_world(digits_manifest(), scenario)


def test_before_the_first_step_a_higher_term_is_taken() -> None:
    async def scenario(world: World) -> None:
        peer = await world.start(0)
        peer.node.server.passes.intake.adopt(Term(5, "another"))
        await world.start(1)
        await world.trainer.wait_for_start()
        await world.train(1)

    world = run_world(digits_manifest(), scenario)
    assert world.trainer.term.number == 6


def test_one_that_refuses_decisions_too_is_asked_now_and_then_only() -> None:
    """It is where the last decision began: each time it is told that one, and refuses again."""
    asked: list[float] = []

    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(1)
        liar = world.of_stage(0)[0]
        await claim(world, liar, 7, kinds=("prepare", "reset", "cancel", "decide"))

        def look(link, header) -> bool:
            if link.target == liar.peer_id and header["kind"] == "question":
                asked.append(anyio.current_time())
                assert len(asked) < 1000, "it is asked without a pause"
            return False

        world.faults.add(look, Drop())
        for peer in world.peers.values():
            peer.slow_down(20.0)
        await world.train(6)

    world = run_world(digits_manifest(), scenario)
    assert [done.step for done in world.done] == list(range(7))
    least_s = world.manifest.periods.watch_s / 2
    assert len(asked) > 1
    assert all(later - earlier >= least_s for earlier, later in itertools.pairwise(asked))
