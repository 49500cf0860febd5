# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Cameras: what users give, brought into one form and checked. All arithmetic is in float64.

Pixels: x to the right, y down; pixel (0, 0) covers [0, 1] × [0, 1], so that its centre is at (0.5, 0.5). Poses, unless
said otherwise, are as in OpenCV: the camera looks along +z, its x is to the right and its y down. In OpenGL (Blender,
NeRF) it looks along −z and y is up: the same pose with the second and third axis negated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CONVENTIONS = ("opencv", "opengl")
ORTHONORMAL = 1e-3  # greatest entry of RᵀR − 1; matrices written with four digits pass
LEAST_FOCAL = 2.0  # pixels; less is a field of view of 173° for 64 pixels, or not in pixels


class Crop(NamedTuple):
    """An image resized to height × width pixels, of which a part is kept that begins at row `top`, column `left`."""

    height: int
    width: int
    top: int
    left: int


def as_float64(name: str, value: Any) -> Tensor:
    """Numbers, arrays, tensors, or lists of them, as a float64 tensor.

    Raises:
        ValueError: where lists have entries of different shapes, or a number is not finite.
    """
    tensor = _stack(name, value)
    if not tensor.isfinite().all():
        at = (~tensor.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}{at} is {tensor[tuple(at)].item()}; cameras have finite numbers")
    return tensor


def _stack(name: str, value: Any) -> Tensor:
    if isinstance(value, list | tuple):
        parts = [_stack(name, part) for part in value]
        shapes = sorted({tuple(part.shape) for part in parts})
        if len(shapes) != 1:
            raise ValueError(f"{name} is a list with entries of shapes {shapes}; expected entries of one shape")
        return torch.stack(parts)
    try:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} holds {value!r}, which is not a number, an array or a tensor") from error


def _first(bad: Tensor) -> list[int]:
    """The place of the first True."""
    return bad.nonzero()[0].tolist()


def read_intrinsics(name: str, value: Any, views: Sequence[int]) -> Tensor:
    """Intrinsics as [*views, 4]: fx, fy, cx, cy in pixels.

    Args:
        name: of the argument, for messages.
        value: [*views, 4] or [*views, 3, 3], or [4] or [3, 3] for all views.
        views: the leading dimensions.

    Raises:
        ValueError: for other shapes; a matrix with skew or another last row than 0, 0, 1; and focal lengths below 2,
            which are not in pixels, or negative.
    """
    given, views = as_float64(name, value), tuple(views)
    shape = tuple(given.shape)
    if shape not in ((4,), (3, 3), (*views, 4), (*views, 3, 3)):
        raise ValueError(
            f"{name} has shape {list(shape)}; expected {[*views, 4]} (fx, fy, cx, cy in pixels) or {[*views, 3, 3]}, "
            "or [4] or [3, 3] for all views"
        )
    if shape[-1] == 3:
        given = _from_matrix(name, given)
    for i, axis in enumerate(("fx", "fy")):
        bad = given[..., i] < LEAST_FOCAL
        if bad.any():
            at = _first(bad)
            focal = given[(*at, i)].item()
            hint = ": multiply normalised intrinsics by the image's width and height" if focal > 0 else ""
            raise ValueError(
                f"{name}{at or ''} has {axis}={focal:g}; expected a focal length in pixels, at least "
                f"{LEAST_FOCAL:g}{hint}"
            )
    return given.expand(*views, 4).clone()


def _from_matrix(name: str, matrix: Tensor) -> Tensor:
    bottom = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    if not torch.equal(matrix[..., 2, :], bottom.expand_as(matrix[..., 2, :])):
        at = _first((matrix[..., 2, :] != bottom).any(-1))
        raise ValueError(
            f"{name}{at or ''} has the last row {matrix[(*at, 2)].tolist()}; expected 0, 0, 1 (transposed?)"
        )
    skewed = (matrix[..., 0, 1] != 0) | (matrix[..., 1, 0] != 0)
    if skewed.any():
        at = _first(skewed)
        raise ValueError(
            f"{name}{at or ''} has skew {matrix[(*at, 0, 1)].item():g} and {matrix[(*at, 1, 0)].item():g}, which four "
            "numbers cannot say: undistort the images, or give the model itself the matrix"
        )
    return torch.stack([matrix[..., 0, 0], matrix[..., 1, 1], matrix[..., 0, 2], matrix[..., 1, 2]], -1)


