# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Scenes in three formats, written here with the same cameras, give the same rows; what is drawn; what is refused."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_cameras import poses
from test_processing_lact_nvs import photograph, tiny_model
from transformers import Trainer, TrainingArguments

from hf_ttt import LaCTNVSProcessor
from hf_ttt.data import SceneDataset, collate_scenes, load_scenes, sample_views

load_from_disk = pytest.importorskip("datasets", reason="load_scenes makes a datasets.Dataset").load_from_disk

HEIGHT, WIDTH = 20, 30
FX, FY, CX, CY = 25.0, 26.5, 14.0, 11.0
VIEWS = 5
POSES = poses(VIEWS, seed=2)
OPENGL = POSES @ torch.diag(torch.tensor([1.0, -1, -1, 1], dtype=POSES.dtype))


def write_images(folder: Path, names=None) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:03}.png" for i in range(VIEWS)] if names is None else names
    for i, name in enumerate(names):
        Image.fromarray(photograph(HEIGHT, WIDTH, seed=i)).save(folder / name)
    return names


def write_json(file: Path, content) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def published(root: Path, name="opencv_cameras.json", **changes) -> Path:
    """A scene in the published format; `changes` are of its second view."""
    camera = {"w": WIDTH, "h": HEIGHT, "fx": FX, "fy": FY, "cx": CX, "cy": CY}
    frames = [
        {**camera, "w2c": torch.linalg.inv(pose).tolist(), "file_path": f"images/{image}"}
        for pose, image in zip(POSES, write_images(root / "images"), strict=True)
    ]
    frames[1] |= changes
    frames[1] = {key: value for key, value in frames[1].items() if value is not None}
    return write_json(root / name, frames)


def nerf(root: Path, suffix=".png", name="transforms.json", **changes) -> Path:
    """A scene as transforms.json; `changes` are of the whole file."""
    frames = [
        {"file_path": f"./images/{image.removesuffix('.png')}{suffix}", "transform_matrix": pose.tolist()}
        for pose, image in zip(OPENGL, write_images(root / "images"), strict=True)
    ]
    content = {"fl_x": FX, "fl_y": FY, "cx": CX, "cy": CY, "w": WIDTH, "h": HEIGHT, "frames": frames, **changes}
    return write_json(root / name, {key: value for key, value in content.items() if value is not None})


def quaternion(rotation: torch.Tensor) -> list[float]:
    """w, x, y, z: the axis that a rotation leaves as it is, and its angle."""
    angle = math.acos(max(-1.0, min(1.0, (rotation.trace().item() - 1) / 2)))
    skew = rotation - rotation.T
    axis = torch.stack([skew[2, 1], skew[0, 2], skew[1, 0]])
    axis = axis / axis.norm()
    return [math.cos(angle / 2), *(math.sin(angle / 2) * axis).tolist()]


CAMERAS = (
    f"# Camera list\n1 PINHOLE {WIDTH} {HEIGHT} {FX} {FY} {CX} {CY}\n2 SIMPLE_PINHOLE {WIDTH} {HEIGHT} {FX} 15 10\n"
)


def colmap(root: Path, cameras=CAMERAS, model="sparse/0", points=True, names=None) -> Path:
    """A COLMAP text model whose images are listed backwards, every other line of points empty."""
    (root / model).mkdir(parents=True)
    (root / model / "cameras.txt").write_text(cameras)
    lines = ["# Image list", "# two lines for each"]
    entries = list(enumerate(zip(POSES, write_images(root / "images", names), strict=True)))
    for i, (pose, image) in reversed(entries):
        w2c = torch.linalg.inv(pose)
        numbers = " ".join(map(repr, [*quaternion(w2c[:3, :3]), *w2c[:3, 3].tolist()]))
        lines += [f"{i + 7} {numbers} 1 {image}", "1.5 2.5 -1 7.0 8.0 3" if points and i % 2 else ""]
    (root / model / "images.txt").write_text("\n".join(lines) + "\n")
    return root


def check_row(row: dict, folder: Path) -> None:
    """The row of the scene that all writers write."""
    assert row["file_path"] == [str(folder / f"{i:03}.png") for i in range(VIEWS)]
    assert row["width"] == [WIDTH] * VIEWS and row["height"] == [HEIGHT] * VIEWS
    assert row["intrinsics"] == [[FX, FY, CX, CY]] * VIEWS
    torch.testing.assert_close(torch.tensor(row["camera_to_world"], dtype=POSES.dtype), POSES, atol=1e-9, rtol=0)


