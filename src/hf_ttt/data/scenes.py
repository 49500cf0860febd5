# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Scenes of posed images as a `datasets.Dataset`, and what training takes of them.

Three formats are read, and brought into the OpenCV convention:

- "json": as published with LaCT, a JSON list of the views of a scene, each with `w`, `h`, `fx`, `fy`, `cx`, `cy`, `w2c`
  (4 × 4) and `file_path`; or a JSON list of paths of such files. Paths are relative to the file they are in.
- "colmap": a text model, `cameras.txt` and `images.txt`, of undistorted cameras. Images are in `images` beside it or
  beside the folder `sparse` that holds it.
- "nerf": `transforms.json` of NeRF and its successors, with OpenGL poses.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ..cameras import read_intrinsics, read_poses

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("json", "colmap", "nerf")
SCENE_FILES = {  # of a scene's folder
    "json": ("opencv_cameras.json",),
    "colmap": ("cameras.txt", "sparse/0/cameras.txt", "sparse/cameras.txt"),
    "nerf": ("transforms.json", "transforms_train.json"),
}
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # tried for a file_path without one
DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")  # of transforms.json


@dataclass
class _Views:
    """The views of a scene as a file gives them."""

    name: str
    source: Path
    files: list[Path]
    sizes: list[tuple[int, int]]  # width and height
    intrinsics: list[list[float]]
    poses: list[Any]
    world_to_camera: bool
    convention: str = "opencv"

    @property
    def label(self) -> str:
        return f"scene {self.name!r} ({self.source})"


