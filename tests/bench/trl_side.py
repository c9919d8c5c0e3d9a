"""TRL's side of the comparison: seconds of each GRPO step, as JSON. Runs in TRL's own environment, from test_step.py.

    .venv-trl/bin/python tests/bench/trl_side.py '{"model": ..., "data": ..., ...}'

TRL is set up as somebody would who wants it fast here: the whole batch in one forward, no gradient checkpointing, no
reference model, no old log-probs beside the policy's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NO_TOKEN = 10**6
"""Stands for the end of text, so that every answer has all its tokens."""


class Clock(TrainerCallback):
    """Notes the time at each step's end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(text.rpartition(";")[2] == right) for text, right in zip(texts, answer, strict=True)]


def main() -> None:
    sizes = json.loads(sys.argv[1])
    torch.set_num_threads(sizes["threads"])
    rows = [json.loads(line) for line in Path(sizes["data"]).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=sizes["num_prompts"] * sizes["num_samples"],
            num_generations=sizes["num_samples"],
            max_completion_length=sizes["max_new_tokens"],
            generation_kwargs={"eos_token_id": NO_TOKEN},
            max_steps=sizes["num_steps"],
            learning_rate=sizes["learning_rate"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            save_strategy="no",
            logging_steps=1000,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(sizes["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(sizes["model"]),
            reward_funcs=last_number,
            args=config,
            train_dataset=data,
            callbacks=[clock],
        )
        trainer.eos_token_ids = [NO_TOKEN]
        trainer.train()
    lengths = [
        int(log["completions/mean_length"]) for log in trainer.state.log_history if "completions/mean_length" in log
    ]
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"step_s": seconds, "mean_length": lengths, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
