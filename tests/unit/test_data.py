import hashlib
import os
import sys
import types

import numpy as np
import pytest
from sklearn.datasets import load_digits

from swarm.data import ArrayBatches, TextBatches, load_batches, load_corpus
from swarm.data.batches import draw
from swarm.data.corpus import make_corpus
from swarm.errors import ConfigError, DataError


def staircase(count: int):
    """A corpus in which every token tells its place, modulo 251."""
    return make_corpus(bytes(i % 251 for i in range(count)), holdout=0.1)


def text_batches(corpus=None, *, sequence=16, microbatch=4, seed=7) -> TextBatches:
    return TextBatches(
        corpus or staircase(4000), sequence=sequence, microbatch=microbatch, seed=seed
    )


def numbered_batches(count=100, *, holdout=0.2, microbatch=8, seed=7) -> ArrayBatches:
    """Inputs that are their own numbers, targets their squares."""
    numbers = np.arange(count)
    return ArrayBatches(
        numbers, numbers * numbers, holdout=holdout, microbatch=microbatch, seed=seed
    )


MAKERS = {"text": text_batches, "arrays": numbered_batches}


def equal(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def load(source, *, allow=(), sha256="", holdout=0.1, sequence=8):
    return load_batches(
        source,
        expected_sha256=sha256,
        holdout=holdout,
        sequence=sequence,
        microbatch=2,
        seed=1,
        allow=allow,
    )


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# The corpus


def test_a_corpus_is_split_at_its_end_without_overlap():
    corpus = make_corpus(bytes(range(200)), holdout=0.25)
    assert corpus.tokens.dtype == np.uint8
    assert corpus.train.tolist() == list(range(150))
    assert corpus.holdout.tolist() == list(range(150, 200))
    assert np.shares_memory(corpus.train, corpus.tokens)
    assert np.shares_memory(corpus.holdout, corpus.tokens)
    assert corpus.sha256 == hashlib.sha256(bytes(range(200))).hexdigest()


def test_a_corpus_cannot_be_changed():
    for content in (b"some text", bytearray(b"some text")):
        corpus = make_corpus(content, holdout=0.5)
        for part in (corpus.tokens, corpus.train, corpus.holdout):
            with pytest.raises(ValueError, match="read-only"):
                part[0] = 0
    with pytest.raises(AttributeError):
        corpus.split = 0


@pytest.mark.parametrize("holdout", [-0.1, 0, 1, 1.5, float("nan")])
def test_a_holdout_that_leaves_nothing_on_one_side_is_refused(holdout, tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"^data.holdout: got .* above 0 and below 1"):
        load_corpus(f"text:{tmp_path}", holdout=holdout)


def test_the_default_holds_out_a_twentieth(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    assert len(load_corpus(f"text:{tmp_path}").holdout) == 50


def test_a_file_is_read_as_it_is(tmp_path):
    content = bytes(range(256))  # not decodable as UTF-8
    (tmp_path / "a.bin").write_bytes(content)
    corpus = load_corpus(f"text:{tmp_path / 'a.bin'}", holdout=0.5)
    assert corpus.tokens.tobytes() == content


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path):
    for path, content in {
        "b/inner.txt": b"3",
        "b.txt": b"2",  # "b.txt" sorts before "b/inner.txt", though a walk finds it otherwise
        "a.txt": b"1",
        "c": b"4",
        "c.empty": b"",
        "Z": b"0",
        ".hidden": b"x",
        ".git/config": b"x",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    corpus = load_corpus(f"text:{tmp_path}", holdout=0.3)
    assert corpus.tokens.tobytes() == b"0\n1\n2\n3\n4"


def test_what_is_no_regular_file_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").write_bytes(b"text")
    assert load_corpus(f"text:{tmp_path}", holdout=0.5).tokens.tobytes() == b"text"
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus(f"text:{tmp_path / 'pipe'}")


def test_links_that_lead_in_a_circle_are_not_followed(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a").write_bytes(b"text")
    assert load_corpus(f"text:{tmp_path}", holdout=0.5).tokens.tobytes() == b"text"


@pytest.mark.parametrize("path", ["missing", "nul\0", "new\nline", "dangling"])
def test_a_path_that_cannot_be_read_is_named_in_one_line(path, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError) as error:
        load_corpus(f"text:{tmp_path}/{path}")
    assert repr(path).strip("'") in one_line(error)


def test_a_broken_file_in_a_folder_is_an_error_not_a_gap(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"dangling.*No such file"):
        load_corpus(f"text:{tmp_path}")


def test_a_file_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"text")

    def denied(self):  # permissions do not stop a test that runs as root
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(DataError, match=r"/a': Permission denied"):
        load_corpus(f"text:{tmp_path}")


def test_a_folder_that_may_not_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"text")
    listing = os.scandir

    def denied(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match=r"inner': Permission denied"):
        load_corpus(f"text:{tmp_path}")


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        load_corpus(f"text:{tmp_path}")
    (tmp_path / "a").touch()
    for source in (f"text:{tmp_path}", f"text:{tmp_path / 'a'}"):
        with pytest.raises(DataError, match="is empty"):
            load_corpus(source)


def test_each_part_must_hold_one_sample(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(100))
    assert len(load_corpus(f"text:{file}", holdout=0.1, min_tokens=10).holdout) == 10
    with pytest.raises(DataError, match=r"held-out part has 10 of 100 bytes, one sample takes 11"):
        load_corpus(f"text:{file}", holdout=0.1, min_tokens=11)
    with pytest.raises(DataError, match=r"training part has 10 of 100 bytes, one sample takes 11"):
        load_corpus(f"text:{file}", holdout=0.9, min_tokens=11)


def test_another_corpus_than_that_of_the_run_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"some text")
    sha256 = hashlib.sha256(b"some text").hexdigest()
    for expected in ("", sha256, sha256.upper()):
        assert load_corpus(f"text:{tmp_path}", holdout=0.5, expected_sha256=expected)
    with pytest.raises(DataError) as error:
        load_corpus(f"text:{tmp_path}", holdout=0.5, expected_sha256="0123456789abcdef" * 4)
    message = one_line(error)
    assert sha256[:12] in message
    assert "0123456789ab..." in message
    assert "coordinator's corpus differs" in message


