# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What the inner loop of a TTT layer does, and nothing else."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TTTRule:
    r"""The inner loop of a TTT layer: one gradient step on the fast weights for each chunk of tokens.

    The fast network is `f(x) = w1 φ(x)` with `φ(x) = silu(w0 x) ⊙ (w2 x)` ("swiglu") or `φ(x) = x` ("linear"). For a
    chunk with keys k, values v and rates η the step is

        g_i = Σ_t η_i,t ∂(−loss_t)/∂w_i       loss_t = −⟨f(k_t), v_t⟩  or  ½ ‖f(k_t) − v_t‖²
        M_i ← g_i + m M_i                      m = mean of the momentum over the chunk
        w_i ← norm(w_i ± muon(M_i))            + for descent, − for ascent

    Sources: LaCT (Zhang et al., arXiv 2505.23884) for the rule; "Test-Time Training with KV Binding Is Secretly Linear
    Attention" (arXiv 2602.21204) for its simplifications and for the conditions of the parallel form.

    Args:
        update: "all" updates w0, w1 and w2, "last" only w1.
        fast_weight: "swiglu" or "linear". For "linear" there is only w1, so "all" equals "last".
        loss: "dot_product" or "mse".
        direction: "descent" or "ascent" on the loss.
        read_with: "query" reads the network with q, "key" with k.
        weight_norm: "post" scales the rows of the updated weights to the norms of the initial ones after each step;
            "pre" accumulates unnormalised weights and scales what is read and differentiated; "none" does neither.
        detach_norms: whether the norms of the initial weights are constants for the gradient.
        muon: None, or the coefficients of the Newton–Schulz iteration: "lact" (five triples of the language model) or
            "nvs" (one triple, `muon_steps` times).
        muon_steps: iterations; "lact" has exactly 5. With 0 the update is still divided by its Frobenius norm.
        muon_dtype: "float32" (at least; float64 inputs stay float64) or "bfloat16" as in the published code, whose
            result is not reproducible between kernels.
        inner_steps: gradient steps on each chunk; the momentum carries on from one to the next.

    Raises:
        ValueError: if a value is not one of the above.
    """

    update: Literal["all", "last"] = "all"
    fast_weight: Literal["swiglu", "linear"] = "swiglu"
    loss: Literal["dot_product", "mse"] = "dot_product"
    direction: Literal["descent", "ascent"] = "descent"
    read_with: Literal["query", "key"] = "query"
    weight_norm: Literal["post", "pre", "none"] = "post"
    detach_norms: bool = False
    muon: Literal["lact", "nvs"] | None = None
    muon_steps: int = 5
    muon_dtype: Literal["float32", "bfloat16"] = "float32"
    inner_steps: int = 1

    def __post_init__(self):
        choices = {
            "update": ("all", "last"),
            "fast_weight": ("swiglu", "linear"),
            "loss": ("dot_product", "mse"),
            "direction": ("descent", "ascent"),
            "read_with": ("query", "key"),
            "weight_norm": ("post", "pre", "none"),
            "detach_norms": (True, False),
            "muon": (None, "lact", "nvs"),
            "muon_dtype": ("float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}")
        for name, least in (("muon_steps", 0), ("inner_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if self.muon == "lact" and self.muon_steps != 5:
            raise ValueError(
                f"muon_steps={self.muon_steps} does not fit muon='lact', which has exactly 5 coefficient triples; "
                "set muon_steps=5, or muon='nvs' for any number of steps"
            )

    @property
    def updated(self) -> tuple[int, ...]:
        """Indices of the fast weights that the step changes: (0, 1, 2) or (1,)."""
        return (0, 1, 2) if self.update == "all" and self.fast_weight == "swiglu" else (1,)

    @property
    def sign(self) -> int:
        """+1 for descent (w ← w + muon(M)), −1 for ascent."""
        return 1 if self.direction == "descent" else -1

    @property
    def parallelizable(self) -> bool:
        """Whether all chunks can be evaluated at once with the same numbers (paper, section 5 and appendix I)."""
        return self.why_not_parallel is None

    @property
    def why_not_parallel(self) -> str | None:
        """Why the parallel form is not exact, with the field to change; None where it is exact."""
        if self.updated != (1,):
            return (
                "update='all' makes the features of later chunks depend on earlier updates: "
                "set update='last' (ttt_update in a model's config)"
            )
        if self.loss != "dot_product":
            return (
                f"loss={self.loss!r} makes each gradient read the state: "
                "set loss='dot_product' (ttt_loss_type in a model's config)"
            )
        if self.weight_norm == "post":
            return (
                "weight_norm='post' rescales the state after every step: "
                "set weight_norm='none' or 'pre' (ttt_weight_norm in a model's config)"
            )
        return None

    def to_dict(self) -> dict[str, str | int | bool | None]:
        """The fields as a dictionary: `TTTRule(**rule.to_dict()) == rule`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