# ---- the three formats ----


@pytest.mark.parametrize("writer", [published, nerf, colmap])
@pytest.mark.parametrize("points", [True, False])
def test_the_same_scene_in_every_format(writer, points, tmp_path):
    """Names, sizes, intrinsics and OpenCV poses agree: w2c is inverted, OpenGL flipped, quaternions are w first."""
    root = tmp_path / "chair"
    writer(root, points=points) if writer is colmap else writer(root)
    scenes = load_scenes(root)
    assert type(scenes).__module__.startswith("datasets.") and len(scenes) == 1 and scenes[0]["name"] == "chair"
    check_row(scenes[0], root / "images")


def test_formats_are_found_by_their_file_too(tmp_path):
    """A file of a scene instead of its folder, and a format instead of "auto"."""
    for scenes in (
        load_scenes(published(tmp_path / "a"), format="json"),
        load_scenes(nerf(tmp_path / "b"), format="nerf"),
        load_scenes(str(colmap(tmp_path / "c") / "sparse/0/images.txt"), format="colmap"),
    ):
        check_row(scenes[0], Path(scenes[0]["file_path"][0]).parent)


@pytest.mark.parametrize("model", ["sparse/0", "sparse", "."])
def test_places_of_a_colmap_model(model, tmp_path):
    check_row(load_scenes(colmap(tmp_path / "room", model=model))[0], tmp_path / "room/images")


def test_colmap_cameras(tmp_path):
    """SIMPLE_PINHOLE has one focal length; names may hold spaces."""
    root = colmap(tmp_path / "room", names=[f"view {i}.png" for i in range(VIEWS)])
    images = root / "sparse/0/images.txt"
    images.write_text(images.read_text().replace(" 1 view 3.png", " 2 view 3.png"))
    row = load_scenes(root)[0]
    assert row["intrinsics"][3] == [FX, FX, 15, 10] and row["intrinsics"][2] == [FX, FY, CX, CY]
    assert row["file_path"][3].endswith("/view 3.png")


def test_a_list_of_scenes(tmp_path):
    """The published list of scene files, relative to it and absolute, in its order."""
    paths = ["b/opencv_cameras.json", str(published(tmp_path / "a"))]
    published(tmp_path / "b")
    scenes = load_scenes(write_json(tmp_path / "train.json", paths))
    assert scenes["name"][:] == ["b", "a"]
    check_row(scenes[0], tmp_path / "b/images")


def test_a_folder_of_scenes(tmp_path):
    """Of folders in different formats, in the order of their names; or of JSON files."""
    for name, writer in (("c", published), ("a", nerf), ("b", colmap)):
        writer(tmp_path / "folders" / name)
    scenes = load_scenes(tmp_path / "folders")
    assert scenes["name"][:] == ["a", "b", "c"]
    for row in scenes:
        check_row(row, tmp_path / "folders" / row["name"] / "images")
    assert load_scenes(tmp_path / "folders", format="colmap")["name"][:] == ["b"]
    for name in ("x.json", "y.json"):
        published(tmp_path / "files", name)
    assert load_scenes(tmp_path / "files")["name"][:] == ["x", "y"]


def test_angles_of_view_and_paths_without_suffix(tmp_path):
    """The synthetic NeRF scenes: one angle for the width, square pixels, the centre, no size and no suffix."""
    angle = 2 * math.atan(WIDTH / (2 * FX))
    none = dict.fromkeys(("fl_x", "fl_y", "cx", "cy", "w", "h"))
    row = load_scenes(nerf(tmp_path / "lego", suffix="", name="transforms_train.json", **none, camera_angle_x=angle))[0]
    assert row["name"] == "lego" and row["file_path"][0].endswith("/images/000.png")
    np.testing.assert_allclose(row["intrinsics"][0], [FX, FX, WIDTH / 2, HEIGHT / 2], rtol=1e-12)
    assert (row["width"][0], row["height"][0]) == (WIDTH, HEIGHT)