@pytest.mark.parametrize("source", ["", "text", "text:", "wiki", "stdlib:", "/tmp"])
def test_an_unknown_source_names_those_that_exist(source):
    for read in (load_corpus, load):
        with pytest.raises(ConfigError, match=r"^data.source: .*stdlib, text:PATH, python:mod"):
            read(source)


# The standard library


def test_the_standard_library_is_of_a_useful_size_and_the_same_each_time():
    corpus = load_corpus("stdlib")
    assert 5e6 < len(corpus.tokens) < 15e6
    assert load_corpus("stdlib", expected_sha256=corpus.sha256).sha256 == corpus.sha256
    content = corpus.tokens.tobytes()
    with open(os.__file__, "rb") as source:
        assert source.read() in content


def test_the_standard_library_is_its_own_sources_alone(tmp_path, monkeypatch):
    files = {
        "b.py": "2",
        "a/inner.py": "1",
        "test_of_something.py": "3",
        "unittest/mock.py": "4",
        "a/notes.txt": "x",
        "test/b.py": "x",
        "a/tests/b.py": "x",
        "idlelib/idle_test/b.py": "x",
        "__pycache__/b.py": "x",
        "site-packages/b.py": "x",
        "dist-packages/b.py": "x",
        "config-3.11-x86_64-linux-gnu/python-config.py": "x",
        "_sysconfigdata__linux_x86_64-linux-gnu.py": "x",
        "sitecustomize.py": "x",
    }
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert load_corpus("stdlib", holdout=0.4).tokens.tobytes() == b"1\n2\n3\n4"


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="use text:PATH"):
        load_corpus("stdlib")


