# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Benchmarks of the TTT op and its models: `python -m benchmarks --help`, from the root of a checkout."""
