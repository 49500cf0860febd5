# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Model cards: what they state, where it comes from, what they leave out, and what is not overwritten."""

import dataclasses
import json
from types import SimpleNamespace

import lact_cases
import nvs_cases
import pytest
import torch
import vittt_cases
from fake_hub import card_errors
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel, Trainer, TrainerState, TrainingArguments

import hf_ttt
from hf_ttt.hub import Run, Setting, TrainerCardMixin, is_generated, model_card, run_in, run_of, save_card
from hf_ttt.hub.cards import COMMIT, HUB_ID
from hf_ttt.ttt_interface import TTTInterface

MEASURED = Setting("parallel", "torch", "float32", "cpu")
RUN = Run(steps=30, epochs=1.5, metrics={"loss": 1.25, "bits_per_byte": 2.0}, metrics_step=30, measured=MEASURED)
TASKS = {
    "LaCTForCausalLM": "text-generation",
    "LaCTForSequenceClassification": "text-classification",
    "LaCTModel": "feature-extraction",
    "LaCTNVSModel": "image-to-3d",
    "ViTTTForImageClassification": "image-classification",
    "ViTTTModel": "image-feature-extraction",
    "ViTTTBackbone": "image-feature-extraction",
    "HViTTTForImageClassification": "image-classification",
    "HViTTTModel": "image-feature-extraction",
    "HViTTTBackbone": "image-feature-extraction",
}


def tiny_model(name: str, variant: str = "baseline"):
    """A model of a class, by its name."""
    model_class = getattr(hf_ttt, name)
    if name == "LaCTNVSModel":
        return nvs_cases.busy_model(nvs_cases.tiny_config(variant))
    if name.startswith("LaCT"):
        return lact_cases.busy_model(lact_cases.tiny_config(variant), model_class)
    return vittt_cases.busy_model(model_class, vittt_cases.tiny_config(model_class.config_class.model_type))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved language model."""
    folder = tmp_path_factory.mktemp("cards") / "my-lact"
    tiny_model("LaCTForCausalLM", "variant2").save_pretrained(folder)
    return folder


# ---- metadata ----


@pytest.mark.parametrize("name", TASKS)
def test_metadata_of_every_class(name):
    """Every class has its pipeline tag and Auto class, and metadata that the Hub takes."""
    card = model_card(tiny_model(name), run=RUN, dataset_name="some data", license="mit", base_model="someone/x")
    assert card_errors(str(card)) == []
    assert (card.data.pipeline_tag, card.data.library_name, card.data.license) == (TASKS[name], "transformers", "mit")
    assert card.data.tags[:3] == ["custom_code", "test-time-training", "linear-attention"] and len(card.data.tags) == 4
    assert card.data.base_model == "someone/x"
    auto_class = next(auto for auto, model in auto_classes() if model is getattr(hf_ttt, name))
    assert f"model = {auto_class}.from_pretrained(" in card.text
    assert is_generated(str(card)) and str(ModelCard(str(card))) == str(card)


def auto_classes():
    for classes in hf_ttt._MODELS.values():
        for auto, model in classes.items():
            yield auto.__name__, model


def test_every_model_class_has_a_card():
    models = {model.__name__ for _, model in auto_classes()}
    assert models == TASKS.keys()


def test_the_check_of_metadata_finds_what_the_hub_rejects():
    """The offline check is not empty: wrong licences, tasks, ids and results are found."""
    good = str(model_card(tiny_model("ViTTTModel")))
    assert card_errors(good) == []
    for old, new in (
        ("license: other", "license: mine"),
        ("pipeline_tag: image-feature-extraction", "pipeline_tag: seeing"),
        ("tags:", "base_model: /tmp/x\ntags:"),
        ("tags:", "datasets: [1]\ntags:"),
        ("tags:", "model-index: [{name: x, results: [{task: {type: y}}]}]\ntags:"),
        ("license: other", "license: [other"),
    ):
        assert old in good and card_errors(good.replace(old, new, 1)), new


# ---- nothing is invented ----


def test_a_bare_model_has_no_numbers():
    """Without a run there is no metric, no result in the metadata, no data set and no licence."""
    card = model_card(tiny_model("LaCTForCausalLM"))
    assert card.data.eval_results is None and card.data.datasets is None and card.data.base_model is None
    assert "Measured" not in card.text and "## Training" not in card.text and "Trained" not in card.text
    assert card.data.license == "other" and "No licence of the weights was stated" in card.text
    assert HUB_ID in card.text and f'revision="{COMMIT}", trust_remote_code=True' in card.text


def test_metrics_with_their_data_and_setting():
    """A metric stands in the text and, where its data has a name, in the metadata, with what it was computed with."""
    model = tiny_model("LaCTForCausalLM")
    card = model_card(model, run=RUN, datasets=["someone/books"])
    loss, bits = card.data.eval_results
    assert (loss.metric_type, loss.metric_value, loss.dataset_type) == ("loss", 1.25, "someone/books")
    assert (bits.metric_type, bits.metric_name, bits.metric_value) == ("bits_per_byte", "bits per byte", 2.0)
    assert Setting(**loss.metric_args) == MEASURED and card.data.datasets == ["someone/books"]
    assert "| bits per byte | 2 |" in card.text and "Evaluated on someone/books, after 30 steps." in card.text
    assert "Computed by the parallel evaluation on backend `torch`, in float32, on cpu" in card.text
    unnamed = model_card(model, run=dataclasses.replace(RUN, measured=None))
    assert unnamed.data.eval_results is None and "| loss | 1.25 |" in unnamed.text
    assert "data that was not named" in unnamed.text and "was not recorded" in unnamed.text


@pytest.mark.parametrize("name", ["LaCTForCausalLM", "ViTTTForImageClassification", "LaCTNVSModel"])
def test_inner_loop_and_evaluations(name):
    """The card lists the fields of the inner loop, and says which evaluations are exact, or why one is not."""
    model = tiny_model(name)
    text = model_card(model).text
    for field in ("ttt_update", "ttt_fast_weight", "use_muon", "ttt_inner_steps"):
        assert f"| `{field}` | `{getattr(model.config, field)}` |" in text
    if model.config.rule.parallelizable:
        assert "two exact evaluations" in text
    else:
        assert model.config.rule.why_not_parallel in text
    assert f"{model.num_parameters():,} parameters" in text and "*initial* fast weights" in text


def test_converted_weights_keep_their_licence():
    model = tiny_model("HViTTTForImageClassification")
    card = model_card(model, converted_from="someone/x/y.pth", license="mit")
    assert "`someone/x/y.pth`" in card.text and "licence `mit`, as stated by whoever converted" in card.text
    card = model_card(model, converted_from="y.pth")
    assert card.data.license == "other" and "look for the terms beside the published weights" in card.text


# ---- folders ----


def test_card_of_a_folder_is_that_of_its_model(folder):
    """Read from the configuration alone, without the weights; only the title differs, the folder's name."""
    from_folder = str(model_card(folder, repo_id="me/x"))
    assert from_folder == str(model_card(hf_ttt.LaCTForCausalLM.from_pretrained(folder), repo_id="me/x"))
    assert "\n# my-lact\n" in model_card(folder).text


