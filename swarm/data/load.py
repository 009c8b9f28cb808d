"""From the manifest's data source to batches."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Collection

import numpy as np

from swarm.data.batches import ArrayBatches, Batches, TextBatches
from swarm.data.corpus import SOURCES, check_sha256, load_corpus
from swarm.errors import ConfigError, DataError


def load_batches(
    source: str,
    *,
    expected_sha256: str,
    holdout: float,
    sequence: int,
    microbatch: int,
    seed: int,
    allow: Collection[str] = (),
) -> tuple[Batches, str]:
    """The batches of ``source`` and the SHA-256 (hex) of its content.

    ``stdlib`` and ``text:PATH`` give :class:`TextBatches` (see :func:`load_corpus`).
    ``python:module:function`` calls the function, which returns an array of inputs and one of
    targets, and gives :class:`ArrayBatches`; ``sequence`` is not used. Since that runs code, it
    is done only if ``allow`` holds ``module:function``. An empty ``expected_sha256`` allows any
    content.

    Raises:
        ConfigError: a parameter is none of what is allowed.
        DataError: the data is missing, unusable, not allowed, or not what is expected.
    """
    if source.startswith("python:"):
        inputs, targets = _call(source, allow)
        sha256 = _arrays_sha256(inputs, targets)
        check_sha256(source, sha256, expected_sha256)
        arrays = ArrayBatches(inputs, targets, holdout=holdout, microbatch=microbatch, seed=seed)
        return arrays, sha256
    corpus = load_corpus(
        source, holdout=holdout, expected_sha256=expected_sha256, min_tokens=sequence + 1
    )
    batches = TextBatches(corpus, sequence=sequence, microbatch=microbatch, seed=seed)
    return batches, corpus.sha256


def _call(source: str, allow: Collection[str]) -> tuple[np.ndarray, np.ndarray]:
    target = source.removeprefix("python:")
    module, _, function = target.partition(":")
    if not module or not function.isidentifier():
        raise ConfigError("data.source", source, SOURCES)
    if target not in allow:
        raise DataError(
            f"data.source {source!r} runs code on this machine: if you trust it, "
            f"start with --allow-model {target}"
        )
    try:
        result = getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever the user's code raises is theirs to mend
        raise DataError(
            f"data.source {source!r} failed with {type(error).__name__}: "
            f"{' '.join(str(error).split())}; mend that function"
        ) from error
    return _as_arrays(source, result)


def _as_arrays(source: str, result: object) -> tuple[np.ndarray, np.ndarray]:
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(array, np.ndarray) for array in result)
    ):
        raise DataError(
            f"data.source {source!r} returned a {type(result).__name__}: "
            "it must return a tuple of two numpy arrays, inputs and targets"
        )
    for array in result:
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"data.source {source!r} returned an array of dtype {array.dtype}: "
                "allowed are booleans, integers and floating-point numbers"
            )
    inputs, targets = result
    return np.ascontiguousarray(inputs), np.ascontiguousarray(targets)


def _arrays_sha256(inputs: np.ndarray, targets: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in (inputs, targets):
        digest.update(f"{array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data.cast("B") if array.size else b"")
    return digest.hexdigest()
