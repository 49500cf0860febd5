# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Scenes of LaCT-NVS as objects: rows, coordinates of their own, files."""

import pytest
import torch
from nvs_cases import RULES, all_views, busy_model, cameras, input_views, target_cameras, tiny_config, to_double
from safetensors.torch import save_file
from torch.testing import assert_close

from hf_ttt.modeling_lact_nvs import LaCTNVSModel
from hf_ttt.scene_lact_nvs import LaCTNVSScene

CLOSE = {"atol": 1e-5, "rtol": 0}  # float32 with Muon: twice its own error in the golden models, 5.6e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("normalised", [False, True])
def test_a_saved_scene_renders_the_same(rule, normalised, tmp_path):
    """Written to safetensors and read again, of every rule, with and without coordinates of its own."""
    model, inputs, own = busy_model(tiny_config(rule)), all_views(), {}
    if normalised:
        own = {
            "world_to_scene": cameras(2, 1, 12, 16, 7)["camera_to_world"][:, 0],
            "scene_scale": torch.tensor([2, 0.5]),
        }
    with torch.no_grad():
        scene = model.reconstruct(**input_views(), **own)
        scene.save(tmp_path / "scene.safetensors")
        loaded = LaCTNVSScene.load(tmp_path / "scene.safetensors")
        for a, b in zip(scene.states, loaded.states, strict=True):
            assert all(torch.equal(*pair) for pair in zip(a.weights, b.weights, strict=True))
        views = [model.render(some, *target_cameras(inputs), (12, 16)) for some in (scene, loaded)]
        assert torch.equal(*views)
        assert_close(views[0], model(**inputs, **own).rendered, **CLOSE)
    assert (loaded.world_to_scene is not None) == normalised == (loaded.scene_scale is not None)


def test_scenes_can_be_reordered():
    """Rows of a batch, in another order and more than once."""
    model, inputs = busy_model(tiny_config()), all_views(batch=3)
    rows = torch.tensor([2, 0, 2])
    with torch.no_grad():
        scene = model.reconstruct(**input_views(batch=3))
        chosen = scene.index_select(rows)
        assert (scene.batch_size, chosen.batch_size) == (3, 3)
        cameras = (value[rows] for value in target_cameras(inputs))
        assert_close(model.render(chosen, *cameras, (12, 16)), model(**inputs).rendered[rows], **CLOSE)


def test_a_scene_has_its_own_coordinates():
    """Cameras of the world, carried by the scene, render what their normalised counterparts render."""
    model, inputs, own = busy_model(tiny_config()), all_views(), cameras(2, 1, 12, 16, 7)["camera_to_world"][:, 0]
    scale, (intrinsics, pose) = torch.tensor([2.0, 0.5]), target_cameras(inputs)
    moved = own[:, None] @ pose
    moved[..., :3, 3] *= scale[:, None, None]
    with torch.no_grad():
        scene = model.reconstruct(**input_views(), world_to_scene=own, scene_scale=scale)
        plain = model.reconstruct(**input_views())
        got, want = (model.render(*args, (12, 16)) for args in ((scene, intrinsics, pose), (plain, intrinsics, moved)))
        assert_close(got, want, **CLOSE)
        assert (want - model.render(plain, intrinsics, pose, (12, 16))).abs().max() > 1e-2


def test_a_file_that_is_no_scene(tmp_path):
    path = tmp_path / "x.safetensors"
    for tensors in ({}, {"0.w0": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(1), "c": torch.ones(1)}):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=rf"path='.*x.safetensors' has tensors {', '.join(tensors) or 'none'}: it"):
            LaCTNVSScene.load(path)


def test_a_file_that_is_not_safetensors(tmp_path):
    """The name of the file and what it is for, instead of an error of safetensors alone; and one that is missing."""
    path = tmp_path / "x.safetensors"
    path.write_text("abc")
    with pytest.raises(ValueError, match="path='.*x.safetensors' is no saved scene: "):
        LaCTNVSScene.load(path)
    with pytest.raises(FileNotFoundError, match="y.safetensors"):
        LaCTNVSScene.load(tmp_path / "y.safetensors")


def test_a_model_loads_its_scenes(tmp_path):
    """`load_scene` needs no import, which remote code has not; the scene of another model is refused at once."""
    model, inputs, path = busy_model(tiny_config()), all_views(), tmp_path / "scene.safetensors"
    with torch.no_grad():
        model.reconstruct(**input_views()).save(path)
        rendered = model.render(model.load_scene(path), *target_cameras(inputs), (12, 16))
        assert_close(rendered, model(**inputs).rendered, **CLOSE)
    with pytest.raises(ValueError, match="scene has 2 states where this model has 3 TTT layers"):
        LaCTNVSModel(tiny_config(num_hidden_layers=3)).load_scene(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scenes_of_a_model_of_another_type(dtype):
    """What a float64 model reconstructed, a float32 and a bfloat16 model render in their own type."""
    inputs = all_views()
    with torch.no_grad():
        scene = busy_model(tiny_config()).double().reconstruct(**to_double(input_views()))
        model = busy_model(tiny_config())
        want = model(**inputs).rendered
        got = model.to(dtype).render(scene, *target_cameras(inputs), (12, 16))
    assert got.dtype == dtype
    assert_close(got.float(), want, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
