# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Configuration of LaCT-NVS, the novel-view synthesis model."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from .configuration_ttt import INNER_LOOP_DEFAULTS, make_rule, resolve_inner_loop, variant_fields
from .ttt_rule import TTTRule

_MODULES: dict[str, dict[str, Any]] = {  # what an entry of a block may say, with its values where it says nothing
    "attention": {"head_dim": 64, "use_qk_norm": True},
    "ttt": {"head_dim": None, "inter_multi": 1},
    "mlp": {"inter_multi": 4},
}
_PUBLISHED_MODULES = {
    "model.SelfAttention": "attention",
    "lact_ttt.FastWeightGluMLPMultihead": "ttt",
    "model.MLP": "mlp",
}
_LENGTH_DIMS = {"attention": ("l",), "ttt": ("vl",), "mlp": ("l", "vl")}  # over which tokens, as published
_LAYER_FIELDS = ("base_lr", "muon_update_steps", "ttt_loss_type", "no_query")  # of a published ttt entry, set once here
_KERNEL_FIELDS = ("grad_calc_method", "use_fused")  # of the published code, which choose kernels
_INNER_LOOP_DEFAULTS = {**INNER_LOOP_DEFAULTS, "use_muon": True}
_ABSENT = ("use_momentum",)
SIZES = {
    "l12_ttt1x": {"num_hidden_layers": 12, "inter_multi": 1},
    "l14_ttt2x": {"num_hidden_layers": 14, "inter_multi": 2},
    "l24_ttt2x": {"num_hidden_layers": 24, "inter_multi": 2},
    "l24_ttt4x": {"num_hidden_layers": 24, "inter_multi": 4},
}


def block_of(inter_multi: int | float) -> list[dict[str, Any]]:
    """The published block, with a fast network whose hidden width is so many times its input width."""
    return [{"type": "attention"}, {"type": "ttt", "inter_multi": inter_multi}, {"type": "mlp"}]