def read_poses(name: str, value: Any, *, world_to_camera: bool = False, convention: str = "opencv") -> Tensor:
    """Poses as camera-to-world matrices [..., 4, 4] of the OpenCV convention.

    Poses of the other direction (world to camera or camera to world), and of the other convention, are valid poses too:
    nothing but a wrong rendering tells them apart.

    Args:
        name: of the argument, for messages.
        value: [..., 4, 4] or [..., 3, 4].
        world_to_camera: whether the matrices take the world to the camera.
        convention: of the camera's axes, "opencv" or "opengl".

    Raises:
        ValueError: for other shapes and conventions; a last row that is not 0, 0, 0, 1; and a rotation that is
            mirrored, scaled or otherwise not orthonormal.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"camera_convention={convention!r} is not one of {', '.join(map(repr, CONVENTIONS))}")
    poses = as_float64(name, value)
    if poses.dim() < 2 or tuple(poses.shape[-2:]) not in ((4, 4), (3, 4)):
        raise ValueError(f"{name} has shape {list(poses.shape)}; expected matrices [4, 4] or [3, 4], one for each view")
    bottom = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    if poses.shape[-2] == 3:
        poses = torch.cat([poses, bottom.expand(*poses.shape[:-2], 1, 4)], -2)
    wrong = (poses[..., 3, :] != bottom).any(-1)
    if wrong.any():
        at = _first(wrong)
        raise ValueError(
            f"{name}{at or ''} has the last row {poses[(*at, 3)].tolist()}; expected 0, 0, 0, 1, with the translation "
            "in the last column (transposed?)"
        )
    check_rotations(name, poses[..., :3, :3])
    poses = torch.linalg.inv(poses) if world_to_camera else poses
    return flip_convention(poses) if convention == "opengl" else poses


def check_rotations(name: str, rotation: Tensor) -> None:
    """Raise a `ValueError` that says what is wrong, if matrices [..., 3, 3] are not rotations."""
    gram = rotation.mT @ rotation
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
    identity = torch.eye(3, dtype=rotation.dtype)
    deviation = (gram - identity).abs().amax((-2, -1))
    similar = (gram / scale.square().clamp_min(1e-300)[..., None, None] - identity).abs().amax((-2, -1)) <= ORTHONORMAL
    mirrored = similar & (torch.linalg.det(rotation) < 0)
    if mirrored.any():
        raise ValueError(
            f"{name}{_first(mirrored) or ''} has a left-handed rotation (determinant −1): one axis, or all three, was "
            "negated. Conversions between conventions negate two: use camera_convention='opengl' for cameras that "
            "look along −z with y up"
        )
    bad = deviation > ORTHONORMAL
    if bad.any():
        at = _first(bad)
        came = f"{name}{at or ''} has a rotation R with RᵀR − 1 up to {deviation[tuple(at)].item():.3g}"
        if similar[tuple(at)]:
            raise ValueError(
                f"{came}: it is scaled by {scale[tuple(at)].item():.6g}. Divide the rotation by it; a scene's scale "
                "belongs to the translations alone"
            )
        raise ValueError(
            f"{came}; at most {ORTHONORMAL:g} is allowed. Is it rounded, sheared, averaged, or another matrix (such as "
            "K [R | t])?"
        )


def flip_convention(camera_to_world: Tensor) -> Tensor:
    """OpenCV poses [..., 4, 4] of OpenGL ones, or the reverse: the camera's y and z negated."""
    return camera_to_world * torch.tensor([1, -1, -1, 1], dtype=camera_to_world.dtype)


def cover(before: tuple[int, int], size: tuple[int, int]) -> Crop:
    """How an image of `before` = (height, width) is resized to cover `size`, and cut to its centre."""
    scale = max(after / old for after, old in zip(size, before, strict=True))
    height, width = (max(after, round(old * scale)) for after, old in zip(size, before, strict=True))
    return Crop(height, width, (height - size[0]) // 2, (width - size[1]) // 2)


def crop_intrinsics(intrinsics: Tensor, before: tuple[int, int], crop: Crop) -> Tensor:
    """Intrinsics [..., 4] of an image of `before` = (height, width) after it was resized and cropped."""
    x, y = crop.width / before[1], crop.height / before[0]
    scale = torch.tensor([x, y, x, y], dtype=intrinsics.dtype)
    return intrinsics * scale - torch.tensor([0, 0, crop.left, crop.top], dtype=intrinsics.dtype)


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x)


def mean_pose(camera_to_world: Tensor) -> Tensor:
    """The mean pose [4, 4] of poses [V, 4, 4].

    With o, y and z the means of the positions and of the cameras' second and third axes: position o, third axis z/|z|,
    first axis y × z / |y × z|, second axis third × first. Where z or y × z vanishes, as for cameras around an object,
    the axes are those of the first camera.
    """
    position, down, forward = (camera_to_world[:, :3, i].mean(0) for i in (3, 1, 2))
    right = torch.linalg.cross(down, forward)
    if torch.linalg.vector_norm(forward) < 1e-3 or torch.linalg.vector_norm(right) < 1e-3:
        axes = camera_to_world[0, :3, :3]
    else:
        forward, right = _unit(forward), _unit(right)
        axes = torch.stack([right, torch.linalg.cross(forward, right), forward], -1)
    pose = torch.eye(4, dtype=camera_to_world.dtype)
    pose[:3, :3], pose[:3, 3] = axes, position
    return pose


def normalisation(camera_to_world: Tensor, extent: float = 1.0) -> tuple[Tensor, Tensor]:
    """World-to-scene matrix [4, 4] and scale [] that put cameras [V, 4, 4] around the origin.

    The matrix is the inverse of `mean_pose`. The scale is `extent` over the greatest absolute coordinate of a camera's
    position after that, and 1 where all cameras are at one place. A point p of the world is at scale · (matrix p).
    """
    pose = mean_pose(camera_to_world)
    rotation, position = pose[:3, :3].T, pose[:3, 3]
    matrix = torch.eye(4, dtype=pose.dtype)
    matrix[:3, :3], matrix[:3, 3] = rotation, -rotation @ position
    greatest = ((camera_to_world[:, :3, 3] - position) @ rotation.T).abs().max()
    rounding = 1e-6 * camera_to_world[:, :3, 3].abs().max()
    scale = extent / greatest if greatest > rounding else torch.ones_like(greatest)
    return matrix, scale


def move(camera_to_world: Tensor, world_to_scene: Tensor, scale: Tensor) -> Tensor:
    """Poses [V, 4, 4] in the coordinates of `normalisation`."""
    poses = world_to_scene @ camera_to_world
    poses[:, :3, 3] *= scale
    return poses
