# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Show what the patches of a photograph read from each other in a ViTTT block.

A ViTTT block computes no attention map, but it is linear attention, so it has one: `hf_ttt.analysis.attention_map`.
This script draws it over a photograph, for a few patches and heads: what is read with a positive weight in red, with a
negative one in blue, relative to the greatest.

    python examples/explain_vittt_image.py --model vittt-output --image photo.jpg
    python examples/explain_vittt_image.py

Without `--model` a small ViTTT first learns, for a minute or two and on crops of 64 × 64, to tell the parts of
scikit-learn's two photographs apart; the map is then drawn for the whole photograph at another size, which needs no
change of the model. Without `--image` it is one of those two.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from hf_ttt import ViTTTConfig, ViTTTForImageClassification
from hf_ttt.analysis import attention_map

CROP, GRID = 64, (2, 3)  # crops of the small model's training, and the parts of a photograph it tells apart


@dataclass
class Normalisation:
    """What a model's images are normalised with, per channel, after scaling to [0, 1]."""

    mean: list[float]
    std: list[float]

    def __call__(self, photograph: Image.Image) -> torch.Tensor:
        """Pixel values [3, height, width]."""
        pixels = torch.from_numpy(np.array(photograph.convert("RGB"))).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


def sample_photographs() -> list[Image.Image]:
    """The two photographs that come with scikit-learn (427 × 640)."""
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


def random_crops(photographs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Crops [count, 3, CROP, CROP], half of them mirrored, and the part of the photograph that each is centred in."""
    number, _, height, width = photographs.shape
    which = torch.randint(number, (count,))
    top, left = torch.randint(height - CROP, (count,)), torch.randint(width - CROP, (count,))
    crops = torch.stack(
        [photographs[i, :, t : t + CROP, s : s + CROP] for i, t, s in zip(which, top, left, strict=True)]
    )
    row, column = (top + CROP // 2) * GRID[0] // height, (left + CROP // 2) * GRID[1] // width
    mirrored = torch.rand(count) < 0.5
    crops[mirrored] = crops[mirrored].flip(-1)
    return crops, (which * GRID[0] + row) * GRID[1] + column


def train_small_model(normalise: Normalisation, steps: int, batch: int = 32) -> ViTTTForImageClassification:
    """A small ViTTT that tells the parts of the sample photographs apart."""
    torch.manual_seed(0)
    photographs = torch.stack([normalise(photograph) for photograph in sample_photographs()])
    classes = len(photographs) * GRID[0] * GRID[1]
    config = ViTTTConfig(
        image_size=CROP, patch_size=8, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_labels=classes
    )
    model = ViTTTForImageClassification(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps)
    for step in range(steps):
        crops, labels = random_crops(photographs, batch)
        output = model(crops, labels=labels)
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step + 1 == steps:
            accuracy = (output.logits.argmax(-1) == labels).float().mean()
            print(f"step {step + 1:4d} of {steps}: loss {output.loss:.2f}, accuracy {accuracy:.2f}")
    return model.eval()


def load_model(folder: str) -> tuple[torch.nn.Module, Normalisation]:
    """A saved model, and what its image processor normalises with."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    return model, Normalisation(list(processor.image_mean), list(processor.image_std))


def draw(photograph: Image.Image, maps: torch.Tensor, points: list[tuple[int, int]], path: Path) -> None:
    """One row for each patch in `points`, one column for each head, over the photograph.

    Args:
        photograph: the image.
        maps: weights [heads, h, w, h, w].
        points: query patches (row, column).
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    heads, height, width = maps.shape[:3]
    scale = photograph.height / height, photograph.width / width
    grey = np.array(photograph.convert("L"))
    figure = Figure(figsize=(3.2 * (heads + 1), 3.2 * len(points) * photograph.height / photograph.width + 0.5))
    axes = figure.subplots(len(points), heads + 1, squeeze=False)
    for row, (y, x) in zip(axes, points, strict=True):
        where = (x + 0.5) * scale[1], (y + 0.5) * scale[0]
        row[0].imshow(photograph)
        for head in range(heads):
            weights = maps[head, y, x]
            weights = F.interpolate(weights[None, None], (photograph.height, photograph.width), mode="bilinear")[0, 0]
            weights = weights / weights.abs().max()
            row[head + 1].imshow(grey, cmap="gray")
            row[head + 1].imshow(
                weights, cmap="RdBu_r", vmin=-1, vmax=1, alpha=weights.abs().sqrt().clamp(max=0.8).numpy()
            )
        for axis in row:
            axis.plot(*where, "o", markersize=8, markerfacecolor="none", markeredgecolor="black", markeredgewidth=3)
            axis.plot(*where, "o", markersize=8, markerfacecolor="none", markeredgecolor="yellow", markeredgewidth=1.5)
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0, 0].set_title("patch that reads")
    for head in range(heads):
        axes[0, head + 1].set_title(f"head {head}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id of a ViTTT or H-ViTTT classifier")
    parser.add_argument("--image", type=Path, help="photograph; default: one of scikit-learn's")
    parser.add_argument(
        "--side", type=int, default=256, help="its shorter side is scaled to this, default: %(default)s"
    )
    parser.add_argument("--layer", type=int, default=-1, help="block, default: %(default)s (the last)")
    parser.add_argument("--heads", type=int, nargs="+", help="heads to draw, default: the first four")
    parser.add_argument(
        "--points",
        type=float,
        nargs="+",
        default=[0.15, 0.5, 0.55, 0.35, 0.85, 0.7],
        help="patches that read: pairs of row and column, as shares of the height and width, default: %(default)s",
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps without --model, default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("attention_map.png"), help="default: %(default)s")
    arguments = parser.parse_args()
    if len(arguments.points) % 2 or not all(0 <= point < 1 for point in arguments.points):
        parser.error(f"--points must be pairs of numbers in [0, 1), not {arguments.points}")
    if arguments.model is None:
        normalise = Normalisation([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        model = train_small_model(normalise, arguments.steps)
    else:
        model, normalise = load_model(arguments.model)
    photograph = sample_photographs()[0] if arguments.image is None else Image.open(arguments.image).convert("RGB")
    scale = arguments.side / min(photograph.size)
    photograph = photograph.resize([round(side * scale) for side in photograph.size], Image.Resampling.BICUBIC)
    pixels = normalise(photograph)
    blocks = [module for module in model.modules() if type(module).__name__ == "ViTTTAttention"]
    heads = range(min(4, blocks[arguments.layer].heads)) if arguments.heads is None else arguments.heads
    maps = torch.stack([attention_map(model, pixels, arguments.layer, head) for head in heads])
    points = [
        (int(y * maps.shape[1]), int(x * maps.shape[2]))
        for y, x in zip(arguments.points[::2], arguments.points[1::2], strict=True)
    ]
    draw(photograph, maps, points, arguments.output)
    print(f"wrote {arguments.output}: {maps.shape[1]} × {maps.shape[2]} patches, heads {list(heads)}")


if __name__ == "__main__":
    main()
