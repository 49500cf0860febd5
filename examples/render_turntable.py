# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Go around a scene: a LaCT-NVS model reconstructs it from some of its images and renders it from a circle of cameras.

    python examples/render_turntable.py --model my-nvs --scene scenes/chair --output_dir turntable
    python examples/render_turntable.py --model my-nvs --scene scenes/chair --save_scene chair.safetensors --size 64 96
    python examples/render_turntable.py --model my-nvs --scene chair.safetensors --frames 48 --elevation 40

Writes `turntable.gif`, `contact_sheet.png` and, where imageio finds ffmpeg (`pip install imageio imageio-ffmpeg`),
`turntable.mp4`. Needs `pip install hf-ttt[examples]`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvs_solids import look_at
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from transformers import AutoModel, AutoProcessor

from hf_ttt import LaCTNVSScene
from hf_ttt.data import load_scenes

VIEWS_AT_ONCE = 8
SHEET_FRAMES = 8
GAP = 2  # pixels between the images of a sheet
HEADING = 12  # pixels


@dataclass
class Orbit:
    """Cameras on a circle that look at its middle.

    Attributes:
        centre: what they look at, in the world.
        up: the axis of the circle, of length 1.
        radius: distance of the cameras from the centre.
        elevation: degrees of the cameras above the plane through the centre.
        focal_length: in multiples of the shorter side of an image.
    """

    centre: list[float]
    up: list[float]
    radius: float
    elevation: float
    focal_length: float

    def cameras(self, frames: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Intrinsics [1, frames, 4] for images of this height and width, and poses [1, frames, 4, 4] (OpenCV)."""
        up, centre = np.array(self.up), np.array(self.centre)
        first = np.cross(up, np.eye(3)[np.argmin(np.abs(up))])
        first = first / np.linalg.norm(first)
        second = np.cross(up, first)
        elevation = math.radians(self.elevation)
        poses = []
        for turn in np.arange(frames) * (2 * math.pi / frames):
            level = math.cos(turn) * first + math.sin(turn) * second
            away = math.cos(elevation) * level + math.sin(elevation) * up
            poses.append(look_at(centre + self.radius * away, centre, up))
        height, width = size
        focal = self.focal_length * min(size)
        intrinsics = torch.tensor([focal, focal, width / 2, height / 2]).expand(1, frames, 4)
        return intrinsics, torch.tensor(np.stack(poses), dtype=torch.float32)[None]


def fit_orbit(camera_to_world: np.ndarray, intrinsics: np.ndarray, size: tuple[int, int]) -> Orbit:
    """The orbit through the midst of cameras around something.

    Its centre is the point nearest to all of their axes, or, where these are parallel, ahead of their mean; upwards is
    the mean of what is upwards in their images.

    Args:
        camera_to_world: [V, 4, 4], OpenCV.
        intrinsics: [V, 4] with fx, fy, cx, cy in pixels.
        size: height and width of the images, in these pixels.
    """
    places, ahead = camera_to_world[:, :3, 3], camera_to_world[:, :3, 2]
    across = np.eye(3) - ahead[:, :, None] * ahead[:, None, :]  # project onto the planes across the axes
    total = across.sum(0)
    if np.linalg.eigvalsh(total)[0] > 1e-3 * len(places):
        centre = np.linalg.solve(total, (across @ places[:, :, None]).sum(0))[:, 0]
    else:
        centre = places.mean(0) + ahead.mean(0)
    up = -camera_to_world[:, :3, 1].mean(0)
    up = up / max(np.linalg.norm(up), 1e-9)
    radius = float(np.linalg.norm(places - centre, axis=1).mean())
    heights = (places - centre) @ up / np.maximum(np.linalg.norm(places - centre, axis=1), 1e-9)
    elevation = math.degrees(math.asin(float(np.clip(heights.mean(), -1, 1))))
    focal_length = float(intrinsics[:, :2].mean() / min(size))
    return Orbit(centre.tolist(), up.tolist(), radius, elevation, focal_length)


def spread(camera_to_world: np.ndarray, count: int) -> list[int]:
    """Indices of so many cameras, each the farthest from those before it, the first being the first."""
    places = camera_to_world[:, :3, 3]
    chosen, distances = [0], np.linalg.norm(places - places[0], axis=1)
    while len(chosen) < count:
        chosen.append(int(distances.argmax()))
        distances = np.minimum(distances, np.linalg.norm(places - places[chosen[-1]], axis=1))
    return chosen


def orbit_file(scene: Path) -> Path:
    """Where the cameras of a saved scene are."""
    return scene.with_suffix(".json")


def read_images(path: Path, count: int) -> tuple[list[Image.Image], np.ndarray, np.ndarray]:
    """Some input views of the scene in a folder or file, with intrinsics [V, 4] and poses [V, 4, 4].

    Raises:
        ValueError: for a folder of several scenes, and for too few views.
    """
    scenes = load_scenes(path)
    if len(scenes) > 1:
        raise ValueError(f"--scene {str(path)!r} holds {len(scenes)} scenes, {scenes['name'][:5]} …: give one of them")
    scene = scenes[0]
    poses, intrinsics = (np.array(scene[name], float) for name in ("camera_to_world", "intrinsics"))
    if not 1 <= count <= len(poses):
        raise ValueError(f"--num_input {count} must be from 1 to {len(poses)}, the number of views of {str(path)!r}")
    chosen = spread(poses, count)
    images = []
    for i in chosen:
        with Image.open(scene["file_path"][i]) as image:
            image.load()
        images.append(image)
    return images, intrinsics[chosen], poses[chosen]


@torch.no_grad()
def reconstruct(model: Any, processor: Any, path: Path, count: int) -> tuple[LaCTNVSScene, Orbit, list[Image.Image]]:
    """The scene in a folder or file, the orbit of its cameras, and the images it was made of, as the model saw them."""
    images, intrinsics, poses = read_images(path, count)
    inputs = processor(images=images, intrinsics=intrinsics, camera_to_world=poses, camera_convention="opencv").to(
        model.device
    )
    scene = model.reconstruct(**inputs)
    orbit = fit_orbit(poses, inputs["intrinsics"][0].cpu().numpy(), tuple(inputs["pixel_values"].shape[-2:]))
    return scene, orbit, processor.post_process_novel_views(inputs["pixel_values"])[0]


@torch.no_grad()
def render_orbit(model: Any, scene: LaCTNVSScene, orbit: Orbit, frames: int, size: tuple[int, int]) -> Tensor:
    """Frames [1, frames, 3, height, width] in (0, 1) of a turn around a scene, a few at a time."""
    intrinsics, poses = (t.to(model.device) for t in orbit.cameras(frames, size))
    parts = zip(intrinsics.split(VIEWS_AT_ONCE, 1), poses.split(VIEWS_AT_ONCE, 1), strict=True)
    return torch.cat([model.render(scene, k, pose, size).float().cpu() for k, pose in parts], 1)


def contact_sheet(rows: Sequence[Sequence[Image.Image]], path: str | Path, headings: Sequence[str] = ()) -> None:
    """Write images side by side, one row under another; small ones are enlarged.

    Args:
        rows: images; those of another shape than the greatest keep theirs, within a white margin.
        path: the picture to write.
        headings: of the columns.
    """
    width, height = (max(image.size[axis] for row in rows for image in row) for axis in (0, 1))
    scale = -(-96 // max(width, height))
    width, height = width * scale, height * scale
    top = HEADING if headings else 0
    columns = max(len(row) for row in rows)
    sheet = Image.new("RGB", (columns * (width + GAP) - GAP, top + len(rows) * (height + GAP) - GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, heading in enumerate(headings):
        draw.text((i * (width + GAP) + 1, 0), heading, fill="black")
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            resized = ImageOps.pad(image, (width, height), Image.Resampling.NEAREST, color="white")
            sheet.paste(resized, (j * (width + GAP), top + i * (height + GAP)))
    sheet.save(path)


def write_video(frames: Sequence[Image.Image], path: str | Path, fps: float) -> bool:
    """Write an MP4; returns whether it was written, False where imageio or its ffmpeg is missing."""
    try:
        import imageio
        import imageio_ffmpeg  # noqa: F401  imageio writes videos through it
    except ImportError:
        print("No MP4: it needs pip install imageio imageio-ffmpeg")
        return False
    imageio.mimwrite(path, [np.asarray(frame) for frame in frames], fps=fps, macro_block_size=2)
    return True


def load_orbit(args: argparse.Namespace, default: Orbit | None) -> Orbit:
    """The orbit that was asked for; what was not said is of `default`, the input cameras'."""
    given = {name: getattr(args, name) for name in ("centre", "up", "radius", "elevation", "focal_length")}
    given = {name: value for name, value in given.items() if value is not None}
    orbit = Orbit([0, 0, 0], [0, 0, 1], 1.0, 30.0, 1.0) if default is None else default
    if default is None and not {"radius", "focal_length"} <= given.keys():
        raise ValueError(
            f"--scene {args.scene!r} has no {orbit_file(Path(args.scene)).name} beside it, which says where its "
            "cameras were: give --radius and --focal_length"
        )
    orbit = Orbit(**{**asdict(orbit), **given})
    length = float(np.linalg.norm(orbit.up))
    if not length > 0 or not orbit.radius > 0 or not orbit.focal_length > 0 or not -90 < orbit.elevation < 90:
        raise ValueError(
            f"--up {orbit.up}, --radius {orbit.radius} and --focal_length {orbit.focal_length} must not be 0 or below, "
            f"and --elevation {orbit.elevation} between -90 and 90"
        )
    return Orbit(**{**asdict(orbit), "up": [value / length for value in orbit.up]})


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    """Arguments from a list of strings (default: the command line)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="saved model, with its processor")
    parser.add_argument("--scene", required=True, help="a scene's folder or file, or a saved scene (.safetensors)")
    parser.add_argument("--output_dir", default="turntable", help="folder for what is written")
    parser.add_argument("--num_input", type=int, default=4, help="input views, as far apart as there are")
    parser.add_argument("--save_scene", help="write the reconstructed scene there (.safetensors), and its cameras")
    parser.add_argument("--frames", type=int, default=24, help="frames of a turn")
    parser.add_argument("--fps", type=float, default=12, help="frames per second")
    parser.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="default: as the input views")
    parser.add_argument("--elevation", type=float, help="of the cameras, in degrees; default: the input cameras' mean")
    parser.add_argument("--radius", type=float, help="distance from the centre; default: the input cameras' mean")
    parser.add_argument("--centre", type=float, nargs=3, metavar=("X", "Y", "Z"), help="default: where the inputs look")
    parser.add_argument("--up", type=float, nargs=3, metavar=("X", "Y", "Z"), help="default: upwards in the inputs")
    parser.add_argument("--focal_length", type=float, help="in shorter sides of the image; default: the inputs' mean")
    parsed = parser.parse_args(args)
    if parsed.frames < 1 or not parsed.fps > 0:
        raise ValueError(f"--frames {parsed.frames} and --fps {parsed.fps} must be positive")
    if parsed.save_scene is not None and Path(parsed.save_scene).suffix != ".safetensors":
        raise ValueError(f"--save_scene {parsed.save_scene!r} must end in .safetensors")
    return parsed


def load_scene(args: argparse.Namespace, model: Any, processor: Any) -> tuple[LaCTNVSScene, Orbit | None, list]:
    """The scene, the orbit of its cameras, if known, and its input views, if there."""
    path = Path(args.scene)
    if path.suffix != ".safetensors":
        return reconstruct(model, processor, path, args.num_input)
    if not path.is_file():
        raise ValueError(f"--scene: there is no file {args.scene!r}")
    cameras = orbit_file(path)
    orbit = Orbit(**json.loads(cameras.read_text(encoding="utf-8"))) if cameras.is_file() else None
    return LaCTNVSScene.load(path, device=str(model.device)), orbit, []


def main(args: list[str] | None = None) -> Path:
    """Render the turntable and return the folder; `args` as on the command line."""
    parsed = parse_arguments(args)
    model = AutoModel.from_pretrained(parsed.model).eval()
    model = model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    processor = AutoProcessor.from_pretrained(parsed.model)
    scene, known, inputs = load_scene(parsed, model, processor)
    orbit = load_orbit(parsed, known)
    size = tuple(parsed.size or (processor.size["height"], processor.size["width"]))
    frames = processor.post_process_novel_views(render_orbit(model, scene, orbit, parsed.frames, size))[0]

    folder = Path(parsed.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if parsed.save_scene is not None:
        scene.save(parsed.save_scene)
        orbit_file(Path(parsed.save_scene)).write_text(json.dumps(asdict(orbit)), encoding="utf-8")
    first, *others = frames
    first.save(folder / "turntable.gif", save_all=True, append_images=others, duration=1000 / parsed.fps, loop=0)
    shown = [frames[i] for i in range(0, len(frames), max(1, len(frames) // (2 * SHEET_FRAMES)))]
    rows = [shown[i : i + SHEET_FRAMES] for i in range(0, len(shown), SHEET_FRAMES)]
    if inputs:
        rows.insert(0, inputs[:SHEET_FRAMES])
    contact_sheet(rows, folder / "contact_sheet.png", ["input views above turntable"] if inputs else [])
    write_video(frames, folder / "turntable.mp4", parsed.fps)
    print(f"{len(frames)} frames of {size[0]} × {size[1]} (height × width) in {folder}")
    return folder


if __name__ == "__main__":
    main()
