# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Posed images and new cameras to what LaCT-NVS takes, and its renderings to images."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_transforms import to_pil_image
from transformers.image_utils import is_pil_image, is_valid_image, to_numpy_array
from transformers.processing_utils import ProcessorMixin
from transformers.utils import logging, requires_backends

from .cameras import (
    CONVENTIONS,
    Crop,
    as_float64,
    cover,
    crop_intrinsics,
    move,
    normalisation,
    read_intrinsics,
    read_poses,
)

logger = logging.get_logger(__name__)

LANCZOS = 3  # lobes of the filter
BLOCK = 32  # outputs of one product
Size = int | Sequence[int] | dict[str, int]


def read_size(size: Size) -> tuple[int, int]:
    """Height and width of {"height": h, "width": w}, (h, w) or one side.

    Raises:
        ValueError: for anything else.
    """
    sides: Sequence[Any] = ()
    if isinstance(size, dict):
        sides = [size.get("height"), size.get("width"), *(size.keys() - {"height", "width"})]
    elif isinstance(size, int | list | tuple):
        sides = [size, size] if isinstance(size, int) else size
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise ValueError(
            f"size={size!r} is not a size: expected {{'height': h, 'width': w}}, (height, width) or one side"
        )
    return int(sides[0]), int(sides[1])


def resample(x: Tensor, after: int, first: int, count: int) -> Tensor:
    """Pixels `first` to `first + count` of the last dimension of x, resized to `after`: [..., n] → [..., count].

    A Lanczos filter, widened where it shrinks, as in Pillow. A block of outputs is a product with the inputs it sees.
    """
    before, parts = x.shape[-1], []
    widening = max(before / after, 1.0)
    for start in range(first, first + count, BLOCK):
        centres = torch.arange(start, min(start + BLOCK, first + count), dtype=torch.float64) + 0.5
        centres = centres * (before / after)
        low = max(0, int(centres[0] - LANCZOS * widening))
        high = min(before, int(centres[-1] + LANCZOS * widening) + 1)
        distance = (torch.arange(low, high, dtype=torch.float64) + 0.5 - centres[:, None]) / widening
        weights = torch.sinc(distance) * torch.sinc(distance / LANCZOS) * (distance.abs() < LANCZOS)
        weights = weights / weights.sum(-1, keepdim=True)
        parts.append(x[..., low:high] @ weights.T.to(x.dtype))
    return torch.cat(parts, -1)


def resize(image: Tensor, crop: Crop, size: tuple[int, int]) -> Tensor:
    """An image [3, h, w] in [0, 1], resized and cut to `size`."""
    height, width = size
    if (crop.height, crop.width) == tuple(image.shape[1:]):
        return image[:, crop.top : crop.top + height, crop.left : crop.left + width].contiguous()
    rows = resample(image.mT, crop.height, crop.top, height).mT
    return resample(rows, crop.width, crop.left, width).clamp_(0, 1)


def read_image(name: str, image: Any, background: Sequence[float]) -> Tensor:
    """An image as float32 [3, height, width] in [0, 1]; a transparent one over the colour `background`.

    Raises:
        ValueError: for what is not an image, another number of channels, and values of another range.
    """
    if is_pil_image(image):
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise ValueError(f"{name} has the PIL mode {image.mode!r}; expected 8 bits (image.convert('RGB'))")
        mode = "RGBA" if image.has_transparency_data else "RGB"
        image = to_numpy_array(image.convert(mode)).transpose(2, 0, 1)
    if not isinstance(image, Tensor):
        if not is_valid_image(image):
            raise ValueError(f"{name} is a {type(image).__name__}; expected a PIL image, an array or a tensor")
        image = torch.from_numpy(image.copy())  # owned, and without negative strides
    image = _to_unit_range(name, _channels_first(name, image.detach().cpu()))
    if image.shape[0] == 3:
        return image
    colours, alpha = image[:3], image[3:]
    return colours * alpha + torch.tensor(background).view(3, 1, 1) * (1 - alpha)