# Batches of both kinds


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_batch_does_not_depend_on_what_was_asked_before(make):
    wanted = [(step, m) for step in range(4) for m in range(4)]
    forward = make()
    in_order = {key: forward.train(*key) for key in wanted}
    backward = make()
    for key in reversed(wanted):
        backward.evaluation(key[0])
        assert equal(backward.train(*key), in_order[key])
        assert equal(backward.train(*key), in_order[key])
        assert equal(make().train(*key), in_order[key])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_seed_step_and_microbatch_each_change_the_batch(make):
    numbers = (0, 1, 11, 111)  # (1, 11) and (11, 1) must not be the same digits in a row
    seen = {
        make(seed=seed).train(step, m)[0].tobytes()
        for seed in numbers
        for step in numbers
        for m in numbers
    }
    assert len(seen) == len(numbers) ** 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_global_random_state_is_neither_used_nor_changed(make):
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = make().train(0, 0)
    assert np.array_equal(np.random.get_state()[1], before)
    np.random.seed(2)
    assert equal(make().train(0, 0), first)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_arrays_are_the_callers_own(make):
    batches = make()
    for read in (lambda: batches.train(0, 0), lambda: batches.evaluation(0)):
        kept = [array.copy() for array in read()]
        for array in read():
            assert array.flags.c_contiguous
            array[:] = 0
        assert equal(read(), kept)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_evaluation_is_fixed_differs_by_index_and_wraps(make):
    batches = make()
    count = batches.evaluation_count
    assert count > 1
    assert len({batches.evaluation(index)[0].tobytes() for index in range(count)}) == count
    assert equal(batches.evaluation(0), batches.evaluation(count))
    assert equal(batches.evaluation(count - 1), batches.evaluation(-1))
    assert equal(batches.evaluation(1), make(seed=8).evaluation(1))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_size_below_one_is_refused(make):
    with pytest.raises(ConfigError, match=r"^batch.microbatch: got 0; allowed: 1 or more"):
        make(microbatch=0)


def test_the_draw_is_pinned():
    # A run must draw the same data with every version of numpy and on every machine.
    assert draw(1, 2, 3, count=4, below=10**6).tolist() == [638487, 527019, 943869, 743042]


def test_the_draw_reaches_all_values_about_equally_often():
    drawn = np.concatenate([draw(0, step, 0, count=100, below=10) for step in range(100)])
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 850
    assert counts.max() < 1150


# Text batches


def test_targets_are_the_inputs_one_ahead():
    batches = text_batches()
    for inputs, targets in (batches.train(3, 5), batches.evaluation(2)):
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.dtype == targets.dtype == np.uint8
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
        # In the staircase each token is followed by the next number.
        assert np.array_equal((inputs.astype(int) + 1) % 251, targets)


def test_training_never_sees_the_held_out_part():
    corpus = make_corpus(b"t" * 90 + b"h" * 10, holdout=0.1)
    batches = text_batches(corpus, sequence=4, microbatch=50)
    trained = np.concatenate([np.stack(batches.train(step, 0)) for step in range(40)])
    assert set(trained.ravel().tolist()) == {ord("t")}
    held = np.concatenate([np.stack(batches.evaluation(index)) for index in range(5)])
    assert set(held.ravel().tolist()) == {ord("h")}


def test_training_reaches_the_first_and_the_last_token_of_its_part():
    corpus = make_corpus(bytes(range(40)), holdout=0.25)
    batches = text_batches(corpus, sequence=4, microbatch=50)
    starts = {start for step in range(20) for start in batches.train(step, 0)[0][:, 0].tolist()}
    assert starts == set(range(30 - 4))
    assert max(batches.train(step, 0)[1].max() for step in range(20)) == 29