def test_what_a_trainer_leaves_in_its_folder(folder):
    """Metrics are finite floats of the evaluation; times, rates and counts are none."""
    setting = MEASURED.to_dict()
    first = {"eval_loss": 3.0, "eval_runtime": 1.5, "eval_samples_per_second": 2.5, "step": 10, "epoch": 0.5}
    last = {**first, "eval_loss": 2.0, "step": 20, "epoch": 1.0, "eval_setting": setting}
    history = [{"loss": 4.0, "learning_rate": 0.1, "step": 10}, first, {"learning_rate": 0.05}, last]
    state = {"global_step": 20, "epoch": 1.0, "train_batch_size": 8, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    run = run_in(folder)
    assert (run.steps, run.epochs, run.metrics, run.metrics_step) == (20, 1.0, {"loss": 2.0}, 20)
    assert run.measured == MEASURED and run.settings == {"highest learning rate logged": 0.1, "batch size": 8}
    results = {
        "eval_loss": 1.5,
        "eval_rows": 7,
        "eval_runtime": 0.1,
        "epoch": 1.0,
        "views_psnr": 20.5,
        "bad": float("nan"),
    }
    (folder / "eval_results.json").write_text(json.dumps(results))
    assert run_in(folder).metrics == {"loss": 1.5, "views_psnr": 20.5}
    text = model_card(folder, dataset_name="books").text
    assert "| views psnr | 20.5 |" in text and "Steps: 20; epochs: 1." in text and "nan" not in text
    (folder / "eval_results.json").write_text("{")
    with pytest.raises(ValueError, match=r"eval_results.json' is not JSON"):
        run_in(folder)
    (folder / "eval_results.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list; expected an object"):
        run_in(folder)
    for name in ("eval_results.json", "trainer_state.json"):
        (folder / name).unlink()
    assert run_in(folder) == Run()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ('{"model_type": "bert"}', "holds a 'bert'; expected one of 'lact_swiglu'"),
        ('{"model_type": "lact_swiglu"}', "names None in architectures"),
        ('{"model_type": "lact_swiglu", "architectures": ["LaCTConfig"]}', "names 'LaCTConfig' in architectures"),
    ],
)
def test_folders_without_such_a_model(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        model_card(tmp_path)


def test_other_models_have_no_card():
    config = BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, vocab_size=4)
    with pytest.raises(ValueError, match="is a BertModel; expected a model of hf-ttt"):
        model_card(BertModel(config))


# ---- files ----


