# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A renderer of solids, by intersecting rays with them, for tests of novel views: no package but numpy is needed."""

import math

import numpy as np

BACKGROUND = 1.0
AMBIENT, DIFFUSE = 0.6, 0.4
LIGHT = np.array([0.4, 0.25, 0.88]) / np.linalg.norm([0.4, 0.25, 0.88])


def ray_directions(pose: np.ndarray, intrinsics: np.ndarray, size: tuple[int, int], fine: int) -> np.ndarray:
    """Directions [fine · height · fine · width, 3] in the world, through the centres of pixels or of parts of them."""
    height, width = size
    fx, fy, cx, cy = intrinsics
    rows, columns = ((np.arange(n * fine) + 0.5) / fine for n in (height, width))
    x, y = np.meshgrid((columns - cx) / fx, (rows - cy) / fy)
    directions = np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3) @ pose[:3, :3].T
    return directions / np.linalg.norm(directions, axis=1, keepdims=True)


def slab(origin: np.ndarray, directions: np.ndarray, half_sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Where rays enter and leave |x_i| ≤ half_sizes_i, and through which axis they enter."""
    with np.errstate(divide="ignore"):
        inverse = 1 / directions
    near = (-np.sign(inverse) * half_sizes - origin) * inverse
    far = (np.sign(inverse) * half_sizes - origin) * inverse
    return near.max(1), far.min(1), near.argmax(1)


def round_side(origin: np.ndarray, directions: np.ndarray, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Where rays enter and leave |x| ≤ radius, in any number of dimensions; infinite where they miss it."""
    a = (directions**2).sum(1)
    b = directions @ origin
    root = b**2 - a * (origin @ origin - radius**2)
    hit = root > 0
    root = np.sqrt(np.where(hit, root, 0))
    return np.where(hit, (-b - root) / a, np.inf), np.where(hit, (-b + root) / a, -np.inf)


def intersect(solid, origin: np.ndarray, directions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances [N] to a solid along rays, infinite where they miss it, and the normals [N, 3] there."""
    c, s = math.cos(solid.turn), math.sin(solid.turn)
    turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])  # its axes to the world's
    origin, directions = (origin - np.array(solid.centre)) @ turn, directions @ turn
    half_sizes = np.array(solid.half_sizes)
    if solid.kind == "sphere":
        near, far = round_side(origin, directions, half_sizes[0])
        normals = origin + np.where(np.isfinite(near), near, 0)[:, None] * directions
    elif solid.kind == "box":
        near, far, axis = slab(origin, directions, half_sizes)
        normals = np.eye(3)[axis] * -np.sign(directions[np.arange(len(axis)), axis])[:, None]
    else:
        side, end_of_side = round_side(origin[:2], directions[:, :2], half_sizes[0])
        top, end_of_top, _ = slab(origin[2:], directions[:, 2:], half_sizes[2:])
        near, far = np.maximum(side, top), np.minimum(end_of_side, end_of_top)
        normals = origin + np.where(np.isfinite(near), near, 0)[:, None] * directions
        normals[:, 2] = 0
        normals[top > side] = [0, 0, 1]
        normals[(top > side) & (directions[:, 2] > 0)] *= -1
    normals = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    return np.where((near < far) & (near > 0), near, np.inf), normals @ turn.T


def first_hits(scene, pose, intrinsics, size, fine: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Which of `scene.all_solids` each ray sees first [fine · height, fine · width] (−1: none), and the normal."""
    directions = ray_directions(pose, intrinsics, size, fine)
    distances, normals = zip(*(intersect(solid, pose[:3, 3], directions) for solid in scene.all_solids), strict=True)
    seen = np.argmin(distances, 0)
    nearest = np.min(distances, 0)
    normal = np.stack(normals)[seen, np.arange(len(seen))]
    shape = (fine * size[0], fine * size[1])
    return np.where(np.isinf(nearest), -1, seen).reshape(shape), normal.reshape(*shape, 3)


def render(scene, camera_to_world, intrinsics, size, fine: int = 2) -> np.ndarray:
    """Views [V, height, width, 3] (uint8) of a scene of `nvs_solids`, as `nvs_solids.write_scenes` takes a renderer."""
    height, width = size
    colours = np.array([solid.colour for solid in scene.all_solids] + [[BACKGROUND] * 3])
    views = []
    for pose, camera in zip(camera_to_world, intrinsics, strict=True):
        seen, normals = first_hits(scene, pose, camera, size, fine)
        light = AMBIENT + DIFFUSE * np.maximum(normals @ LIGHT, 0)
        pixels = colours[seen] * np.where(seen < 0, 1, light)[..., None]
        pixels = pixels.reshape(height, fine, width, fine, 3).mean((1, 3))
        views.append((pixels * 255).round().astype(np.uint8))
    return np.stack(views)
