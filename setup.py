"""Packaging of hf-ttt: a src layout, few base dependencies, and an extra for everything else."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithTemplates(build_py):
    """Puts the templates of model cards beside the code that reads them; from a clone they are read where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "hf_ttt", "hub", "templates")
            shutil.copytree(Path(__file__).with_name("model_cards"), target, dirs_exist_ok=True)


extras = {
    "train": ["accelerate", "datasets", "evaluate", "pillow"],
    "peft": ["peft"],
    "hub": ["jinja2"],  # for model cards
    "quantization": ["torchao"],
    "triton": ["triton; sys_platform == 'linux'"],
}
extras["all"] = extras["train"] + extras["peft"] + extras["hub"] + extras["triton"]
extras["examples"] = extras["train"] + ["matplotlib", "scikit-learn"]
extras["nvs"] = extras["examples"] + ["pybullet"]  # a wheel for Python 3.11; built from source on others
extras["test"] = extras["quantization"] + [
    "lm_eval",
    "mkdocs",
    "mypy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "parameterized",
    "pillow",
    "psutil",
    "pytest",
    "pytest-xdist",
    "ruff",
]

setup(
    name="hf-ttt",
    version="0.1.0",
    description="Test-time-training layers and models for transformers, with exact recurrent and parallel evaluation",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The hf-ttt contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["test-time training", "linear attention", "transformers", "pytorch", "language model"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"hf_ttt": ["py.typed"]},
    cmdclass={"build_py": BuildWithTemplates},
    zip_safe=False,
    install_requires=["torch>=2.7", "transformers>=5.18,<6", "huggingface-hub", "safetensors", "typer"],
    entry_points={"console_scripts": ["hf-ttt = hf_ttt.cli:main"]},
    extras_require=extras,
)