def read_entry(entry: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An entry of a block with all of its values, and the fields of the whole model that a published one holds.

    Args:
        entry: a dictionary with a "type", of this package or published.
        where: names the entry in an error.

    Raises:
        ValueError: for what is not known.
    """
    if not isinstance(entry, dict) or "type" not in entry:
        raise ValueError(f"{where} is {entry!r}; expected a dictionary with a 'type'")
    entry = {**entry, **entry.get("params", {})}
    entry.pop("params", None)
    kind = _PUBLISHED_MODULES.get(entry["type"], entry["type"])
    if kind not in _MODULES:
        known = ", ".join(map(repr, (*_MODULES, *_PUBLISHED_MODULES)))
        raise ValueError(f"{where} has type {entry['type']!r}, which is not one of {known}")
    tokens = entry.pop("length_dim", _LENGTH_DIMS[kind][0])
    if tokens not in _LENGTH_DIMS[kind]:
        raise ValueError(
            f"{where} has length_dim={tokens!r}, which this model does not have for {kind!r}: expected "
            f"{' or '.join(map(repr, _LENGTH_DIMS[kind]))}"
        )
    lifted = {name: entry.pop(name) for name in _LAYER_FIELDS if kind == "ttt" and name in entry}
    for name in _KERNEL_FIELDS if kind == "ttt" else ():
        entry.pop(name, None)
    unknown = [name for name in entry if name != "type" and name not in _MODULES[kind]]
    if unknown:
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}, which {kind!r} does not take")
    return {**_MODULES[kind], **entry, "type": kind}, lifted


class LaCTNVSConfig(PreTrainedConfig):
    r"""Configuration of LaCT-NVS, which renders new views of a scene from posed images of it.

    Defaults are those of the published code (a1600012888/LaCT, `lact_nvs`) at its size of 24 layers; the inner loop is
    described by fields that all models of this package share.

    Args:
        patch_size: side of a patch; images have sides that it divides.
        hidden_size: width D.
        num_hidden_layers: number of blocks.
        block_config: the modules of a block, in order, as dictionaries with a "type" and, for
            "attention" (within an image): `head_dim`, `use_qk_norm`;
            "ttt" (over all tokens): `head_dim` (None: D, a single head), `inter_multi`, hidden over input width;
            "mlp": `inter_multi`.
            The published form (`model.SelfAttention` and so on, with `length_dim` and `params`) is read too; fields of
            the inner loop in it yield to those of the configuration.
        base_lr: inner learning rate at a linear output of zero: rate = softplus(linear(x) + softplus⁻¹(base_lr)).
        muon_update_steps: Newton–Schulz iterations; with 0 an update is still divided by its Frobenius norm.
        layer_norm_eps: of the layer norms and of the norm of the TTT output.
        initializer_range: standard deviation of the initial linear weights; those of projections back into the hidden
            states are divided by √(modules of all blocks).
        ttt_loss_type: inner loss, "dot_product" or "mse". The suffixed names of the published variants, such as
            "only_w1_straight_qk_no_lr1_no_wn_muon", are read and become the fields below.
        ttt_update: which fast weights a step updates: "all" or "last" (w1).
        ttt_weight_norm: "post", "pre" or "none"; the norms of the initial weights are constants for the gradient.
        ttt_fast_weight: "swiglu" or "linear" (then inter_multi must be 1).
        ttt_learnable_lr: whether rates are learned; otherwise they are 1.
        use_muon: whether updates are orthogonalised by Newton–Schulz iteration.
        ttt_muon_dtype: "float32", or "bfloat16" as published (not reproducible between kernels).
        ttt_direction: "descent" or "ascent" on the inner loss.
        ttt_read_with: "query" or "key". A model made with "key" has no query projection, as published (`no_query`); one
            made with "query" can be set to "key" later.
        ttt_inner_steps: gradient steps on the input views.
        ttt_implementation: "recurrent", "parallel" (where exact), or "auto".
        ttt_backend: "auto", "torch" or "triton"; belongs to a machine and is not written to config.json.

    `use_momentum`, which the language model has, does not apply: setting it is an error.

    Raises:
        ValueError: for values that are not known or contradict each other.
    """

    model_type = "lact_nvs"

    patch_size: int = 8
    hidden_size: int = 768
    num_hidden_layers: int = 24
    block_config: list[dict] | None = None
    base_lr: float | None = None
    muon_update_steps: int | None = None
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    ttt_loss_type: str | None = None
    ttt_update: str | None = None
    ttt_weight_norm: str | None = None
    ttt_fast_weight: str | None = None
    ttt_learnable_lr: bool | None = None
    use_muon: bool | None = None
    ttt_muon_dtype: str = "float32"
    ttt_direction: str | None = None
    ttt_read_with: str | None = None
    ttt_inner_steps: int = 1
    ttt_implementation: str | None = None
    ttt_backend: str = "auto"

    def __post_init__(self, **kwargs):
        for name in _ABSENT:
            value = kwargs.pop(name, None)
            if value:
                raise ValueError(f"{name}={value!r} does not apply: {self.model_type!r} has no such part; leave it out")
        layer = self._read_blocks()
        no_query = layer.pop("no_query", False) if self.ttt_read_with is None else False
        if no_query:
            self.ttt_read_with = "key"
        for name, default in (("base_lr", 0.01), ("muon_update_steps", 5), ("ttt_loss_type", "dot_product")):
            if getattr(self, name) is None:
                setattr(self, name, layer.get(name, default))
        if not self.base_lr > 0:
            raise ValueError(f"base_lr={self.base_lr} must be greater than 0")
        prenorm = bool(kwargs.pop("ttt_prenorm", False))
        resolve_inner_loop(self, prenorm=prenorm, defaults=_INNER_LOOP_DEFAULTS)
        super().__post_init__(**kwargs)
        self.rule  # noqa: B018  the values of its fields are checked here

    def _read_blocks(self) -> dict[str, Any]:
        """Bring `block_config` into its own form; the fields of the whole model that its published form holds."""
        entries = block_of(2) if self.block_config is None else self.block_config
        blocks: list[dict[str, Any]] = []
        layer: dict[str, Any] = {}
        for i, entry in enumerate(entries):
            block, lifted = read_entry(entry, f"block_config[{i}]")
            for name, value in lifted.items():
                if layer.setdefault(name, value) != value:
                    raise ValueError(f"block_config has {name}={layer[name]!r} and {value!r}: all layers share it")
            blocks.append(block)
        self.block_config = blocks
        return layer

    @classmethod
    def variant(cls, name: str, **fields: Any) -> "LaCTNVSConfig":
        """The inner loop of a row of the paper's Table 2, "baseline" or "variant1" to "variant6". There is no momentum,
        so variant 5 equals variant 4. Variants 3 to 6 need blocks with `inter_multi` 1.

        Args:
            name: the variant.
            fields: any fields of the configuration; they win over those of the variant.

        Raises:
            ValueError: for a name that is not known.
        """
        return cls(**{**variant_fields(name, momentum=False), **fields})

    @classmethod
    def size(cls, name: str, **fields: Any) -> "LaCTNVSConfig":
        """A published size: "l12_ttt1x", "l14_ttt2x", "l24_ttt2x" or "l24_ttt4x".

        Args:
            name: the size.
            fields: any fields of the configuration; they win over those of the size.

        Raises:
            ValueError: for a name that is not known.
        """
        if name not in SIZES:
            raise ValueError(f"size {name!r} is not known; expected one of {', '.join(map(repr, SIZES))}")
        size = SIZES[name]
        blocks = block_of(size["inter_multi"])
        return cls(**{"num_hidden_layers": size["num_hidden_layers"], "block_config": blocks, **fields})

    @property
    def rule(self) -> TTTRule:
        """The inner loop as a `TTTRule`."""
        return make_rule(self, muon="nvs", detach_norms=True, muon_steps=self.muon_update_steps)

    def check_buildable(self) -> None:
        """Raise a `ValueError` that says why no model can be built with this configuration, if so."""
        for name in ("patch_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not any(block["type"] == "ttt" for block in self.block_config):
            raise ValueError("block_config has no entry of type 'ttt', through which new views see the input views")
        for i, block in enumerate(self.block_config):
            head = block.get("head_dim") or self.hidden_size
            if head < 1 or self.hidden_size % head:
                raise ValueError(
                    f"block_config[{i}] has head_dim={head}, which does not divide hidden_size={self.hidden_size}"
                )
            multi = block.get("inter_multi", 1)
            if block["type"] == "ttt" and self.ttt_fast_weight == "linear" and multi != 1:
                raise ValueError(
                    f"block_config[{i}] has inter_multi={multi}, but ttt_fast_weight='linear' needs hidden and key "
                    "widths to be equal: set inter_multi to 1"
                )
            if int(multi * head) < 1:
                raise ValueError(f"block_config[{i}] has inter_multi={multi}, which leaves no hidden channel")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, without `ttt_backend`, which belongs to a machine."""
        output = super().to_dict()
        output.pop("ttt_backend", None)
        return output


__all__ = ["LaCTNVSConfig"]