def _channels_first(name: str, image: Tensor) -> Tensor:
    shape = list(image.shape)
    first, last = (len(shape) == 3 and shape[i] in (3, 4) for i in (0, 2))
    if first and last:
        raise ValueError(f"{name} has shape {shape}, whose channels may be first or last: pass a PIL image")
    if not first and not last or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}; expected [3, height, width] or [height, width, 3], or 4 channels with alpha"
        )
    return image if first else image.permute(2, 0, 1)


def _to_unit_range(name: str, image: Tensor) -> Tensor:
    if image.dtype == torch.uint8:
        return image.float() / 255
    if not image.is_floating_point():
        raise ValueError(f"{name} has dtype {image.dtype}; expected uint8, or floats from 0 to 1")
    low, high = image.min().item(), image.max().item()
    if not 0 <= low <= high <= 1:
        raise ValueError(f"{name} has floats from {low:g} to {high:g}; expected 0 to 1 (divide by 255, or pass uint8)")
    return image.float()


def _is_scene(images: Any) -> bool:
    """Whether it is a list of images, or views stacked."""
    if isinstance(images, list | tuple):
        return not any(isinstance(image, list | tuple) or getattr(image, "ndim", 3) == 4 for image in images)
    return getattr(images, "ndim", 0) == 4


def read_scenes(name: str, images: Any, background: Sequence[float]) -> tuple[list[list[Tensor]], bool]:
    """Images of scenes as lists of tensors [3, h, w], and whether they came as a batch.

    Raises:
        ValueError: as `read_image`; and for scenes without views, or of different numbers of them.
    """
    if is_pil_image(images) or not (isinstance(images, list | tuple) or getattr(images, "ndim", 0) in (4, 5)):
        came = f"has shape {list(images.shape)}" if hasattr(images, "shape") else f"is a {type(images).__name__}"
        raise ValueError(f"{name} {came}; expected the list of a scene's views, or a list of such lists")
    batched = not _is_scene(images)
    scenes = list(images) if batched else [images]
    for i, scene in enumerate(scenes):
        if is_pil_image(scene) or not _is_scene(scene):
            raise ValueError(f"{name}[{i}] is not a list of a scene's views, unlike others: pass a list for each scene")
    counts = [len(scene) for scene in scenes]
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(
            f"{name} has scenes with {counts} views; expected one view at least, and the same number in all"
        )
    prefix = [f"{name}[{i}]" if batched else name for i in range(len(scenes))]
    read = [
        [read_image(f"{p}[{j}]", v, background) for j, v in enumerate(s)] for p, s in zip(prefix, scenes, strict=True)
    ]
    return read, batched


class LaCTNVSInputs(BatchFeature):
    """Arguments of `LaCTNVSModel`. `to` with a type, such as bfloat16, changes images and leaves cameras, whose rays
    would be off by pixels."""

    def to(self, *args: Any, **kwargs: Any) -> LaCTNVSInputs:
        """As in transformers: a device, a type of the images, or both."""
        before = dict(self.items())
        super().to(*args, **kwargs)
        for name, value in before.items():
            if isinstance(value, Tensor) and not name.endswith("pixel_values"):
                self[name] = value.to(self[name].device)
        return self


