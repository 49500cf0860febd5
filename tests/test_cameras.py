# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Cameras with known answers: rays of the model against projection by K [R | t], conventions, and what is refused."""

import math

import pytest
import torch

from hf_ttt.cameras import (
    Crop,
    as_float64,
    cover,
    crop_intrinsics,
    flip_convention,
    mean_pose,
    move,
    normalisation,
    read_intrinsics,
    read_poses,
)
from hf_ttt.modeling_lact_nvs import pixel_rays

F64 = torch.float64
RAY = 1e-6  # sine of the angle between a ray and the point that it should meet


def rotation(generator: torch.Generator) -> torch.Tensor:
    """A random rotation [3, 3]."""
    q, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=F64))
    return q * torch.linalg.det(q)  # of three axes, negating all turns a reflection into a rotation


def pose(turn: torch.Tensor, position) -> torch.Tensor:
    matrix = torch.eye(4, dtype=F64)
    matrix[:3, :3], matrix[:3, 3] = turn, torch.as_tensor(position, dtype=F64)
    return matrix


def poses(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = [(rotation(generator), torch.randn(3, generator=generator, dtype=F64)) for _ in range(count)]
    return torch.stack([pose(*one) for one in drawn])


def about_y(angle: float) -> torch.Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]], dtype=F64)


def matrix_of(intrinsics: torch.Tensor) -> torch.Tensor:
    fx, fy, cx, cy = intrinsics.tolist()
    return torch.tensor([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], dtype=F64)


def project(point: torch.Tensor, intrinsics: torch.Tensor, camera_to_world: torch.Tensor) -> tuple[float, float, float]:
    """Column, row and depth of a point of the world, by K [R | t] of the world-to-camera matrix."""
    world_to_camera = torch.linalg.inv(camera_to_world)
    x = matrix_of(intrinsics) @ (world_to_camera @ torch.cat([point, torch.ones(1, dtype=F64)]))[:3]
    return (x[0] / x[2]).item(), (x[1] / x[2]).item(), x[2].item()


def ray(intrinsics, camera_to_world, row: int, column: int, height=6, width=8, dtype=F64):
    """Origin and direction of one pixel's ray, by the model."""
    views = (t.to(dtype)[None, None] for t in (torch.as_tensor(intrinsics, dtype=F64), camera_to_world))
    origins, directions = pixel_rays(*views, height, width)
    return origins[0, 0, row, column].double(), directions[0, 0, row, column].double()


def miss(point, origin, direction) -> float:
    """Sine of the angle between a ray and a point, which lies before the origin."""
    to_point = point - origin
    assert to_point @ direction > 0
    return (torch.linalg.norm(torch.linalg.cross(to_point, direction)) / torch.linalg.norm(to_point)).item()


# ---- rays ----


def test_identity_pose():
    """The pixel at the principal point looks along +z; one to the right of it and below leans to +x and +y."""
    origin, direction = ray([10, 10, 4.5, 3.5], torch.eye(4, dtype=F64), row=3, column=4)
    assert origin.tolist() == [0, 0, 0] and direction.tolist() == [0, 0, 1]
    _, direction = ray([10, 10, 4.5, 3.5], torch.eye(4, dtype=F64), row=5, column=7)
    torch.testing.assert_close(direction * direction[2].reciprocal(), torch.tensor([0.3, 0.2, 1.0], dtype=F64))


def test_quarter_turn():
    """Turned to the right about the vertical axis, the camera looks along the world's +x, its right along −z."""
    turned = pose(about_y(math.pi / 2), [1, 2, 3])
    origin, direction = ray([10, 10, 4.5, 3.5], turned, row=3, column=4)
    torch.testing.assert_close(origin, torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    torch.testing.assert_close(direction, torch.tensor([1.0, 0.0, 0.0], dtype=F64))
    _, direction = ray([10, 10, 4.5, 3.5], turned, row=3, column=6)
    torch.testing.assert_close(direction / direction[0], torch.tensor([1.0, 0.0, -0.2], dtype=F64))


def test_principal_point_and_focal_lengths_have_their_axes():
    """Off-centre principal points and non-square pixels: x with fx and cx, y with fy and cy."""
    _, direction = ray([10, 20, 1.5, 4.5], torch.eye(4, dtype=F64), row=2, column=7)
    expected = torch.tensor([(7.5 - 1.5) / 10, (2.5 - 4.5) / 20, 1], dtype=F64)
    torch.testing.assert_close(direction, expected / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, RAY), (F64, 1e-14)])
