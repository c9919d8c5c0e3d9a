"""What a judge says of an answer: it is asked one question an answer, and a pattern reads the number from its reply."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from runtime.rollout.base import Ask, Reward
from runtime.types import Prompt, Sample, SamplingParams

logger = logging.getLogger("agent")

TEMPLATE: Final = """\
Question: {prompt}

Expected answer: {answer}

Given answer: {text}

Is the given answer right? Think, then end with a line "Score: 1" if it is and "Score: 0" if it is not."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "judge"
    """One of `rollout.sets`."""
    template: str = TEMPLATE
    """The question, with {prompt} (the last message), {answer} and {text}. Other braces are written twice."""
    pattern: str = r"Score:\s*([-+]?\d+(?:\.\d+)?)"
    """A regular expression; its first group is the reward, where it matches last. No match: the answer has none."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 512
    temperature: Annotated[float, Meta(ge=0.0)] = 0.0

    @property
    def asks(self) -> tuple[str, ...]:
        return (self.model,)

    def __post_init__(self) -> None:
        try:
            self.template.format(prompt="", answer="", text="")
        except (KeyError, IndexError, AttributeError, ValueError) as e:
            raise ValueError(f"template: only {{prompt}}, {{answer}} and {{text}} are filled in, not {e}") from None
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as e:
            raise ValueError(f"pattern {self.pattern!r}: {e}") from None
        if num_groups == 0:
            raise ValueError(f"pattern {self.pattern!r} has no group (...) around the number")


class Judge:
    def __init__(self, config: Config) -> None:
        self._config, self._pattern = config, re.compile(config.pattern)
        self._params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens)

    async def score(
        self, samples: Sequence[Sample], texts: Sequence[str], prompt: Prompt, ask: Ask
    ) -> list[float | None]:
        return list(await asyncio.gather(*(self._score(text, prompt, ask) for text in texts)))

    async def _score(self, text: str, prompt: Prompt, ask: Ask) -> float | None:
        asked = prompt.messages[-1]["content"] if prompt.messages else ""
        question = self._config.template.format(prompt=asked, answer=prompt.answer, text=text)
        try:
            reply = await ask(self._config.model, [{"role": "user", "content": question}], self._params)
        except ValueError as e:  # too long an answer: the others of its group still get their scores
            logger.warning("the %s was not asked: %s", self._config.model, e)
            return None
        found = [match.group(1) for match in self._pattern.finditer(reply)]
        try:
            return float(found[-1])
        except (IndexError, ValueError, TypeError):
            logger.warning("the %s gave no score, but %r", self._config.model, reply[-200:])
            return None


def build(options: Config) -> Reward:
    return Judge(options)