def test_a_view_of_transforms_may_have_its_own_camera(tmp_path):
    file = nerf(tmp_path / "lego", k1=0, camera_model="OPENCV")
    content = json.loads(file.read_text())
    content["frames"][2] |= {"fl_x": 99.0, "cy": 3.0}
    intrinsics = load_scenes(write_json(file, content))[0]["intrinsics"]
    assert intrinsics[1] == [FX, FY, CX, CY] and intrinsics[2] == [99, FY, CX, 3]


def test_images_may_differ_in_size(tmp_path):
    """The processor brings them to one size; a row has the size of each."""
    file = published(tmp_path / "chair", w=44, h=33)
    Image.fromarray(photograph(33, 44)).save(tmp_path / "chair/images/001.png")
    row = load_scenes(file)[0]
    assert row["width"] == [WIDTH, 44, *[WIDTH] * 3] and row["height"][1] == 33
    sample = SceneDataset([row], LaCTNVSProcessor(size=(16, 24)), 3, 2)[0]
    assert sample["pixel_values"].shape == (3, 3, 16, 24)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w2c": None}, r"scene 'chair' \(.*opencv_cameras.json\) has no 'w2c' in view 1"),
        ({"fx": None}, r"scene 'chair' .* has no 'fx' in view 1"),
        ({"file_path": None}, r"scene 'chair' .* has no 'file_path' in view 1"),
        ({"fx": 0.8}, r"intrinsics of scene 'chair' \(.*\)\[1\] has fx=0.8; .*normalised"),
        (
            {"w2c": torch.diag(torch.tensor([1.0, 1, -1, 1])).tolist()},
            r"w2c of scene 'chair' .*\[1\] has a left-handed",
        ),
        ({"w2c": [[1, 2], [3, 4]]}, r"w2c of scene 'chair' .* is a list with entries of shapes"),
        ({"file_path": 3}, r"scene 'chair' \(.*\) has file_path=3 in view 1; expected the path of an image"),
        ({"w": "wide"}, r"scene 'chair' \(.*\) has w='wide' in view 1; expected a number of pixels"),
        ({"h": 20.5}, r"scene 'chair' \(.*\) has h=20.5 in view 1"),
        ({"h": -20}, r"scene 'chair' \(.*\) has h=-20 in view 1"),
        ({"h": math.nan}, r"scene 'chair' \(.*\) has h=nan in view 1"),
        ({"w": WIDTH + 1}, r"scene 'chair' .* states 31 × 20 .* for .*/images/001.png, which is 30 × 20"),
    ],
)
def test_published_scenes_that_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_scenes(published(tmp_path / "chair", **changes))


@pytest.mark.parametrize("writer", [published, nerf, colmap])
def test_an_image_that_is_missing(writer, tmp_path):
    """The scene and the file are named; without looking at the files the scene loads, and its use names them."""
    root = tmp_path / "chair"
    writer(root)
    (root / "images/003.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"scene 'chair' \(.*\) names the image .*/images/003.png"):
        load_scenes(root)
    scenes = load_scenes(root, check_files=False)
    with pytest.raises(FileNotFoundError, match=r"scene 'chair' names the image .*/images/003.png"):
        SceneDataset(scenes, LaCTNVSProcessor(size=16), 4, 1)[0]


def test_images_that_are_broken(tmp_path):
    """No image at all, and one that ends too early, which only reading it shows."""
    root = tmp_path / "chair"
    published(root)
    image = root / "images/001.png"
    image.write_bytes(image.read_bytes()[:700])
    scenes = load_scenes(root)
    with pytest.raises(ValueError, match=r"scene 'chair' has the image .*001.png, which cannot be read"):
        SceneDataset(scenes, LaCTNVSProcessor(size=16), 4, 1)[0]
    image.write_text("nothing")
    with pytest.raises(ValueError, match=r"scene 'chair' .* names .*001.png, which is not an image"):
        load_scenes(root)


def test_an_image_that_was_scaled_after_loading(tmp_path):
    scenes = load_scenes(published(tmp_path / "chair"))
    Image.new("RGB", (15, 10)).save(tmp_path / "chair/images/001.png")
    with pytest.raises(ValueError, match=r"scene 'chair' states 30 × 20 .*001.png, which is 15 × 10"):
        SceneDataset(scenes, LaCTNVSProcessor(size=16), 4, 1)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k1": 0.1, "p2": -0.01}, r"scene 'lego' .* distorted cameras \(k1=0.1, p2=-0.01 in view 0\): undistort"),
        ({"camera_model": "OPENCV_FISHEYE"}, r"distorted cameras \(camera_model=OPENCV_FISHEYE in view 0\)"),
        ({"is_fisheye": True}, r"distorted cameras \(is_fisheye=True in view 0\)"),
        ({"h": []}, r"scene 'lego' .* has h=\[\] in view 0; expected a number of pixels"),
        (
            {"fl_x": None, "fl_y": None, "camera_angle_x": "wide"},
            r"scene 'lego' .* has camera_angle_x='wide' for view 0; expected radians below π",
        ),
        ({"fl_x": None, "fl_y": None, "camera_angle_x": 40}, r"has camera_angle_x=40 for view 0; expected radians"),
        ({"frames": [{"file_path": None}]}, r"scene 'lego' .* has file_path=None in view 0"),
        ({"fl_x": None, "fl_y": None}, r"scene 'lego' .* has neither 'fl_x' nor 'camera_angle_x' for view 0"),
        ({"frames": None}, r"scene 'lego' .* has no list 'frames'"),
        ({"frames": []}, r"scene 'lego' .* has no views"),
        ({"frames": [{"file_path": "images/000"}]}, r"scene 'lego' .* has no 'transform_matrix' in view 0"),
    ],
)
def test_transforms_that_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_scenes(nerf(tmp_path / "lego", **changes))


