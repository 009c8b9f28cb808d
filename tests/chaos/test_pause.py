"""A node that pauses takes no new work, and is none the worse for it."""

from __future__ import annotations

from tests.chaos.harness import World, digits_manifest, run_world


def test_one_that_pauses_is_passed_over_and_counts_again_afterwards():
    counted: list[list[int]] = []

    async def scenario(world: World) -> None:
        await world.start_all(2)
        nodes = [peer.node for peer in world.of_stage(0)]

        def note() -> None:
            counted.append([node.server.passes.counters.counted for node in nodes])

        await world.train(2)
        note()
        nodes[0].pause(True)
        await world.train(2)
        note()
        nodes[0].pause(False)
        await world.train(3)
        note()

    run_world(digits_manifest(), scenario)
    before, meanwhile, after = counted
    assert before[0] > 0
    assert meanwhile[0] == before[0]
    assert meanwhile[1] - before[1] == 2 * digits_manifest().batch.microbatches
    assert after[0] > meanwhile[0]


def test_one_that_moves_while_it_pauses_pauses_there_too():
    from peers.node import Node

    async def scenario(world: World) -> None:
        await world.start_all(1)
        node: Node = world.of_stage(0)[0].node
        node.pause(True)
        assert node.server is not None
        assert node._serve(node.server.host.stage, node.server.host.tasks).passes.paused

    run_world(digits_manifest(), scenario)
