# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Sequences split over 2 and 4 gloo processes against one; the processes run `distributed_worker_sequence.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_worker_sequence import MODELS

from hf_ttt.sequence_parallel import shard_sequence

SAME = 1e-10  # float64 against float64
WORKER = Path(__file__).with_name("distributed_worker_sequence.py")
BYTES = 2 * 8 * 4 * 4 * 4  # of the states of a layer in float32: 2 rows, 8 heads of width 4
HALO = 2 * 2 * 7 * 32 * 4  # keys and values in float32: 2 rows, 7 tokens before a window of 8, width 32

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the processes are forked")


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[int, list[dict]]:
    """What each rank found, by number of ranks. One launch for all tests of this file."""
    folder, env = tmp_path_factory.mktemp("ranks"), dict(os.environ)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, WORKER, folder], env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-5000:]
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (2, 4)}


def greatest(figures: list[dict], check: str) -> dict[str, float]:
    """The greatest error of all ranks, by case; NaN stays NaN."""
    return {key: max((part[check][key] for part in figures), key=lambda e: (e != e, e)) for key in figures[0][check]}


def assert_below(errors: dict[str, float], limit: float, cases: int) -> None:
    assert len(errors) == cases
    assert not {key: e for key, e in errors.items() if not e <= limit}


@pytest.mark.parametrize("ranks", [2, 4])
def test_op_for_every_rule(figures, ranks):
    """Output and gradients of the op, for every combination of fields that has a parallel evaluation."""
    assert_below(greatest(figures[ranks], "op_every_rule"), SAME, {2: 144, 4: 29}[ranks])


@pytest.mark.parametrize("ranks", [2, 4])
def test_op_lengths_and_momentum(figures, ranks):
    """The last rank has 1 token, a chunk, a chunk and a token; momentum none, 0, 1, or between; rates per channel."""
    assert_below(greatest(figures[ranks], "op_lengths"), SAME, 50)


@pytest.mark.parametrize("ranks", [2, 4])
def test_op_many_chunks(figures, ranks):
    """37 chunks on each rank, which are scanned in several blocks, with a momentum of 0 and of 1 in some."""
    assert_below(greatest(figures[ranks], "op_many_chunks"), SAME, 6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_op_float32(figures, ranks):
    """2,049 chunks in float32: rounding is that of one process. Factor 4, for sums in another order."""
    for part in figures[ranks]:
        for case, (error, error_of_one) in part["op_float32"].items():
            assert error <= 4 * error_of_one, case


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_model(figures, ranks, model):
    """Logits, mean loss and mean gradients of a model, at lengths that are no multiple of a chunk."""
    assert greatest(figures[ranks], "model_errors")[model] <= SAME


@pytest.mark.parametrize("ranks", [2, 4])
def test_model_float32(figures, ranks):
    """Rounding is that of one process. Factor 8: Newton–Schulz amplifies it by another factor in each draw."""
    for part in figures[ranks]:
        for case, (error, error_of_one) in part["model_float32"].items():
            assert error <= 8 * error_of_one, case


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_and_checkpointing(figures, ranks):
    """DDP's average is the gradient; a layer that is computed again in the backward pass exchanges again."""
    assert_below(greatest(figures[ranks], "model_wrapped"), SAME, 6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_accumulated_gradients(figures, ranks):
    """Two batches of unequally many labels, with `num_items_in_batch` of both."""
    assert_below(greatest(figures[ranks], "model_accumulated"), SAME, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups(figures, ranks):
    """Two groups that split different sequences, and DDP over all ranks: the gradient of the mean loss."""
    assert_below(greatest(figures[ranks], "model_groups"), SAME, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_base_model(figures, ranks):
    """Hidden states without a head, in evaluation mode, whose default is to keep a cache."""
    assert_below(greatest(figures[ranks], "base_model"), SAME, 1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("model", "states", "decays"),
    [("variant6", 1, 0), ("variant5", 1, 0), ("variant2", 2, 1), ("variant2 without Muon", 2, 2)],
)
def test_bytes(figures, ranks, model, states, decays):
    """What a layer exchanges is what the docstrings say, at 64 and at 192 tokens alike."""
    for by_length in [part["exchanged_bytes"][model] for part in figures[ranks]]:
        for everyone in by_length:
            for rank, (forward, backward) in enumerate(everyone):
                assert forward["all_gather"] == states * BYTES + decays * 2 * 8 * 4
                assert backward["all_gather"] == states * BYTES
                assert forward["send"] == (HALO if rank + 1 < ranks else 0)
                assert backward["send"] == (HALO if rank else 0)


MESSAGES = {
    "rule": "implementation='parallel' is not exact for this rule: .* set weight_norm='none' or 'pre'",
    "window": "window_size=None attends to all tokens.*: set window_size",
    "rope": "rope_type='dynamic' depends on the length.*set another",
    "model": "Linear cannot be split over ranks: expected a LaCTForCausalLM",
    "padding": "attention_mask has zeros.*cut the batch to one length",
    "packed": "position_ids restart.*one document a row",
    "entry": "'token_type_ids' is in the batch.*expected input_ids",
    "short": "a sequence of .* tokens has .* chunks, too few for .* ranks.*take longer sequences or fewer ranks",
    "wide window": "too few for .* ranks of 33 tokens and more .*window_size=34",
    "whole": "position_ids do not say where this rank's slice begins",
    "cache": "sequence parallelism has no cache: pass none and use_cache=False",
    "documents": "packed documents cannot be split over ranks",
    "no chunk": "rank 0 has 23 tokens; expected whole chunks of 8",
    "next window": "rank 0 has 5 tokens; .* at least the 7 that the next rank attends to",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_what_is_refused(figures, case):
    """An error on each rank before it waits for another, with what to change; then the model is as it was."""
    for ranks in (2, 4):
        assert re.search(MESSAGES[case], figures[ranks][0]["errors"][case]), figures[ranks][0]["errors"][case]


def test_needs_a_process_group():
    """Without one the error says how to make it."""
    with pytest.raises(ValueError, match="there is no process group: call torch.distributed.init_process_group first"):
        shard_sequence({}, None)


def test_memory(figures):
    """Two ranks hold half of what one does for the same step: tensors are counted, parameters' gradients included."""
    for part in figures[2]:
        (one, loss), (both, other_loss) = part["memory"]["one"], part["memory"]["both"]
        assert both < 0.55 * one
        assert other_loss == pytest.approx(loss, rel=1e-6)
