"""The optimizers agree with torch's and give the same bits whatever the number of threads."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.core.update import make_update
from swarm.manifest_sections import Optimizer as Section
from swarm.model import optimizer
from swarm.model.optimizer import PIECE, make_optimizer, pieces

LENGTH = PIECE + 1000
STEPS = 20


def gradient(t: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(t)) * 10.0 ** (t % 5 - 2)


def start() -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(999))


def ours(section: Section) -> tuple[Tensor, dict[str, Tensor]]:
    weights = start()
    made = make_optimizer(section, weights)
    for t in range(STEPS):
        update = make_update(section, t, t, [0.0], True)
        for piece in pieces(LENGTH):
            made.step(weights, gradient(t)[piece].clone(), piece, update)
    return weights, made.vectors


def theirs(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Tensor:
    weights = start().requires_grad_()
    optimizer = make([weights])
    for t in range(STEPS):
        weights.grad = gradient(t)
        optimizer.step()
    return weights.detach()


def section(**fields: object) -> Section:
    return Section.model_validate({"lr": 0.01, "clip": 0.0, **fields})


def test_adamw_agrees_with_torch() -> None:
    weights, vectors = ours(section(weight_decay=0.1, betas=[0.9, 0.95], eps=1e-8))
    expected = theirs(
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    )
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    assert set(vectors) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.1), (0.9, 0.0), (0.0, 0.1)])
def test_sgd_agrees_with_torch(momentum: float, decay: float) -> None:
    weights, vectors = ours(section(kind="sgd", momentum=momentum, weight_decay=decay))
    expected = theirs(lambda p: torch.optim.SGD(p, lr=0.01, momentum=momentum, weight_decay=decay))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    assert set(vectors) == ({"momentum_buffer"} if momentum else set())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_bits_do_not_depend_on_threads(kind: str) -> None:
    before = torch.get_num_threads()
    hashes = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weights, _ = ours(section(kind=kind, weight_decay=0.1))
            hashes.add(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    finally:
        torch.set_num_threads(before)
    assert len(hashes) == 1


def rounded(values: np.ndarray) -> np.ndarray:
    """float64, rounded to float32: one operation on float32 done so is rounded exactly once."""
    return values.astype(np.float32).astype(np.float64)


def test_adamw_rounds_every_operation_once_as_ieee_754_says() -> None:
    """So it gives the same bits on every processor: torch's own square root does not."""
    fields = section(weight_decay=0.1)
    weights, vectors = ours(fields)
    b1, b2 = fields.betas
    w = start().double().numpy()
    m = v = np.zeros(LENGTH)

    def scalar(value: float) -> np.float64:
        return np.float64(np.float32(value))

    for t in range(STEPS):
        g, update = gradient(t).double().numpy(), make_update(fields, t, t, [0.0], True)
        v = rounded(rounded(v * scalar(b2)) + rounded(rounded(g * g) * scalar(1 - b2)))
        m = rounded(rounded(m * scalar(b1)) + rounded(g * scalar(1 - b1)))
        root = rounded(rounded(np.sqrt(v)) / scalar(math.sqrt(update.bias2)))
        change = rounded(m / rounded(root + scalar(fields.eps)))
        w = rounded(w * scalar(1 - update.lr * 0.1))
        w = rounded(w - rounded(change * scalar(update.lr / update.bias1)))
    for name, expected in (("exp_avg", m), ("exp_avg_sq", v)):
        assert np.array_equal(vectors[name].double().numpy(), expected)
    assert np.array_equal(weights.double().numpy(), w)


class LikeCuda:
    """torch's functions as CUDA has them: roots are exact, and a number is inverted to divide."""

    add, subtract, multiply = torch.add, torch.subtract, torch.multiply

    @staticmethod
    def sqrt(values: Tensor, *, out: Tensor) -> None:
        np.sqrt(values.numpy(), out=out.numpy())

    @staticmethod
    def divide(values: Tensor, by: Tensor | float, *, out: Tensor) -> None:
        if isinstance(by, Tensor):
            torch.divide(values, by, out=out)
        else:
            torch.multiply(values, float(np.float32(1.0) / np.float32(by)), out=out)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_gpu_gives_the_bits_of_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = section(kind=kind, weight_decay=0.1, momentum=0.9 if kind == "sgd" else 0.0)
    expected, _ = ours(fields)
    monkeypatch.setattr(optimizer, "_arithmetic", lambda *tensors: (LikeCuda, list(tensors)))
    found, _ = ours(fields)
    assert torch.equal(found, expected)


def test_large_gradients_pass_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fields, weights = section(), start()
        update = make_update(fields, 0, 0, [0.0], True)
        make_optimizer(fields, weights).step(
            weights[:4], torch.full((4,), 3e38), slice(0, 4), update
        )
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_cover_a_vector_in_order(length: int) -> None:
    covered = [i for piece in pieces(length) for i in (piece.start, piece.stop)]
    assert covered == sorted(covered)
    assert sum(piece.stop - piece.start for piece in pieces(length)) == length
    assert all(0 < piece.stop - piece.start <= PIECE for piece in pieces(length))