def test_projected_points_lie_on_their_rays(dtype, tolerance):
    """A point that K [R | t] projects onto a pixel's centre lies on that pixel's ray."""
    generator, worst = torch.Generator().manual_seed(1), 0.0
    for camera_to_world in poses(50):
        intrinsics = torch.tensor([9.0, 13.0, 2.7, 4.1], dtype=F64)
        in_camera = torch.rand(3, generator=generator, dtype=F64) * 4 + torch.tensor([-2, -2, 1])
        point = (camera_to_world @ torch.cat([in_camera, torch.ones(1, dtype=F64)]))[:3]
        row, column = torch.randint(6, (2,), generator=generator).tolist()
        u, v, depth = project(point, intrinsics, camera_to_world)
        assert depth > 0
        intrinsics[2:] += torch.tensor([column + 0.5 - u, row + 0.5 - v], dtype=F64)  # moves it onto the centre
        worst = max(worst, miss(point, *ray(intrinsics, camera_to_world, row, column, dtype=dtype)))
    print(f"greatest miss: {worst:.1e}")
    assert worst <= tolerance


@pytest.mark.parametrize("before", [(37, 53), (20, 90), (12, 16), (200, 31)])
@pytest.mark.parametrize("size", [(24, 32), (32, 24)])
def test_projected_points_lie_on_their_rays_after_resizing(before, size):
    """The same with intrinsics that followed a resize and a crop: the centre of a new pixel, traced back through the
    crop and the two scales, is where the old camera sees the point."""
    camera_to_world, intrinsics = poses(1, seed=3)[0], torch.tensor([40.0, 51.0, 17.3, 12.9], dtype=F64)
    crop = cover(before, size)
    after = crop_intrinsics(intrinsics, before, crop)
    for row, column in ((0, 0), (3, 17), (size[0] - 1, size[1] - 1)):
        u = (column + 0.5 + crop.left) * before[1] / crop.width
        v = (row + 0.5 + crop.top) * before[0] / crop.height
        seen = torch.linalg.solve(matrix_of(intrinsics), torch.tensor([u, v, 1], dtype=F64)) * 2.5
        point = (camera_to_world @ torch.cat([seen, torch.ones(1, dtype=F64)]))[:3]
        assert project(point, intrinsics, camera_to_world) == pytest.approx((u, v, 2.5), rel=1e-9)
        found = ray(after, camera_to_world, row, column, *size, dtype=torch.float32)
        assert miss(point, *found) <= RAY


def test_crops_with_known_answers():
    """Cover keeps the ratio, the crop is centred, and height comes first."""
    assert cover((100, 200), (50, 50)) == Crop(50, 100, 0, 25)
    assert cover((200, 100), (50, 50)) == Crop(100, 50, 25, 0)
    assert cover((30, 40), (60, 100)) == Crop(75, 100, 7, 0)
    assert cover((64, 48), (64, 48)) == Crop(64, 48, 0, 0)
    given = torch.tensor([100.0, 110.0, 90.0, 50.0], dtype=F64)
    assert crop_intrinsics(given, (100, 200), Crop(50, 100, 0, 25)).tolist() == [50, 55, 20, 25]
    assert crop_intrinsics(given, (200, 100), Crop(100, 50, 25, 0)).tolist() == [50, 55, 45, 0]


@pytest.mark.parametrize("before", [(37, 53), (101, 999), (999, 101), (7, 8), (1, 1)])
@pytest.mark.parametrize("size", [(24, 32), (32, 24), (8, 8)])
def test_a_resized_image_covers_the_size(before, size):
    """Rounding never leaves a row or column short, and one side fits exactly."""
    crop = cover(before, size)
    assert crop.height >= size[0] and crop.width >= size[1] and size[0] + crop.top <= crop.height
    assert crop.height == size[0] or crop.width == size[1]
    assert 0 <= crop.height - size[0] - 2 * crop.top <= 1 and 0 <= crop.width - size[1] - 2 * crop.left <= 1


