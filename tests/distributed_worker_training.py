# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What `test_distributed.py` runs on two processes, by `torchrun --nproc_per_node 2`.

Each check gives figures, which the test judges; runs of `Trainer` leave losses and parameters to compare with.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lact_cases
import nvs_cases
import torch
import torch.distributed as dist
import vittt_cases
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from lact_cases import gradients, token_ids
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hf_ttt import LaCTForCausalLM, LaCTForSequenceClassification, modeling_lact, modeling_lact_nvs, modeling_vittt

HEADS = ("causal_lm", "sequence_classification", "image_classification", "novel_views")
FAMILIES = ("lact", "lact_nvs", "vittt", "h_vittt")
STEPS = 3


def make_model(family: str, variant: str = "variant2", model_class=LaCTForCausalLM, **fields) -> nn.Module:
    """A tiny model of a family in training, every part of which matters."""
    if family == "lact":
        return lact_cases.busy_model(lact_cases.tiny_config(variant, **fields), model_class).train()
    if family == "lact_nvs":
        return nvs_cases.busy_model(nvs_cases.tiny_config(variant, **fields)).train()
    config = vittt_cases.CONFIGS[family].variant(variant, **vittt_cases.TINY[family], **fields)
    return vittt_cases.busy_model(vittt_cases.CLASSIFIERS[family], config).train()


