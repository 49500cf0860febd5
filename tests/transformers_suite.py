# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Imports transformers' own tests from the source distribution of the installed version (the wheel has none).

The folder that holds its `tests/` is HF_TTT_TRANSFORMERS_TESTS, or .cache/transformers-<version>/ in the repository,
where `make test` puts it. Without either, a test file that imports this one is skipped.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import transformers

PACKAGE = "transformers_tests"
DEFAULT = Path(__file__).parents[1] / ".cache" / f"transformers-{transformers.__version__}"
FOLDER = Path(os.environ.get("HF_TTT_TRANSFORMERS_TESTS", DEFAULT)) / "tests"
if not FOLDER.is_dir():
    if "HF_TTT_TRANSFORMERS_TESTS" in os.environ:
        raise FileNotFoundError(f"HF_TTT_TRANSFORMERS_TESTS={FOLDER.parent} has no folder tests/")
    pytest.skip(f"no source distribution of transformers in {DEFAULT}; `make fetch` gets it", allow_module_level=True)


class GenerationTesterMixin:
    """Stands in for a class that the source distribution lacks."""


class ExportTesterMixin:
    """Stands in for a class that the source distribution lacks."""


ABSENT = {  # modules that the source distribution lacks, with the names that are imported from them
    "generation": {},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    "exporters": {},
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "utils": {},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}


def import_common(name: str) -> types.ModuleType:
    """A module of transformers' `tests`, as part of a package whose name is not that of a folder here."""
    if PACKAGE not in sys.modules:
        for child, attributes in {"": {}, **ABSENT}.items():
            full = f"{PACKAGE}.{child}".rstrip(".")
            module = types.ModuleType(full)
            module.__path__ = [str(FOLDER)] if not child else []
            vars(module).update(attributes)
            sys.modules[full] = module
    # the tests of configurations import transformers by a path that the distribution lacks, and do not use it
    with mock.patch("transformers.utils.direct_transformers_import", lambda path: transformers):
        return importlib.import_module(f"{PACKAGE}.{name}")
