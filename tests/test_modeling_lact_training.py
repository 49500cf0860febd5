# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Training of the LaCT models: checkpointing, DDP, Trainer, compilation, autocast, extreme inputs.

Most tests name a fault of other packages that they pin. Run as a script, this file is the two processes of a DDP run.
"""

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed
from lact_cases import OTHER_RULES, VARIANTS, busy_model, gradients, tiny_config, token_ids
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from hf_ttt import LaCTForCausalLM, LaCTForSequenceClassification
from hf_ttt.modeling_lact import CACHE_KEY

LENGTHS = (5, 8, 17)  # shorter than a chunk, one chunk, two chunks and a token


def padded_batch(lengths=(21, 16)):
    """Tokens with padding on the left, their mask and labels."""
    ids, mask = token_ids(len(lengths), max(lengths)), torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_and_gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: grad.clone() for name, grad in gradients(model).items()}


@pytest.mark.parametrize("variant", [*VARIANTS, *OTHER_RULES])
def test_every_parameter_gets_a_gradient(variant):
    """Parameters without gradient stop DDP: the published code has some for sequences of one chunk and less."""
    for length in LENGTHS:
        ids = token_ids(2, length)
        for model_class, labels in ((LaCTForCausalLM, ids), (LaCTForSequenceClassification, torch.tensor([0, 1]))):
            model = model_class(tiny_config(variant)).train()
            for implementation in ("recurrent", "auto"):
                model.set_ttt_implementation(implementation)
                _, grads = loss_and_gradients(model, input_ids=ids, labels=labels)
                assert not [name for name, grad in grads.items() if grad is None], length


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("variant", ["baseline", "variant2", "fixed_rate_low_rank"])
def test_gradient_checkpointing(variant, use_cache, use_reentrant):
    """With a cache, the second forward pass of checkpointing updated the state twice, or failed."""
    model, batch = busy_model(tiny_config(variant)).train(), padded_batch()
    loss, grads = loss_and_gradients(model, **batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    other_loss, other_grads = loss_and_gradients(model, **batch, use_cache=use_cache)
    assert_close(other_loss, loss, atol=0, rtol=0)
    for name, grad in grads.items():
        assert_close(other_grads[name], grad, atol=0, rtol=0, msg=name)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_gradient_checkpointing_does_not_continue_from_a_cache():
    model = busy_model(tiny_config()).train()
    ids = token_ids(2, 21)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True)[CACHE_KEY]
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="a cache with tokens was passed together with .* gradient checkpointing"):
        model(ids[:, 9:], past_key_values=cache, use_cache=True)


def ddp_process(rank: int, folder: str) -> None:
    """One of two processes: sequences shorter and longer than a chunk, two steps, and the mean of both gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for variant in ("baseline", "variant2", "variant4"):
        batches = [token_ids(2, LENGTHS[2 * i], seed=i) for i in range(2)]
        expected: dict[str, torch.Tensor] = {}
        for ids in batches:
            _, grads = loss_and_gradients(busy_model(tiny_config(variant)), input_ids=ids, labels=ids)
            expected = {name: grad / 2 + expected.get(name, 0) for name, grad in grads.items()}
        model = DistributedDataParallel(busy_model(tiny_config(variant)).train())
        for _ in range(2):  # an unused parameter is an error of the second step
            loss_and_gradients(model, input_ids=batches[rank], labels=batches[rank])
        for name, grad in gradients(model.module).items():
            assert_close(grad, expected[name], msg=name)
    torch.distributed.destroy_process_group()


def test_ddp(tmp_path):
    """Two processes with gloo, without a search for unused parameters."""
    tests, env = os.path.dirname(__file__), dict(os.environ)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    env["PYTHONPATH"] = os.pathsep.join([tests, *(path for path in sys.path if path)])
    command = [sys.executable, __file__, str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


def trainer_arguments(folder, **fields) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        **{
            "max_steps": 1,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **fields,
        },
    )


def rows_of_unequal_length(lengths=(21, 5, 8, 17), label=None):
    """What a tokenised data set holds; with `label`, rows to be classified."""
    rows = []
    for i, length in enumerate(lengths):
        ids = token_ids(1, length, seed=i)[0].tolist()
        rows.append({"input_ids": ids, "labels": ids if label is None else label(i)})
    return rows