@pytest.mark.parametrize(
    ("cameras", "message"),
    [
        (
            CAMERAS.replace("PINHOLE 3", "OPENCV 3", 1),
            r"scene 'room' .*model OPENCV, whose rays are distorted: .*undis",
        ),
        (CAMERAS.replace("SIMPLE_PINHOLE", "SIMPLE_RADIAL"), r"scene 'room' .*model SIMPLE_RADIAL, whose rays"),
        (CAMERAS.replace(f"{CY}", ""), r"scene 'room' .* with 3 parameters; PINHOLE has 4"),
        (CAMERAS.replace(f"{WIDTH}", "wide"), r"scene 'room' .* expected CAMERA_ID, MODEL, WIDTH"),
        ("2" + CAMERAS.splitlines()[1][1:], r"scene 'room' \(.*images.txt\) has '11 .* for image 0; expected IMAGE_ID"),
    ],
)
def test_colmap_cameras_that_are_refused(cameras, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_scenes(colmap(tmp_path / "room", cameras=cameras))


def test_colmap_models_that_are_refused(tmp_path):
    """Without images.txt; with numbers that are none; binary; and without an image."""
    root = colmap(tmp_path / "room")
    images = root / "sparse/0/images.txt"
    text = images.read_text()
    images.write_text(text.replace("9 ", "9 x", 1))
    with pytest.raises(ValueError, match=r"scene 'room' \(.*images.txt\) has '9 x.* for image 2"):
        load_scenes(root)
    images.write_text("# nothing\n")
    with pytest.raises(ValueError, match="scene 'room' .* has no views"):
        load_scenes(root)
    images.unlink()
    with pytest.raises(FileNotFoundError, match="scene 'room' .* has no images.txt beside it"):
        load_scenes(root)
    (root / "sparse/0/cameras.txt").rename(root / "sparse/0/cameras.bin")
    with pytest.raises(ValueError, match=r"cameras.bin is binary; convert it to text: colmap model_converter"):
        load_scenes(root)


def test_paths_that_are_refused(tmp_path):
    """Nothing there, an empty folder, unreadable JSON, other JSON, and a list that names what is not there."""
    with pytest.raises(FileNotFoundError, match="path=.*nowhere' does not exist"):
        load_scenes(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"path=.* holds no scene \(looked for opencv_cameras.json"):
        load_scenes(tmp_path)
    with pytest.raises(ValueError, match="format='bin' is not one of 'auto', 'json', 'colmap', 'nerf'"):
        load_scenes(tmp_path, format="bin")
    file = tmp_path / "train.json"
    file.write_text('[{"w": 3')
    with pytest.raises(ValueError, match=r"train.json is not readable JSON: Expecting"):
        load_scenes(file)
    with pytest.raises(ValueError, match=r"scene 'train' .* has no 'w' in view 0"):
        load_scenes(write_json(file, [3, 4]))
    with pytest.raises(ValueError, match=r"scene 'train' .* is a int; expected a list of views"):
        load_scenes(write_json(file, 3))
    with pytest.raises(FileNotFoundError, match=r"train.json lists 'a/b.json', which is not there"):
        load_scenes(write_json(file, ["a/b.json"]))
    with pytest.raises(ValueError, match=r"train.json lists 'train.json', which is a list of paths itself"):
        load_scenes(write_json(file, ["train.json"]))  # did not end
    with pytest.raises(ValueError, match=r"is not of format 'nerf' but looks like 'json'"):
        load_scenes(published(tmp_path / "chair"), format="nerf")


# ---- what is drawn ----


def test_inputs_and_targets_do_not_overlap():
    """15 views with 8 inputs and 8 targets gave one view in both; now it is an error, and 16 use each view once."""
    for seed in range(20):
        inputs, targets = sample_views(16, 8, 8, random.Random(seed))
        assert sorted(inputs + targets) == list(range(16))
    with pytest.raises(ValueError, match="scene 'a' has 15 views; 8 inputs and 8 other targets are 16"):
        sample_views(15, 8, 8, random.Random(0), name="a")
    with pytest.raises(ValueError, match="num_input=0 and num_target=8 must be at least 1"):
        sample_views(15, 0, 8, random.Random(0))


def test_every_view_is_drawn():
    """As input and as target, at about the same rate: 3 of 10 and 2 of 10 in 2,000 draws, within 5 deviations."""
    rng, counts = random.Random(0), np.zeros((2, 10))
    for _ in range(2000):
        for i, chosen in enumerate(sample_views(10, 3, 2, rng)):
            counts[i, chosen] += 1
    deviation = np.sqrt(2000 * np.array([[0.3 * 0.7], [0.2 * 0.8]]))
    assert (np.abs(counts - 2000 * np.array([[0.3], [0.2]])) < 5 * deviation).all()


def test_frame_gaps():
    """Inputs are the ends of a gap, with others between them in order, and all targets lie inside; all gaps and starts
    come, up to those that the video has."""
    gaps, firsts = set(), set()
    for seed in range(300):
        inputs, targets = sample_views(12, 3, 2, random.Random(seed), frame_gap=(3, 90))
        assert inputs == sorted(set(inputs)) and not set(inputs) & set(targets) and len(set(targets)) == 2
        assert all(inputs[0] < t < inputs[-1] for t in targets) and inputs[0] >= 0 and inputs[-1] < 12
        gaps.add(inputs[-1] - inputs[0])
        firsts.add(inputs[0])
    assert gaps == set(range(4, 12)) and firsts == set(range(8))
    two, _ = sample_views(100, 2, 3, random.Random(0), frame_gap=(25, 25))
    assert two[1] - two[0] == 25
    for arguments in ((12, 3, 2, (12, 20)), (12, 1, 2, (3, 6)), (12, 3, 2, (1, 3))):
        with pytest.raises(ValueError, match="frame_gap=.* does not fit scene 'a' of 12 views"):
            sample_views(*arguments[:3], random.Random(0), frame_gap=arguments[3], name="a")


# ---- training ----


@pytest.fixture
def scenes(tmp_path):
    for name in ("a", "b"):
        published(tmp_path / name)
    return load_scenes(tmp_path)


def test_samples_hold_the_views_that_were_drawn(scenes):
    """Pixels, intrinsics and poses of a sample are of the same view, for inputs and targets, which are other views."""
    sample = SceneDataset(scenes, LaCTNVSProcessor(size=(HEIGHT, WIDTH)), 3, 2, seed=0)[1]
    seen = []
    for prefix in ("", "target_"):
        for pixels, camera in zip(sample[f"{prefix}pixel_values"], sample[f"{prefix}camera_to_world"], strict=True):
            (view,) = [i for i in range(VIEWS) if torch.allclose(camera, POSES[i].float())]
            image = torch.from_numpy(photograph(HEIGHT, WIDTH, seed=view)).permute(2, 0, 1) / 255
            torch.testing.assert_close(pixels, image)
            seen.append(view)
        assert sample[f"{prefix}intrinsics"][0].tolist() == [FX, FY, CX, CY]
    assert sorted(seen) == list(range(VIEWS))


def test_seeds(scenes):
    """A seed gives a scene the same views always, and other scenes others; without one, torch's generator decides."""
    processor, key = LaCTNVSProcessor(size=16), "target_camera_to_world"
    fixed = SceneDataset(scenes, processor, 2, 2, seed=3)
    assert torch.equal(fixed[0][key], fixed[0][key]) and not torch.equal(fixed[0][key], fixed[1][key])
    free = SceneDataset(scenes, processor, 2, 2)
    torch.manual_seed(0)
    first = [free[0][key] for _ in range(4)]
    assert any(not torch.equal(first[0], other) for other in first[1:])
    torch.manual_seed(0)
    assert all(torch.equal(free[0][key], value) for value in first)


def test_poses_of_rows_are_opencv_whatever_the_processor_reads(scenes):
    """Rows are converted: a processor for OpenGL poses, for its users, must not convert them again."""
    samples = [
        SceneDataset(scenes, LaCTNVSProcessor(16, camera_convention=c), 2, 2, seed=3)[0] for c in ("opencv", "opengl")
    ]
    assert torch.equal(samples[0]["camera_to_world"], samples[1]["camera_to_world"])


def test_rows_in_other_forms(scenes, tmp_path):
    """Lists of rows, formatted rows, and those of a data set that was written give the same samples; a stream, whose
    rows have no numbers, says what would do."""
    scenes.save_to_disk(tmp_path / "rows")
    forms = [list(scenes), scenes.with_format("torch"), scenes.with_format("numpy"), load_from_disk(tmp_path / "rows")]
    want = SceneDataset(scenes, LaCTNVSProcessor(size=16), 2, 2, seed=3)[1]
    for rows in forms:
        got = SceneDataset(rows, LaCTNVSProcessor(size=16), 2, 2, seed=3)[1]
        assert got.keys() == want.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match=r"scenes is a IterableDataset, .*: pass list\(scenes\)"):
        SceneDataset(scenes.to_iterable_dataset(), LaCTNVSProcessor(size=16), 2, 2)


