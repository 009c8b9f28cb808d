"""A GPU's copies and waits, on a card that makes every copy late and every misuse an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import Tensor

import swarm.model.cuda
from peers.device import check_device, choose_device
from swarm.errors import ConfigError
from swarm.model.cuda import CudaCard
from swarm.model.device import CPU, snapshot
from swarm.model.gpu import Gpu
from swarm.model.probe import look_for
from tests.chaos.harness import World, digits_manifest, reference, run_world
from tests.fake_card import LOOP, FakeCard, placed


@pytest.fixture
def card() -> FakeCard:
    return FakeCard()


# -- copies ---------------------------------------------------------------------------------


def test_what_goes_up_is_there_when_it_is_waited_for_and_not_before(card: FakeCard) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    copy = Gpu(card).to_device(tensor)
    assert copy.target.isnan().all()
    tensor.zero_()  # the network's buffer is free again
    assert torch.equal(copy.wait(), torch.arange(6.0).view(2, 3))
    assert (card.up, card.down, sum(card.blocked.values())) == (1, 0, 0)


def test_what_comes_down_is_there_when_it_is_waited_for_and_not_before(card: FakeCard) -> None:
    copy = Gpu(card).to_host(torch.arange(4.0))
    assert copy.target.isnan().all()
    assert not card.blocked
    assert torch.equal(copy.wait(), torch.arange(4.0))
    assert card.blocked == {"test": 1}


def test_any_number_of_answers_is_one_readback(card: FakeCard) -> None:
    gpu = Gpu(card)
    scalars = [torch.tensor(1.5), torch.tensor([7]), torch.tensor(2.5, dtype=torch.bfloat16)]
    assert gpu.read(scalars) == [1.5, 7.0, 2.5] == CPU.read(scalars)
    assert (card.down, sum(card.blocked.values())) == (1, 1)
    assert gpu.read([]) == [] == CPU.read([])
    assert card.down == 1


def test_the_event_loop_may_not_wait(card: FakeCard) -> None:
    gpu = Gpu(card)
    up, down = gpu.to_device(torch.ones(3)), gpu.to_host(torch.ones(3))
    card.where = LOOP
    for wait in (up.wait, down.wait, lambda: gpu.read([torch.ones(1)])):
        with pytest.raises(AssertionError):
            wait()


def test_the_cpu_copies_nothing() -> None:
    tensor = torch.ones(3)
    assert CPU.to_device(tensor).wait() is tensor
    assert CPU.to_host(tensor).wait() is tensor


def test_a_snapshot_is_a_copy_on_either(card: FakeCard) -> None:
    for device in (CPU, Gpu(card)):
        tensor = torch.ones(3)
        kept = snapshot(device, tensor)
        tensor.zero_()
        assert torch.equal(kept, torch.ones(3))


BIG = torch.full((4,), 3e38)


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        (torch.ones(3), True),
        (BIG, True),  # their sum is not
        (torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([float("inf"), float("-inf")]), False),
        (torch.tensor(float("inf")), False),
        (torch.tensor([200], dtype=torch.uint8), True),
        (torch.zeros(0), True),
        (None, True),
    ],
)
def test_what_is_not_finite_is_found(card: FakeCard, tensor: Tensor | None, finite: bool) -> None:
    for device in (CPU, Gpu(card)):
        found = look_for(device, {"a": torch.tensor(2.0), "b": tensor, "c": torch.ones(2)})
        assert (found["a"], found["c"]) == (2.0, 2.0)
        assert torch.tensor(found["b"]).isfinite().item() is finite
    assert card.down == 1


# -- a swarm on such cards --------------------------------------------------------------------


@pytest.fixture
def on_card(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """All nodes of the harness compute on it."""
    monkeypatch.setattr("peers.node.CPU", Gpu(card))
    monkeypatch.setattr("tests.chaos.harness.InlineExecutor", placed(card))
    return card


def losses(world: World) -> list[float]:
    return [done.loss for done in world.done]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"limits__graphs": 0},  # computed again for the backward
        {"wire__averaging": "int8"},
        {"wire__activations": "bf16", "wire__gradients": "bf16", "stages__count": 3},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_a_swarm_has_the_losses_of_one_process(on_card: FakeCard, changes: dict) -> None:
    """Were anything computed with or sent before its copy is complete, it would be nonsense."""
    manifest = digits_manifest(**changes)
    lossy = "wire__averaging" in changes

    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(3)

    world = run_world(manifest, scenario)
    expected = [result.loss for result in reference(manifest, 3).results]
    assert losses(world) == pytest.approx(expected, rel=2e-2 if lossy else 1e-5)
    assert world.sha256()
    assert on_card.up > 0


@pytest.mark.parametrize("graphs", [0, 16])
def test_one_readback_a_pass_and_none_in_the_event_loop(on_card: FakeCard, graphs: int) -> None:
    manifest = digits_manifest(limits__graphs=graphs)
    microbatches, replicas = manifest.batch.microbatches, 2

    async def scenario(world: World) -> None:
        await world.start_all(replicas)
        on_card.blocked.clear()
        on_card.up = on_card.down = 0
        await world.train(1)
        assert world.done[0].resent == 0

    run_world(manifest, scenario)
    sent = on_card.blocked.pop("side")
    assert sent == 2 * microbatches  # an activation and a gradient each
    assert on_card.blocked == {
        "forward": microbatches,
        "forward_backward": microbatches,
        "backward": microbatches,
        "prepare": 2 * replicas,  # the accumulators, for the round
    }
    # Input, activation, targets, gradient.
    assert on_card.up == 4 * microbatches


def test_joiners_and_checkpoints_get_what_was_on_the_card(on_card: FakeCard) -> None:
    async def scenario(world: World) -> None:
        await world.start_all(1)
        await world.train(2)
        world.tasks.start_soon(world.start, 0)
        await world.start(1)
        for stage in range(2):
            await world.wait_for(stage, 2)
        await world.train(2)

    manifest = digits_manifest(limits__state_piece=64)
    world = run_world(manifest, scenario)
    assert losses(world) == pytest.approx(
        [result.loss for result in reference(manifest, 4).results], rel=1e-5
    )
    assert world.sha256()  # of all replicas that are at the mark
    assert on_card.blocked["copy"] > 0


# -- which device -----------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:0x", "cuda:٣"])
def test_words_that_are_no_device(wish: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda or cuda:N"):
        check_device(wish)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes torch see so many."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    def made(index: int) -> FakeCard:
        fake = FakeCard()
        fake.name = f"number {index}"
        return fake

    monkeypatch.setattr(swarm.model.cuda, "CudaCard", made)
    return see


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_an_error(gpus: Callable[[int], None]) -> None:
    gpus(0)
    assert choose_device("auto") is choose_device("cpu") is CPU
    for wish in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="torch finds no GPU") as caught:
            choose_device(wish)
        assert "\n" not in str(caught.value)


def test_with_gpus_the_one_that_is_wished_for(gpus: Callable[[int], None]) -> None:
    gpus(2)
    for wish, name in (("auto", "number 0"), ("cuda", "number 0"), ("cuda:1", "number 1")):
        device = choose_device(wish)
        assert device.words == f"cpu, {name}"
        assert device.memory_bytes == 3 << 30
    assert choose_device("cpu") is CPU
    with pytest.raises(ConfigError, match="cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_a_reproducible_run_is_the_cpu_s(gpus: Callable[[int], None]) -> None:
    gpus(1)
    assert choose_device("auto", reproducible=True) is CPU
    with pytest.raises(ConfigError, match=r"reproducible\.enabled"):
        choose_device("cuda", reproducible=True)


def test_a_word_that_is_no_device_ends_the_command_before_anything_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from peers.cli import app

    key = tmp_path / "key"
    words = ["node", "--join", "/ip4/127.0.0.1/tcp/1", "--identity", str(key), "--device", "gpu"]
    result = CliRunner().invoke(app, words)
    error = result.stderr + capfd.readouterr().err
    assert result.exit_code == 2
    assert error.startswith("error: --device: got 'gpu'")
    assert error.count("\n") == 1
    assert not key.exists()


def test_cuda_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no card: the calls fit torch's signatures, and are given the right stream."""
    entered: list[object] = []
    stream = create_autospec(torch.cuda.Stream, instance=True)
    event = create_autospec(torch.cuda.Event, instance=True)

    class Entered:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            entered.append(self.stream)

        def __exit__(self, *error: object) -> None: ...

    fake = SimpleNamespace(
        get_device_name=create_autospec(torch.cuda.get_device_name, return_value="H"),
        mem_get_info=create_autospec(torch.cuda.mem_get_info, return_value=(5, 9)),
        Stream=MagicMock(return_value=stream),
        Event=MagicMock(return_value=event),
        current_stream=create_autospec(torch.cuda.current_stream, return_value=stream),
        stream=Entered,
    )
    made = MagicMock(return_value=torch.zeros(3))
    monkeypatch.setattr(swarm.model.cuda.torch, "cuda", fake)
    monkeypatch.setattr(swarm.model.cuda.torch, "empty", made)
    card = CudaCard(1)
    assert (card.name, card.free_bytes(), card.torch_device) == ("H", 5, torch.device("cuda:1"))
    assert card.stream() is card.computing() is stream
    card.pinned(torch.ones(3))
    assert made.call_args.kwargs == {"dtype": torch.float32, "pin_memory": True}
    target = card.empty(torch.ones(3), stream)
    assert made.call_args.kwargs == {"dtype": torch.float32, "device": torch.device("cuda:1")}
    card.copy(target, torch.ones(3), stream)
    assert torch.equal(target, torch.ones(3))
    assert entered == [stream, stream]
    assert card.record(stream) is event
    event.record.assert_called_once_with(stream)
    card.wait(stream, event)
    stream.wait_event.assert_called_once_with(event)
    card.block(event)
    event.synchronize.assert_called_once_with()
    tensor = MagicMock()
    card.used_on(tensor, stream)
    tensor.record_stream.assert_called_once_with(stream)
