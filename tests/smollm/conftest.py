"""The converted model, and answers that it gave itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from runtime.types import Group, Prompt, Sample

ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that can fly.",
    "How do I boil an egg?",
)
NUM_SAMPLES, NEW_TOKENS = 4, 48


@pytest.fixture(scope="session")
def smollm() -> Path:
    folder = ROOT / "models/smollm2-135m"
    assert folder.is_dir(), "`make smollm` gets the model"
    return folder


@pytest.fixture(scope="session")
def model(smollm: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def prompts(smollm: Path) -> list[list[int]]:
    """Tokens of the questions, up to where the answer begins."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [list(tokenizer.apply_chat_template(a, add_generation_prompt=True, return_dict=False)) for a in asked]


@pytest.fixture(scope="session")
def groups(model: PreTrainedModel, prompts: list[list[int]]) -> list[Group]:
    """Answers of all their tokens; each second one is liked."""
    torch.manual_seed(0)
    made = []
    for lease, prompt in enumerate(prompts):
        asked = torch.tensor([prompt] * NUM_SAMPLES)
        answers = model.generate(
            asked, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=10**6, pad_token_id=0
        )
        logprobs = model(answers).logits[:, :-1].log_softmax(-1).gather(-1, answers[:, 1:, None])[..., 0]
        mask = np.arange(answers.shape[1]) >= len(prompt)
        samples = tuple(
            Sample(
                prompt_id=f"p{lease}",
                index=index,
                tokens=answers[index].numpy().astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, np.r_[0.0, logprobs[index].numpy()], 0.0).astype(np.float32),
                versions=((0, 0),),
                reward=float(index % 2),
            )
            for index in range(NUM_SAMPLES)
        )
        prompt_of = Prompt(id=f"p{lease}", dataset="questions")
        made.append(Group(lease=lease, prompt=prompt_of, samples=samples, version=0))
    return made
