# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Images to pixel values, as the published evaluation of ViTTT and H-ViTTT makes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature, get_size_dict
from transformers.image_transforms import to_channel_dimension_format
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ChannelDimension,
    SizeDict,
    infer_channel_dimension_format,
    is_pil_image,
    to_numpy_array,
)
from transformers.utils import requires_backends

Array = Any  # numpy.ndarray
EIGHT_BIT_MODES = ("1", "CMYK", "HSV", "L", "LA", "LAB", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "YCbCr")


def resized_edge(crop: int) -> int:
    """The shorter side of an image before a square of side `crop` is cut from it: 256 for 224, in proportion."""
    return crop * 256 // 224


def add_channel_axis(images: Any) -> Any:
    """Images as they are, with one channel for those that have none: [height, width] → [1, height, width]."""
    if isinstance(images, list | tuple):
        return [add_channel_axis(image) for image in images]
    return images[None] if getattr(images, "ndim", None) == 2 else images


def check_values(image: Array, do_resize: bool, do_rescale: bool, do_normalize: bool, mean: Any) -> None:
    """Raise a `ValueError` that says which argument to change, if an image's values contradict the arguments."""
    low, high = image.min().item(), image.max().item()
    came = f"images holds {image.dtype} values from {low:g} to {high:g}"
    if image.dtype.kind == "f":
        limit = 255 if do_rescale else 1
        if (do_resize or do_rescale) and not 0 <= low <= high <= limit:
            raise ValueError(f"{came}; with do_rescale={do_rescale} they must be from 0 to {limit}")
        if do_rescale and 0 < high <= 1:
            raise ValueError(f"{came}, which is rescaled already: pass do_rescale=False")
    elif do_normalize and not do_rescale and max(mean if isinstance(mean, list | tuple) else [mean]) <= 1:
        raise ValueError(f"{came}, and image_mean={mean} is for values from 0 to 1: pass do_rescale=True")