def test_a_card_that_was_edited_is_not_overwritten(tmp_path):
    """What someone wrote is kept unless `overwrite`; a card that hf-ttt wrote is replaced."""
    model, path = tiny_model("LaCTModel"), tmp_path / "README.md"
    save_card(model_card(model), path)
    save_card(model_card(model, license="mit"), path)
    assert "license: mit\n" in path.read_text()
    for edited in (
        path.read_text().replace("## Limits", "## Limits and more"),
        path.read_text() + "More.\n",
        "# Mine\n",
    ):
        path.write_text(edited)
        with pytest.raises(ValueError, match="edited by hand, or not written by hf-ttt"):
            save_card(model_card(model), path)
        assert path.read_text() == edited
    save_card(model_card(model), path, overwrite=True)
    assert is_generated(path.read_text()) and [file.name for file in tmp_path.iterdir()] == ["README.md"]
    with pytest.raises(ValueError, match="is a folder"):
        save_card(model_card(model), tmp_path)


def test_without_jinja_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("huggingface_hub.repocard.is_jinja_available", lambda: False)
    with pytest.raises(ImportError, match="pip install Jinja2"):
        model_card(tiny_model("LaCTModel"))


# ---- settings and Trainer ----


def test_setting_of_a_model():
    model = tiny_model("LaCTForCausalLM", "variant2")
    setting = Setting.of(model)
    assert (setting.implementation, setting.backend, setting.dtype, setting.device) == (
        "parallel",
        "torch",
        "float32",
        "cpu",
    )
    assert (setting.torch, setting.hf_ttt) == (torch.__version__, hf_ttt.__version__)
    model.set_ttt_implementation("recurrent")
    setting = Setting.of(model.to(torch.bfloat16), autocast="float16")
    assert (setting.implementation, setting.dtype) == ("recurrent", "bfloat16 under float16 autocast")


def test_backend_that_depends_on_the_size(monkeypatch):
    """Where "auto" takes kernels for some calls only, a card must not name one backend for all."""
    monkeypatch.setattr("hf_ttt.ttt_triton.is_available", lambda device: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "some GPU")
    functions = TTTInterface()
    functions.register("parallel", "torch", None)
    functions.register_lazy("parallel", "triton", lambda: None, faster={128: 1000})
    config = SimpleNamespace(
        rule=lact_cases.tiny_config("variant2").rule, ttt_implementation="parallel", ttt_backend="auto"
    )
    model = SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.float32,
        config=config,
        _ttt_functions=functions,
        get_ttt_implementation=lambda: "parallel",
    )
    assert (Setting.of(model).backend, Setting.of(model).device) == ("auto", "some GPU")


class CardTrainer(TrainerCardMixin, Trainer):
    pass


def card_trainer(folder, **settings):
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True, **settings)
    return CardTrainer(tiny_model("LaCTForCausalLM", "variant2"), arguments, eval_dataset=[])


def test_trainer_card(tmp_path):
    """The card of a Trainer has its settings and last evaluation, or the metrics that are given; edited ones stay."""
    trainer = card_trainer(tmp_path, learning_rate=0.25, weight_decay=0.5, lr_scheduler_type="cosine")
    trainer.state = TrainerState(global_step=7, epoch=0.5, log_history=[{"eval_loss": 2.5, "step": 7}])
    trainer.create_model_card(finetuned_from="someone/base", dataset="books", language="en")
    card = ModelCard.load(tmp_path / "README.md")
    assert "| learning rate | 0.25 |" in card.text and "| weight decay | 0.5 |" in card.text and "cosine" in card.text
    assert (card.data.base_model, card.data.language) == ("someone/base", "en")
    assert card.data.eval_results[0].metric_value == 2.5 and "was not recorded" in card.text
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 7
    trainer.create_model_card(finetuned_from=str(tmp_path), metrics={"psnr": 20.0})
    card = ModelCard.load(tmp_path / "README.md")
    assert "| psnr | 20 |" in card.text and "loss |" not in card.text and card.data.base_model is None
    (tmp_path / "README.md").write_text("# Mine\n")
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_the_best_evaluation_is_that_of_the_best_weights(tmp_path):
    """With load_best_model_at_end the last evaluation is one of other weights, unless it came after training."""
    trainer = card_trainer(
        tmp_path, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", save_steps=5, eval_steps=5
    )
    history = [{"eval_loss": 1.0, "step": 5}, {"eval_loss": 9.0, "step": 10}, {"train_runtime": 1.0, "step": 10}]
    trainer.state = TrainerState(global_step=10, best_global_step=5, log_history=history)
    assert (run_of(trainer).metrics, run_of(trainer).metrics_step) == ({"loss": 1.0}, 5)
    trainer.state.log_history.append({"eval_loss": 1.1, "step": 10})
    assert run_of(trainer).metrics == {"loss": 1.1}


def test_adapters_keep_their_own_card(tmp_path):
    """A Trainer of a PEFT model writes adapters, which are no model of this package: their card is that of peft."""
    model = get_peft_model(tiny_model("LaCTForCausalLM", "variant2"), LoraConfig(target_modules=["o_proj"]))
    arguments = TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    trainer = CardTrainer(model, arguments, eval_dataset=[])
    trainer.save_model()
    trainer.create_model_card()
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "peft"
