# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Where there is no GPU, Triton's kernels are interpreted: what that needs is set before anything imports Triton."""

import importlib.util
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: threads slow its small products down 100 times

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from triton_interpreter import install

    install()