# ---- what a camera can be ----


def test_opengl_and_opencv():
    """An OpenGL camera at the origin looks along −z with y up: as OpenCV, half a turn about x; twice, the identity."""
    expected = torch.diag(torch.tensor([1.0, -1, -1, 1], dtype=F64))
    assert torch.equal(read_poses("p", torch.eye(4), convention="opengl"), expected)
    given = poses(3)
    flipped = read_poses("p", given, convention="opengl")
    assert torch.equal(flipped[:, :3, 3], given[:, :3, 3]) and torch.equal(flip_convention(flipped), given)
    _, direction = ray([10, 10, 4.5, 3.5], flipped[0], row=3, column=4)
    torch.testing.assert_close(direction, -given[0, :3, 2])


@pytest.mark.parametrize("convention", ["opencv", "opengl"])
def test_world_to_camera_is_the_inverse(convention):
    given = poses(4)
    inverses = torch.linalg.inv(given)
    read = read_poses("p", inverses, world_to_camera=True, convention=convention)
    torch.testing.assert_close(read, read_poses("p", given, convention=convention))
    assert torch.equal(read_poses("p", inverses[:, :3], world_to_camera=True, convention=convention), read)


def test_intrinsics_in_every_form():
    four = [10.0, 20.0, 3.0, 4.0]
    matrix = [[10.0, 0, 3], [0, 20, 4], [0, 0, 1]]
    expected = torch.tensor(four, dtype=F64).expand(2, 4)
    for value in (four, matrix, [four, four], [matrix, matrix], torch.tensor([four, four]), [torch.tensor(matrix)] * 2):
        assert torch.equal(read_intrinsics("k", value, (2,)), expected)
    assert read_intrinsics("k", torch.tensor([[four] * 3] * 2), (2, 3)).shape == (2, 3, 4)


def test_numbers_are_read_in_float64():
    """0.1 of a JSON file was rounded to float32 on the way."""
    assert as_float64("x", [0.1])[0].item() == 0.1


MIRRORED = torch.diag(torch.tensor([1.0, 1, -1, 1]))
SCALED = torch.diag(torch.tensor([2.0, 2, 2, 1]))
SHEARED = torch.eye(4) + torch.tensor([[0, 0.1, 0, 0]] + [[0.0] * 4] * 3)
TRANSPOSED = torch.eye(4) + torch.tensor([[0.0] * 4] * 3 + [[1.0, 2, 3, 0]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.eye(4), MIRRORED], r"^p\[1\] has a left-handed rotation .*opengl"),
        ([torch.eye(4), -SCALED], r"^p\[1\] has .*(left-handed|last row)"),
        ([torch.eye(4), SCALED], r"^p\[1\] has a rotation R with RᵀR − 1 up to 3: it is scaled by 2\."),
        ([torch.eye(4), SHEARED], r"^p\[1\] has a rotation R with RᵀR − 1 up to 0\.1; at most 0\.001"),
        (torch.zeros(2, 4, 4) + torch.tensor([0, 0, 0, 1.0]).diag(), r"^p\[0\] has a rotation R with RᵀR − 1 up to 1;"),
        ([torch.eye(4), TRANSPOSED], r"^p\[1\] has the last row \[1\.0, 2\.0, 3\.0, 1\.0\].*transposed"),
        ([torch.eye(4), torch.eye(4) / 0], r"^p\[1, 0, 0\] is inf"),
        (torch.eye(4) * math.nan, r"^p\[0, 0\] is nan"),
        (torch.eye(3), r"^p has shape \[3, 3\]; expected matrices \[4, 4\] or \[3, 4\]"),
        ([torch.eye(4), torch.eye(4)[:3]], r"^p is a list with entries of shapes \[\(3, 4\), \(4, 4\)\]"),
        (["a"], r"^p holds 'a', which is not a number"),
    ],
)
def test_poses_that_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        read_poses("p", value)


def test_a_convention_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="camera_convention='blender' is not one of 'opencv', 'opengl'"):
        read_poses("p", torch.eye(4), convention="blender")