def test_evaluation_windows_are_spread_over_the_whole_held_out_part():
    tokens = np.arange(250, dtype=np.uint8)
    corpus = make_corpus(tokens.tobytes(), holdout=0.8)  # held out: 50..249
    batches = text_batches(corpus, sequence=9, microbatch=4)
    assert batches.evaluation_count == 5
    starts = np.stack([batches.evaluation(index)[0][:, 0] for index in range(5)])
    in_order = np.sort(starts.ravel()).astype(int)
    assert in_order[0] == 50
    assert in_order[-1] == 240  # its last target is the last token
    assert set(np.diff(in_order)) == {10}
    # Each microbatch alone reaches from one end to the other, too.
    assert (starts.max(axis=1) - starts.min(axis=1) >= 150).all()


def test_one_sample_in_each_part_is_enough():
    corpus = make_corpus(bytes(range(10)), holdout=0.5)
    batches = text_batches(corpus, sequence=4, microbatch=2)
    assert batches.train(0, 0)[0].tolist() == [[0, 1, 2, 3]] * 2
    assert batches.evaluation(5)[1].tolist() == [[6, 7, 8, 9]] * 2
    with pytest.raises(DataError, match=r"part has 5 of 10 bytes, one sample takes 6"):
        text_batches(corpus, sequence=5)
    single = text_batches(corpus, sequence=4, microbatch=1)
    assert single.evaluation(0)[0].tolist() == [[5, 6, 7, 8]]


def test_a_sequence_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"^model.sequence: got 0"):
        text_batches(sequence=0)


# Array batches


def test_inputs_stay_with_their_targets_and_parts_do_not_overlap():
    batches = numbered_batches()
    trained, held = set(), []
    for index in range(200):
        for inputs, targets in (batches.train(index, 0), batches.evaluation(index)):
            assert inputs.shape == (8,)
            assert np.array_equal(inputs * inputs, targets)
        trained |= set(batches.train(index, 0)[0].tolist())
    for index in range(batches.evaluation_count):
        held += batches.evaluation(index)[0].tolist()
    assert trained == set(range(80))
    assert held == [*range(80, 100), *range(80, 84)]  # 20 held out, the last batch filled up


def test_arrays_keep_their_shapes_and_dtypes():
    digits = load_digits()
    inputs = digits.images.astype(np.float32)
    batches = ArrayBatches(inputs, digits.target, holdout=0.1, microbatch=3, seed=0)
    for found, labels in (batches.train(0, 0), batches.evaluation(0)):
        assert (found.shape, found.dtype) == ((3, 8, 8), np.float32)
        assert (labels.shape, labels.dtype) == ((3,), digits.target.dtype)
    assert np.array_equal(batches.evaluation(0)[0], inputs[-179:-176])


@pytest.mark.parametrize(
    ("inputs", "targets"), [((5, 2), (4,)), ((), (5,)), ((5,), ())], ids=["length", "in", "out"]
)
def test_arrays_of_different_length_are_refused(inputs, targets):
    with pytest.raises(DataError, match="the same first dimension"):
        ArrayBatches(np.zeros(inputs), np.zeros(targets), holdout=0.5, microbatch=1, seed=0)


@pytest.mark.parametrize("count", [0, 9])
def test_too_few_samples_to_hold_one_out_are_refused(count):
    with pytest.raises(DataError, match=f"{count} samples are too few"):
        numbered_batches(count, holdout=0.1)


def test_arrays_need_a_holdout_within_bounds():
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        numbered_batches(holdout=1.0)


# From a source to batches


@pytest.fixture
def samples(monkeypatch):
    """A module ``samples`` with data functions in it."""
    module = types.ModuleType("samples")
    module.calls = []

    def pair():
        module.calls.append("pair")
        return np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)

    def broken():
        raise RuntimeError("no\nluck")

    module.pair = pair
    module.broken = broken
    monkeypatch.setitem(sys.modules, "samples", module)
    return module