class ViTTTImageProcessor(PilBackend):
    r"""Images to `pixel_values`: RGB, resized, cut to the centre, scaled to [0, 1] and normalised.

    The defaults are the published evaluation at 224 × 224: the shorter side to 256 pixels, bicubic, then the centre.
    The models take any size; `do_center_crop=False` keeps the whole image, and `do_resize=False` its resolution. The
    arguments can be given when an instance is made, where they are saved with it, and in a call.

    Images are PIL images, numpy arrays or torch tensors, one, a list, or a batch; arrays have their one, three or four
    channels first or last, or, where grey, none. Integers are from 0 to 255; floats are too, and from 0 to 1 with
    `do_rescale=False`. Alpha is dropped, as `PIL.Image.convert` does. Floats are rounded to 8 bits to be resized.

    Args:
        do_convert_rgb: whether to make three channels of grey and transparent images.
        do_resize, size, resample: whether to resize, to `{"shortest_edge": s}` (or s) or `{"height": h, "width": w}`,
            in pixels, and the PIL filter. Without `size`, the shorter side is 256 / 224 of `crop_size`.
        do_center_crop, crop_size: whether to cut out the centre, and its `{"height": h, "width": w}` (or its side).
        do_rescale, rescale_factor: whether to multiply by the factor, and the factor.
        do_normalize, image_mean, image_std: whether to subtract the mean of each channel and divide by its deviation.

    Raises:
        ValueError: for a size that is not one of these.
        ImportError: without Pillow.
    """

    do_convert_rgb = True
    do_resize = True
    size = {"shortest_edge": 256}
    default_to_square = False
    resample = 3  # PIL.Image.Resampling.BICUBIC, without importing PIL
    do_center_crop = True
    crop_size = {"height": 224, "width": 224}
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_DEFAULT_MEAN
    image_std = IMAGENET_DEFAULT_STD

    def __init__(self, **kwargs: Any):
        requires_backends(self, "vision")
        crop = kwargs.get("crop_size")
        if crop is not None and kwargs.get("size") is None:
            crop = get_size_dict(crop, param_name="crop_size")
            kwargs["size"] = {"shortest_edge": resized_edge(max(crop.values()))}
        super().__init__(**kwargs)

    def _prepare_images_structure(self, images: Any, expected_ndims: int = 3) -> list[Any]:
        return super()._prepare_images_structure(add_channel_axis(images), expected_ndims=expected_ndims)

    def process_image(
        self, image: Any, do_convert_rgb: bool | None = None, input_data_format: Any = None, **kwargs: Any
    ) -> Array:
        """One image as an array [channels, height, width] of 8-bit integers or float32.

        Args:
            image: a PIL image, or an array or tensor of three dimensions.
            do_convert_rgb: whether to make three channels of it.
            input_data_format: where the channels are, "channels_first" or "channels_last"; found out if None.

        Raises:
            ValueError: for an image of more than 8 bits, and integers that are not from 0 to 255.
        """
        if is_pil_image(image):
            if image.mode not in EIGHT_BIT_MODES:
                raise ValueError(
                    f"images has a PIL image of mode {image.mode!r}, whose range is not known: convert it to 8 bits "
                    "('L' or 'RGB'), or pass an array of floats from 0 to 1 and do_rescale=False"
                )
            bits = {"1": "L"}.get(image.mode, image.mode)
            image = to_numpy_array(image.convert("RGB" if do_convert_rgb else bits))
            input_data_format = ChannelDimension.LAST
        elif isinstance(image, torch.Tensor):
            image = image.detach().cpu()
            image = (image.float() if image.is_floating_point() else image).numpy()
        if image.ndim == 2:
            image, input_data_format = image[None], ChannelDimension.FIRST
        if input_data_format is None:
            input_data_format = infer_channel_dimension_format(image, num_channels=(1, 3, 4))
        image = to_channel_dimension_format(image, ChannelDimension.FIRST, input_data_format)
        if do_convert_rgb:
            image = image.repeat(3, 0) if image.shape[0] == 1 else image[:3]
        return self._narrow(image)

    @staticmethod
    def _narrow(image: Array) -> Array:
        """The same values as 8-bit integers or float32."""
        if image.dtype.kind == "f":
            return image.astype("float32")
        if image.dtype.kind not in "iu" or image.min() < 0 or image.max() > 255:
            raise ValueError(
                f"images holds {image.dtype} values from {image.min()} to {image.max()}: integers must be from 0 to "
                "255; pass other values as floats from 0 to 1 with do_rescale=False"
            )
        return image.astype("uint8")

    def resize(self, image: Array, size: SizeDict, resample: Any = None, **kwargs: Any) -> Array:
        """An image [channels, height, width] at another size; floats, from 0 to 1 or to 255, in steps of 8 bits."""
        if image.dtype.kind != "f":
            return super().resize(image, size, resample, **kwargs)
        steps = 255 if image.max() <= 1 else 1
        resized = super().resize((image * steps).round().astype("uint8"), size, resample, **kwargs)
        return self.rescale(resized, 1 / steps)

    def center_crop(self, image: Array, size: SizeDict, **kwargs: Any) -> Array:
        """The centre of an image [channels, height, width]; of two centres the one that torchvision takes.

        Raises:
            ValueError: if `size` has no height and width, or the image is smaller.
        """
        if not size.height or not size.width:
            raise ValueError(f"crop_size={dict(size)} must have the keys 'height' and 'width'")
        height, width = image.shape[-2:]
        if height < size.height or width < size.width:
            raise ValueError(
                f"crop_size={size.height} × {size.width} is more than the image has, which is {height} × {width} after "
                f"resizing: set size={{'shortest_edge': {resized_edge(max(size.height, size.width))}}} or more, a "
                "smaller crop_size, or do_center_crop=False"
            )
        top, left = round((height - size.height) / 2), round((width - size.width) / 2)
        return image[..., top : top + size.height, left : left + size.width]

    def _preprocess(
        self,
        images: list[Array],
        do_resize: bool,
        do_rescale: bool,
        do_normalize: bool,
        image_mean: Any,
        return_tensors: Any,
        **kwargs: Any,
    ) -> BatchFeature:
        if not images:
            raise ValueError("images is empty: pass at least one image")
        for image in images:
            check_values(image, do_resize, do_rescale, do_normalize, image_mean)
        options = {"do_resize": do_resize, "do_rescale": do_rescale, "do_normalize": do_normalize}
        pixels = super()._preprocess(images, **options, image_mean=image_mean, return_tensors=None, **kwargs)
        shapes = sorted({image.shape for image in pixels["pixel_values"]})
        if return_tensors is not None and len(shapes) > 1:
            raise ValueError(
                f"images have the shapes {', '.join(map(str, shapes))} after processing, which make no batch: set "
                "do_center_crop=True, or size={'height': …, 'width': …}, or process them one by one"
            )
        return BatchFeature(data=dict(pixels), tensor_type=return_tensors)


__all__ = ["ViTTTImageProcessor"]
