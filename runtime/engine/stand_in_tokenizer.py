"""A tokenizer for a model without one: for random weights no words are needed, only token ids."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vcli.runtime.config import ModelConfig
from vcli.runtime.engine.tokenizer import Tokenizer


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    """The model's tokenizer; with random weights and no tokenizer.json, one that stands in for it.

    Raises:
        ConfigError: the model's own is missing where it is needed, or damaged.
    """
    if model.load_format == "dummy" and not (model.path / "tokenizer.json").exists():
        return _stand_in(model)
    return Tokenizer.from_folder(model.path)


def _stand_in(model: ModelConfig) -> Tokenizer:
    """One token for each byte of a text; every other id of the vocabulary reads as its number."""
    size = model.spec.vocab_size
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    names = [*alphabet, *(f"Ġ{number}" for number in range(len(alphabet), size))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        backend, eos_token_ids=model.spec.eos_token_ids, origin=f"the stand-in for {model.path}"
    )
