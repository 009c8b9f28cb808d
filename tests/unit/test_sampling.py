"""Text from a trained model."""

from __future__ import annotations

import pytest

from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.model.sampling import generate
from swarm.model.stage import StageModel

MANIFEST = Manifest.from_tree(
    {
        "model": {"d_model": 16, "heads": 2, "layers": 2, "sequence": 12},
        "stages": {"count": 2},
    }
)


def stages() -> list[StageModel]:
    spec = model_spec(MANIFEST)
    return [StageModel(MANIFEST, spec, stage) for stage in range(2)]


@pytest.mark.parametrize("prompt", [b"a", b"abcdefghijkl", b"a prompt longer than the context"])
def test_as_many_bytes_as_asked_for_and_the_same_again(prompt: bytes) -> None:
    model = stages()
    text = generate(model, prompt, count=20, sequence=12, seed=1)
    assert len(text) == 20
    assert generate(model, prompt, count=20, sequence=12, seed=1) == text
    assert generate(model, prompt, count=20, sequence=12, seed=2) != text


def test_a_model_that_is_sure_repeats_itself() -> None:
    model = stages()
    # At a temperature near zero the likeliest byte is always taken, so the seed cannot matter.
    cold = [
        generate(model, b"x", count=8, sequence=12, seed=seed, temperature=1e-6) for seed in (1, 2)
    ]
    assert cold[0] == cold[1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        generate(stages(), b"", count=1, sequence=12)


def test_it_stops_when_told() -> None:
    asked = iter([False, False, True])
    assert len(generate(stages(), b"x", count=8, sequence=12, stop=lambda: next(asked))) == 2
