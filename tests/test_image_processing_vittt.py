# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The image processor against the published evaluation in PIL and numpy; what it takes, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

import hf_ttt
from hf_ttt import HViTTTConfig, ViTTTConfig, ViTTTImageProcessor

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
ROUNDING = 2e-6  # values are below 3; three float32 operations of 2^-24 each, relative, make 6e-7
SHAPES = [(300, 200), (200, 371), (257, 259), (64, 48), (256, 256), (17, 230)]


def photograph(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """8-bit values [height, width, channels] with smooth parts and hard edges, on which bicubic filters overshoot."""
    rows, columns = np.mgrid[:height, :width]
    waves = [127.5 * (1 + np.sin(rows / (5 + c) + columns / (9 - c))) for c in range(channels)]
    image = np.stack(waves, -1).round().astype(np.uint8)
    noise = np.random.default_rng(seed).integers(0, 256, image.shape, dtype=np.uint8)
    image[height // 4 : height // 2] = 255
    image[:, width // 3 : width // 2] = noise[:, width // 3 : width // 2]
    image[height // 2 :, : width // 3] = 0
    return image


def published(image: Image.Image, size: int = 224) -> np.ndarray:
    """Evaluation of the published code: shorter side to int(256 / 224 · size) bicubic, centre of size², normalised."""
    image = image.convert("RGB")
    width, height = image.size
    short = int((256 / 224) * size)
    target = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(target, Image.Resampling.BICUBIC)
    left, top = (int(round((side - size) / 2.0)) for side in image.size)
    image = image.crop((left, top, left + size, top + size))
    return ((np.asarray(image, np.float64) / 255 - MEAN) / STD).transpose(2, 0, 1)


def pixels(images, processor=None, **arguments) -> torch.Tensor:
    values = (processor or ViTTTImageProcessor())(images, return_tensors="pt", **arguments).pixel_values
    assert values.dtype == torch.float32
    return values


def equal(values: torch.Tensor, expected: np.ndarray) -> None:
    assert values.shape == expected.shape
    assert np.abs(values.double().numpy() - expected).max() <= ROUNDING


# ---- numbers ----


@pytest.mark.parametrize("shape", SHAPES)
def test_the_published_evaluation(shape):
    """Ratio, filter, rounding of sizes and of the crop, mean and deviation, on wide, tall, odd and small images."""
    image = Image.fromarray(photograph(*shape))
    equal(pixels(image)[0], published(image))


@pytest.mark.parametrize("size", [32, 96, 160, 384])
def test_the_published_evaluation_at_other_sizes(size):
    """`crop_size` alone keeps the published ratio of 256 to 224."""
    image = Image.fromarray(photograph(130, 190))
    processor = ViTTTImageProcessor(crop_size=size)
    assert dict(processor.size) == {"shortest_edge": int((256 / 224) * size)}
    equal(pixels(image, processor)[0], published(image, size))


def test_the_crop_is_where_torchvision_cuts():
    """A difference of 3 modulo 4 puts the centre at x.5, where rounding half to even and down differ by a pixel."""
    image = Image.fromarray(photograph(256, 339))  # (339 − 224) / 2 = 57.5 → 58
    whole = pixels(image, do_center_crop=False)[0]
    assert torch.equal(pixels(image)[0], whole[:, 16:240, 58:282])
    assert not torch.equal(pixels(image)[0], whole[:, 16:240, 57:281])


def test_a_batch_gives_what_its_images_give_alone():
    images = [Image.fromarray(photograph(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    batch = pixels(images)
    assert batch.shape == (len(SHAPES), 3, 224, 224)
    for image, values in zip(images, batch, strict=True):
        assert torch.equal(pixels(image)[0], values)


# ---- sizes ----


def test_height_and_width():
    """The aspect ratio is given up where both sides are given, and height comes first."""
    image = Image.fromarray(photograph(90, 130))
    values = pixels(image, size={"height": 40, "width": 72}, do_center_crop=False)[0]
    resized = np.asarray(image.resize((72, 40), Image.Resampling.BICUBIC), np.float64)
    equal(values, ((resized / 255 - MEAN) / STD).transpose(2, 0, 1))


def test_a_crop_that_is_not_square():
    image = Image.fromarray(photograph(90, 130))
    processor = ViTTTImageProcessor(crop_size={"height": 48, "width": 80})
    whole = pixels(image, processor, do_center_crop=False)
    assert whole.shape == (1, 3, 91, 131)  # 80 · 256 / 224 = 91; int(91 · 130 / 90) = 131
    assert torch.equal(pixels(image, processor), whole[..., 22:70, 26:106])


@pytest.mark.parametrize("shape", [(16, 16), (90, 131)])
def test_any_resolution_can_be_kept(shape):
    """Models take any size, so that neither resizing nor the crop may be forced on an image."""
    image = photograph(*shape)
    values = pixels(Image.fromarray(image), do_resize=False, do_center_crop=False)[0]
    equal(values, ((image / 255 - MEAN) / STD).transpose(2, 0, 1))


def test_the_shorter_side_alone():
    image = Image.fromarray(photograph(100, 151))
    assert pixels(image, size={"shortest_edge": 64}, do_center_crop=False).shape == (1, 3, 64, 96)
    assert pixels(image, size=64, do_center_crop=False).shape == (1, 3, 64, 96)
    assert pixels(image, ViTTTImageProcessor(size=64, do_center_crop=False)).shape == (1, 3, 64, 96)


def test_resolutions_of_the_models_own_choice_reach_the_model():
    """An image that is not square goes through a model as it is."""
    config = ViTTTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=8)
    values = pixels(Image.fromarray(photograph(40, 72)), do_resize=False, do_center_crop=False)
    assert hf_ttt.ViTTTModel(config)(values).last_hidden_state.shape == (1, 5 * 9, 16)


# ---- what an image can be ----


FORMS = {
    "array, channels last": lambda image: image,
    "array, channels first": lambda image: image.transpose(2, 0, 1),
    "array of int64": lambda image: image.astype(np.int64),
    "tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1),
    "tensor, channels last": torch.from_numpy,
    "array of float64 to 255": lambda image: image.astype(np.float64),
    "tensor of float32 to 255": lambda image: torch.from_numpy(image).permute(2, 0, 1).float(),
    "tensor that needs a gradient": lambda image: torch.from_numpy(image).float().requires_grad_(),
    "tensor of bfloat16 to 255": lambda image: torch.from_numpy(image).to(torch.bfloat16),
}
UNIT_FORMS = {
    "tensor of float32": lambda image: torch.from_numpy(image).permute(2, 0, 1).float() / 255,
    "tensor of float64": lambda image: torch.from_numpy(image).double() / 255,
    "array of float32": lambda image: image.astype(np.float32) / 255,
    "array of float16": lambda image: (image / 255).astype(np.float16),
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_and_tensors(form):
    """One image gives the same numbers in all its forms."""
    image = photograph(60, 90)
    assert torch.equal(pixels(FORMS[form](image)), pixels(Image.fromarray(image)))


@pytest.mark.parametrize("form", UNIT_FORMS)
def test_floats_from_0_to_1(form):
    """Resizing cut x / 255 · 255 off to 8 bits, a level too low for many values, where it must be rounded."""
    image = photograph(60, 90)
    values = pixels(UNIT_FORMS[form](image), do_rescale=False)
    assert torch.equal(values, pixels(Image.fromarray(image)))


def test_floats_that_are_not_resized_keep_their_precision():
    image = np.random.default_rng(0).random((3, 20, 24))
    values = pixels(image, do_resize=False, do_center_crop=False, do_rescale=False)[0]
    equal(values, (image - MEAN[:, None, None]) / STD[:, None, None])


@pytest.mark.parametrize("values", ["uint8", "unit"])
def test_batches_in_one_array(values):
    images = np.stack([photograph(60, 90, seed=i) for i in range(3)])
    expected = pixels([Image.fromarray(image) for image in images])
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    given = tensor if values == "uint8" else tensor.float() / 255
    assert torch.equal(pixels(given, do_rescale=values == "uint8"), expected)


GREY = {
    "PIL, L": lambda grey: Image.fromarray(grey),
    "PIL, LA": lambda grey: Image.fromarray(grey).convert("LA"),
    "array": lambda grey: grey,
    "array with a channel": lambda grey: grey[..., None],
    "tensor": torch.from_numpy,
    "tensor with a channel": lambda grey: torch.from_numpy(grey)[None],
    "list of arrays": lambda grey: [grey],
    "batch": lambda grey: grey[None, ..., None],
}


@pytest.mark.parametrize("form", GREY)
def test_grey_images(form):
    """Three equal channels before normalisation; a grey array without a channel axis was no image at all."""
    grey = photograph(60, 90, 1)[..., 0]
    assert torch.equal(pixels(GREY[form](grey)), pixels(np.stack([grey] * 3, -1)))


def test_one_channel_stays_one_where_asked():
    processor = ViTTTImageProcessor(do_convert_rgb=False, image_mean=[0.5], image_std=[0.25], do_resize=False)
    grey = photograph(30, 40, 1)
    expected = ((grey / 255 - 0.5) / 0.25).transpose(2, 0, 1)
    for image in (grey, grey[..., 0], Image.fromarray(grey[..., 0])):
        equal(pixels(image, processor, do_center_crop=False)[0], expected)


def test_black_and_white_images():
    """PIL's mode "1" holds booleans."""
    black = Image.fromarray(photograph(60, 90, 1)[..., 0]).convert("1")
    assert torch.equal(pixels(black), pixels(black.convert("RGB")))
    values = pixels(black, do_convert_rgb=False, do_normalize=False, do_resize=False, do_center_crop=False)
    assert torch.equal(values[0, 0], torch.from_numpy(np.array(black)).float())


@pytest.mark.parametrize("form", ["PIL", "array", "tensor", "unit"])
def test_transparent_images(form):
    """Alpha is dropped, as the published code's and the pipelines' `convert("RGB")` drops it, in every form."""
    image = photograph(60, 90, 4)
    tensor = torch.from_numpy(image)
    forms = {"PIL": Image.fromarray(image), "array": image, "tensor": tensor.permute(2, 0, 1), "unit": tensor / 255}
    assert torch.equal(pixels(forms[form], do_rescale=form != "unit"), pixels(image[..., :3]))


@pytest.mark.parametrize("mode", ["P", "CMYK", "YCbCr"])
def test_other_colour_modes(mode):
    image = Image.fromarray(photograph(60, 90)).convert(mode)
    equal(pixels(image)[0], published(image))


def test_lists_of_different_sizes_need_no_tensor():
    images = [photograph(60, 90), photograph(40, 32)]
    arrays = ViTTTImageProcessor()(images, do_resize=False, do_center_crop=False)["pixel_values"]
    assert [array.shape for array in arrays] == [(3, 60, 90), (3, 40, 32)]


# ---- what is refused ----

PHOTO = photograph(60, 90)
REFUSED = {
    "rescaled twice": (PHOTO / 255, {}, "images holds float32 values from 0 to 1.*pass do_rescale=False"),
    "negative": (PHOTO / 255 - 0.5, {}, "from -0.5 to 0.5.*from 0 to 255"),
    "negative, to resize": (PHOTO / 255 - 0.5, {"do_rescale": False}, "from 0 to 1"),
    "above one": (PHOTO / 200, {"do_rescale": False}, "do_rescale=False they must be from 0 to 1"),
    "not a number": (np.full((60, 90, 3), np.nan), {}, "from nan to nan"),
    "never rescaled": (PHOTO, {"do_rescale": False}, "image_mean=.*pass do_rescale=True"),
    "16 bits": (PHOTO.astype(np.uint16) * 257, {}, "uint16 values from 0 to 65535: integers must be from 0 to 255"),
    "negative integers": (PHOTO.astype(np.int16) - 1, {}, "int16 values from -1"),
    "booleans": (PHOTO > 100, {}, "images holds bool values"),
    "PIL of 16 bits": (Image.fromarray(PHOTO[..., 0].astype(np.uint16)), {}, "mode 'I;16'.*convert it to 8 bits"),
    "PIL of floats": (Image.fromarray(PHOTO[..., 0].astype(np.float32)), {}, "mode 'F'"),
    "crop above the image": (
        PHOTO,
        {"do_resize": False},
        "crop_size=224 × 224 .* which is 60 × 90.*'shortest_edge': 256",
    ),
    "larger crop alone": (PHOTO, {"crop_size": 384}, "crop_size=384 × 384.*'shortest_edge': 438"),
    "crop by an edge": (PHOTO, {"crop_size": {"shortest_edge": 24}}, "crop_size=.*'height' and 'width'"),
    "no such size": (PHOTO, {"size": {"side": 24}}, "size must have one of the following"),
    "no images": ([], {}, "images is empty"),
    "two means": (PHOTO, {"image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]}, "mean must have 3 elements"),
    "no batch": (
        [PHOTO, PHOTO[:40]],
        {"do_resize": False, "do_center_crop": False},
        r"\(3, 40, 90\), \(3, 60, 90\).*no batch: set do_center_crop=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """Contradictions between images and arguments were computed silently, or failed without a name."""
    images, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        pixels(images, **arguments)


def test_five_channels_are_refused():
    with pytest.raises(ValueError, match="channel"):
        pixels(photograph(60, 90, 5))


# ---- saved and registered ----


def test_save_and_load(tmp_path):
    """What is given at construction is saved, and no more than the arguments."""
    processor = ViTTTImageProcessor(crop_size={"height": 48, "width": 80}, image_mean=[0.5] * 3, do_rescale=False)
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["crop_size"] == {"height": 48, "width": 80} and saved["size"] == {"shortest_edge": 91}
    assert saved["auto_map"] == {"AutoImageProcessor": "image_processing_vittt.ViTTTImageProcessor"}
    for loaded in (ViTTTImageProcessor.from_pretrained(tmp_path), AutoImageProcessor.from_pretrained(tmp_path)):
        assert type(loaded) is ViTTTImageProcessor
        assert loaded.to_dict() == processor.to_dict()
    other = AutoImageProcessor.from_pretrained(tmp_path, do_rescale=True, size={"shortest_edge": 100})
    assert torch.equal(pixels(PHOTO, other), pixels(PHOTO, processor, do_rescale=True, size={"shortest_edge": 100}))


@pytest.mark.parametrize("config_class", [ViTTTConfig, HViTTTConfig])
def test_the_model_type_alone_finds_the_processor(config_class, tmp_path):
    """A preprocessor_config.json of another origin names no class: the model's configuration says which."""
    config_class().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"crop_size": {"height": 32, "width": 32}}')
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(processor) is ViTTTImageProcessor and dict(processor.size) == {"shortest_edge": 36}


def test_the_package_is_imported_without_pillow():
    """Text models need no Pillow, without which AutoImageProcessor.register raises an ImportError."""
    code = f"import sys; sys.path[:] = {sys.path!r}; sys.modules['PIL'] = None\nimport hf_ttt; hf_ttt.LaCTConfig()\n"
    code += "try:\n    hf_ttt.ViTTTImageProcessor()\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert "ViTTTImageProcessor requires the PIL library" in done.stdout
