# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The LaCT-NVS processor: pixels against Pillow, cameras against projection, what it takes, and what it refuses."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_cameras import F64, RAY, about_y, miss, pose, poses, project, ray
from test_remote_code import python_files, run_child
from transformers import AutoModel, AutoProcessor
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

import hf_ttt
from hf_ttt import LaCTNVSConfig, LaCTNVSModel, LaCTNVSProcessor

FILTER = 1e-6  # of Pillow's filter in float32; values are at most 1
EYES = torch.eye(4).expand(2, 4, 4)
BLOCKS = [{"type": "attention", "head_dim": 8}, {"type": "ttt"}, {"type": "mlp", "inter_multi": 2}]


def tiny_model(seed: int = 0) -> LaCTNVSModel:
    torch.manual_seed(seed)
    model = LaCTNVSModel(LaCTNVSConfig(patch_size=4, hidden_size=16, num_hidden_layers=2, block_config=BLOCKS))
    return model.eval()


def photograph(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """8-bit values [height, width, channels] with noise and an edge."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    image[: height // 2, : width // 3] = 255
    return image


def scene(views: int = 2, height: int = 40, width: int = 60, seed: int = 0) -> dict:
    """Arguments of the processor for one scene."""
    images = [Image.fromarray(photograph(height, width, seed + i)) for i in range(views)]
    return {"images": images, "intrinsics": [50.0, 55.0, 31.0, 18.0], "camera_to_world": poses(views, seed)}


def process(**changes):
    return LaCTNVSProcessor(size=(16, 24))(**{**scene(), **changes})


# ---- pixels ----


@pytest.mark.parametrize("before", [(30, 40), (97, 61), (16, 90), (10, 13)])
@pytest.mark.parametrize("size", [(16, 24), (40, 24)])
def test_resized_as_by_pillow(before, size):
    """Lanczos, antialiased, then the centre: as `PIL.Image.resize` of floats and a crop, for all ratios."""
    image = photograph(*before).astype(np.float32) / 255
    scale = max(size[0] / before[0], size[1] / before[1])
    height, width = round(before[0] * scale), round(before[1] * scale)
    resized = [
        np.asarray(Image.fromarray(channel, mode="F").resize((width, height), Image.Resampling.LANCZOS))
        for channel in image.transpose(2, 0, 1).copy()
    ]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    expected = np.stack(resized)[:, top : top + size[0], left : left + size[1]].clip(0, 1)
    pixels = process(images=[image] * 2, size=size).pixel_values
    assert pixels.shape == (1, 2, 3, *size) and pixels.dtype == torch.float32
    assert np.abs(pixels[0, 0].numpy() - expected).max() <= FILTER


def test_an_image_of_the_size_is_not_changed():
    image = photograph(16, 24)
    pixels = process(images=[image] * 2).pixel_values[0, 0]
    assert torch.equal(pixels, torch.from_numpy(image).permute(2, 0, 1) / 255)


def test_height_and_width_are_never_swapped():
    """A marker at a row and a column comes out there, in an image that is not square, and in one that is halved."""
    image = np.zeros((32, 48, 3), np.uint8)
    image[4:6, 30:32] = (255, 128, 0)
    whole = process(images=[image] * 2, size={"height": 32, "width": 48}).pixel_values[0, 0]
    assert whole.shape == (3, 32, 48)
    assert whole.nonzero()[:, 1:].amin(0).tolist() == [4, 30] and whole.nonzero()[:, 1:].amax(0).tolist() == [5, 31]
    halved = process(images=[image] * 2).pixel_values[0, 0]
    assert divmod(halved[0].argmax().item(), 24) == (2, 15)
    assert halved[0, 2, 15] > halved[1, 2, 15] > 0.2 and halved[2].max() == 0


def test_what_is_at_a_projected_point_stays_there():
    """Image and intrinsics are resized and cut alike: a bright spot is where the new camera projects its point."""
    camera_to_world, intrinsics = poses(1, seed=5)[0], torch.tensor([70.0, 90.0, 33.0, 21.0], dtype=F64)
    point = (camera_to_world @ torch.tensor([0.1, 0.05, 1.6, 1], dtype=F64))[:3]
    u, v, _ = project(point, intrinsics, camera_to_world)
    rows, columns = torch.meshgrid(torch.arange(50) + 0.5, torch.arange(90) + 0.5, indexing="ij")
    spot = torch.exp(-((rows - v) ** 2 + (columns - u) ** 2) / 18).float()
    done = process(
        images=[spot.expand(3, -1, -1)], intrinsics=intrinsics, camera_to_world=camera_to_world[None], size=(24, 16)
    )
    found, pixels = done.intrinsics[0, 0].double(), done.pixel_values[0, 0, 0].double()
    column, row, _ = project(point, found, done.camera_to_world[0, 0].double())
    rows, columns = torch.meshgrid(torch.arange(24) + 0.5, torch.arange(16) + 0.5, indexing="ij")
    seen = [(pixels * axis).sum().item() / pixels.sum().item() for axis in (columns, rows)]
    assert seen == pytest.approx([column, row], abs=0.02)  # pixels


def test_points_lie_on_the_rays_of_processed_cameras():
    """Known answer through the whole processor, which halves the image and cuts 8 columns on the left: a point seen at
    a pixel of the given image is on the model's ray for the pixel where it is then."""
    camera_to_world, intrinsics = poses(1, seed=6)[0], torch.tensor([60.0, 75.0, 29.0, 20.0], dtype=F64)
    done = process(
        images=[photograph(32, 64)], intrinsics=intrinsics, camera_to_world=camera_to_world[None], size=(16, 16)
    )
    for row, column in ((0, 0), (7, 3), (15, 15)):
        u, v = 2 * (column + 8 + 0.5), 2 * (row + 0.5)
        seen = torch.tensor([(u - 29) / 60, (v - 20) / 75, 1, 1 / 3], dtype=F64) * 3
        point = (camera_to_world @ seen)[:3]
        assert project(point, intrinsics, camera_to_world) == pytest.approx((u, v, 3), rel=1e-9)
        found = ray(done.intrinsics[0, 0], done.camera_to_world[0, 0], row, column, 16, 16, dtype=torch.float32)
        assert miss(point, *found) <= RAY


def test_transparent_images_have_no_dark_edges():
    """A red disc with transparent black around it: on white, every pixel is between red and white, whatever the scale;
    the black of pixels that nobody sees leaked in where colours and alpha were resized apart."""
    rows, columns = np.mgrid[:64, :96]
    inside = (rows - 32) ** 2 + (columns - 48) ** 2 < 400
    image = np.zeros((64, 96, 4), np.uint8)
    image[inside] = (255, 0, 0, 255)
    for form in (Image.fromarray(image), image, torch.from_numpy(image).permute(2, 0, 1) / 255):
        pixels = process(images=[form] * 2).pixel_values[0, 0]
        assert pixels[0].min() >= 1 - 1e-6 and torch.equal(pixels[1], pixels[2])
        assert ((pixels[1] > 0.1) & (pixels[1] < 0.9)).sum() > 8
    blue = process(images=[image] * 2, background=(0, 0, 1)).pixel_values[0, 0]
    torch.testing.assert_close(blue[0] + blue[2], torch.ones(16, 24), atol=1e-6, rtol=0)
    assert blue[1].max() == 0


def test_half_transparent():
    """Alpha is straight, not premultiplied."""
    image = np.full((16, 24, 4), (255, 0, 0, 51), np.uint8)
    pixels = process(images=[image] * 2, background=(0, 0, 1)).pixel_values[0, 0]
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([0.2, 0, 0.8]))