def make_batch(family: str, rows: int = 2, length: int = 17, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of a model with its targets."""
    if family == "lact":
        ids = token_ids(rows, length, seed)
        return {"input_ids": ids, "labels": ids}
    if family == "lact_nvs":
        return nvs_cases.all_views(batch=rows, seed=seed)
    return {"pixel_values": vittt_cases.images(rows, seed=seed), "labels": torch.arange(rows) % 5}


def head_model(head: str) -> nn.Module:
    if head == "sequence_classification":
        return make_model("lact", "variant2", LaCTForSequenceClassification, use_muon=False)
    family = {"causal_lm": "lact", "image_classification": "vittt", "novel_views": "lact_nvs"}[head]
    return make_model(family, **({"use_muon": False} if family == "lact" else {}))


def head_rows(head: str) -> list[dict]:
    """Data for `STEPS` steps of four rows; texts of unequal length."""
    count = 4 * STEPS
    if head == "image_classification":
        return [{"pixel_values": x, "labels": i % 5} for i, x in enumerate(vittt_cases.images(count))]
    if head == "novel_views":
        views = nvs_cases.all_views(batch=count)
        return [{name: value[i] for name, value in views.items()} for i in range(count)]
    texts = [token_ids(1, 5 + 7 * i % 31, seed=i)[0].tolist() for i in range(count)]
    return [{"input_ids": ids, "labels": ids if head == "causal_lm" else i % 2} for i, ids in enumerate(texts)]


def train(head: str, folder: Path, batch_size: int, accumulated: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the parameters after them. SGD, so that a wrong scale of the gradients shows."""
    model = head_model(head)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        max_steps=STEPS,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collate = {} if head in ("image_classification", "novel_views") else {"data_collator": pad_right}
    trainer = Trainer(model=model, args=arguments, train_dataset=head_rows(head), **collate)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def pad_right(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of texts, with their labels."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    pad = lambda x, value: nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value)  # noqa: E731
    labels = [row["labels"] for row in rows]
    return {
        "input_ids": pad(ids, 7),
        "attention_mask": pad([torch.ones_like(x) for x in ids], 0),
        "labels": pad(ids, -100) if isinstance(labels[0], list) else torch.tensor(labels),
    }


def trainer_runs(folder: Path) -> dict[str, list[float]]:
    """Two processes, two accumulated batches of one row: four rows a step."""
    results = {}
    for head in HEADS:
        results[head], parameters = train(head, folder, 1, 2)
        if dist.get_rank() == 0:
            save_file(parameters, folder / f"{head}.safetensors")
    return results


def without_gradient(folder: Path) -> dict[str, list[str]]:
    """Parameters without gradient in DDP, by model and length; the second step of DDP would be an error."""
    cases = [
        ("lact", variant, length) for variant in (*lact_cases.VARIANTS, *lact_cases.OTHER_RULES) for length in (5, 8)
    ]
    cases += [("lact_nvs", variant, 0) for variant in nvs_cases.RULES]
    cases += [(family, f"variant{i}", 0) for family in ("vittt", "h_vittt") for i in range(1, 7)]
    results = {}
    for family, variant, length in cases:
        model = DistributedDataParallel(make_model(family, variant))
        for seed in range(2):
            model(**make_batch(family, 2, length, seed + 2 * dist.get_rank())).loss.backward()
        grads = gradients(model.module)
        results[f"{family}, {variant}, {length}"] = [name for name, grad in grads.items() if grad is None]
    return results


def loss_and_gradients(model: nn.Module, batch: dict[str, torch.Tensor], wrapped: nn.Module | None = None):
    model.zero_grad()
    loss = (model if wrapped is None else wrapped)(**batch).loss
    loss.backward()
    return loss.detach(), {name: grad.clone() for name, grad in gradients(model).items()}


def greatest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The greatest difference over the greatest value of a tensor, of all tensors."""
    return max(((got[k] - x).abs().max() / x.abs().max().clamp(min=1e-6)).item() for k, x in want.items())


def checkpointed(folder: Path) -> dict[str, float]:
    """Differences that gradient checkpointing makes in a DDP step. DDP allows no reentrant one for LaCT-NVS, which runs
    each block twice: on the input views and on the others."""
    results = {}
    for family in FAMILIES:
        for reentrant in (False,) if family == "lact_nvs" else (False, True):
            found = []
            for checkpointing in (False, True):
                model = make_model(family)
                if checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                batch = make_batch(family, seed=dist.get_rank())
                loss, grads = loss_and_gradients(model, batch, DistributedDataParallel(model))
                found.append({"loss": loss, **grads})
            results[f"{family}, reentrant {reentrant}"] = greatest(found[1], found[0])
    return results


def recorded_types(family: str, call) -> list[tuple[str, str]]:
    """Types of the tensors that the TTT ops of a model get during a call: (what, type) of rates and fast weights."""
    seen: set[tuple[str, str]] = set()

    def recording(function):
        def call(*args, **kwargs):
            for x in (*args, *kwargs.values()):
                if hasattr(x, "w1"):  # a state
                    seen.update((f"state {name}", str(t.dtype)) for name, t in x.tensors().items() if name[0] != "k")
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            seen.update((f"argument [{x.dim()}, {x.shape[-1] == 1}]", str(x.dtype)) for x in tensors)
            return function(*args, **kwargs)

        return call

    names = {"lact": (modeling_lact, ("evaluate",)), "lact_nvs": (modeling_lact_nvs, ("ttt_update", "ttt_read"))}
    if family in names:
        module, functions = names[family]
        with patch.multiple(module, **{name: recording(getattr(module, name)) for name in functions}):
            call()
    else:
        get = modeling_vittt.VISION_FUNCTIONS.get
        with patch.object(modeling_vittt.VISION_FUNCTIONS, "get", lambda *args: recording(get(*args))):
            call()
    return sorted(seen)


def autocast_types(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Types of rates and fast weights under bfloat16 autocast in DDP."""
    results = {}
    for family in FAMILIES:
        model = make_model(family)
        wrapped, batch = DistributedDataParallel(model), make_batch(family, seed=dist.get_rank())

        def step(wrapped=wrapped, batch=batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(**batch).loss
            loss.backward()

        results[family] = recorded_types(family, step)
        grads = {str(grad.dtype) for grad in gradients(model).values()}
        results[family] += [("gradient", dtype) for dtype in sorted(grads)]
    return results


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compare_sharded(family: str, shard, autocast: bool) -> dict[str, float]:
    """Differences in loss, gradients and gradient norm between a sharded model and DDP, relative. Without autocast in
    float64: some gradients are zero but for rounding, such as those of what a batch norm takes out again."""
    convert = lambda x: x.double() if x.is_floating_point() and not autocast else x  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        batch = {name: convert(x) for name, x in make_batch(family, seed=dist.get_rank()).items()}
        model, sharded = (make_model(family)._apply(convert) for _ in range(2))
        loss, want = loss_and_gradients(model, batch, DistributedDataParallel(model))
        shard(sharded)
        other_loss, got = loss_and_gradients(sharded, batch)
    got = {name: full(grad) for name, grad in got.items()}
    norm, other_norm = (torch.stack([g.norm() for g in grads.values()]).norm() for grads in (want, got))
    units = sum(isinstance(module, FSDPModule) for module in sharded.modules())
    return {
        "loss": abs(other_loss / loss - 1).item(),
        "norm": abs(other_norm / norm - 1).item(),
        "gradients": greatest(got, want),
        "units": units,
    }


def shard_blocks(model: nn.Module, **settings) -> None:
    """`fully_shard` of the blocks that a model names, then of the model."""
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, **settings)
    fully_shard(model, **settings)


def sharded(folder: Path) -> dict[str, dict[str, float]]:
    """FSDP2 over the blocks that a model names; with autocast, where parameters stay float32; and as
    accelerate prepares it, with a policy instead of its own one for bfloat16, which would round fast weights."""
    results = {}
    for family in FAMILIES:
        results[family] = compare_sharded(family, shard_blocks, False)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        shard = lambda model, policy=policy: shard_blocks(model, mp_policy=policy)  # noqa: E731
        results[f"{family}, autocast"] = compare_sharded(family, shard, True)

    def prepare(model):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            mixed_precision_policy=MixedPrecisionPolicy(),
            cpu_ram_efficient_loading=False,
        )
        state = SimpleNamespace(fsdp_plugin=plugin)
        fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="bf16", is_main_process=False), model)

    for family in FAMILIES:
        results[f"{family}, accelerate"] = compare_sharded(family, prepare, True)
    return results


CHECKS = (trainer_runs, without_gradient, checkpointed, autocast_types, sharded)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {check.__name__: check(folder) for check in CHECKS}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
