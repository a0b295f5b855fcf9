"""A setting that knows a few words takes no other one."""

import pytest

from stepkeeper.config.settings import SETTINGS
from stepkeeper.config.values import from_text
from stepkeeper.errors import StepkeeperError


@pytest.mark.parametrize("word", SETTINGS["policy.read_back"].about.choices)
def test_each_of_the_words_is_taken(word: str):
    assert from_text(SETTINGS["policy.read_back"], word, "--read-back") == word


def test_another_word_is_refused_with_those_that_are_known():
    with pytest.raises(StepkeeperError, match="one of off, newest, all is wanted"):
        from_text(SETTINGS["policy.read_back"], "sometimes", "--read-back")