class LaCTNVSProcessor(ProcessorMixin):
    r"""Posed images and new cameras of scenes to the arguments of `LaCTNVSModel`, and renderings to images.

    Images are resized so that they cover `size` (Lanczos, antialiased, as published) and cut to the centre, and the
    intrinsics follow. The arguments can be given when an instance is made, where they are saved with it, and in a call.

    With `normalize_scene`, as published for scenes (not for single objects), the cameras are moved: with o, y and z the
    means of the input views' positions and of their second and third axes, the origin becomes o, the third axis z/|z|,
    the first y × z / |y × z|, the second third × first; then positions are divided by the greatest absolute coordinate
    of an input view's position and multiplied by `scene_extent`. Where z or y × z vanishes (cameras around an object)
    the axes are those of the first view; where all views are at one place nothing is divided. New cameras are given in
    the world's coordinates: with the `world_to_scene` and `scene_scale` returned here the model moves them itself.

    Args:
        size: height and width of the images: {"height": h, "width": w}, (h, w) or one side; multiples of the model's
            patch size.
        background: colour behind transparent images, three numbers from 0 to 1.
        camera_convention: "opencv" (x to the right, y down, looking along +z) or "opengl" (y up, looking along −z; also
            of Blender and NeRF), of all poses of a call.
        normalize_scene: whether to move the cameras into coordinates of the scene.
        scene_extent: the greatest coordinate of an input view after that.

    Raises:
        ValueError: for values that are none of these.
    """

    def __init__(
        self,
        size: Size = 256,
        background: Sequence[float] = (1.0, 1.0, 1.0),
        camera_convention: str = "opencv",
        normalize_scene: bool = False,
        scene_extent: float = 1.0,
    ):
        super().__init__()
        height, width = read_size(size)
        self.size = {"height": height, "width": width}
        self.background = _read_background(background)
        if camera_convention not in CONVENTIONS:
            raise ValueError(
                f"camera_convention={camera_convention!r} is not one of {', '.join(map(repr, CONVENTIONS))}"
            )
        if not scene_extent > 0:
            raise ValueError(f"scene_extent={scene_extent} must be greater than 0")
        self.camera_convention, self.normalize_scene, self.scene_extent = (
            camera_convention,
            normalize_scene,
            scene_extent,
        )

    @property
    def model_input_names(self) -> list[str]:
        """What a call can return."""
        views = ["pixel_values", "intrinsics", "camera_to_world"]
        return [*views, "world_to_scene", "scene_scale", *(f"target_{name}" for name in views)]

    def __call__(
        self,
        images: Any,
        intrinsics: Any,
        camera_to_world: Any = None,
        *,
        world_to_camera: Any = None,
        target_images: Any = None,
        target_intrinsics: Any = None,
        target_camera_to_world: Any = None,
        target_world_to_camera: Any = None,
        size: Size | None = None,
        background: Sequence[float] | None = None,
        camera_convention: str | None = None,
        normalize_scene: bool | None = None,
        return_tensors: str | None = "pt",
    ) -> LaCTNVSInputs:
        """Arguments of `LaCTNVSModel.reconstruct`, and with target cameras of its `forward`, in float32.

        Args:
            images: the views of a scene, V PIL images, arrays or tensors (uint8, or floats from 0 to 1; three channels
                or four, first or last); or a list of such lists, all of one length; or tensors [V, 3, h, w] or
                [B, V, 3, h, w]. Sizes may differ.
            intrinsics: fx, fy, cx, cy in pixels of the images as they are given, with pixel (0, 0)'s centre at
                (0.5, 0.5): [V, 4] or [V, 3, 3], of a batch [B, V, 4] or [B, V, 3, 3], or [4] or [3, 3] for all.
            camera_to_world: poses [V, 4, 4] or [V, 3, 4], of a batch [B, V, 4, 4] or [B, V, 3, 4].
            world_to_camera: their inverses, instead.
            target_images: views to be rendered, for a loss, if any.
            target_intrinsics: of their cameras, in pixels of `target_images` as they are given; without these, of
                images like the input views, which must then be of one size. They are resized in the same way.
            target_camera_to_world, target_world_to_camera: their poses.
            size, background, camera_convention, normalize_scene: instead of the processor's.
            return_tensors: "pt", "np", or None for torch tensors.

        Returns:
            `pixel_values` [B, V, 3, height, width] in [0, 1], `intrinsics` [B, V, 4], `camera_to_world` [B, V, 4, 4];
            where scenes are normalised, `world_to_scene` [B, 4, 4] and `scene_scale` [B]; with target cameras
            `target_intrinsics`, `target_camera_to_world` (not normalised) and, with images, `target_pixel_values`.

        Raises:
            ValueError: for shapes, values and cameras that are none of these.
        """
        height, width = read_size(self.size if size is None else size)
        colour = self.background if background is None else _read_background(background)
        convention = self.camera_convention if camera_convention is None else camera_convention
        scenes, batched = read_scenes("images", images, colour)
        views = (len(scenes), len(scenes[0]))
        poses = _read_either("", camera_to_world, world_to_camera, convention, batched)
        _check_count("images", views, "camera_to_world", poses)
        given = _read_batch("intrinsics", intrinsics, views, batched)
        pixels, given = self._resize(scenes, given, (height, width))
        data = {"pixel_values": pixels, "intrinsics": given}
        if self.normalize_scene if normalize_scene is None else normalize_scene:
            frames = [normalisation(scene, self.scene_extent) for scene in poses]
            poses = torch.stack([move(scene, *frame) for scene, frame in zip(poses, frames, strict=True)])
            matrices, scales = zip(*frames, strict=True)
            data |= {"world_to_scene": torch.stack(matrices), "scene_scale": torch.stack(scales)}
        data["camera_to_world"] = poses

        targets = (target_images, target_intrinsics, target_camera_to_world, target_world_to_camera)
        if any(value is not None for value in targets):
            new = _read_either("target_", target_camera_to_world, target_world_to_camera, convention, batched)
            data |= self._targets(target_images, target_intrinsics, new, scenes, batched, colour, (height, width))
        data = {name: value.float() for name, value in data.items()}
        return LaCTNVSInputs(data=data, tensor_type=return_tensors)

    def process_cameras(
        self,
        intrinsics: Any,
        camera_to_world: Any = None,
        *,
        world_to_camera: Any = None,
        image_size: Size | None = None,
        size: Size | None = None,
        camera_convention: str | None = None,
        return_tensors: str | None = "pt",
    ) -> LaCTNVSInputs:
        """New cameras of a scene that is there: `model.render(scene, **processor.process_cameras(…), size=(h, w))`.

        Args:
            intrinsics, camera_to_world, world_to_camera: of V views of a scene, or with poses [B, V, 4, 4] of a batch,
                in the same forms as in a call; poses in the world's coordinates.
            image_size: height and width of the images that the intrinsics are of, which are resized and cut to `size`
                like images; None for intrinsics in pixels of the views that are rendered.
            size, camera_convention: instead of the processor's.
            return_tensors: "pt", "np", or None for torch tensors.

        Returns:
            `intrinsics` [B, V, 4] and `camera_to_world` [B, V, 4, 4] in the OpenCV convention.

        Raises:
            ValueError: for shapes, values and cameras that are none of these.
        """
        convention = self.camera_convention if camera_convention is None else camera_convention
        names = {"camera_to_world": camera_to_world, "world_to_camera": world_to_camera}
        batched = any(as_float64(name, poses).dim() == 4 for name, poses in names.items() if poses is not None)
        poses = _read_either("", camera_to_world, world_to_camera, convention, batched)
        cameras = _read_batch("intrinsics", intrinsics, (poses.shape[0], poses.shape[1]), batched)
        if image_size is not None:
            before = read_size(image_size)
            crop = cover(before, read_size(self.size if size is None else size))
            cameras = crop_intrinsics(cameras, before, crop)
        data = {"intrinsics": cameras.float(), "camera_to_world": poses.float()}
        return LaCTNVSInputs(data=data, tensor_type=return_tensors)

    @staticmethod
    def _resize(scenes: list[list[Tensor]], intrinsics: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Pixels [B, V, 3, *size] and intrinsics [B, V, 4] of images that are resized."""
        pixels, adjusted = [], torch.empty_like(intrinsics)
        for i, scene in enumerate(scenes):
            for j, image in enumerate(scene):
                before = (image.shape[1], image.shape[2])
                _check_centre(intrinsics[i, j], before)
                crop = cover(before, size)
                pixels.append(resize(image, crop, size))
                adjusted[i, j] = crop_intrinsics(intrinsics[i, j], before, crop)
        return torch.stack(pixels).unflatten(0, (len(scenes), -1)), adjusted

    def _targets(
        self,
        images: Any,
        intrinsics: Any,
        poses: Tensor,
        inputs: list[list[Tensor]],
        batched: bool,
        background: Sequence[float],
        size: tuple[int, int],
    ) -> dict[str, Tensor]:
        """What the model takes of target cameras [B, V, 4, 4]."""
        if intrinsics is None:
            raise ValueError("target_intrinsics is missing: pass it with target cameras")
        if poses.shape[0] != len(inputs):
            raise ValueError(f"target_camera_to_world has {poses.shape[0]} scenes and images {len(inputs)}")
        given = _read_batch("target_intrinsics", intrinsics, (poses.shape[0], poses.shape[1]), batched)
        data = {"target_camera_to_world": poses}
        if images is not None:
            scenes, is_batch = read_scenes("target_images", images, background)
            if is_batch != batched:
                raise ValueError("target_images and images must both be of one scene, or both batches")
            _check_count("target_images", (len(scenes), len(scenes[0])), "target_camera_to_world", poses)
            data["target_pixel_values"], given = self._resize(scenes, given, size)
        else:
            sizes = {(image.shape[1], image.shape[2]) for scene in inputs for image in scene}
            if len(sizes) > 1:
                raise ValueError(
                    f"images have the sizes {sorted(sizes)}, and which of them target_intrinsics is for is not known: "
                    "pass images of one size, or target_images"
                )
            (before,) = sizes
            given = crop_intrinsics(given, before, cover(before, size))
        return {**data, "target_intrinsics": given}

    def post_process_novel_views(self, rendered: Any) -> list[list[Any]]:
        """Rendered views [B, V, 3, h, w] in [0, 1], a tensor or an array, as PIL images, a list for each scene.

        Raises:
            ValueError: for other shapes.
            ImportError: without Pillow.
        """
        requires_backends(self, "vision")
        rendered = torch.as_tensor(rendered)
        if rendered.dim() != 5 or rendered.shape[2] != 3:
            raise ValueError(f"rendered has shape {list(rendered.shape)}; expected [batch, views, 3, height, width]")
        levels = (rendered.detach().float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
        return [[to_pil_image(view, input_data_format="channels_first") for view in scene] for scene in levels]


def _read_background(background: Sequence[float]) -> list[float]:
    try:
        colour = [float(value) for value in background]
    except (TypeError, ValueError):
        colour = []
    if len(colour) != 3 or not all(0 <= value <= 1 for value in colour):
        raise ValueError(f"background={background!r} is not a colour: expected three numbers from 0 to 1")
    return colour


def _check_centre(intrinsics: Tensor, size: tuple[int, int]) -> None:
    """Warn of a principal point outside of its image, as intrinsics have that are of another resolution."""
    cx, cy = intrinsics[2:].tolist()
    height, width = size
    if not (0 < cx < width and 0 < cy < height):
        logger.warning_once(
            f"intrinsics have the principal point ({cx:g}, {cy:g}) outside of an image of {width} × {height} pixels "
            "(width × height): are they of images of another size?"
        )


def _read_either(prefix: str, to_world: Any, to_camera: Any, convention: str, batched: bool) -> Tensor:
    """Camera-to-world poses [B, V, 4, 4] of either argument."""
    if (to_world is None) == (to_camera is None):
        came = "neither" if to_world is None else "both"
        raise ValueError(f"{came} of {prefix}camera_to_world and {prefix}world_to_camera came; pass one of them")
    inverse = to_world is None
    name = prefix + ("world_to_camera" if inverse else "camera_to_world")
    poses = read_poses(name, to_camera if inverse else to_world, world_to_camera=inverse, convention=convention)
    if poses.dim() != 3 + batched:
        expected = "[scenes, views, 4, 4]" if batched else "[views, 4, 4]"
        raise ValueError(f"{name} has {poses.dim()} dimensions; expected {expected} (or [3, 4] matrices), as of images")
    return poses if batched else poses[None]


def _read_batch(name: str, intrinsics: Any, views: tuple[int, int], batched: bool) -> Tensor:
    """Intrinsics [B, V, 4]."""
    read = read_intrinsics(name, intrinsics, views if batched else views[1:])
    return read if batched else read[None]


def _check_count(name: str, views: tuple[int, int], poses_name: str, poses: Tensor) -> None:
    if views != tuple(poses.shape[:2]):
        raise ValueError(
            f"{name} has {views[0]} × {views[1]} views (scenes × views) and {poses_name} has {poses.shape[0]} × "
            f"{poses.shape[1]}; expected a pose for each view"
        )


__all__ = ["LaCTNVSProcessor"]
