# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A saved novel-view model loads, renders and trains where hf_ttt cannot be imported, and its scenes are saved there.

What a fresh process does is written as a function here (`child_…`), whose source is sent to it. The processor's own
remote code is in test_processing_lact_nvs.
"""

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from nvs_cases import (
    INDEX,
    all_views,
    busy_model,
    golden_inputs,
    golden_state,
    golden_tensors,
    input_views,
    published_config,
    target_cameras,
    tiny_config,
)
from test_remote_code import REPOSITORY, ReadOnlyHub, python_files, run_child
from transformers import AutoModel

from hf_ttt.conversion import from_official
from hf_ttt.modeling_lact_nvs import LaCTNVSModel, LaCTNVSScene

PUBLISHED = "model_nvsA_2heads_im2.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folder "nvs" written by `save_pretrained`, a scene, and what the installed class computes."""
    root = tmp_path_factory.mktemp("saved")
    model, inputs = busy_model(tiny_config()), all_views()
    model.save_pretrained(root / "nvs")
    with torch.no_grad():
        model.reconstruct(**input_views()).save(root / "scene.safetensors")
        torch.save({"inputs": inputs, "rendered": model(**inputs).rendered}, root / "expected.pt")
    return root


def test_auto_map(saved):
    """AutoConfig and AutoModel find their classes in the folder."""
    auto_map = json.loads((saved / "nvs" / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_lact_nvs.LaCTNVSConfig",
        "AutoModel": "modeling_lact_nvs.LaCTNVSModel",
    }
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (saved / "nvs" / f"{module}.py").read_text(encoding="utf-8")


def test_an_installed_package_loads_its_own_class(saved):
    """With hf_ttt imported the folder loads without trust_remote_code, and keeps its numbers."""
    model, expected = AutoModel.from_pretrained(saved / "nvs"), torch.load(saved / "expected.pt")
    assert type(model) is LaCTNVSModel
    with torch.no_grad():
        torch.testing.assert_close(model(**expected["inputs"]).rendered, expected["rendered"], atol=1e-5, rtol=0)


def child_loads(folder, expected, scene, again, second):
    import sys

    import torch
    from torch.testing import assert_close
    from transformers import AutoConfig, AutoModel

    expected, trust = torch.load(expected), {"trust_remote_code": True}
    inputs = expected["inputs"]
    targets = inputs["target_intrinsics"], inputs["target_camera_to_world"]
    model = AutoModel.from_pretrained(folder, **trust)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        assert_close(model(**inputs).rendered, expected["rendered"], atol=1e-5, rtol=0)
        given = {name: value for name, value in inputs.items() if not name.startswith("target_")}
        made = model.reconstruct(**given)
        made.save(again)
        assert "hf_ttt" not in sys.modules
        for path in (scene, again):  # one that the package wrote, and one of this process
            loaded = model.load_scene(path)
            assert type(loaded) is type(made)
            assert_close(model.render(loaded, *targets, size=(12, 16)), expected["rendered"], atol=1e-5, rtol=0)
    half = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, ttt_implementation="recurrent", **trust)
    assert half(**inputs).rendered.dtype == torch.bfloat16 and half.get_ttt_implementation() == "recurrent"
    assert {p.dtype for n, p in half.named_parameters() if n.endswith((".w0", ".w1", ".w2"))} == {torch.float32}
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(folder, **trust), **trust)
    fresh(**inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in fresh.parameters())
    model.save_pretrained(second)
    return type(model).__name__


def test_loads_without_the_package_and_triton(saved, tmp_path):
    """Remote code: views and scenes both ways; what is saved again is the same, and loads again."""
    folder = saved / "nvs"
    for i in range(2):
        second, again = tmp_path / f"again{i}", tmp_path / f"scene{i}.safetensors"
        args = folder, saved / "expected.pt", saved / "scene.safetensors", again, second
        assert run_child(child_loads, *args, home=tmp_path / f"home{i}", no_triton=True) == "LaCTNVSModel"
        assert python_files(second) == python_files(folder)
        first, other = (json.loads((some / "config.json").read_text()) for some in (folder, second))
        assert first == other
        folder = second
    model = AutoModel.from_pretrained(saved / "nvs")
    with torch.no_grad():
        scene = LaCTNVSScene.load(tmp_path / "scene0.safetensors")
        rendered = model.render(scene, *target_cameras(all_views()), (12, 16))
    torch.testing.assert_close(rendered, torch.load(saved / "expected.pt")["rendered"], atol=1e-5, rtol=0)


def child_renders(folder, inputs, rendered):
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        got = model(**torch.load(inputs)).rendered
    return (got - torch.load(rendered)).abs().max().item()


def test_a_converted_checkpoint_loads_without_the_package(tmp_path):
    """The published views out of a folder made of a published state dict."""
    tensors = golden_tensors(PUBLISHED)
    from_official("lact_nvs", golden_state(tensors), **published_config(PUBLISHED)).save_pretrained(tmp_path / "nvs")
    torch.save(golden_inputs(tensors), tmp_path / "inputs.pt")
    torch.save(tensors["rendered_exact_muon"], tmp_path / "rendered.pt")
    args = tmp_path / "nvs", tmp_path / "inputs.pt", tmp_path / "rendered.pt"
    assert run_child(child_renders, *args, home=tmp_path / "home") <= INDEX["tolerance"]["rendered"]


@pytest.fixture
def endpoint(saved):
    """Address of a Hub that holds the folder as `REPOSITORY`."""
    handler = type("Hub", (ReadOnlyHub,), {"folder": saved / "nvs", "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def child_loads_from_hub(repository, expected):
    import torch
    from transformers import AutoModel, dynamic_module_utils

    checked, check_imports = [], dynamic_module_utils.check_imports

    def recording(filename):
        checked.append(str(filename).rsplit("/", 1)[-1])
        return check_imports(filename)

    dynamic_module_utils.check_imports = recording
    expected = torch.load(expected)
    with torch.no_grad():
        rendered = AutoModel.from_pretrained(repository, trust_remote_code=True)(**expected["inputs"]).rendered
    torch.testing.assert_close(rendered, expected["rendered"], atol=1e-5, rtol=0)
    return sorted(set(checked))


def test_loads_from_a_hub_that_checks_every_file(saved, endpoint, tmp_path):
    """From the Hub the imports of every file must be there, not only those of the first."""
    proxies = {name: "127.0.0.1" for name in ("NO_PROXY", "no_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **proxies}
    args = REPOSITORY, saved / "expected.pt"
    checked = run_child(child_loads_from_hub, *args, home=tmp_path / "home", no_triton=True, **settings)
    assert set(checked) == python_files(saved / "nvs").keys()
