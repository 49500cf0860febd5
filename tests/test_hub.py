# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Pushing to a Hub and loading back, also where it fails, for the three families.

One process publishes and one without hf_ttt loads; what they do is in `child_publishes` and `child_loads`, whose source
is sent to them. They start once, and each test looks at a part of what they found.
"""

import json
import re

import lact_cases
import nvs_cases
import pytest
import torch
import vittt_cases
from fake_hub import TOKEN, Fault, fake_hub
from huggingface_hub import ModelCard
from PIL import Image
from test_remote_code import run_child
from transformers import ByT5Tokenizer

import hf_ttt
from hf_ttt.hub import is_generated, model_card, save_card

PROCESSOR_FILES = {"lact": "tokenizer_config.json", "vittt": "preprocessor_config.json", "nvs": "processor_config.json"}
FAMILIES = tuple(PROCESSOR_FILES)
pytestmark = pytest.mark.slow
FAULTS = (
    Fault(r"PUT /lfs/me/flaky/", 503, times=1),
    Fault(r"PUT /lfs/me/full/", 507, skip=1),
    Fault(r"POST /api/models/me/broken/commit/", 500, skip=1),
    Fault(r"GET /me/interrupted/resolve/.*/model.safetensors", 0, times=1),
    Fault(r"GET /me/lost/resolve/.*/model.safetensors", 0, times=1),
    Fault(r"GET /me/lost/resolve/.*/model.safetensors", 0, times=6, part=0),
)


def tiny_models():
    """Name → model, what prepares its inputs, and some inputs."""
    tokenizer = ByT5Tokenizer(padding_side="left")
    config = lact_cases.tiny_config("variant2", vocab_size=len(tokenizer))
    yield "lact", lact_cases.busy_model(config), tokenizer, {"input_ids": lact_cases.token_ids(2, 21)}
    vision = vittt_cases.busy_model(hf_ttt.ViTTTForImageClassification, vittt_cases.tiny_config("vittt"))
    yield "vittt", vision, hf_ttt.ViTTTImageProcessor(crop_size=32), {"pixel_values": vittt_cases.images(2)}
    nvs = nvs_cases.busy_model(nvs_cases.tiny_config("variant2"))
    yield "nvs", nvs, hf_ttt.LaCTNVSProcessor(size=(12, 16)), nvs_cases.all_views()


def tensors(outputs):
    return [value for value in outputs.to_tuple() if isinstance(value, torch.Tensor)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of each model with its card; beside it its inputs and outputs."""
    root = tmp_path_factory.mktemp("hub")
    for name, model, processor, inputs in tiny_models():
        model.save_pretrained(root / name)
        processor.save_pretrained(root / name)
        save_card(model_card(root / name, repo_id=f"me/{name}"), root / name / "README.md")
        with torch.no_grad():
            torch.save((inputs, tensors(model.eval()(**inputs))), root / f"{name}.pt")
    Image.new("RGB", (40, 30), "teal").save(root / "photograph.png")
    return root


@pytest.fixture(scope="module")
def hub():
    with fake_hub() as hub:
        hub.faults = list(FAULTS)
        yield hub


# ---- publishing ----