FORMS = {
    "array, channels first": lambda image: image.transpose(2, 0, 1),
    "array with negative strides": lambda image: image[::-1].copy()[::-1],
    "floats": lambda image: image / 255,
    "tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1),
    "tensor of floats": lambda image: torch.from_numpy(image).permute(2, 0, 1) / 255,
    "PIL": Image.fromarray,
    "PIL with alpha": lambda image: Image.fromarray(image).convert("RGBA"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_image(form):
    images = [photograph(40, 60, seed) for seed in (0, 1)]
    expected = process(images=images).pixel_values
    torch.testing.assert_close(process(images=[FORMS[form](image) for image in images]).pixel_values, expected)


def test_modes_of_pillow():
    """Grey, palettes and transparent palettes become what Pillow makes of them."""
    image = Image.fromarray(photograph(16, 24))
    grey = process(images=[image.convert("L")] * 2).pixel_values[0, 0]
    assert torch.equal(grey[0], grey[1]) and grey.std() > 0
    palette = image.quantize(8)
    expected = process(images=[palette.convert("RGB")] * 2).pixel_values
    assert torch.equal(process(images=[palette] * 2).pixel_values, expected)
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert process(images=[palette] * 2, background=(0, 0, 1)).pixel_values[0, 0, :, 0, 0].tolist() == [0, 0, 1]


def test_views_may_differ_in_size():
    """Each is resized with its own intrinsics: the same camera, photographed at two resolutions, comes out the same."""
    image = Image.fromarray(photograph(64, 96))
    done = process(
        images=[image, image.resize((48, 32), Image.Resampling.LANCZOS)],
        intrinsics=[[80, 80, 50, 30], [40, 40, 25, 15]],
        camera_to_world=torch.eye(4).expand(2, 4, 4),
    )
    assert torch.equal(done.intrinsics[0, 0], done.intrinsics[0, 1])
    assert done.intrinsics[0, 0].tolist() == [20, 20, 12.5, 7.5]
    assert (done.pixel_values[0, 0] - done.pixel_values[0, 1]).abs().mean() < 0.05


# ---- batches and cameras ----


def test_a_batch_gives_what_its_scenes_give_alone():
    """Lists of lists, also of scenes with images of other sizes, and intrinsics and poses for each or for all."""
    processor, scenes = LaCTNVSProcessor(size=(16, 24), normalize_scene=True), [scene(3), scene(3, 70, 33, seed=7)]
    batch = processor(
        [s["images"] for s in scenes],
        [[s["intrinsics"]] * 3 for s in scenes],
        [s["camera_to_world"].tolist() for s in scenes],
    )
    for i, one in enumerate(scenes):
        for key, value in processor(**one).items():
            assert value.shape[0] == 1 and torch.equal(batch[key][i], value[0]), key
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    assert shapes == {
        "pixel_values": (2, 3, 3, 16, 24),
        "intrinsics": (2, 3, 4),
        "camera_to_world": (2, 3, 4, 4),
        "world_to_scene": (2, 4, 4),
        "scene_scale": (2,),
    }
    assert all(value.dtype == torch.float32 for value in batch.values())


def test_stacked_images():
    """Tensors [V, 3, h, w] are a scene, [B, V, 3, h, w] and lists of the former a batch."""
    views = torch.rand(2, 3, 3, 20, 30)
    cameras = {"intrinsics": [30, 30, 15, 10], "camera_to_world": poses(3)}
    one = process(images=views[0], **cameras)
    both = process(images=views, intrinsics=cameras["intrinsics"], camera_to_world=poses(3).expand(2, 3, 4, 4))
    listed = process(images=list(views), intrinsics=[30, 30, 15, 10], camera_to_world=[poses(3)] * 2)
    assert torch.equal(both.pixel_values[:1], one.pixel_values)
    assert all(torch.equal(both[key], listed[key]) for key in both)


def test_both_directions_and_conventions_of_poses():
    given = scene()["camera_to_world"]
    expected = process().camera_to_world
    inverse = torch.linalg.inv(given)
    flip = torch.diag(torch.tensor([1.0, -1, -1, 1], dtype=F64))
    torch.testing.assert_close(process(camera_to_world=None, world_to_camera=inverse).camera_to_world, expected)
    opengl = process(camera_to_world=(given @ flip)[:, :3], camera_convention="opengl")
    torch.testing.assert_close(opengl.camera_to_world, expected)
    opengl = process(camera_to_world=None, world_to_camera=flip @ inverse, camera_convention="opengl")
    torch.testing.assert_close(opengl.camera_to_world, expected)
    saved = LaCTNVSProcessor(size=(16, 24), camera_convention="opengl")(**{**scene(), "camera_to_world": given @ flip})
    torch.testing.assert_close(saved.camera_to_world, expected)


def test_arrays_are_returned_where_asked_for():
    assert {type(value) for value in process(return_tensors="np").values()} == {np.ndarray}


def test_types_are_those_of_images():
    """`inputs.to(torch.bfloat16)`, the usual line of transformers, rounded cameras to three digits: rays were off by
    pixels. Images take the type, cameras stay float32; `to` with a device moves both."""
    done = process(normalize_scene=True, target_intrinsics=[50, 50, 30, 20], target_camera_to_world=poses(1))
    before = {name: value.clone() for name, value in done.items()}
    assert done.to(torch.bfloat16) is done
    for name, value in done.items():
        kept = not name.endswith("pixel_values")
        assert value.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(value, before[name].to(value.dtype))
    moved = done.to("meta", dtype=torch.float64)
    assert {value.device.type for value in moved.values()} == {"meta"}
    assert moved.pixel_values.dtype == torch.float64 and moved.intrinsics.dtype == torch.float32
    assert set(process(return_tensors="np").to("cpu")) == {"pixel_values", "intrinsics", "camera_to_world"}


def test_a_principal_point_outside_of_its_image(monkeypatch):
    """Intrinsics of the full resolution with smaller images are the usual mistake, and rendered a grey blur in silence:
    a warning names both."""
    said = []
    monkeypatch.setattr("hf_ttt.processing_lact_nvs.logger.warning_once", said.append)
    process()
    process(intrinsics=[50, 55, 59.5, 0.5])
    assert not said
    process(intrinsics=[200, 220, 124, 18])
    assert said[0] == (
        "intrinsics have the principal point (124, 18) outside of an image of 60 × 40 pixels (width × height): are "
        "they of images of another size?"
    )
    assert len(said) == 2  # one for each image; transformers' logger says each text once


def test_numbers_of_numpy_are_sides():
    """`image.shape` of some libraries; they are saved as JSON."""
    processor = LaCTNVSProcessor(size=(np.int64(16), np.int32(24)))
    assert json.loads(processor.to_json_string())["size"] == {"height": 16, "width": 24}


# ---- new cameras of a scene that is there ----


def test_new_cameras_without_images():
    """Cameras in every convention for `render`, in another process than the images: as the targets of a call."""
    model, new = tiny_model(), poses(3, seed=4)
    flip = torch.diag(torch.tensor([1.0, -1, -1, 1], dtype=F64))
    processor, k = LaCTNVSProcessor(size=(16, 24)), [50.0, 55.0, 31.0, 18.0]
    done = processor(**scene(), target_intrinsics=k, target_camera_to_world=new)
    given = {name: done[name] for name in ("pixel_values", "intrinsics", "camera_to_world")}
    matrix = torch.tensor([[50.0, 0, 31], [0, 55, 18], [0, 0, 1]])
    for intrinsics, cameras in (
        (k, {"camera_to_world": new}),
        (matrix, {"world_to_camera": torch.linalg.inv(new)}),
        ([k] * 3, {"camera_to_world": (new @ flip).numpy(), "camera_convention": "opengl"}),
        ([[k] * 3], {"camera_to_world": new[None]}),
    ):
        made = processor.process_cameras(intrinsics, **cameras, image_size=(40, 60))
        assert torch.equal(made.intrinsics, done.target_intrinsics)
        torch.testing.assert_close(made.camera_to_world, done.target_camera_to_world)
    with torch.no_grad():
        views = model.render(model.reconstruct(**given), **made, size=(16, 24))
        torch.testing.assert_close(views, model(**done).rendered, atol=1e-5, rtol=0)
    plain = processor.process_cameras(k, new)  # in pixels of what is rendered, of any size
    assert torch.equal(plain.intrinsics, torch.tensor(k).expand(1, 3, 4))
    both = processor.process_cameras(k, new.expand(2, 3, 4, 4), image_size=(40, 60), size=(40, 60))
    assert both.camera_to_world.shape == (2, 3, 4, 4) and torch.equal(both.intrinsics[1], plain.intrinsics[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "^neither of camera_to_world and world_to_camera came"),
        ({"camera_to_world": torch.eye(4)}, r"^camera_to_world has 2 dimensions; expected \[views, 4, 4\]"),
        ({"camera_to_world": -torch.eye(4)[None]}, r"^camera_to_world\[0\] has the last row"),
        ({"world_to_camera": EYES * torch.tensor([1, 1, -1, 1])}, r"^world_to_camera\[0\] has a left-handed rotation"),
        ({"camera_to_world": [["x"]]}, "^camera_to_world holds 'x', which is not a number"),
        ({"camera_to_world": torch.eye(4)[None], "image_size": (4, 5, 6)}, r"^size=\(4, 5, 6\) is not a size"),
        ({"camera_to_world": torch.eye(4)[None], "intrinsics": [[9, 9, 4, 4]] * 2}, r"^intrinsics has shape \[2, 4\]"),
    ],
)
def test_new_cameras_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LaCTNVSProcessor().process_cameras(**{"intrinsics": [9, 9, 4, 4], **arguments})


# ---- normalisation and targets ----


def walk(views: int, seed: int) -> torch.Tensor:
    """Cameras that look about the same way from different places, far from the origin of a world in other units."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(views, 3, generator=generator, dtype=F64) * 9 + torch.tensor([40.0, -30, 20])
    return torch.stack([pose(about_y(0.1 * i), place) for i, place in enumerate(places)])


def test_rendering_with_cameras_of_the_world():
    """`render` moves new cameras into the normalised scene: those of the world give what normalised ones give to a
    scene that was made of normalised cameras alone."""
    model, inputs, new = tiny_model(), scene(3), walk(2, seed=8)
    inputs["camera_to_world"] = walk(3, seed=7)
    done = LaCTNVSProcessor(size=(16, 24), normalize_scene=True)(**inputs)
    assert done.camera_to_world[..., :3, 3].abs().max().item() == pytest.approx(1)
    k, size = torch.tensor([20.0, 20, 12, 8]).expand(1, 2, 4), (16, 24)
    matrix, scale = done.world_to_scene[0].double(), done.scene_scale[0].double()
    moved = matrix @ new
    moved[:, :3, 3] *= scale
    with torch.no_grad():
        world = model.render(model.reconstruct(**done), k, new[None].float(), size)
        normalised = {key: done[key] for key in ("pixel_values", "intrinsics", "camera_to_world")}
        alone = model.render(model.reconstruct(**normalised), k, moved[None].float(), size)
        wrong = model.render(model.reconstruct(**normalised), k, new[None].float(), size)
    torch.testing.assert_close(world, alone, atol=1e-5, rtol=0)
    assert (world - wrong).abs().max() > 1e-3


def test_targets_are_arguments_of_forward():
    """Target images and cameras are resized like the inputs, poses left in the world; `forward` takes them all."""
    model, inputs = tiny_model(), scene(3)
    inputs["camera_to_world"] = walk(3, seed=7)
    processor = LaCTNVSProcessor(size=(16, 24), normalize_scene=True)
    targets = {
        "target_images": scene(2, 33, 77, seed=3)["images"],
        "target_intrinsics": [60.0, 66.0, 40.0, 15.0],
        "target_camera_to_world": walk(2, seed=8),
    }
    done = processor(**inputs, **targets)
    alone = processor(targets["target_images"], *list(targets.values())[1:], normalize_scene=False)
    for key, value in alone.items():
        assert torch.equal(done[f"target_{key}"], value), key
    output = model(**done)
    assert output.rendered.shape == (1, 2, 3, 16, 24) and output.loss.isfinite()
    assert set(done) == set(processor.model_input_names)


def test_target_cameras_without_images_are_of_the_inputs_size():
    """Their intrinsics are in pixels of the images as they came, and are resized like those."""
    done = process(target_intrinsics=scene()["intrinsics"], target_camera_to_world=poses(3, seed=4))
    assert torch.equal(done.target_intrinsics, done.intrinsics[:, :1].expand(1, 3, 4))
    assert "target_pixel_values" not in done and tiny_model()(**done).rendered.shape == (1, 3, 3, 16, 24)
    inverse = torch.linalg.inv(poses(3, seed=4))
    other = process(target_intrinsics=scene()["intrinsics"], target_world_to_camera=inverse)
    torch.testing.assert_close(other.target_camera_to_world, done.target_camera_to_world)


def test_rendered_views_become_images():
    """[B, V, 3, h, w] in [0, 1] → lists of PIL images with h rows, rounded to 8 bits; and back."""
    pixels = torch.from_numpy(photograph(16, 24)).permute(2, 0, 1).expand(2, 3, 3, 16, 24) / 255
    views = LaCTNVSProcessor().post_process_novel_views(pixels)
    assert [len(scene) for scene in views] == [3, 3] and views[1][2].size == (24, 16) and views[0][0].mode == "RGB"
    assert np.array_equal(np.asarray(views[1][2]), photograph(16, 24))
    arrays = LaCTNVSProcessor().post_process_novel_views(pixels.numpy())  # predictions of Trainer
    assert np.array_equal(np.asarray(arrays[1][2]), photograph(16, 24))
    with pytest.raises(ValueError, match=r"rendered has shape \[3, 16, 24\]; expected \[batch, views, 3"):
        LaCTNVSProcessor().post_process_novel_views(pixels[0, 0])


# ---- what is refused ----

GREY16 = Image.fromarray(np.zeros((16, 24), np.uint16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": Image.new("RGB", (8, 8))}, r"^images is a Image; expected the list of a scene's views"),
        ({"images": torch.rand(3, 16, 24)}, r"^images has shape \[3, 16, 24\]; expected the list"),
        ({"images": []}, r"^images has scenes with \[0\] views"),
        ({"images": [[torch.rand(3, 9, 9)], [torch.rand(3, 9, 9)] * 2]}, r"^images has scenes with \[1, 2\] views"),
        ({"images": [[torch.rand(3, 9, 9)], torch.rand(3, 9, 9)]}, r"^images\[1\] is not a list of a scene's views"),
        ({"images": [torch.rand(3, 9, 9), "x.png"]}, r"^images\[1\] is a str; expected a PIL image"),
        ({"images": [torch.rand(9, 9)] * 2}, r"^images\[0\] has shape \[9, 9\]; expected \[3, height, width\]"),
        ({"images": [torch.rand(3, 0, 9)] * 2}, r"^images\[0\] has shape \[3, 0, 9\]"),
        ({"images": [torch.rand(3, 9, 4)] * 2}, r"^images\[0\] has shape \[3, 9, 4\], whose channels may be first"),
        ({"images": [torch.rand(3, 9, 9) * 255] * 2}, r"^images\[0\] has floats from .* expected 0 to 1"),
        ({"images": [torch.rand(3, 9, 9) / 0] * 2}, r"^images\[0\] has floats from"),
        ({"images": [torch.ones(3, 9, 9, dtype=torch.int64)] * 2}, r"^images\[0\] has dtype torch.int64"),
        ({"images": [GREY16] * 2}, r"^images\[0\] has the PIL mode 'I;16'; expected 8 bits"),
        ({"camera_to_world": None}, "^neither of camera_to_world and world_to_camera came"),
        ({"world_to_camera": EYES}, "^both of camera_to_world and world_to_camera came"),
        ({"camera_to_world": torch.eye(4)}, r"^camera_to_world has 2 dimensions; expected \[views, 4, 4\]"),
        ({"camera_to_world": torch.eye(4).expand(3, 4, 4)}, r"^images has 1 × 2 views .* camera_to_world has 1 × 3"),
        ({"camera_to_world": EYES * torch.tensor([1, 1, -1, 1])}, r"^camera_to_world\[0\] has a left-handed rotation"),
        ({"camera_to_world": EYES * torch.tensor([2, 2, 2, 1])}, r"^camera_to_world\[0\] .* scaled by 2"),
        ({"camera_convention": "gl"}, "^camera_convention='gl' is not one of"),
        ({"intrinsics": [0.9, 0.9, 0.5, 0.5]}, r"^intrinsics has fx=0\.9; .*normalised"),
        ({"intrinsics": [[50, 50, 30, 20]] * 3}, r"^intrinsics has shape \[3, 4\]; expected \[2, 4\]"),
        ({"size": (16, 24, 3)}, r"^size=\(16, 24, 3\) is not a size"),
        ({"size": {"shortest_edge": 16}}, r"^size=\{'shortest_edge': 16\} is not a size"),
        ({"size": 16.0}, r"^size=16.0 is not a size"),
        ({"size": (0, 16)}, r"^size=\(0, 16\) is not a size"),
        ({"background": (255, 255, 255)}, r"^background=\(255, 255, 255\) is not a colour"),
        ({"target_camera_to_world": EYES}, "^target_intrinsics is missing"),
        ({"target_intrinsics": [9, 9, 4, 4]}, "^neither of target_camera_to_world and target_world_to_camera came"),
        (
            {"target_intrinsics": [9, 9, 4, 4], "target_camera_to_world": EYES, "target_images": scene(3)["images"]},
            r"^target_images has 1 × 3 views .* target_camera_to_world has 1 × 2",
        ),
        (
            {"target_intrinsics": [9, 9, 4, 4], "target_camera_to_world": EYES, "target_images": [scene(2)["images"]]},
            "^target_images and images must both be of one scene",
        ),
        (
            {
                "images": [torch.rand(3, 9, 9), torch.rand(3, 9, 8)],
                "target_intrinsics": [9, 9, 4, 4],
                "target_camera_to_world": EYES,
            },
            r"^images have the sizes \[\(9, 8\), \(9, 9\)\], and which of them target_intrinsics is for is not known",
        ),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        process(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": None}, "size=None is not a size"),
        ({"background": (1, 1)}, r"background=\(1, 1\) is not a colour"),
        ({"background": "white"}, "background='white' is not a colour: expected three numbers from 0 to 1"),
        ({"background": 1.0}, "background=1.0 is not a colour"),
        ({"camera_convention": "opengl "}, "camera_convention='opengl ' is not one of"),
        ({"scene_extent": 0}, "scene_extent=0 must be greater than 0"),
    ],
)
def test_settings_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LaCTNVSProcessor(**arguments)


# ---- saving, and a process without hf_ttt ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a model, its processor, and beside it arguments and what they give."""
    root = tmp_path_factory.mktemp("nvs")
    model = tiny_model()
    processor = LaCTNVSProcessor(size=(16, 24), background=(0, 0.5, 1), normalize_scene=True, scene_extent=0.75)
    model.save_pretrained(root / "nvs")
    processor.save_pretrained(root / "nvs")
    images = torch.rand(3, 4, 20, 30)
    arguments = {"images": images, "intrinsics": torch.tensor([30.0, 31, 14, 11]), "camera_to_world": walk(3, seed=7)}
    inputs = processor(**arguments)
    with torch.no_grad():
        rendered = model.render(model.reconstruct(**inputs), inputs.intrinsics, walk(3, seed=8)[None].float(), (16, 24))
    torch.save({"arguments": arguments, "inputs": dict(inputs), "rendered": rendered}, root / "expected.pt")
    torch.save(walk(3, seed=8), root / "new.pt")
    return root


def test_settings_are_saved(saved):
    """And overridden by arguments of `from_pretrained`."""
    processor = AutoProcessor.from_pretrained(saved / "nvs")
    assert type(processor) is LaCTNVSProcessor and processor.size == {"height": 16, "width": 24}
    assert processor.background == [0, 0.5, 1] and processor.normalize_scene and processor.scene_extent == 0.75
    assert type(AutoModel.from_pretrained(saved / "nvs")) is LaCTNVSModel
    other = LaCTNVSProcessor.from_pretrained(saved / "nvs", size=32, camera_convention="opengl")
    assert other.size == {"height": 32, "width": 32} and other.camera_convention == "opengl"


def test_saved_files_are_those_that_are_reached(saved):
    """The model's and the processor's files, no others; they import torch, transformers and the standard library."""
    source, files = Path(hf_ttt.__file__).parent, python_files(saved / "nvs")
    entries = {"modeling_lact_nvs.py", "processing_lact_nvs.py"}
    reached = {Path(file).name for entry in entries for file in get_relative_import_files(source / entry)} | entries
    assert files == {name: (source / name).read_text(encoding="utf-8") for name in reached}
    assert "cameras.py" in files and "modeling_lact.py" not in files and "modeling_vittt.py" not in files
    for name, text in files.items():
        assert set(get_imports(saved / "nvs" / name)) <= {"torch", "transformers"} | set(sys.stdlib_module_names), name
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
        assert all(node.level == 1 and node.module and "." not in node.module for node in nodes), name
        assert set(get_relative_imports(saved / "nvs" / name)) == {node.module for node in nodes}, name
    processor = json.loads((saved / "nvs" / "processor_config.json").read_text())
    assert processor["auto_map"] == {"AutoProcessor": "processing_lact_nvs.LaCTNVSProcessor"}
    config = json.loads((saved / "nvs" / "config.json").read_text())
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModel"}


def child_renders(folder, expected, new, second):
    import torch
    from torch.testing import assert_close
    from transformers import AutoModel, AutoProcessor

    expected, new = torch.load(expected), torch.load(new)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    for loaded in (processor, model):
        assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
    inputs = processor(**expected["arguments"])
    assert inputs.keys() == expected["inputs"].keys()
    assert all(torch.equal(inputs[key], value) for key, value in expected["inputs"].items())
    with torch.no_grad():
        scene = model.reconstruct(**inputs)
        rendered = model.render(scene, intrinsics=inputs.intrinsics, camera_to_world=new[None].float(), size=(16, 24))
    assert_close(rendered, expected["rendered"])
    views = processor.post_process_novel_views(rendered)
    model.save_pretrained(second)
    processor.save_pretrained(second)
    return [type(processor).__name__, len(views[0]), *views[0][0].size]


def test_loads_without_the_package(saved, tmp_path):
    """Remote code of the processor and the model: the same inputs and renderings; what is saved again is the same, and
    loads again."""
    folder = saved / "nvs"
    for i in range(2):
        second = tmp_path / f"again{i}"
        args = folder, saved / "expected.pt", saved / "new.pt", second
        assert run_child(child_renders, *args, home=tmp_path / f"home{i}") == ["LaCTNVSProcessor", 3, 24, 16]
        assert python_files(second) == python_files(folder)
        for name in ("config.json", "processor_config.json"):
            assert json.loads((second / name).read_text()) == json.loads((folder / name).read_text())
        folder = second


WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = None
import torch, hf_ttt
processor = hf_ttt.LaCTNVSProcessor(size=8)
done = processor(images=torch.rand(2, 3, 9, 9), intrinsics=[9, 9, 4, 4], camera_to_world=torch.eye(4).expand(2, 4, 4))
assert done.pixel_values.shape == (1, 2, 3, 8, 8)
try:
    processor.post_process_novel_views(done.pixel_values)
except ImportError as error:
    assert "Pillow" in str(error) or "PIL" in str(error), error
else:
    raise AssertionError("no error")
"""


def test_works_on_tensors_without_pillow():
    """Pillow is optional: the import and tensors work without it; images as output say what is missing."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n" + WITHOUT_PILLOW
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
