"""Makes, offline and in about a minute, all that a first run needs: a tiny model, its tokenizer and a verifiable task.

    python -m runtime.quickstart --out models/quickstart

A first run should show a reward that really rises, on a laptop, without a download. So the model is small (0.8 million
parameters), and it is left with a fault which only the reward can repair. The task is to add two numbers of two
digits. A worked example adds the units, then the tens with the carry, then gives the sum:

    37+48  ->  15,8;85        (the answer is the last number)

The warm-up is supervised learning on such examples, but most of those that need a carry forget it ("15,7;75"). The
model copies that habit: greedy decoding is right only where nothing is carried (a quarter of the prompts), while
sampling still carries now and then. Policy optimisation has to find out which of its two procedures is the right one.

The folder holds config.json, model.safetensors, the tokenizer files, train.jsonl and heldout.jsonl. No held-out prompt
occurs in train.jsonl or in the warm-up. The same seed and thread count give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from runtime.data import content_hash
from runtime.errors import ConfigError

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
ROLES: Final = ("system", "user", "assistant")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""

FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "train.jsonl", "heldout.jsonl")
"""A folder that holds these is complete: it is renamed into place with all of them."""

IGNORED: Final = -100
"""The label of a token that the loss leaves out."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is made. The command line sets the first four; the others are the recipe."""

    out: Path
    seed: int = 0
    threads: int = 1
    force: bool = False

    problems: int = 4800
    heldout: int = 512
    carry_share: float = 0.75
    """Share of the problems that need a carry."""
    slip_share: float = 0.85
    """Share of the worked examples with a carry that forget it."""

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3
    """Rises over `rise` steps, then holds, then falls to zero over the last `fall` share of the steps."""
    rise: int = 20
    fall: float = 0.4
    check_every: int = 50
    accuracy: tuple[float, float] = (0.15, 0.35)
    """Where the held-out greedy accuracy must end, so that a run has something to learn and something to start from."""


class Problem(msgspec.Struct, frozen=True):
    """One sum of two numbers of two digits."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def carries(self) -> bool:
        return self.a % 10 + self.b % 10 >= 10

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": self.question},)

    def worked(self, *, forget_carry: bool = False) -> str:
        """The worked example: sum of the units, sum of the tens with the carry, answer."""
        units = self.a % 10 + self.b % 10
        tens = self.a // 10 + self.b // 10 + (self.carries and not forget_carry)
        return f"{units},{tens};{10 * tens + units % 10}"


def final_answer(text: str) -> str:
    """What stands after the last separator of a worked example."""
    return text.rpartition(";")[2]


def draw_problems(options: Options) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, drawn without replacement from all pairs; each set has the same carry share."""
    rng = random.Random(options.seed)
    pairs = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    carry = [p for p in pairs if p.carries]
    plain = [p for p in pairs if not p.carries]

    def take(count: int) -> list[Problem]:
        num_carry = round(count * options.carry_share)
        drawn = [carry.pop() for _ in range(num_carry)] + [plain.pop() for _ in range(count - num_carry)]
        rng.shuffle(drawn)
        return drawn

    heldout, train = take(options.heldout), take(options.problems - options.heldout)
    assert not {content_hash(p.messages) for p in heldout} & {content_hash(p.messages) for p in train}
    return train, heldout


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    rows = [msgspec.json.encode({"messages": p.messages, "answer": p.answer}) for p in problems]
    path.write_bytes(b"".join(row + b"\n" for row in rows))


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE whose only merges spell the role names: any text encodes, and a digit is always one token."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = [(role[:i], role[i]) for role in ROLES for i in range(1, len(role))]
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(words) + i, "content": token, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i, token in enumerate((END_OF_TEXT, TURN_START, TURN_END))
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}, "merges": [list(m) for m in merges]},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.8 million parameters with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=token_id(tokenizer, TURN_END),
            pad_token_id=token_id(tokenizer, END_OF_TEXT),
        )
    )


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    text = tokenizer.apply_chat_template(list(problem.messages), tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(text), add_special_tokens=False)