def collate(rows):
    """Pad on the right."""
    size = max(len(row["input_ids"]) for row in rows)
    pad = lambda x, value: x + [value] * (size - len(x))  # noqa: E731
    batch = {
        "input_ids": torch.tensor([pad(row["input_ids"], 7) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
    }
    if isinstance(rows[0]["labels"], list):
        return {**batch, "labels": torch.tensor([pad(row["labels"], -100) for row in rows])}
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.parametrize("task", ["language_model", "classification"])
def test_gradient_accumulation_is_a_larger_batch(tmp_path, task):
    """The loss of accumulated batches was scaled by their number, or by tokens where it is a mean over rows."""
    model_class = LaCTForCausalLM if task == "language_model" else LaCTForSequenceClassification
    rows = rows_of_unequal_length(label=None if task == "language_model" else lambda i: i % 2)
    results = []
    for batch_size, steps in ((4, 1), (1, 4)):
        model = busy_model(tiny_config(use_muon=False), model_class)
        arguments = trainer_arguments(
            tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=steps
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        results.append((trainer.state.log_history[0]["loss"], {n: p.detach() for n, p in model.named_parameters()}))
    (loss, parameters), (other_loss, others) = results
    assert other_loss == pytest.approx(loss, rel=1e-5)
    start = dict(busy_model(tiny_config(use_muon=False), model_class).named_parameters())
    moved = 0
    for name, parameter in parameters.items():
        step = parameter - start[name]
        moved += step.abs().max().item() > 1e-4
        # float32: gradients of the two runs differ by some 1e-6 of their size, parameters are rounded to 1e-7 of theirs
        bound = 1e-5 * step.abs().max().item() + 1e-6 * parameter.abs().max().item()
        assert_close(others[name], parameter, atol=bound, rtol=0, msg=name)
    assert moved > len(start) / 2


def test_evaluation_with_metrics(tmp_path):
    """Evaluation failed where the outputs held a cache, which cannot be gathered."""
    model = busy_model(tiny_config())
    assert model.config.use_cache
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    rows = rows_of_unequal_length((21, 21, 9, 17))
    trainer = Trainer(
        model=model,
        args=trainer_arguments(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.evaluate()
    assert np.isfinite(metrics["eval_loss"]) and 0 <= metrics["eval_accuracy"] <= 1
    trainer.train()
    assert [type(p.predictions) for p in seen] == [np.ndarray] * 2
    assert seen[0].predictions.shape == (4, 21, 61)
    assert any("eval_accuracy" in entry for entry in trainer.state.log_history)


class MatrixProducts(TorchDispatchMode):
    """Records the batched matrix products of an op: the shapes of the first factors, by type."""

    def __init__(self):
        super().__init__()
        self.shapes: dict[torch.dtype, list[torch.Size]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            self.shapes.setdefault(args[-2].dtype, []).append(args[-2].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fp32_states", [True, False])
@pytest.mark.parametrize("variant", ["baseline", "variant1", "variant2", "variant6"])
def test_autocast(variant, fp32_states):
    """A fused op computed in float32 under bfloat16 training, or met two types in one product."""
    config = tiny_config(variant, use_muon=False, use_momentum=False, fp32_states=fp32_states)
    model, batch = busy_model(config).train(), padded_batch()
    loss, _ = loss_and_gradients(model, **batch)
    attention = model.model.layers[0].attn
    products = MatrixProducts()
    plain = type(attention)._ttt

    def recorded(*arguments):
        with products:
            return plain(attention, *arguments)

    attention._ttt = recorded
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    with products:
        output.loss.backward()
    assert len(products.shapes[torch.bfloat16]) >= 2
    # only the sum of the states of 2 chunks, a product with a matrix [2, 2], may be in float32
    assert {tuple(shape[-2:]) for shape in products.shapes.get(torch.float32, [])} <= {(2, 2)}
    assert products.shapes.keys() <= {torch.bfloat16, torch.float32}
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    assert abs(output.loss - loss) < 0.02 * loss  # a rounding of 2^-8, some five times in a row
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32 and grad.isfinite().all(), name


def check_compiled(config, batches) -> int:
    """Loss and gradients of a compiled model are those of the eager one; returns the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    model = busy_model(config).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # a graph break is an error
    for batch in batches:
        loss, grads = loss_and_gradients(model, **batch)
        model.zero_grad()
        compiled_loss = compiled(**batch).loss
        compiled_loss.backward()
        assert_close(compiled_loss, loss)
        for name, grad in gradients(model).items():
            assert_close(grad, grads[name], msg=name)
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_model_at_several_lengths():
    """A compiled model gave other numbers without an error, or was compiled again for every length."""
    config = tiny_config("variant6", num_hidden_layers=1, lact_chunk_size=64)
    batches = [{"input_ids": ids, "labels": ids} for ids in (token_ids(2, length) for length in (64, 65, 66))]
    assert check_compiled(config, batches) <= 3  # the first and at most two more


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "padded"), [("baseline", True), ("variant2", False)])
def test_compiled_model(variant, padded):
    """One chunk that updates, and a tail; without Muon, whose iterations would take most of the time."""
    config = tiny_config(variant, num_hidden_layers=1, lact_chunk_size=16, use_muon=False)
    ids = token_ids(2, 17)
    batch = padded_batch((17, 9)) if padded else {"input_ids": ids, "labels": ids}
    check_compiled(config, [{**batch, "use_cache": False}])


EXTREMES = {
    "zeros": lambda x: x * 0,
    "a_hundred_times": lambda x: x * 100,
    "tiny": lambda x: x * 1e-12,
    "constant": lambda x: torch.ones_like(x),
    "one_token": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("variant", ["baseline", "variant2", "variant6", "prenorm", "prenorm_last", "mse"])
def test_extreme_inputs_stay_finite(variant, extreme):
    """The gradient of a norm at zero, Newton–Schulz of a zero update, and large keys gave NaN."""
    model = busy_model(tiny_config(variant)).train()
    embeds = model.get_input_embeddings()(token_ids(2, 45)).detach()
    for scale in (1.0, 100.0):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.attn.qkv.weight.mul_(scale)
        output = model(inputs_embeds=EXTREMES[extreme](embeds), labels=token_ids(2, 45))
        assert output.logits.isfinite().all()
        model.zero_grad()
        output.loss.backward()
        assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.parametrize("momentum", [-200.0, 200.0], ids=["none", "all"])
@pytest.mark.parametrize("variant", ["variant2", "variant3", "prenorm_last"])
def test_saturated_momentum_over_many_chunks(variant, momentum):
    """A running product of decays was divided by, and left the range of floats: 512 chunks of one repeated token."""
    model = busy_model(tiny_config(variant, num_hidden_layers=1, use_muon=variant != "variant3")).train()
    with torch.no_grad():
        model.model.layers[0].attn.momentum_proj[0].bias.fill_(momentum)
    ids = torch.full((1, 4096), 7)
    loss, grads = loss_and_gradients(model, input_ids=ids, labels=ids)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())


def test_random_rules_stay_finite():
    choices = {
        "ttt_update": ("all", "last"),
        "ttt_fast_weight": ("swiglu", "linear"),
        "ttt_loss_type": ("dot_product", "mse"),
        "ttt_direction": ("descent", "ascent"),
        "ttt_read_with": ("query", "key"),
        "ttt_weight_norm": ("post", "pre", "none"),
        "ttt_learnable_lr": (True, False),
        "use_momentum": (True, False),
        "use_muon": (True, False),
        "ttt_inner_steps": (1, 2),
        "w0_w2_low_rank": (-1, 2),
        "ttt_nope": (True, False),
        "qkv_silu": (True, False),
        "lact_chunk_size": (1, 3, 8),
    }
    drawn = random.Random(0).sample(list(itertools.product(*choices.values())), 24)
    for seed, values in enumerate(drawn):
        fields = dict(zip(choices, values, strict=True))
        model, batch = busy_model(tiny_config(**fields), seed=seed).train(), padded_batch((19, 1, 12))
        loss, grads = loss_and_gradients(model, **batch)
        assert loss.isfinite(), fields
        assert all(grad.isfinite().all() for grad in grads.values()), fields


if __name__ == "__main__":
    torch.multiprocessing.start_processes(ddp_process, (sys.argv[1],), nprocs=2, start_method="fork")
