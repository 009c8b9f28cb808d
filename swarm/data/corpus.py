"""A corpus: bytes as tokens, the last part held out for evaluation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from swarm.data.files import read_standard_library, read_text
from swarm.errors import ConfigError, DataError

SOURCES = "stdlib, text:PATH, python:module:function"


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of a run. Nothing of it can be changed.

    ``tokens``: uint8 (n,), read-only. ``sha256``: hex digest of their bytes. ``split``: the
    index of the first held-out token.
    """

    tokens: np.ndarray
    sha256: str
    split: int

    @property
    def train(self) -> np.ndarray:
        """uint8 (split,): a view of what is trained on."""
        return self.tokens[: self.split]

    @property
    def holdout(self) -> np.ndarray:
        """uint8 (n - split,): a view of what is never trained on."""
        return self.tokens[self.split :]


def make_corpus(content: bytes | bytearray, *, holdout: float) -> Corpus:
    """A corpus of ``content``, which must not be changed afterwards.

    The held-out part is the last ``holdout`` fraction, rounded down.

    Raises:
        ConfigError: ``holdout`` is not between 0 and 1.
    """
    check_holdout(holdout)
    tokens = np.frombuffer(content, dtype=np.uint8)
    tokens.flags.writeable = False
    split = len(tokens) - int(len(tokens) * holdout)
    return Corpus(tokens, hashlib.sha256(content).hexdigest(), split)


def load_corpus(
    source: str, *, holdout: float = 0.05, expected_sha256: str = "", min_tokens: int = 2
) -> Corpus:
    """Read the text that ``source`` names.

    ``stdlib``: the sources of the running Python's standard library (tests left out), about
    10 MB, which differ between Python builds. ``text:PATH``: a file, or a folder of files in
    the order of their relative paths, hidden ones left out, joined by newlines; PATH is
    relative to the working directory. An empty ``expected_sha256`` allows any content.
    ``min_tokens`` is what one sample takes: both parts must hold that many.

    Raises:
        ConfigError: ``source`` or ``holdout`` is none of what is allowed.
        DataError: missing, unreadable, empty or too short, or another content than expected.
    """
    if source == "stdlib":
        content = read_standard_library()
    elif source.startswith("text:") and source != "text:":
        content = read_text(source.removeprefix("text:"))
    else:
        raise ConfigError("data.source", source, SOURCES)
    if not content:
        raise DataError(f"data.source {source!r} is empty: name a file or folder with text in it")
    corpus = make_corpus(content, holdout=holdout)
    check_sha256(source, corpus.sha256, expected_sha256)
    check_length(corpus, min_tokens)
    return corpus


def check_holdout(holdout: float) -> None:
    """Raises ConfigError unless ``holdout`` is a fraction that leaves something on both sides."""
    if not 0 < holdout < 1:
        raise ConfigError("data.holdout", holdout, "a fraction above 0 and below 1")


def check_sha256(source: str, actual: str, expected: str) -> None:
    """Raises DataError if ``expected`` is given and is not ``actual``."""
    if expected and actual != expected.lower():
        raise DataError(
            f"data.source {source!r} has SHA-256 {actual[:12]}... here, but the run has "
            f"{expected[:12]}...: the coordinator's corpus differs (for stdlib: another Python "
            "build); use the same Python build or a copy of the same files"
        )


def check_length(corpus: Corpus, min_tokens: int) -> None:
    """Raises DataError unless both parts hold ``min_tokens``."""
    for part, tokens in (("training", corpus.train), ("held-out", corpus.holdout)):
        if len(tokens) < min_tokens:
            raise DataError(
                f"the corpus is too short: its {part} part has {len(tokens)} of "
                f"{len(corpus.tokens)} bytes, one sample takes {min_tokens}; give more text, "
                "shorten the sequence or change data.holdout"
            )