def load_scenes(path: str | os.PathLike, format: str = "auto", check_files: bool = True) -> Dataset:
    """Scenes of posed images, a row for each.

    Args:
        path: a scene's file or folder, a JSON list of paths of scene files, or a folder of scenes' folders or files.
        format: "json", "colmap" or "nerf"; "auto" takes what is there.
        check_files: whether to look at each image: that it exists, and has the width and height that are stated.

    Returns:
        A data set with the columns `name`; and with an entry for each view, in the order of the file (of COLMAP: of the
        names), `file_path` (absolute), `width` and `height`, `intrinsics` (fx, fy, cx, cy in pixels) and
        `camera_to_world` (4 × 4, OpenCV).

    Raises:
        FileNotFoundError: for a path or an image that is not there.
        ValueError: for files that cannot be read, with their scene; for distorted cameras and impossible poses.
        ImportError: without the package datasets.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise ImportError("load_scenes needs the package datasets: pip install 'hf-ttt[train]'") from error
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format={format!r} is not one of 'auto', {', '.join(map(repr, FORMATS))}")
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r} does not exist")
    found = list(_find(path, FORMATS if format == "auto" else (format,)))
    if not found:
        kinds = ", ".join(name for kind, names in SCENE_FILES.items() if format in ("auto", kind) for name in names)
        raise ValueError(
            f"path={str(path)!r} holds no scene (looked for {kinds}, here and in its folders; *.json here)"
        )
    return Dataset.from_list([_row(views, check_files) for views in found])


# ---- which files ----


def _find(path: Path, formats: Sequence[str]) -> Iterator[_Views]:
    """The scenes of a file or folder."""
    if path.is_file():
        yield from _read_file(path, formats)
        return
    own = _scene_of(path, formats)
    scenes = [own] if own else [scene for folder in _folders(path) if (scene := _scene_of(folder, formats))]
    for folder, kind, file in scenes:
        yield _read_scene(kind, file, folder.name)
    if not scenes and {"json", "nerf"} & set(formats):
        for file in sorted(path.glob("*.json")):
            yield from _read_file(file, formats)


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir())


def _scene_of(folder: Path, formats: Sequence[str]) -> tuple[Path, str, Path] | None:
    for kind in formats:
        for name in SCENE_FILES[kind]:
            if (folder / name).is_file():
                return folder, kind, folder / name
    if "colmap" in formats:
        for name in SCENE_FILES["colmap"]:
            if (folder / name).with_suffix(".bin").is_file():
                raise ValueError(
                    f"{(folder / name).with_suffix('.bin')} is binary; convert it to text: colmap model_converter "
                    "--output_type TXT"
                )
    return None


def _read_file(file: Path, formats: Sequence[str]) -> Iterator[_Views]:
    """The scenes of a file: itself, or those whose paths it lists."""
    if file.suffix == ".txt" and "colmap" in formats:
        yield _read_scene("colmap", file.with_name("cameras.txt"), file.parent.name)
        return
    content = _read_json(file)
    if _is_list_of_paths(content):
        for entry in content:
            scene = file.parent / entry
            if not scene.is_file():
                raise FileNotFoundError(f"{file} lists {entry!r}, which is not there (relative to its folder)")
            if scene.suffix == ".json" and _is_list_of_paths(_read_json(scene)):
                raise ValueError(f"{file} lists {entry!r}, which is a list of paths itself; expected a scene's file")
            yield from _read_file(scene, formats)
        return
    kind = "nerf" if isinstance(content, dict) else "json"
    if kind not in formats:
        raise ValueError(f"{file} is not of format {', '.join(map(repr, formats))} but looks like {kind!r}")
    yield _read_scene(kind, file, file.parent.name if file.name in SCENE_FILES[kind] else file.stem)


def _is_list_of_paths(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(entry, str) for entry in content)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error


def _read_scene(kind: str, file: Path, name: str) -> _Views:
    views = {"json": _read_published, "colmap": _read_colmap, "nerf": _read_nerf}[kind](file, name)
    if not views.files:
        raise ValueError(f"{views.label} has no views")
    return views


# ---- the three formats ----


def _field(frame: Any, name: str, label: str, i: int) -> Any:
    if not isinstance(frame, dict) or name not in frame:
        raise ValueError(f"{label} has no {name!r} in view {i}")
    return frame[name]


def _image_path(folder: Path, frame: Any, label: str, i: int) -> Path:
    name = _field(frame, "file_path", label, i)
    if not isinstance(name, str):
        raise ValueError(f"{label} has file_path={name!r} in view {i}; expected the path of an image")
    return folder / name


def _side(value: Any, name: str, label: str, i: int) -> int:
    """A width or height in pixels; some files have 640.0."""
    if not isinstance(value, int | float) or not float(value).is_integer() or value < 1:
        raise ValueError(f"{label} has {name}={value!r} in view {i}; expected a number of pixels")
    return int(value)


def _read_published(file: Path, name: str) -> _Views:
    frames = _read_json(file)
    label = f"scene {name!r} ({file})"
    if not isinstance(frames, list):
        raise ValueError(f"{label} is a {type(frames).__name__}; expected a list of views, or of paths of scene files")
    numbers = [[_field(f, key, label, i) for key in ("w", "h", "fx", "fy", "cx", "cy")] for i, f in enumerate(frames)]
    return _Views(
        name,
        file,
        [_image_path(file.parent, frame, label, i) for i, frame in enumerate(frames)],
        [(_side(row[0], "w", label, i), _side(row[1], "h", label, i)) for i, row in enumerate(numbers)],
        [row[2:] for row in numbers],
        [_field(frame, "w2c", label, i) for i, frame in enumerate(frames)],
        world_to_camera=True,
    )


def _read_nerf(file: Path, name: str) -> _Views:
    content, label = _read_json(file), f"scene {name!r} ({file})"
    frames = content.get("frames") if isinstance(content, dict) else None
    if not isinstance(frames, list):
        raise ValueError(f"{label} has no list 'frames'")
    files = [_with_suffix(_image_path(file.parent, frame, label, i)) for i, frame in enumerate(frames)]
    settings = [{**content, **frame} for frame in frames]  # a view's own camera wins
    sizes = [_nerf_size(fields, image, label, i) for i, (fields, image) in enumerate(zip(settings, files, strict=True))]
    return _Views(
        name,
        file,
        files,
        sizes,
        [
            _nerf_intrinsics(fields, size, label, i)
            for i, (fields, size) in enumerate(zip(settings, sizes, strict=True))
        ],
        [_field(frame, "transform_matrix", label, i) for i, frame in enumerate(frames)],
        world_to_camera=False,
        convention="opengl",
    )


def _with_suffix(image: Path) -> Path:
    """The image that a path without its suffix means."""
    if image.suffix.lower() in SUFFIXES or image.exists():
        return image
    there = [image.with_name(image.name + suffix) for suffix in SUFFIXES]
    return next((candidate for candidate in there if candidate.exists()), there[0])


def _nerf_size(fields: dict[str, Any], image: Path, label: str, i: int) -> tuple[int, int]:
    if "w" in fields and "h" in fields:
        return _side(fields["w"], "w", label, i), _side(fields["h"], "h", label, i)
    return _image_size(image, label)


def _nerf_intrinsics(fields: dict[str, Any], size: tuple[int, int], label: str, i: int) -> list[float]:
    """fx, fy, cx, cy of `fl_x`, `fl_y`, `cx`, `cy` or of the angles of view, in radians."""
    distorted = {name: fields[name] for name in (*DISTORTION, "is_fisheye") if fields.get(name)}
    model = str(fields.get("camera_model", "PINHOLE")).upper()
    if distorted or model not in ("PINHOLE", "SIMPLE_PINHOLE", "OPENCV"):
        found = ", ".join(f"{key}={value}" for key, value in distorted.items()) or f"camera_model={model}"
        raise ValueError(f"{label} has distorted cameras ({found} in view {i}): undistort the images first")
    focal: list[float | None] = [fields.get("fl_x"), fields.get("fl_y")]
    for axis, (side, angle) in enumerate(zip(size, ("camera_angle_x", "camera_angle_y"), strict=True)):
        if focal[axis] is None and angle in fields:
            if not isinstance(fields[angle], int | float) or not 0 < fields[angle] < math.pi:
                raise ValueError(f"{label} has {angle}={fields[angle]!r} for view {i}; expected radians below π")
            focal[axis] = side / (2 * math.tan(fields[angle] / 2))
    fx, fy = focal[0] or focal[1], focal[1] or focal[0]
    if fx is None or fy is None:
        raise ValueError(f"{label} has neither 'fl_x' nor 'camera_angle_x' for view {i}")
    return [fx, fy, fields.get("cx", size[0] / 2), fields.get("cy", size[1] / 2)]


def _read_colmap(file: Path, name: str) -> _Views:
    label, cameras = f"scene {name!r} ({file})", _colmap_cameras(file, f"scene {name!r} ({file})")
    images = file.with_name("images.txt")
    if not images.is_file():
        raise FileNotFoundError(f"{label} has no images.txt beside it")
    lines = [line.strip() for line in _lines(images) if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    entries = []
    for number, line in enumerate(lines[::2]):  # the lines between hold points, and may be empty
        fields = line.split(maxsplit=9)
        try:
            entries.append((fields[9], [float(value) for value in fields[1:8]], cameras[fields[8]]))
        except (IndexError, ValueError, KeyError) as error:
            raise ValueError(
                f"scene {name!r} ({images}) has {line!r} for image {number}; expected IMAGE_ID, QW, QX, QY, QZ, TX, "
                "TY, TZ, CAMERA_ID of cameras.txt, NAME, followed by a line of points"
            ) from error
    entries.sort(key=lambda entry: entry[0])
    folder = _colmap_images(file.parent, [entry[0] for entry in entries])
    return _Views(
        name,
        images,
        [folder / entry[0] for entry in entries],
        [entry[2][0] for entry in entries],
        [entry[2][1] for entry in entries],
        [_colmap_pose(entry[1]) for entry in entries],
        world_to_camera=True,
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable text: {error}") from error


def _colmap_cameras(file: Path, label: str) -> dict[str, tuple[tuple[int, int], list[float]]]:
    """Of each camera's id, its width and height, and its intrinsics."""
    cameras = {}
    for line in _lines(file):
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        try:
            identity, model, width, height = fields[0], fields[1], int(fields[2]), int(fields[3])
            numbers = [float(value) for value in fields[4:]]
        except (IndexError, ValueError) as error:
            raise ValueError(f"{label} has {line!r}; expected CAMERA_ID, MODEL, WIDTH, HEIGHT, PARAMS") from error
        counts = {"PINHOLE": 4, "SIMPLE_PINHOLE": 3}
        if model not in counts:
            raise ValueError(
                f"{label} has a camera of model {model}, whose rays are distorted: undistort the images first (colmap "
                "image_undistorter), which leaves PINHOLE cameras"
            )
        if len(numbers) != counts[model]:
            raise ValueError(f"{label} has {line!r}, with {len(numbers)} parameters; {model} has {counts[model]}")
        cameras[identity] = ((width, height), numbers if model == "PINHOLE" else numbers[:1] + numbers)
    return cameras


