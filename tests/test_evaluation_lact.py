# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""lm-evaluation-harness on a saved folder, where hf_ttt cannot be imported, on tasks whose data are local files."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from lact_cases import busy_model, tiny_config
from test_remote_code import run_child
from transformers import ByT5Tokenizer

HARNESS = os.environ.get("HF_TTT_LM_EVAL")  # a folder that lm_eval and what only it needs are installed in
QUESTIONS = [
    {"question": f"What is {i} plus {i + 1}?", "choices": [str(2 * i + 1), str(i), f"about {3 * i}"], "answer": i % 3}
    for i in range(5)
]
TEXTS = [{"text": "The fast weights take a step for each chunk. " * k + "Done."} for k in (1, 2, 7)]
TASKS = {
    "local_questions": """
task: local_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
    "local_texts": """
task: local_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
""",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        HARNESS is None and importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed, nor is HF_TTT_LM_EVAL a folder with it",
    ),
]


def child_evaluates(model, tasks, output):
    """The command line of the harness with batches of 1 and of 4. `add_bos_token=False` keeps away the end-of-text
    token that ByT5's tokenizer adds to every text, also between context and continuation."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    for size in "1", "4":
        sys.argv = ["lm_eval", "--model", "hf", "--batch_size", size]
        sys.argv += ["--model_args", f"pretrained={model},trust_remote_code=True,add_bos_token=False"]
        sys.argv += ["--tasks", "local_questions,local_texts", "--include_path", tasks]
        sys.argv += ["--device", "cpu", "--log_samples", "--output_path", f"{output}/{size}"]
        cli_evaluate()
    return "hf_ttt" in sys.modules


@pytest.fixture(scope="module")
def model():
    return busy_model(tiny_config("variant2", vocab_size=384, lact_chunk_size=8, max_position_embeddings=512))


@pytest.fixture(scope="module")
def results(model, tmp_path_factory) -> dict[str, dict[str, list]]:
    """By batch size and task: what the harness logged of each sample, in order; and the metrics, under "results"."""
    root = tmp_path_factory.mktemp("harness")
    model.save_pretrained(root / "lm")
    ByT5Tokenizer().save_pretrained(root / "lm")
    (root / "tasks").mkdir()
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (root / "tasks" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, text in TASKS.items():
        (root / "tasks" / f"{name}.yaml").write_text(text.format(folder=root / "tasks"), encoding="utf-8")
    path = {} if HARNESS is None else {"PYTHONPATH": os.pathsep.join([HARNESS, os.environ.get("PYTHONPATH", "")])}
    args = root / "lm", root / "tasks", root
    assert run_child(child_evaluates, *args, home=root / "home", **path) is False
    return {size: read_output(root / size) for size in ("1", "4")}


def read_output(folder: Path) -> dict[str, list]:
    found = {}
    for task in TASKS:
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[task] = sorted(samples, key=lambda sample: sample["doc_id"])
    (path,) = folder.rglob("results_*.json")
    return {**found, "results": json.loads(path.read_text(encoding="utf-8"))["results"]}


def log_likelihoods(samples: list, task: str) -> torch.Tensor:
    """[samples, choices or 1], as the harness logged them."""
    if task == "local_questions":
        return torch.tensor([[float(choice[0]) for choice in s["filtered_resps"]] for s in samples])
    return torch.tensor([[float(s["filtered_resps"][0])] for s in samples])


@torch.no_grad()
def by_hand(model, context: str, text: str) -> float:
    """Log-likelihood of a text after a context, or after the end-of-text token if there is none."""
    tokenizer = ByT5Tokenizer()
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    before = encode(context) if context else [tokenizer.eos_token_id]
    ids = torch.tensor([before + encode(text)])
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return scores[len(before) - 1 :].sum().item()


@pytest.mark.parametrize("task", TASKS)
def test_batches_of_one_and_four_give_the_same_log_likelihoods(results, task):
    """Rows that are padded to the longest of a batch must have what they have alone."""
    one, four = (log_likelihoods(results[size][task], task) for size in ("1", "4"))
    torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-4)


def test_log_likelihoods_by_hand(results, model):
    """The harness sees the model: choices after a question, and whole texts."""
    expected = [[by_hand(model, f"{q['question']} Answer:", f" {c}") for c in q["choices"]] for q in QUESTIONS]
    got = log_likelihoods(results["4"]["local_questions"], "local_questions")
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-4)
    expected = [[by_hand(model, "", row["text"])] for row in TEXTS]
    got = log_likelihoods(results["4"]["local_texts"], "local_texts")
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_metrics_follow_from_the_log_likelihoods(results):
    """Accuracy and bits per byte are those of the log-likelihoods, so no sample was left out."""
    metrics = results["1"]["results"]
    best = log_likelihoods(results["1"]["local_questions"], "local_questions").argmax(1)
    right = [int(choice == q["answer"]) for choice, q in zip(best.tolist(), QUESTIONS, strict=True)]
    assert metrics["local_questions"]["acc,none"] == pytest.approx(sum(right) / len(right))
    nats = -log_likelihoods(results["1"]["local_texts"], "local_texts").double().sum()
    size = sum(len(row["text"].encode()) for row in TEXTS)
    bits = (nats / size / torch.tensor(2.0).double().log()).item()
    assert metrics["local_texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