@pytest.mark.parametrize("factor", [1, 1 + 4e-4, 1 - 4e-4])
def test_rounded_rotations_pass(factor):
    """Files with four digits are common; RᵀR − 1 is twice their error."""
    matrix = poses(5)
    matrix[:, :3, :3] *= factor
    assert torch.equal(read_poses("p", matrix), matrix)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 10, 1, 1], r"^k has fx=0; expected a focal length in pixels"),
        ([10, -3, 1, 1], r"^k has fy=-3; expected a focal length in pixels, at least 2$"),
        ([[10, 10, 1, 1], [0.8, 1.1, 0.5, 0.5]], r"^k\[1\] has fx=0\.8; .*normalised"),
        ([10, 10, math.nan, 1], r"^k\[2\] is nan"),
        ([10, 10, 1], r"^k has shape \[3\]; expected \[2, 4\]"),
        ([[10, 10, 1, 1]] * 3, r"^k has shape \[3, 4\]; expected \[2, 4\]"),
        ([[10, 0, 0], [0, 10, 0], [3, 4, 1]], r"^k has the last row \[3\.0, 4\.0, 1\.0\]; expected 0, 0, 1"),
        ([[[10, 0.5, 3], [0, 10, 4], [0, 0, 1]]] * 2, r"^k\[0\] has skew 0\.5 and 0"),
    ],
)
def test_intrinsics_that_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        read_intrinsics("k", value, (2,))


# ---- normalisation ----


def test_normalisation_with_a_known_answer():
    """Two cameras at x = ±2 around (5, 6, 7), turned a quarter: the mean camera is the origin, and 2 becomes 1."""
    turn = about_y(math.pi / 2)
    given = torch.stack([pose(turn, [5, 6, 7 - 2]), pose(turn, [5, 6, 7 + 2])])
    matrix, scale = normalisation(given)
    torch.testing.assert_close(matrix, torch.linalg.inv(pose(turn, [5, 6, 7])))
    assert scale.item() == pytest.approx(0.5)
    moved = move(given, matrix, scale)
    expected = torch.stack([pose(torch.eye(3, dtype=F64), [1, 0, 0]), pose(torch.eye(3, dtype=F64), [-1, 0, 0])])
    torch.testing.assert_close(moved, expected)
    assert normalisation(given, extent=0.25)[1].item() == pytest.approx(0.125)


def test_normalisation_does_not_depend_on_the_world():
    """The world's origin, axes and unit are arbitrary: cameras in the scene's coordinates are the same for all."""
    given = poses(6)
    given[:, :3, :3] = torch.stack([about_y(0.2 * i) for i in range(6)])
    elsewhere = poses(1, seed=9)[0] @ given
    elsewhere[:, :3, 3] *= 70
    moved = [move(cameras, *normalisation(cameras)) for cameras in (given, elsewhere)]
    torch.testing.assert_close(*moved)
    assert moved[0][:, :3, 3].abs().max() == pytest.approx(1)
    torch.testing.assert_close(moved[0][:, :3, 3].mean(0), torch.zeros(3, dtype=F64), atol=1e-12, rtol=0)
    torch.testing.assert_close(mean_pose(moved[0]), torch.eye(4, dtype=F64))


@pytest.mark.parametrize("count", [1, 3])
def test_cameras_at_one_place_are_not_divided(count):
    """The greatest translation is then rounding alone: dividing by it gave infinities."""
    given = poses(1)[0].expand(count, 4, 4)
    matrix, scale = normalisation(given)
    assert scale.item() == 1
    torch.testing.assert_close(matrix, torch.linalg.inv(given[0]))


def test_cameras_around_an_object():
    """Their directions cancel, so that there is no mean: the first camera's axes are taken, and no NaN comes."""
    angles = torch.arange(8, dtype=F64) * math.pi / 4
    given = torch.stack([pose(about_y(a), about_y(a) @ torch.tensor([0, 0, -2.7], dtype=F64)) for a in angles])
    mean = mean_pose(given)
    torch.testing.assert_close(mean, torch.eye(4, dtype=F64))
    matrix, scale = normalisation(given)
    assert matrix.isfinite().all() and scale.item() == pytest.approx(1 / 2.7)