def _colmap_images(model: Path, names: Sequence[str]) -> Path:
    """The folder that holds a model's images."""
    candidates = [folder / "images" for folder in (model, *model.parents[:2])]
    return next((folder for folder in candidates if names and (folder / names[0]).exists()), candidates[0])


def _colmap_pose(numbers: Sequence[float]) -> list[list[float]]:
    """World-to-camera [3, 4] of a quaternion (w, x, y, z) and a translation."""
    length = math.sqrt(sum(value * value for value in numbers[:4]))
    w, x, y, z = (value / length for value in numbers[:4]) if length else (math.nan,) * 4
    return [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), numbers[4]],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x), numbers[5]],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y), numbers[6]],
    ]


# ---- rows ----


def _open(image: Path | str, label: str) -> Any:
    """An image, of which only the header is read."""
    from PIL import Image, UnidentifiedImageError

    if not Path(image).is_file():
        raise FileNotFoundError(f"{label} names the image {image}, which is not there")
    try:
        return Image.open(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{label} names {image}, which is not an image that Pillow reads") from error


def _image_size(image: Path, label: str) -> tuple[int, int]:
    with _open(image, label) as opened:
        return opened.size


def _check_size(image: Path | str, came: tuple[int, int], stated: tuple[int, int], label: str) -> None:
    if came != stated:
        raise ValueError(
            f"{label} states {stated[0]} × {stated[1]} (width × height) for {image}, which is {came[0]} × {came[1]}: "
            "intrinsics are for the stated size; scale them with the image"
        )


def _row(views: _Views, check_files: bool) -> dict[str, Any]:
    count, label = len(views.files), views.label
    intrinsics = read_intrinsics(f"intrinsics of {label}", views.intrinsics, (count,))
    name = "w2c" if views.world_to_camera else "transform_matrix"
    poses = read_poses(
        f"{name} of {label}", views.poses, world_to_camera=views.world_to_camera, convention=views.convention
    )
    for image, size in zip(views.files, views.sizes, strict=True) if check_files else ():
        _check_size(image, _image_size(image, label), size, label)
    return {
        "name": views.name,
        "file_path": [os.fspath(image) for image in views.files],
        "width": [size[0] for size in views.sizes],
        "height": [size[1] for size in views.sizes],
        "intrinsics": intrinsics.tolist(),
        "camera_to_world": poses.tolist(),
    }


# ---- training ----


def sample_views(
    num_views: int,
    num_input: int,
    num_target: int,
    rng: random.Random,
    frame_gap: tuple[int, int] | None = None,
    name: str = "",
) -> tuple[list[int], list[int]]:
    """Views of a scene for a step of training: inputs, and targets that are none of them.

    Without `frame_gap` all are drawn at random. With it, for videos, the first and the last input are at a distance
    that is drawn from it (as far as the video goes), and the other inputs and all targets lie between them.

    Args:
        num_views: of the scene.
        num_input, num_target: how many to draw.
        rng: the source of randomness.
        frame_gap: the least and the greatest distance, in frames.
        name: of the scene, for messages.

    Returns:
        Indices of the inputs and of the targets; with `frame_gap` the inputs are in order.

    Raises:
        ValueError: if there are too few views, or no gap holds as many.
    """
    gaps = _check_counts(num_views, num_input, num_target, frame_gap, name)
    if gaps is None:
        drawn = rng.sample(range(num_views), num_input + num_target)
        return drawn[:num_input], drawn[num_input:]
    gap = rng.choice(gaps)
    first = rng.randrange(num_views - gap)
    drawn = rng.sample(range(first + 1, first + gap), num_input + num_target - 2)
    return sorted([first, first + gap, *drawn[num_target:]]), drawn[:num_target]


def _check_counts(
    num_views: int, num_input: int, num_target: int, frame_gap: tuple[int, int] | None, name: str
) -> range | None:
    """The gaps to draw from, if any."""
    wanted = num_input + num_target
    if num_input < 1 or num_target < 1:
        raise ValueError(f"num_input={num_input} and num_target={num_target} must be at least 1")
    if num_views < wanted:
        raise ValueError(
            f"scene {name!r} has {num_views} views; {num_input} inputs and {num_target} other targets are {wanted}"
        )
    if frame_gap is None:
        return None
    gaps = range(max(frame_gap[0], wanted - 1), min(frame_gap[1], num_views - 1) + 1)
    if not gaps or num_input < 2:
        raise ValueError(
            f"frame_gap={frame_gap} does not fit scene {name!r} of {num_views} views, {num_input} inputs and "
            f"{num_target} targets: a gap from {wanted - 1} to {num_views - 1} does, and 2 inputs or more, its ends "
            "among them"
        )
    return gaps


class SceneDataset(TorchDataset):
    """Samples of scenes for `Trainer`: arguments of `LaCTNVSModel.forward` for one scene, with target images.

    `TrainingArguments(label_names=["target_pixel_values"])` makes `Trainer` evaluate the loss, and metrics.

    Args:
        scenes: rows of `load_scenes`.
        processor: `LaCTNVSProcessor`, whose size, background and normalisation count.
        num_input, num_target, frame_gap: as in `sample_views`; they can be changed while training goes on.
        seed: None draws other views each time, from torch's generator; a number gives a scene the same views always,
            for evaluation.

    Raises:
        ValueError: if a scene has too few views; for a stream, whose scenes have no numbers.
    """

    def __init__(
        self,
        scenes: Dataset | Sequence[dict[str, Any]],
        processor: Any,
        num_input: int,
        num_target: int,
        frame_gap: tuple[int, int] | None = None,
        seed: int | None = None,
    ):
        if not hasattr(scenes, "__len__"):
            raise ValueError(f"scenes is a {type(scenes).__name__}, which has no rows by number: pass list(scenes)")
        self.scenes, self.processor, self.seed = scenes, processor, seed
        self.num_input, self.num_target, self.frame_gap = num_input, num_target, frame_gap
        columns = scenes.select_columns(["name", "file_path"]) if hasattr(scenes, "select_columns") else scenes
        for scene in columns:
            _check_counts(len(scene["file_path"]), num_input, num_target, frame_gap, scene["name"])

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tensors as the model takes them, without the dimension of the batch."""
        scene = self.scenes[index]
        rng = random.Random(torch.randint(2**62, ()).item() if self.seed is None else f"{self.seed} {index}")
        counts = len(scene["file_path"]), self.num_input, self.num_target
        return self.sample(scene, *sample_views(*counts, rng, self.frame_gap, scene["name"]))

    def sample(self, scene: dict[str, Any], inputs: Sequence[int], targets: Sequence[int]) -> dict[str, Tensor]:
        """The same, for chosen views of a row of `load_scenes`."""
        views = [self._views(scene, chosen) for chosen in (inputs, targets)]
        arguments = {**views[0], **{f"target_{key}": value for key, value in views[1].items()}}
        return {key: value[0] for key, value in self.processor(**arguments, camera_convention="opencv").items()}

    @staticmethod
    def _views(scene: dict[str, Any], chosen: Sequence[int]) -> dict[str, list[Any]]:
        """What the processor takes of some views."""
        images, label = [], f"scene {scene['name']!r}"
        for i in chosen:
            file = scene["file_path"][i]
            with _open(file, label) as image:
                _check_size(file, image.size, (scene["width"][i], scene["height"][i]), label)
                try:
                    image.load()
                except OSError as error:
                    raise ValueError(f"{label} has the image {file}, which cannot be read: {error}") from error
            images.append(image)
        cameras = {key: [scene[key][i] for i in chosen] for key in ("intrinsics", "camera_to_world")}
        return {"images": images, **cameras}


def collate_scenes(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of the samples of a `SceneDataset`, for `Trainer(data_collator=collate_scenes)`.

    Raises:
        ValueError: for samples of different numbers of views or sizes.
    """
    batch = {}
    for key in samples[0]:
        shapes = sorted({tuple(sample[key].shape) for sample in samples})
        if len(shapes) > 1:
            raise ValueError(f"{key} has the shapes {shapes} in a batch; expected one number of views and one size")
        batch[key] = torch.stack([sample[key] for sample in samples])
    return batch


__all__ = ["SceneDataset", "collate_scenes", "load_scenes", "sample_views"]
