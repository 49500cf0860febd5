# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Scenes to try novel-view synthesis on: coloured solids on a floor, rendered on the spot.

They are written in the published format, so that `hf_ttt.data.load_scenes` reads them like any others:

    python examples/nvs_solids.py --output_dir solids --count 8 --views 24 --size 64

Needs `pip install hf-ttt[nvs]` for pybullet's CPU renderer; `write_scenes` takes any other.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

KINDS = ("sphere", "box", "cylinder")
BACKGROUND = (1.0, 1.0, 1.0)
FLOOR_HALF_WIDTH = 0.35
FLOOR_HALF_THICKNESS = 0.012  # its top is at z = 0
CAMERA_DISTANCE = 1.15  # about 1, so that no part of a ray (origin, direction, moment) outweighs the colours
CAMERA_ELEVATIONS = (25.0, 65.0)  # degrees above the floor
LOOK_AT = (0.0, 0.0, 0.05)
FOCAL_LENGTH = 1.2  # in widths of the image
LIGHT = (0.4, 0.25, 0.88)  # where it comes from
SUPERSAMPLING = 2  # rays or pixels of the renderer along a side of an image's pixel
TRIES = 100  # to place a solid beside the others
SCENE_FILE = "opencv_cameras.json"
SETTINGS_FILE = "solids.json"

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Solid:
    """A solid, turned about the vertical axis only.

    Attributes:
        kind: its shape.
        centre: x, y, z, with z upwards.
        half_sizes: half extents along its own axes: of a sphere three times the radius, of a cylinder the radius twice
            and half the height.
        turn: radians about z, counter-clockwise.
        colour: red, green and blue in [0, 1].
    """

    kind: Literal["sphere", "box", "cylinder"]
    centre: tuple[float, float, float]
    half_sizes: tuple[float, float, float]
    turn: float
    colour: Colour


@dataclass(frozen=True)
class SolidScene:
    """Solids on a square floor, itself a box, before a white background."""

    solids: tuple[Solid, ...]
    floor_colour: Colour

    @property
    def all_solids(self) -> tuple[Solid, ...]:
        """The solids, and the floor."""
        width, thickness = FLOOR_HALF_WIDTH, FLOOR_HALF_THICKNESS
        floor = Solid("box", (0.0, 0.0, -thickness), (width, width, thickness), 0.0, self.floor_colour)
        return (*self.solids, floor)


# (scene, camera_to_world [V, 4, 4], intrinsics [V, 4], (height, width)) → uint8 [V, height, width, 3]
Renderer = Callable[[SolidScene, np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]


def random_scene(rng: random.Random) -> SolidScene:
    """Two or three solids of clear colours that stand on a floor of a paler one and do not overlap."""
    solids: list[Solid] = []
    for _ in range(rng.randint(2, 3)):
        for _ in range(TRIES):
            solid = random_solid(rng)
            if all(math.dist(solid.centre[:2], o.centre[:2]) > reach(solid) + reach(o) for o in solids):
                solids.append(solid)
                break
    return SolidScene(tuple(solids), colour_of_any_hue(rng, 0.4, 0.85))


def random_solid(rng: random.Random) -> Solid:
    """A solid somewhere on the floor."""
    kind = rng.choice(KINDS)
    radius, height = rng.uniform(0.075, 0.12), rng.uniform(0.075, 0.135)
    half_sizes = {
        "sphere": (radius, radius, radius),
        "box": (rng.uniform(0.066, 0.102), rng.uniform(0.066, 0.102), height),
        "cylinder": (radius, radius, height),
    }[kind]
    place = tuple(rng.uniform(-0.2, 0.2) for _ in range(2))
    colour = colour_of_any_hue(rng, 0.1, 0.9)
    return Solid(kind, (*place, half_sizes[2]), half_sizes, rng.uniform(0, math.pi), colour)


def reach(solid: Solid) -> float:
    """How far a solid reaches from its axis."""
    return math.hypot(*solid.half_sizes[:2]) if solid.kind == "box" else solid.half_sizes[0]


def colour_of_any_hue(rng: random.Random, low: float, high: float) -> Colour:
    """A colour of any hue, never grey: its least channel is `low` and its greatest `high`."""
    hue = rng.uniform(0, 6)
    channels = (min(max(abs((hue + shift) % 6 - 3) - 1, 0.0), 1.0) for shift in (0, 4, 2))
    return tuple(low + (high - low) * channel for channel in channels)  # type: ignore[return-value]


def look_at(eye: Sequence[float], target: Sequence[float], up: Sequence[float] = (0, 0, 1)) -> np.ndarray:
    """The pose [4, 4], camera to world, of a camera at `eye` that looks at `target` (OpenCV: x right, y down, z ahead).

    Args:
        eye, target: points [3].
        up: the direction [3] that is upwards in the image.

    Raises:
        ValueError: if the camera looks along `up`, or at itself.
    """
    eye, forward = np.asarray(eye, float), np.asarray(target, float) - np.asarray(eye, float)
    right = np.cross(forward, np.asarray(up, float))
    if np.linalg.norm(right) < 1e-9 * max(np.linalg.norm(forward), 1.0):
        raise ValueError(f"a camera at {eye.tolist()} that looks at {list(target)} looks along up={list(up)}")
    forward, right = forward / np.linalg.norm(forward), right / np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(forward, right), forward], 1)
    pose[:3, 3] = eye
    return pose


