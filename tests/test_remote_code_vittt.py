# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A saved vision model and its image processor load and classify where hf_ttt cannot be imported.

What a fresh process does is written as a function here (`child_…`), whose source is sent to it. Numbers are compared up
to rounding: where weights lie in memory, which differs for loaded ones, decides the last bit of a product.
"""

import ast
import json
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_remote_code import NO_TRITON, REPOSITORY, ReadOnlyHub, python_files, run_child
from transformers import (
    AutoBackbone,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports
from vittt_cases import BACKBONES, CLASSIFIERS, CONFIGS, FAMILIES, MODELS, busy_model, tiny_config

import hf_ttt
from hf_ttt import ViTTTImageProcessor

AUTO_CLASSES = {"AutoBackbone", "AutoConfig", "AutoModel", "AutoModelForImageClassification"}
STAGES = ["stage1", "stage2"]


def photograph() -> Image.Image:
    """A colour gradient with an edge, 50 × 70 pixels."""
    rows, columns = torch.meshgrid(torch.arange(50), torch.arange(70), indexing="ij")
    values = torch.stack([rows * 5, columns * 3, (rows > columns) * 200], -1)
    return Image.fromarray(values.to(torch.uint8).numpy())


def save_folder(model, folder: Path) -> None:
    """The model, its code and its image processor."""
    model.save_pretrained(folder)
    ViTTTImageProcessor(crop_size=32).save_pretrained(folder)


def write_expected(folder: Path, path: Path) -> None:
    """What the installed classes compute from a folder."""
    pixels = AutoImageProcessor.from_pretrained(folder)(photograph(), return_tensors="pt").pixel_values
    with torch.no_grad():
        model = AutoModelForImageClassification.from_pretrained(folder)
        logits = model(pixels).logits
        pooled = AutoModel.from_pretrained(folder)(pixels).pooler_output
        torch.manual_seed(0)  # H-ViTTT's backbone has norms of its own, newly initialised
        maps = BACKBONES[model.config.model_type].from_pretrained(folder, out_features=STAGES)(pixels).feature_maps
    scores = logits.softmax(-1)[0]
    top = f"LABEL_{scores.argmax()}", scores.max()
    expected = {"pixels": pixels, "logits": logits, "pooled": pooled, "maps": maps, "top": top}
    torch.save(expected, path)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory) -> Path:
    """Folder "vision" written by `save_pretrained`, the picture, and what the installed classes compute."""
    root = tmp_path_factory.mktemp(request.param)
    save_folder(busy_model(CLASSIFIERS[request.param], tiny_config(request.param)), root / "vision")
    photograph().save(root / "photograph.png")
    write_expected(root / "vision", root / "expected.pt")
    return root


def family_of(saved: Path) -> str:
    return json.loads((saved / "vision" / "config.json").read_text())["model_type"]


# ---- what is in the folder ----


def test_auto_map_is_complete(saved):
    """Every Auto class finds its class in the folder, of the right family: both live in the same files."""
    folder, family = saved / "vision", family_of(saved)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == AUTO_CLASSES
    classes = {"AutoConfig": CONFIGS, "AutoModel": MODELS, "AutoBackbone": BACKBONES}
    classes["AutoModelForImageClassification"] = CLASSIFIERS
    for auto, reference in auto_map.items():
        module, name = reference.split(".")
        assert name == classes[auto][family].__name__
        assert f"class {name}(" in (folder / f"{module}.py").read_text(encoding="utf-8")
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert processor["auto_map"] == {"AutoImageProcessor": "image_processing_vittt.ViTTTImageProcessor"}


def test_a_backend_is_not_saved(tmp_path):
    """`ttt_backend` belongs to a machine: it may be absent on the next."""
    model = CLASSIFIERS["vittt"](tiny_config("vittt", ttt_backend="torch", ttt_implementation="recurrent"))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "ttt_backend" not in config and config["ttt_implementation"] == "recurrent"


def test_saved_files_are_those_that_are_reached(saved):
    """Code files were missing, or those of the language model came along."""
    source = Path(hf_ttt.__file__).parent
    entries = {"modeling_vittt.py", "image_processing_vittt.py"}
    reached = {Path(file).name for entry in entries for file in get_relative_import_files(source / entry)} | entries
    files = python_files(saved / "vision")
    assert files.keys() == reached
    assert files == {name: (source / name).read_text(encoding="utf-8") for name in reached}
    assert not any("lact" in name for name in files)


def test_imports_of_every_saved_file(saved):
    """From the Hub every file's imports must be installed: only torch, transformers and the standard library are.
    Relative imports are `from .sibling import name`, which is all that is copied and resolved."""
    folder = saved / "vision"
    files = python_files(folder)
    for name, text in files.items():
        assert set(get_imports(folder / name)) <= {"torch", "transformers"} | set(sys.stdlib_module_names), name
        siblings = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "hf_ttt" for alias in node.names), name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] != "hf_ttt", name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 and node.module and "." not in node.module, (name, ast.unparse(node))
                siblings.add(node.module)
        assert {f"{sibling}.py" for sibling in siblings} <= files.keys(), name
        assert set(get_relative_imports(folder / name)) == siblings, name


# ---- loading with the package ----


def test_an_installed_package_loads_its_own_classes(saved):
    """With hf_ttt imported the folder loads without trust_remote_code, and keeps its numbers."""
    folder, family = saved / "vision", family_of(saved)
    expected = torch.load(saved / "expected.pt")
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert type(model) is CLASSIFIERS[family] and type(model.config) is CONFIGS[family]
    assert type(AutoModel.from_pretrained(folder)) is MODELS[family]
    assert type(AutoBackbone.from_config(model.config)) is BACKBONES[family]
    assert type(AutoImageProcessor.from_pretrained(folder)) is ViTTTImageProcessor
    original = busy_model(CLASSIFIERS[family], tiny_config(family))
    weights = original.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(original(expected["pixels"]).logits, expected["logits"])


def test_the_implementation_is_an_argument(saved):
    """It overrides the saved one for this model, of from_pretrained and of from_config, and is exact."""
    expected = torch.load(saved / "expected.pt")
    models = {}
    for name in ("recurrent", "parallel"):
        models[name] = AutoModelForImageClassification.from_pretrained(saved / "vision", ttt_implementation=name)
        assert models[name].get_ttt_implementation() == models[name].config.ttt_implementation == name
        with torch.no_grad():
            torch.testing.assert_close(models[name](expected["pixels"]).logits, expected["logits"])
    fresh = AutoModelForImageClassification.from_config(models["parallel"].config, ttt_implementation="recurrent")
    assert fresh.get_ttt_implementation() == "recurrent"
    config = json.loads((saved / "vision" / "config.json").read_text())
    assert config["ttt_implementation"] == "auto"


@pytest.mark.parametrize("labels", [1, 3])
def test_the_head_is_replaced(saved, labels, tmp_path):
    """Fine-tuning on other classes keeps everything but the head, which is newly initialised."""
    arguments = {"num_labels": labels, "ignore_mismatched_sizes": True}
    model, info = AutoModelForImageClassification.from_pretrained(
        saved / "vision", output_loading_info=True, **arguments
    )
    assert {key for key, *_ in info["mismatched_keys"]} == {"head.weight", "head.bias"}
    assert not info["missing_keys"] and not info["unexpected_keys"]
    old = AutoModelForImageClassification.from_pretrained(saved / "vision").state_dict()
    new = model.state_dict()
    assert new["head.weight"].shape[0] == new["head.bias"].shape[0] == labels
    assert 0 < new["head.weight"].std() < 0.05 and not new["head.bias"].any()
    assert all(torch.equal(new[name], value) for name, value in old.items() if not name.startswith("head."))
    model.save_pretrained(tmp_path)
    assert AutoModelForImageClassification.from_pretrained(tmp_path).config.num_labels == labels


def test_another_head_by_accident_is_an_error(saved):
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForImageClassification.from_pretrained(saved / "vision", num_labels=3)


# ---- a process without hf_ttt ----


def child_loads(folder, expected, picture, second):
    import torch
    from PIL import Image
    from torch.testing import assert_close
    from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

    expected, picture = torch.load(expected), Image.open(picture)
    trust = {"trust_remote_code": True}
    processor = AutoImageProcessor.from_pretrained(folder, **trust)
    model = AutoModelForImageClassification.from_pretrained(folder, **trust)
    for loaded in (processor, model):
        assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
    pixels = processor(picture, return_tensors="pt").pixel_values
    assert torch.equal(pixels, expected["pixels"])
    with torch.no_grad():
        assert_close(model(pixels).logits, expected["logits"])
        inner = AutoModel.from_pretrained(folder, **trust)
        assert_close(inner(pixels).pooler_output, expected["pooled"])
        config = AutoConfig.from_pretrained(folder, out_features=["stage1", "stage2"], **trust)
        backbone_class = type(AutoBackbone.from_config(config, **trust))  # from_pretrained takes no folders
        torch.manual_seed(0)
        backbone = backbone_class.from_pretrained(folder, config=config)
        maps = backbone(pixels).feature_maps
    assert_close(maps, expected["maps"])

    assert AutoConfig.from_pretrained(folder, **trust).image_size == 32
    half = AutoModelForImageClassification.from_pretrained(
        folder, dtype=torch.bfloat16, ttt_implementation="recurrent", **trust
    )
    assert half(pixels).logits.dtype == torch.bfloat16 and half.get_ttt_implementation() == "recurrent"
    assert {p.dtype for n, p in half.named_parameters() if n.endswith(("w1", "w2", "w3"))} == {torch.float32}
    fresh = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(folder, **trust), **trust)
    assert fresh.eval()(pixels, labels=torch.tensor([2])).loss.isfinite()
    model.save_pretrained(second)
    processor.save_pretrained(second)
    return [type(model).__name__, type(processor).__name__]


@pytest.fixture(scope="module")
def second(saved, tmp_path_factory) -> Path:
    """The folder that a process without hf_ttt and triton saves again."""
    root = tmp_path_factory.mktemp("second")
    args = saved / "vision", saved / "expected.pt", saved / "photograph.png", root / "vision"
    names = run_child(child_loads, *args, home=root / "home", no_triton=True)
    assert names == [CLASSIFIERS[family_of(saved)].__name__, "ViTTTImageProcessor"]
    return root / "vision"


def test_loads_without_the_package_and_triton(saved, second):
    """Remote code: pixels, logits, features and maps of every Auto class; what is saved again is the same."""
    assert python_files(second) == python_files(saved / "vision")
    for name in ("config.json", "preprocessor_config.json"):
        first, again = (json.loads((folder / name).read_text()) for folder in (saved / "vision", second))
        assert first == again


@NO_TRITON
def test_loads_without_the_package_but_with_triton(saved, tmp_path):
    args = saved / "vision", saved / "expected.pt", saved / "photograph.png", tmp_path / "vision"
    run_child(child_loads, *args, home=tmp_path / "home")


def test_a_folder_saved_from_remote_code_loads_again(saved, second, tmp_path):
    """After fine-tuning, the pushed copy must hold the code as well: the second generation loads like the first."""
    third = tmp_path / "third"
    args = second, saved / "expected.pt", saved / "photograph.png", third
    run_child(child_loads, *args, home=tmp_path / "home")
    assert python_files(third) == python_files(second)


# ---- a Hub ----


@pytest.fixture
def endpoint(saved):
    """Address of a Hub that holds the folder as `REPOSITORY`."""
    handler = type("Hub", (ReadOnlyHub,), {"folder": saved / "vision", "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def child_loads_from_hub(repository, expected):
    import torch
    from torch.testing import assert_close
    from transformers import AutoBackbone, AutoImageProcessor, AutoModelForImageClassification, dynamic_module_utils

    checked, check_imports = [], dynamic_module_utils.check_imports

    def recording(filename):
        checked.append(str(filename).rsplit("/", 1)[-1])
        return check_imports(filename)

    dynamic_module_utils.check_imports = recording
    expected = torch.load(expected)
    trust = {"trust_remote_code": True}
    processor = AutoImageProcessor.from_pretrained(repository, **trust)
    assert processor.crop_size.height == 32 and type(processor).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        model = AutoModelForImageClassification.from_pretrained(repository, **trust)
        assert_close(model(expected["pixels"]).logits, expected["logits"])
        torch.manual_seed(0)
        backbone = AutoBackbone.from_pretrained(repository, out_features=["stage1", "stage2"], **trust)
        maps = backbone(expected["pixels"]).feature_maps
    assert_close(maps, expected["maps"])
    return sorted(set(checked))


def test_loads_from_a_hub_that_checks_every_file(saved, endpoint, tmp_path):
    """From the Hub the imports of every file must be there, not only those of the first; AutoBackbone takes weights
    from there alone."""
    proxies = {name: "127.0.0.1" for name in ("NO_PROXY", "no_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **proxies}
    args = REPOSITORY, saved / "expected.pt"
    checked = run_child(child_loads_from_hub, *args, home=tmp_path / "home", no_triton=True, **settings)
    assert set(checked) == python_files(saved / "vision").keys()


# ---- pipelines ----


def child_classifies(folder, picture):
    from PIL import Image
    from transformers import pipeline

    classify = pipeline("image-classification", model=folder, trust_remote_code=True)
    for part in (classify.model, classify.image_processor):
        assert type(part).__module__.startswith("transformers_modules."), type(part)
    return classify(Image.open(picture))


def child_classifies_as_plugin(folder, picture):
    from PIL import Image
    from transformers import pipeline

    import hf_ttt

    classify = pipeline("image-classification", model=folder, trust_remote_code=False)
    assert type(classify.model).__module__ == "hf_ttt.modeling_vittt"
    assert type(classify.image_processor) is hf_ttt.ViTTTImageProcessor
    return classify(Image.open(picture))


@pytest.mark.parametrize("mode", ["remote code", "plugin"])
def test_image_classification_pipeline_of_a_fresh_process(mode, saved, tmp_path):
    """From a folder alone: the label and score that the model gives in this process."""
    child, blocked = (child_classifies, ("hf_ttt",)) if mode == "remote code" else (child_classifies_as_plugin, ())
    answers = run_child(child, saved / "vision", saved / "photograph.png", home=tmp_path / "home", blocked=blocked)
    label, score = torch.load(saved / "expected.pt")["top"]
    assert answers[0]["label"] == label and len(answers) == 5
    assert answers[0]["score"] == pytest.approx(score.item(), rel=1e-6)
    assert sum(answer["score"] for answer in answers) == pytest.approx(1)


def test_image_classification_pipeline_of_objects(saved):
    """Pictures of different sizes in a batch give what each gives alone."""
    model = AutoModelForImageClassification.from_pretrained(saved / "vision")
    processor = AutoImageProcessor.from_pretrained(saved / "vision")
    classify = pipeline("image-classification", model=model, image_processor=processor)
    pictures = [photograph(), photograph().resize((40, 90)), photograph().convert("L")]
    for picture, answers in zip(pictures, classify(pictures, batch_size=3), strict=True):
        (alone,) = classify([picture])
        assert [answer["label"] for answer in answers] == [answer["label"] for answer in alone]
        for one, other in zip(answers, alone, strict=True):
            assert one["score"] == pytest.approx(other["score"], rel=1e-5)