def test_scenes_with_too_few_views(scenes):
    """Named when the data set is made, not in the middle of training; from lists of rows too."""
    for rows in (scenes, list(scenes)):
        with pytest.raises(ValueError, match="scene 'a' has 5 views; 4 inputs and 2 other targets are 6"):
            SceneDataset(rows, LaCTNVSProcessor(size=16), 4, 2)


def test_batches(scenes):
    """Stacked as the model takes them; samples of different numbers of views are refused."""
    few, more = (SceneDataset(scenes, LaCTNVSProcessor(16, normalize_scene=True), n, 2) for n in (2, 3))
    batch = collate_scenes([few[0], few[1]])
    assert batch["pixel_values"].shape == (2, 2, 3, 16, 16) and batch["scene_scale"].shape == (2,)
    output = tiny_model()(**batch)
    assert output.loss.isfinite() and output.rendered.shape == batch["target_pixel_values"].shape
    with pytest.raises(
        ValueError, match=r"pixel_values has the shapes \[\(2, 3, 16, 16\), \(3, 3, 16, 16\)\] in a batch"
    ):
        collate_scenes([few[0], more[0]])


def test_trains_with_trainer(scenes, tmp_path):
    """`Trainer` finds the arguments of `forward` and the loss; `label_names` gives metrics renderings and targets."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    data = SceneDataset(scenes, LaCTNVSProcessor(16, normalize_scene=True), 2, 2)
    settings = {"output_dir": str(tmp_path / "out"), "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(**settings, **quiet, label_names=["target_pixel_values"])
    held_out = SceneDataset(scenes, data.processor, 2, 2, seed=0)
    model, before = tiny_model(), tiny_model().blocks[0].module_list[1].f.w1.detach().clone()
    error = lambda made: {"error": float(((made.predictions - made.label_ids) ** 2).mean())}  # noqa: E731
    trainer = Trainer(model, arguments, collate_scenes, data, held_out, compute_metrics=error)
    assert math.isfinite(trainer.train().training_loss)
    assert not torch.equal(model.blocks[0].module_list[1].f.w1, before)
    measured = trainer.evaluate()
    assert measured["eval_loss"] == pytest.approx(measured["eval_error"], rel=1e-5)
