"""What a user's environment or reward may give instead of samples and rewards, and what is said of it."""

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.rollout.environments.single_turn import SingleTurn
from runtime.rollout.reward_host import Verdict
from tests.unit.test_sampler import Lengths, engine, play


class Spoils(SingleTurn):
    """Answers with its samples as `how` changes them."""

    def __init__(self, how):
        self.how = how

    async def run(self, prompt, index, generate, tokenizer):
        (sample,) = await super().run(prompt, index, generate, tokenizer)
        return self.how(sample)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda s: s, "no list of samples, but Sample("),
        (lambda s: iter([s]), "no list of samples"),
        (lambda s: [s, None], "no list of samples"),
        (
            lambda s: [replace(s, loss_mask=[True] * len(s.tokens))],
            "whose loss_mask are no flat bool array, but a list",
        ),
        (lambda s: [replace(s, tokens=s.tokens.astype(np.int64))], "no flat int32 array, but a int64 array"),
        (lambda s: [replace(s, logprobs=s.logprobs[None])], "whose logprobs are no flat float32"),
        (lambda s: [replace(s, index=9)], "a sample 9 of prompt letters:0, where"),
        (lambda s: [replace(s, prompt_id="b")], "of prompt b, where"),
        (lambda s: [s, s], r"segments [0, 0], which are numbered 0, 1"),
        (lambda s: [replace(s, segment=1)], "segments [1]"),
        (lambda s: [replace(s, status="great")], "cannot be sent: Invalid enum value 'great'"),
        (lambda s: [replace(s, versions=[(0, "new")])], "cannot be sent: Expected `int`"),
        (lambda s: [replace(s, reason=object())], "cannot be sent: "),
    ],
)
def test_answers_of_an_environment_that_are_none_fail_with_what_is_wrong(how, words):
    group, _ = play([engine()], environment=Spoils(how))
    assert [(s.status, len(s.tokens)) for s in group.samples] == [("failed", 0)] * 3
    assert all(s.reason.startswith("the environment returned ") and words in s.reason for s in group.samples)


def test_a_reason_is_bounded_and_whole_in_the_log(caplog):
    class Shouts(SingleTurn):
        async def run(self, prompt, index, generate, tokenizer):
            raise OSError("x" * 10**5)

    class Refuses(Lengths):
        async def score(self, samples, texts, prompt):
            return [Verdict(None, "y" * 10**5)] * len(samples)

    for letter, plays in {"x": {"environment": Shouts()}, "y": {"rewards": Refuses()}}.items():
        group, _ = play([engine()], **plays)
        assert all(900 < len(s.reason) < 1100 and "more characters are in the log" in s.reason for s in group.samples)
        assert letter * 10**5 in caplog.text