def test_text_gives_text_batches_and_the_hash_of_the_corpus(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    batches, sha256 = load(f"text:{tmp_path}", sha256=hashlib.sha256(bytes(range(200))).hexdigest())
    corpus = make_corpus(bytes(range(200)), holdout=0.1)
    assert sha256 == corpus.sha256
    same = TextBatches(corpus, sequence=8, microbatch=2, seed=1)
    assert equal(batches.train(3, 4), same.train(3, 4))
    with pytest.raises(DataError, match="one sample takes 21"):
        load(f"text:{tmp_path}", sequence=20)


def test_the_standard_library_gives_text_batches():
    batches, sha256 = load("stdlib")
    assert isinstance(batches, TextBatches)
    assert sha256 == load_corpus("stdlib").sha256


def test_an_allowed_function_gives_array_batches(samples):
    batches, sha256 = load("python:samples:pair", allow={"samples:pair"})
    inputs, targets = samples.pair()
    same = ArrayBatches(inputs, targets, holdout=0.1, microbatch=2, seed=1)
    assert equal(batches.train(3, 4), same.train(3, 4))
    assert load("python:samples:pair", allow={"samples:pair"}, sha256=sha256)[1] == sha256
    assert sha256 == "1d66b63340620279f03faf7ce4fd682fcb407dc499bde992b6c6a5dc31fd2739"


def test_code_that_is_not_allowed_is_not_run(samples):
    with pytest.raises(DataError, match=r"--allow-model samples:pair$"):
        load("python:samples:pair", allow={"samples:other", "other:pair"})
    assert samples.calls == []
    with pytest.raises(DataError, match=r"--allow-model not_there:pair$"):
        load("python:not_there:pair")  # not even imported


def test_the_hash_covers_values_dtypes_shapes_and_places(samples):
    numbers = np.arange(12, dtype=np.int32)
    pairs = [
        (numbers, numbers),
        (numbers, numbers[::-1]),
        (numbers[::-1], numbers),
        (numbers.view(np.uint32), numbers),
        (numbers.reshape(12, 1), numbers),
        (numbers, numbers.reshape(12, 1)),
    ]
    hashes = set()
    for pair in pairs:
        samples.pair = lambda pair=pair: pair
        hashes.add(load("python:samples:pair", allow={"samples:pair"})[1])
    assert len(hashes) == len(pairs)


def test_arrays_with_another_hash_are_refused(samples):
    with pytest.raises(DataError, match=r"but the run has 000000000000\.\.\."):
        load("python:samples:pair", allow={"samples:pair"}, sha256="0" * 64)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("samples:broken", "RuntimeError: no luck; mend"),
        ("samples:missing", "AttributeError"),
        ("samples:calls", "TypeError"),
        ("not_there:pair", "ModuleNotFoundError"),
        (".relative:pair", "TypeError"),
    ],
)
def test_a_function_that_fails_is_told_in_one_line(samples, target, reason):
    with pytest.raises(DataError) as error:
        load(f"python:{target}", allow={target})
    assert f"failed with {reason}" in one_line(error)


@pytest.mark.parametrize(
    "target", ["", "samples", ":pair", "samples:", "samples:a:b", "samples:a b"]
)
def test_a_python_source_without_module_and_function_is_refused(target):
    with pytest.raises(ConfigError, match=r"^data\.source"):
        load(f"python:{target}", allow={target})


@pytest.mark.parametrize(
    "result",
    [
        None,
        np.zeros((2, 10)),
        (np.zeros(10),),
        (np.zeros(10), [0] * 10),
        (np.zeros(10), np.array([None] * 10)),
        (np.array(["a"] * 10), np.zeros(10)),
    ],
    ids=["none", "one array", "one in a tuple", "list", "objects", "strings"],
)
def test_a_function_that_returns_no_pair_of_number_arrays_is_refused(samples, result):
    samples.pair = lambda: result
    with pytest.raises(DataError, match=r"returned an? .*(must return|allowed are)"):
        load("python:samples:pair", allow={"samples:pair"})


def test_no_samples_at_all_are_refused(samples):
    samples.pair = lambda: (np.zeros((0, 3)), np.zeros(0))
    with pytest.raises(DataError, match="0 samples are too few"):
        load("python:samples:pair", allow={"samples:pair"})
