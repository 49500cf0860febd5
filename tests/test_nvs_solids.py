# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Scenes of solids: what is in them, their cameras, and their renderers."""

import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import nvs_solids as solids  # noqa: E402
import ray_caster  # noqa: E402


def a_scene(seed: int = 0) -> solids.SolidScene:
    return solids.random_scene(random.Random(seed))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Three scenes of eight views of 24 × 24 pixels."""
    return solids.write_scenes(tmp_path_factory.mktemp("scenes"), 3, 8, 24, render=ray_caster.render)


def test_same_seed_same_scenes(scenes, tmp_path):
    """The first scene does not depend on how many there are; another seed gives another."""
    again = solids.write_scenes(tmp_path / "again", 1, 8, 24, render=ray_caster.render)
    other = solids.write_scenes(tmp_path / "other", 1, 8, 24, seed=1, render=ray_caster.render)
    first = Path("solids-0000")
    for name in ("opencv_cameras.json", "contents.json", "images/007.png"):
        assert (scenes / first / name).read_bytes() == (again / first / name).read_bytes()
        assert (scenes / first / name).read_bytes() != (other / first / name).read_bytes()


def test_scenes_that_are_there_are_kept(scenes):
    before = (scenes / "solids-0000" / "images" / "000.png").stat().st_mtime_ns
    assert solids.write_scenes(scenes, 3, 8, 24, render=None) == scenes  # nothing renders
    assert (scenes / "solids-0000" / "images" / "000.png").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds scenes of .*'views': 8.* give another folder"):
        solids.write_scenes(scenes, 3, 9, 24, render=None)


@pytest.mark.parametrize("name", ["count", "views", "size"])
def test_numbers_of_scenes_below_one(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        solids.write_scenes(tmp_path, **{"count": 1, "views": 1, "size": 16, name: 0})


def test_pybullet_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pybullet", None)
    with pytest.raises(ImportError, match=r"pip install hf-ttt\[nvs\]"):
        solids.render_pybullet(a_scene(), np.eye(4)[None], np.ones((1, 4)), (16, 16))


def test_solids_stand_on_the_floor_apart_from_each_other():
    """Two or three, which do not reach over its edge, nor into each other."""
    for seed in range(50):
        scene = a_scene(seed)
        assert 2 <= len(scene.solids) <= 3 and len(scene.all_solids) == len(scene.solids) + 1
        for i, solid in enumerate(scene.solids):
            assert solid.centre[2] == solid.half_sizes[2]
            assert max(map(abs, solid.centre[:2])) + solids.reach(solid) <= solids.FLOOR_HALF_WIDTH
            for other in scene.solids[:i]:
                assert math.dist(solid.centre[:2], other.centre[:2]) > solids.reach(solid) + solids.reach(other)


def test_cameras_look_at_the_middle_from_the_dome():
    poses = solids.random_cameras(random.Random(3), 40)
    rotation, places = poses[:, :3, :3], poses[:, :3, 3] - solids.LOOK_AT
    np.testing.assert_allclose(rotation @ rotation.transpose(0, 2, 1), np.tile(np.eye(3), (40, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rotation), 1)
    np.testing.assert_allclose(rotation[:, :, 2], -places / solids.CAMERA_DISTANCE, atol=1e-12)
    assert (rotation[:, 2, 1] < 0).all()  # y is downwards
    elevations = np.degrees(np.arcsin(places[:, 2] / solids.CAMERA_DISTANCE))
    assert 25 <= elevations.min() < 35 and 55 < elevations.max() <= 65


def test_look_at_by_hand():
    """From the positive x axis to the origin: right is y, down is −z, ahead is −x."""
    expected = [[0, 0, -1, 2], [1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(solids.look_at([2, 0, 0], [0, 0, 0]), expected, atol=1e-12)
    with pytest.raises(ValueError, match="looks along up"):
        solids.look_at([0, 0, 2], [0, 0, 0])


def test_ray_caster_sees_a_sphere_and_the_floor_where_they_are():
    """A sphere of radius 0.5 at distance 4, seen with focal length 40, has radius 40 · 0.5 / √(4² − 0.5²) = 5.04."""
    sphere = solids.Solid("sphere", (0, 0, 0), (0.5,) * 3, 0.0, (1, 0, 0))
    scene = SimpleNamespace(all_solids=(sphere,))
    pose = solids.look_at([4, 0, 0], [0, 0, 0])
    seen, normals = ray_caster.first_hits(scene, pose, (40.0, 40.0, 16.0, 12.0), (24, 32), fine=8)
    radius = math.sqrt((seen == 0).sum() / 64 / math.pi)
    assert radius == pytest.approx(40 * 0.5 / math.sqrt(4**2 - 0.5**2), rel=2e-3)
    rows, columns = np.nonzero(seen == 0)
    assert ((rows + 0.5) / 8).mean() == pytest.approx(12) and ((columns + 0.5) / 8).mean() == pytest.approx(16)
    np.testing.assert_allclose(normals[96, 128], [1, 0, 0], atol=0.02)


@pytest.mark.parametrize("kind", solids.KINDS)
def test_ray_caster_projects_solids_as_the_model_casts_rays(kind):
    """A point that a ray meets lies on the solid's surface; the rays are those of the model."""
    from hf_ttt.modeling_lact_nvs import pixel_rays

    solid = solids.Solid(kind, (0.3, -0.2, 0.4), (0.3, 0.3, 0.4) if kind != "sphere" else (0.3,) * 3, 0.7, (1, 0, 0))
    pose, camera = solids.look_at([2, 1, 1.5], [0.2, 0, 0.3]), (30.0, 34.0, 11.0, 9.0)
    directions = ray_caster.ray_directions(pose, camera, (18, 20), fine=1)
    _, expected = pixel_rays(torch.tensor(camera)[None, None].double(), torch.tensor(pose)[None, None], 18, 20)
    np.testing.assert_allclose(directions, expected.reshape(-1, 3).numpy(), atol=1e-12)
    distance, normal = ray_caster.intersect(solid, pose[:3, 3], directions)
    hit = np.isfinite(distance)
    assert 5 < hit.sum() < 200 and ((normal[hit] * directions[hit]).sum(1) < 0).all()  # faces the camera
    c, s = math.cos(solid.turn), math.sin(solid.turn)
    points = pose[:3, 3] + distance[hit, None] * directions[hit] - solid.centre
    x, y, z = (points @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])).T
    a, _, b = solid.half_sizes
    surface = {
        "sphere": np.sqrt(x**2 + y**2 + z**2) / a,
        "box": np.max(np.abs([x / a, y / a, z / b]), 0),
        "cylinder": np.maximum(np.hypot(x, y) / a, np.abs(z) / b),
    }[kind]
    np.testing.assert_allclose(surface, 1, atol=1e-9)


def test_pybullet_and_the_ray_caster_see_the_same():
    """What is not background overlaps by 97 % at least, and colours are alike, with a camera that is not centred."""
    pytest.importorskip("pybullet", reason="the renderer of solids, an optional extra, is not installed")
    for seed in range(3):
        scene, poses = a_scene(seed), solids.random_cameras(random.Random(seed), 4)
        cameras = np.tile([77.0, 70.0, 30.0, 27.0], (4, 1))
        views = [render(scene, poses, cameras, (48, 64)) for render in (solids.render_pybullet, ray_caster.render)]
        first, second = (view.min(-1) < 250 for view in views)
        assert (first & second).sum() / (first | second).sum() > 0.97
        assert np.abs(views[0].astype(float) - views[1]).mean() < 6
