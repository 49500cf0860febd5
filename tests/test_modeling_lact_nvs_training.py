# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Training LaCT-NVS: gradient checkpointing, `Trainer`, accumulated gradients, adapters."""

import math

import pytest
import torch
from nvs_cases import BLOCK, all_views, busy_model, gradients, tiny_config
from torch import nn
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from hf_ttt.modeling_lact_nvs import LaCTNVSModel


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Scenes with three input views and two target views."""
    inputs = all_views(batch=count)
    return [{name: value[i] for name, value in inputs.items()} for i in range(count)]


def trainer_of(model, folder, data, **arguments) -> Trainer:
    common = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**common, **arguments}),
        train_dataset=data,
        eval_dataset=data,
    )


@pytest.mark.parametrize("block", [BLOCK, [BLOCK[1], BLOCK[0], BLOCK[2], BLOCK[1]]], ids=["published", "two"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, block):
    """The same loss and gradients. Reentrant checkpointing saw no states, whose gradients it dropped in silence."""
    inputs, results = all_views(), []
    for checkpointed in (False, True):
        model = busy_model(tiny_config("variant2", block_config=block)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            assert all(layer.gradient_checkpointing for layer in model.blocks)
        calls = []
        for layer in model.blocks:
            layer.module_list[0].ln.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss, gradients(model), len(calls)))
    (loss, grads, calls), (other_loss, other_grads, other_calls) = results
    assert_close(other_loss, loss, atol=1e-7, rtol=0)
    assert_close(other_grads, grads, atol=1e-6, rtol=1e-4)
    assert other_calls == 2 * calls == 8  # two blocks, input and target views


def test_trainer(tmp_path):
    """Three steps on scenes with target images, which have no labels; the loss falls, and evaluation reports it."""
    torch.manual_seed(0)
    model, data = LaCTNVSModel(tiny_config()), rows(4)
    arguments = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1}
    trainer = trainer_of(model, tmp_path, data, **arguments, label_names=["target_pixel_values"])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(before, rel=1e-3) and trainer.evaluate()["eval_loss"] < before
    predictions = trainer.predict(data)
    assert predictions.predictions.shape == predictions.label_ids.shape == (4, 2, 3, 12, 16)


def test_accumulated_gradients(tmp_path):
    """One step of four scenes at once is that of four batches of one; the loss was multiplied by the batches."""
    assert LaCTNVSModel.accepts_loss_kwargs is False
    data, states = rows(4), []
    for batch, steps in ((4, 1), (1, 4)):
        model = busy_model(tiny_config("variant2"))
        arguments = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "max_steps": 1}
        trainer_of(
            model,
            tmp_path,
            data,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            **arguments,
        ).train()
        states.append(model.state_dict())
    assert_close(states[1], states[0], atol=1e-6, rtol=1e-4)
    weight = "image_token_decoder.1.weight"
    step = states[0][weight] - busy_model(tiny_config("variant2")).state_dict()[weight]
    assert step.abs().max() > 1e-4  # a hundred times the tolerance


class Adapter(nn.Module):
    """A linear layer with an addition of low rank, as adapters are."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.weight = base, base.weight
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


def test_adapters_on_the_projections():
    """Rows of the projection's weight were used past a layer that wraps it, so that an adapter had no effect."""
    model, inputs = busy_model(tiny_config()), all_views()
    merged = busy_model(tiny_config())
    for block, other in zip(model.blocks, merged.blocks, strict=True):
        layer = block.module_list[1].f
        layer.to_qkv = Adapter(layer.to_qkv)
        other.module_list[1].f.to_qkv.weight.data += layer.to_qkv.b @ layer.to_qkv.a
    output = model(**inputs)
    assert_close(output.rendered, merged(**inputs).rendered, atol=1e-5, rtol=0)
    output.loss.backward()
    assert all(block.module_list[1].f.to_qkv.a.grad.any() for block in model.blocks)
