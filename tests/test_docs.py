# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""README and docs: their Python runs, their commands exist with these options, their links lead somewhere."""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_NOT_RUN = "<!-- not run: "  # with the reason, on the line before the block


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of a language with the line that they begin at, without those that say why they are not run."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [
        (text[: block.start()].count("\n") + 2, block[1])
        for block in found
        if not text[: block.start()].rstrip("\n").rsplit("\n", 1)[-1].startswith(PYTHON_NOT_RUN)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_runs(page, tmp_path, monkeypatch):
    """The Python blocks of a page, one after the other in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def commands(page: Path) -> list[str]:
    """The commands of a page's bash blocks, with continued lines joined and comments dropped."""
    lines = "\n".join(code for _, code in blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [" ".join(words) for line in lines if (words := shlex.split(line, comments=True))]


ALL_COMMANDS = sorted({(page_id(page), command) for page in PAGES for command in commands(page)})
HELP: dict[str, str] = {}


def help_of(script: str, *words: str) -> str:
    """What a Python script, a module or a subcommand prints for --help."""
    key = " ".join((script, *words))
    if key not in HELP:
        output, argv, path = io.StringIO(), sys.argv, list(sys.path)
        sys.argv = [script, *words, "--help"]
        sys.path[:0] = [str((ROOT / script).parent), str(ROOT)]
        run = runpy.run_path if script.endswith(".py") else runpy.run_module
        try:
            with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as end:
                run(str(ROOT / script) if script.endswith(".py") else script, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = argv, path
        assert end.value.code in (0, None), output.getvalue()
        HELP[key] = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
    return HELP[key]


def check_options(words: list[str], text: str) -> None:
    for word in words:
        if word.startswith("-"):
            name = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), f"{name} is not an option"


def check_install(words: list[str]) -> None:
    """pip install: extras must exist."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for word in words:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert all(f'extras["{name}"]' in setup or f'"{name}": [' in setup for name in extra.split(","))


def check_command(command: str) -> None:
    """Fails for a script, target, subcommand or option that is not there."""
    first, *rest = shlex.split(command)
    first = Path(first).name
    if first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert rest[0] in targets, f"make has no {rest[0]}"
    elif first == "pip":
        check_install(rest)
    elif first == "hf-ttt":
        words = [] if rest[0].startswith("-") else [rest[0]]
        check_options(rest, help_of("hf_ttt.cli", *words))
    elif first == "bash":
        assert (ROOT / rest[0]).is_file()
    elif first in ("python", "torchrun", "accelerate"):
        check_python(rest)
    else:
        assert first in ("export", "cd", "git", "lm_eval"), f"no check for {first}"


def check_python(words: list[str]) -> None:
    """python [-m module] or script, perhaps behind a launcher's own arguments."""
    places = [i for i, word in enumerate(words) if word.endswith(".py")]
    if places:
        script, *options = words[places[0] :]
        assert (ROOT / script).is_file(), f"{script} is not there"
        if script.startswith(("examples/", "benchmarks/")):
            check_options(options, help_of(script))
    elif words[0] == "-m" and words[1] == "benchmarks":
        check_options(words[3:], help_of("benchmarks", words[2]))
    else:
        assert words[:2] in (["-m", "pytest"], ["-m", "venv"]), f"no check for python {' '.join(words)}"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS)
def test_commands_exist(page, command):
    """A command's script, target, subcommand and options are there. (Whole runs are tests of the examples.)"""
    check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        'pip install ".[nothing]"',
        "hf-ttt convert --nothing a b",
        "python examples/nothing.py",
        "python examples/nvs_solids.py --nothing",
        "python -m benchmarks run --nothing",
        "rm -rf build",
    ],
)
def test_wrong_commands_are_found(command):
    """The check of commands can fail."""
    with pytest.raises(AssertionError):
        check_command(command)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links(page):
    """Relative links lead to files of the repository, and anchors to headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            assert re.match(r"(https://[\w.-]+\.\w+(/|$)|mailto:)", link), link
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists() and file.is_relative_to(ROOT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link}"


def test_pages_are_built(tmp_path):
    """MkDocs builds all pages, and a warning, such as for a page that no menu lists, is an error."""
    mkdocs = pytest.importorskip("mkdocs.commands.build", reason="the test extra installs mkdocs")
    from mkdocs.config import load_config

    config = load_config(os.fspath(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    mkdocs.build(config)
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / ("" if page.stem == "index" else page.stem) / "index.html").is_file()
