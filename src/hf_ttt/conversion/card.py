# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The model card of a converted checkpoint: a stub that says where the weights come from."""

from __future__ import annotations

from typing import NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from transformers.modeling_utils import PreTrainedModel

_TAGS = ["custom_code", "test-time-training", "linear-attention"]


class _Origin(NamedTuple):
    """Name, code and paper of a published architecture."""

    title: str
    code: str
    paper: str


_VITTT = ("https://github.com/LeapLabTHU/ViTTT", "https://arxiv.org/abs/2512.01643")
_LACT = ("https://github.com/a1600012888/LaCT", "https://arxiv.org/abs/2505.23884")
_ORIGINS = {
    "vittt": _Origin("ViTTT", *_VITTT),
    "h_vittt": _Origin("H-ViTTT", *_VITTT),
    "lact": _Origin("LaCT", *_LACT),
    "lact_nvs": _Origin("LaCT-NVS", *_LACT),
}
_TASKS = {  # part of a class's name → pipeline and Auto class
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "Backbone": ("image-feature-extraction", "AutoBackbone"),
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LaCTNVSModel": ("image-to-3d", "AutoModel"),
}
_TEXT = """# {title}

[{title}]({paper}) with the weights of `{source}`, converted from the format of the [published code]({code}).
{parameters:,} parameters.

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("hub-id-of-this-model", trust_remote_code=True)
```

## Licence

{licence}
"""
_GIVEN = "The weights are under the licence `{licence}`, as stated by whoever converted them from the published ones."
_UNKNOWN = (
    "Not stated when the weights were converted, so this card says `other`: look for the terms beside the published "
    "weights and in the [published code]({code}) before using or sharing them."
)


def card_stub(model: PreTrainedModel, architecture: str, source: str, licence: str | None) -> ModelCard:
    """The card of a converted model.

    Args:
        model: the model.
        architecture: "vittt", "h_vittt", "lact" or "lact_nvs".
        source: name of the checkpoint.
        licence: identifier of the weights' licence on the Hub, such as "mit"; None for "other".
    """
    origin = _ORIGINS[architecture]
    pipeline, auto_class = next(task for part, task in _TASKS.items() if type(model).__name__.endswith(part))
    header = ModelCardData(license=licence or "other", library_name="transformers", pipeline_tag=pipeline, tags=_TAGS)
    text = _TEXT.format(
        title=origin.title,
        paper=origin.paper,
        code=origin.code,
        source=source,
        parameters=model.num_parameters(),
        auto_class=auto_class,
        licence=(_GIVEN if licence else _UNKNOWN).format(licence=licence, code=origin.code),
    )
    return ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}")