def child_publishes(root):
    import shutil
    from pathlib import Path

    import torch
    from huggingface_hub import HfApi, constants
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Trainer, TrainingArguments
    from typer.testing import CliRunner

    from hf_ttt import LaCTForCausalLM, LaCTNVSModel, ViTTTForImageClassification
    from hf_ttt.cli import app
    from hf_ttt.hub import TrainerCardMixin, push

    root, found = Path(root), {}

    def main_of(repo):
        return HfApi().model_info(repo).sha

    def message(function, *args, **kwargs):
        try:
            return ["", str(function(*args, **kwargs))]
        except Exception as error:
            return [type(error).__name__, f"{error} {error.__cause__}"]

    families = {
        "lact": (LaCTForCausalLM, AutoTokenizer),
        "vittt": (ViTTTForImageClassification, AutoImageProcessor),
        "nvs": (LaCTNVSModel, AutoProcessor),
    }
    for name, (model_class, processor_class) in families.items():
        model = model_class.from_pretrained(root / name)
        model.push_to_hub(name)
        found[name] = processor_class.from_pretrained(root / name).push_to_hub(name).oid
        with torch.no_grad():
            next(model.parameters()).zero_()
        found[f"{name} later"] = model.push_to_hub(name).oid

    model = LaCTForCausalLM.from_pretrained(root / "lact")
    model.push_to_hub("private", private=True)
    for repo in ("flaky", "full", "broken", "interrupted", "lost"):
        model.push_to_hub(repo)
    with torch.no_grad():
        model.model.embeddings.weight.add_(1)
    for repo in ("full", "broken"):
        before = main_of(f"me/{repo}")
        found[repo] = [*message(model.push_to_hub, repo), main_of(f"me/{repo}") == before]
    before = main_of("me/broken")
    found["push"] = [*message(push, root / "lact", "broken"), main_of("me/broken") == before]
    found["no token"] = message(push, root / "lact", "other", token="wrong")
    found["public"] = message(push, root / "lact", "flaky", private=True)

    class CardTrainer(TrainerCardMixin, Trainer):
        pass

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 384, (8, 24), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        root / "trained",
        max_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        hub_model_id="me/trained",
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(root / "lact")
    trainer = CardTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2], processing_class=tokenizer)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.push_to_hub(dataset_tags="someone/rows", dataset="random rows", license="mit")
    found["trained"] = metrics["eval_loss"]

    def command(*args):
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        return [result.exit_code, result.stdout, result.stderr]

    (root / "bare").mkdir()
    shutil.copy(root / "lact" / "config.json", root / "bare")
    shutil.copytree(root / "lact", root / "cut")
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(root / "lact", root / "leftovers")
    for name in ("training_args.bin", "optimizer.pt", "checkpoint-3/config.json", ".secret", "runs/log", "_a/b"):
        (root / "leftovers" / name).parent.mkdir(exist_ok=True)
        (root / "leftovers" / name).write_text("x")
    assert not command("card", root / "leftovers", "--overwrite")[0]
    found["commands"] = {
        "private": command("push", root / "leftovers", "commanded", "--private"),
        "branch": command("push", root / "lact", "commanded", "--revision", "next"),
        "request": command("push", root / "vittt", "me/commanded", "--create-pr"),
        "both": command("push", root / "lact", "commanded", "--create-pr", "--revision", "next"),
        "no card": command("push", root / "bare", "commanded"),
        "cut weights": command("push", root / "cut", "commanded"),
        "no folder": command("push", root / "nothing", "commanded"),
        "refused": command("push", root / "lact", "broken"),
        "no space": command("push", root / "trained", "full"),
    }
    constants.ENDPOINT = "http://127.0.0.1:1"
    found["commands"]["no hub"] = command("push", root / "lact", "commanded")
    return found


@pytest.fixture(scope="module")
def published(hub, root):
    return run_child(child_publishes, root, home=root / "home", blocked=(), **hub.client_environment())


@pytest.mark.parametrize("name", FAMILIES)
def test_pushed_repositories_hold_weights_code_and_processor(hub, published, name):
    """push_to_hub of a model and of its tokenizer or processor gives a repository that is complete."""
    files = hub.files(f"me/{name}", published[name])
    config = json.loads(files["config.json"])
    modules = {reference.split(".")[0] for reference in config["auto_map"].values()}
    assert {f"{module}.py" for module in modules} | {"model.safetensors", "README.md"} <= files.keys()
    assert PROCESSOR_FILES[name] in files
    assert hub.repositories[f"me/{name}"].branches["main"] == published[f"{name} later"] != published[name]


def test_a_5xx_in_the_middle_of_an_upload_is_retried(hub, published, root):
    """The upload of the weights fails once with 503."""
    assert sum(request.startswith("PUT /lfs/me/flaky/") for request in hub.requests) == 2
    assert hub.files("me/flaky")["model.safetensors"] == (root / "lact" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("repo", "status"), [("full", "507"), ("broken", "500"), ("push", "500")])
def test_a_failed_push_is_a_clear_error_and_changes_nothing(published, repo, status):
    """A 5xx while the weights go up, or at the commit: main is the commit that it was."""
    kind, text, unchanged = published[repo]
    assert kind in ("HfHubHTTPError", "RuntimeError") and status in text and unchanged


def test_push_without_permission(hub, published):
    """A wrong token is a 401 that says so, and nothing is made."""
    kind, text = published["no token"]
    assert "HTTPError" in kind and "401" in text
    assert "me/other" not in hub.repositories


def test_private_is_not_taken_for_granted(published):
    """`private=True` has no effect on a repository that is public: pushing there would publish."""
    kind, text = published["public"]
    assert kind == "ValueError" and "'me/flaky' exists and is public" in text


def test_trainer_pushes_model_and_card(hub, published):
    """Trainer.push_to_hub writes this package's card, with the loss that it measured and what it was computed with."""
    files = hub.files("me/trained")
    assert {"model.safetensors", "modeling_lact.py", "tokenizer_config.json", "README.md"} <= files.keys()
    text = files["README.md"].decode()
    card = ModelCard(text)
    result = next(result for result in card.data.eval_results if result.metric_type == "loss")
    assert result.metric_value == published["trained"] and result.dataset_type == "someone/rows"
    assert result.metric_args["implementation"] == "parallel" and result.metric_args["backend"] == "torch"
    assert card.data.license == "mit" and card.data.datasets == ["someone/rows"] and is_generated(text)
    assert 'from_pretrained("me/trained"' in text and "Steps: 2;" in text and "5e-05" in text


