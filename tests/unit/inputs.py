"""The smallest files that pass the launcher's checks: a config, prompts, and a model folder with one weight."""

import json
import struct
from pathlib import Path

CONFIG = """\
name: tiny
num_steps: 4
models:
  policy: {path: model}
data:
  - path: train.jsonl
rollout:
  num_prompts: 4
  num_samples: 2
evaluation:
  sets:
    - path: held.jsonl
limits: {stop_s: 20, attempts: 2}
"""


def safetensors(offsets=(0, 4), names=("w",), shape=(1, 1)) -> bytes:
    """Of float32 matrices that all lie in the same place."""
    head = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": offsets} for name in names}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(offsets[1])


def write_inputs(folder: Path) -> Path:
    """Make them; returns the config's path."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").write_bytes(safetensors())
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"x": 0}}}')
    (model / "tokenizer_config.json").write_text('{"chat_template": "x", "eos_token": "x"}')
    for name, add in (("train", 1), ("held", 2)):
        rows = [{"prompt": f"{i}+{add}", "answer": str(i + add)} for i in range(10)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)
    return folder / "run.yaml"
