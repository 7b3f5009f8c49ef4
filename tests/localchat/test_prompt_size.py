"""Prompts that are far too long."""

import pytest

from localchat.errors import InputTooLong
from localchat.prompt_size import refuse_what_cannot_fit
from localchat.tokenizer import Tokenizer


def test_a_long_prompt_is_refused_with_both_counts(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InputTooLong) as caught:
        refuse_what_cannot_fit("words " * 1_000_000, tiny_tokenizer, 1000)
    assert str(caught.value).startswith("the prompt has about 6,000,000 tokens in 6,000,000 characters and the context")


def test_one_that_may_fit_is_left_to_the_exact_count(tiny_tokenizer: Tokenizer) -> None:
    refuse_what_cannot_fit("x" * 16_000, tiny_tokenizer, 1000)
    refuse_what_cannot_fit("ll" * 900, tiny_tokenizer, 100_000)
    with pytest.raises(InputTooLong, match="about 8,001 tokens in 16,001 characters"):
        refuse_what_cannot_fit("ll" * 8000 + "x", tiny_tokenizer, 1000)
