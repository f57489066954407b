"""A byte-level tokenizer of a few hundred tokens: every text can be encoded, nothing is loaded."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vcli.runtime.engine.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
START, END = "<|start|>", "<|end|>"


def write_tokenizer(folder: Path, **config: object) -> Path:
    """tokenizer.json, tokenizer_config.json and the eos id in generation_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "he", "ll", "Ġw"])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("Ġ", "w")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


def tiny_tokenizer(folder: Path, **config: object) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer.from_folder(write_tokenizer(folder, **config))