def random_cameras(rng: random.Random, views: int) -> np.ndarray:
    """Poses [views, 4, 4] on a dome over the floor, spread evenly over its azimuths and its area."""
    first, (low, high) = rng.uniform(0, 2 * math.pi), (math.sin(math.radians(e)) for e in CAMERA_ELEVATIONS)
    azimuths = [first + 2 * math.pi * (i + rng.random()) / views for i in range(views)]
    rng.shuffle(azimuths)
    poses = []
    for azimuth in azimuths:
        height = rng.uniform(low, high)
        radius = math.sqrt(1 - height**2)
        away = np.array([radius * math.cos(azimuth), radius * math.sin(azimuth), height])
        poses.append(look_at(LOOK_AT + CAMERA_DISTANCE * away, LOOK_AT))
    return np.stack(poses)


def pybullet_module() -> Any:
    """pybullet.

    Raises:
        ImportError: where it is not installed, with what to do.
    """
    try:
        import pybullet
    except ImportError as error:
        raise ImportError(
            "rendering the solids needs pybullet: pip install hf-ttt[nvs]; or give scenes of your own (--scenes)"
        ) from error
    return pybullet


def render_pybullet(
    scene: SolidScene, camera_to_world: np.ndarray, intrinsics: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """Views [V, height, width, 3] (uint8) of a scene by pybullet's TinyRenderer, on the CPU and without shadows.

    Args:
        scene: the solids.
        camera_to_world: [V, 4, 4], OpenCV.
        intrinsics: [V, 4] with fx, fy, cx, cy in pixels.
        size: height and width.

    Raises:
        ImportError: without pybullet.
    """
    bullet = pybullet_module()
    client = bullet.connect(bullet.DIRECT)
    try:
        for solid in scene.all_solids:
            add_to_pybullet(bullet, client, solid)
        views = zip(camera_to_world, intrinsics, strict=True)
        return np.stack([pybullet_view(bullet, client, pose, camera, size) for pose, camera in views])
    finally:
        bullet.disconnect(client)


def add_to_pybullet(bullet: Any, client: int, solid: Solid) -> None:
    """Show a solid in a pybullet client."""
    x, _, z = solid.half_sizes
    shape = {
        "sphere": {"shapeType": bullet.GEOM_SPHERE, "radius": x},
        "box": {"shapeType": bullet.GEOM_BOX, "halfExtents": solid.half_sizes},
        "cylinder": {"shapeType": bullet.GEOM_CYLINDER, "radius": x, "length": 2 * z},
    }[solid.kind]
    colour = [*solid.colour, 1.0]
    visual = bullet.createVisualShape(rgbaColor=colour, specularColor=[0, 0, 0], physicsClientId=client, **shape)
    turn = [0.0, 0.0, math.sin(solid.turn / 2), math.cos(solid.turn / 2)]
    bullet.createMultiBody(0, -1, visual, solid.centre, turn, physicsClientId=client)


def pybullet_view(
    bullet: Any, client: int, camera_to_world: np.ndarray, intrinsics: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """One view [height, width, 3] (uint8)."""
    height, width = size
    fx, fy, cx, cy = intrinsics
    near, far = 0.05, 10.0
    to_camera = np.diag([1.0, -1.0, -1.0, 1.0]) @ np.linalg.inv(camera_to_world)  # OpenGL looks along −z, y upwards
    projection = np.array(
        [
            [2 * fx / width, 0, 1 - 2 * cx / width, 0],
            [0, 2 * fy / height, 2 * cy / height - 1, 0],
            [0, 0, -(far + near) / (far - near), -2 * far * near / (far - near)],
            [0, 0, -1, 0],
        ]
    )
    _, _, pixels, _, _ = bullet.getCameraImage(
        width * SUPERSAMPLING,
        height * SUPERSAMPLING,
        to_camera.T.ravel().tolist(),  # column by column
        projection.T.ravel().tolist(),
        lightDirection=LIGHT,
        shadow=0,
        renderer=bullet.ER_TINY_RENDERER,
        physicsClientId=client,
    )
    pixels = np.asarray(pixels, np.float32).reshape(height, SUPERSAMPLING, width, SUPERSAMPLING, 4)
    return pixels.mean((1, 3))[..., :3].round().astype(np.uint8)


def write_scenes(
    folder: str | Path, count: int, views: int, size: int, seed: int = 0, render: Renderer = render_pybullet
) -> Path:
    """Render scenes of solids into a folder, in the published format. Scenes that are there already are kept.

    Args:
        folder: gets a folder for each scene, with `opencv_cameras.json` and `images`.
        count: number of scenes.
        views: of each scene.
        size: side of the images in pixels.
        seed: the same seed gives the same scenes, the first of which do not depend on `count`.
        render: the renderer.

    Returns:
        The folder.

    Raises:
        ValueError: for numbers below 1, and for a folder that holds scenes made with other arguments.
        ImportError: without pybullet, where it is the renderer.
    """
    folder = Path(folder)
    settings = {"count": count, "views": views, "size": size, "seed": seed}
    for name in ("count", "views", "size"):
        if settings[name] < 1:
            raise ValueError(f"{name}={settings[name]} must be at least 1")
    done = folder / SETTINGS_FILE
    if done.is_file():
        before = json.loads(done.read_text(encoding="utf-8"))
        if before != settings:
            raise ValueError(f"folder {str(folder)!r} holds scenes of {before}, not of {settings}: give another folder")
        return folder
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        write_scene(folder / f"solids-{i:04d}", random_scene(rng), random_cameras(rng, views), size, render)
    done.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_scene(folder: Path, scene: SolidScene, camera_to_world: np.ndarray, size: int, render: Renderer) -> None:
    """Render a scene into its folder, with what is in it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    focal, centre = FOCAL_LENGTH * size, size / 2
    intrinsics = np.tile([focal, focal, centre, centre], (len(camera_to_world), 1))
    frames = []
    for i, pixels in enumerate(render(scene, camera_to_world, intrinsics, (size, size))):
        file = f"images/{i:03d}.png"
        Image.fromarray(pixels).save(folder / file)
        camera = {"w": size, "h": size, "fx": focal, "fy": focal, "cx": centre, "cy": centre}
        frames.append({**camera, "w2c": np.linalg.inv(camera_to_world[i]).tolist(), "file_path": file})
    (folder / SCENE_FILE).write_text(json.dumps(frames), encoding="utf-8")
    (folder / "contents.json").write_text(json.dumps(asdict(scene), indent=1), encoding="utf-8")


def main(args: list[str] | None = None) -> None:
    """Write scenes; `args` as on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--output_dir", required=True, help="folder for the scenes")
    parser.add_argument("--count", type=int, default=8, help="number of scenes")
    parser.add_argument("--views", type=int, default=24, help="views of each scene")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other scenes")
    parsed = parser.parse_args(args)
    folder = write_scenes(parsed.output_dir, parsed.count, parsed.views, parsed.size, parsed.seed)
    print(f"{parsed.count} scenes of {parsed.views} views in {folder}")


if __name__ == "__main__":
    main()