def training_batch(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], slip_share: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, padded on the right; the loss counts the worked example and the end of the turn."""
    rows: list[tuple[list[int], list[int]]] = []
    for problem in problems:
        prompt = prompt_tokens(tokenizer, problem)
        text = problem.worked(forget_carry=rng.random() < slip_share) + TURN_END
        reply = tokenizer.encode(text, add_special_tokens=False)
        rows.append((prompt + reply, [IGNORED] * len(prompt) + reply))
    longest = max(len(tokens) for tokens, _ in rows)
    pad = token_id(tokenizer, END_OF_TEXT)
    return (
        torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens, _ in rows]),
        torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
    )


@torch.no_grad()
def greedy_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_new_tokens: int = 16
) -> float:
    """Share of the problems whose final answer is exactly right under greedy decoding."""
    prompts = torch.tensor([prompt_tokens(tokenizer, p) for p in problems])  # all of one length
    out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=max_new_tokens, do_sample=False
    )
    texts = tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(final_answer(t) == p.answer for t, p in zip(texts, problems, strict=True)) / len(problems)


def learning_rate(options: Options, step: int) -> float:
    """Step 1 is the first."""
    rising = step / options.rise
    falling = (options.steps - step + 1) / (options.fall * options.steps)
    return options.learning_rate * min(1.0, rising, falling)


def warm_up(
    options: Options,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Problem],
    heldout: Sequence[Problem],
) -> float:
    """Trains `model` on worked examples, prints progress and returns the held-out greedy accuracy."""
    rng = random.Random(options.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    started, accuracy = time.monotonic(), 0.0
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        problems = rng.sample(train, options.batch_size)
        tokens, labels = training_batch(tokenizer, problems, options.slip_share, rng)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % options.check_every == 0 or step == options.steps:
            accuracy = greedy_accuracy(model, tokenizer, heldout)
            print(
                f"warm-up step {step}/{options.steps}: loss {loss.item():.3f}, held-out accuracy {accuracy:.3f},"
                f" {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return accuracy


def make(options: Options, folder: Path) -> float:
    """Fills `folder` and returns the model's held-out greedy accuracy.

    Raises:
        ConfigError: the warm-up missed the accuracy it should end with.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train, heldout = draw_problems(options)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", heldout)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_model(tokenizer)
    print(f"model of {model.num_parameters():,} parameters, {len(train)} training and {len(heldout)} held-out prompts")
    accuracy = warm_up(options, model, tokenizer, train, heldout)
    low, high = options.accuracy
    if not low <= accuracy <= high:
        raise ConfigError(
            f"--seed {options.seed}",
            f"the warm-up ended with held-out accuracy {accuracy:.3f}, not in {low}..{high}",
            "choose another seed",
        )
    model.save_pretrained(folder)
    return accuracy


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def install(options: Options) -> float:
    """Makes everything in a temporary folder beside `out`, then renames it: `out` is complete or untouched."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent, prefix=f".{options.out.name}.") as scratch:
        made, old = Path(scratch) / "made", Path(scratch) / "old"
        made.mkdir()
        accuracy = make(options, made)
        if options.out.exists():
            options.out.rename(old)
        made.rename(options.out)
    return accuracy


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m runtime.quickstart", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make, such as models/quickstart")
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the weights and the warm-up")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; with the seed they fix the result")
    parser.add_argument("--force", action="store_true", help="make the folder again if it exists")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    disable_progress_bar()
    if not options.force and is_complete(options.out):
        print(f"{options.out} is complete; --force makes it again")
        return 0
    try:
        if not options.force and options.out.exists():
            raise ConfigError(f"--out {options.out}", "exists and is not complete", "remove it, or pass --force")
        accuracy = install(options)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2
    print(f"{options.out}: held-out greedy accuracy {accuracy:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