# ---- the command line ----


def test_push_command(hub, published):
    """A private repository, a branch and a pull request; what a Trainer leaves behind stays behind."""
    done = published["commands"]
    repository = hub.repositories["me/commanded"]
    for name in ("private", "branch", "request"):
        code, stdout, stderr = done[name]
        assert code == 0 and stdout.startswith(hub.endpoint) and stdout.count("\n") == 1, stderr
        assert "Checking " in stderr
    assert repository.private and repository.branches.keys() == {"main", "next", "refs/pr/3"}
    assert re.search(r"/discussions/\d+$", done["request"][1].strip())
    files = hub.files("me/commanded")
    assert not any(re.search("training_args|optimizer|checkpoint|secret|runs|_a/", path) for path in files)
    assert 'from_pretrained("me/commanded"' in files["README.md"].decode()
    assert is_generated(files["README.md"].decode())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("both", "revision='next' does not go with create_pr"),
        ("no card", "has no README.md"),
        ("cut weights", "does not load"),
        ("no folder", "is not a folder"),
        ("refused", "500"),
        ("no space", "507"),
        ("no hub", "the Hub at http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_push_command_fails_in_one_line(published, name, message):
    code, stdout, stderr = published["commands"][name]
    last = stderr.strip().splitlines()[-1]
    assert code == 1 and stdout == "" and last.startswith("Error: ") and message in last and "Traceback" not in stderr


# ---- loading ----


def child_loads(root, published, token):
    import json
    import re
    from pathlib import Path

    import torch
    from huggingface_hub import constants
    from PIL import Image
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

    constants.DOWNLOAD_CHUNK_SIZE = 4096  # so that the weights arrive in several pieces
    root, published, found = Path(root), json.loads(published), {}
    Image.new("RGB", (40, 30), "teal").save("photograph.png")
    classes = {"lact": AutoModelForCausalLM, "vittt": AutoModelForImageClassification, "nvs": AutoModel}

    def same(model, name):
        inputs, outputs = torch.load(root / f"{name}.pt")
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.no_grad():
            got = [value for value in model.eval()(**inputs).to_tuple() if isinstance(value, torch.Tensor)]
        return all(torch.equal(a, b) for a, b in zip(got, outputs, strict=True))

    for name, auto_class in classes.items():
        pinned = auto_class.from_pretrained(f"me/{name}", revision=published[name], trust_remote_code=True)
        latest = auto_class.from_pretrained(f"me/{name}", trust_remote_code=True)
        text = (root / name / "README.md").read_text()
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace(
            "commit-that-you-have-read", published[name]
        )
        namespace = {}
        exec(code, namespace)
        found[name] = [same(pinned, name), same(latest, name), same(namespace["model"], name)]

    def load(repo, **kwargs):
        try:
            return same(AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True, **kwargs), "lact")
        except Exception as error:
            return [type(error).__name__, str(error)]

    found["private"] = load("me/private", token=False)
    found["private with a token"] = load("me/private", token=token)
    found["interrupted"] = load("me/interrupted")
    found["lost"] = [load("me/lost"), load("me/lost")]
    found["trained"] = load("me/trained") is False  # other weights, but it loads and runs
    return found


@pytest.fixture(scope="module")
def loaded(hub, root, published):
    environment = hub.client_environment(token=None)
    args = root, json.dumps(published), TOKEN
    return run_child(child_loads, *args, home=root / "home-of-another", no_triton=True, **environment)


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_where_hf_ttt_is_not_installed(loaded, name):
    """A pinned revision gives the outputs of its push, the branch those of a later one; the card's code runs."""
    assert loaded[name] == [True, False, True]


def test_private_repository_without_a_token(loaded):
    """A 401 is an error that speaks of the token; with it the model loads."""
    kind, text = loaded["private"]
    assert kind == "OSError" and "me/private" in text and "token" in text
    assert loaded["private with a token"] is True


def test_an_interrupted_download_goes_on(hub, loaded):
    """The connection is cut in the middle of the weights: the rest is asked for, and the model is whole."""
    assert loaded["interrupted"] is True
    ranges = [r for r in hub.requests if re.search("GET /me/interrupted/resolve/.*model.safetensors bytes=[1-9]", r)]
    assert len(ranges) == 1


def test_a_download_that_fails_is_an_error_and_the_next_one_succeeds(loaded):
    """A connection that is cut again and again: an error, no damaged weights in the cache."""
    (kind, text), second = loaded["lost"]
    assert kind == "OSError" and "Can't load the model for 'me/lost'" in text and second is True


def test_trained_model_loads(loaded):
    assert loaded["trained"]
