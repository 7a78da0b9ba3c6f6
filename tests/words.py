"""A tokenizer of words that are numbers."""

from __future__ import annotations

from harness import COMMON
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


def words() -> PreTrainedTokenizerFast:
    """A word for each id: "w5" is 5."""
    special = {0: "<pad>", 2: "<eos>", 3: "<unk>"}
    vocabulary = {special.get(number, f"w{number}"): number for number in range(COMMON["vocab_size"])}
    own = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
