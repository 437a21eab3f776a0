"""The token sequences of a user's file, which a conversion is fitted and measured on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LONGEST = 512
"""Tokens of a sequence; what is behind them is cut off."""

Tokenize = Callable[[str], Sequence[int]]


def read_prompts(path: Path, base: Path, limit: int, vocabulary: int) -> list[list[int]]:
    """The first `limit` sequences of a file as token ids of the base model's tokenizer, below `vocabulary`.

    A .jsonl file holds one object a line: {"text": ...}, {"prompt": ..., "completion": ...} or {"tokens": [ids]}. Any
    other file is text, one sequence a line. Sequences of fewer than two tokens have nothing to predict and are left
    out. Raises ValueError for a line that is neither or that has another token, for a file without a sequence, and for
    a tokenizer that cannot be loaded; OSError if the file cannot be read.
    """
    tokenize = _tokenizer_of(base)
    prompts: list[list[int]] = []
    try:
        with path.open(encoding="utf-8") as file:  # its lines end at line feeds, and nowhere else within a JSON string
            for number, line in enumerate(file, start=1):
                if len(prompts) == limit:
                    break
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                sequence = _object(line, where) if path.suffix.lower() == ".jsonl" else line.rstrip("\n")
                tokens = list(tokenize(sequence) if isinstance(sequence, str) else sequence)[:LONGEST]
                _check(tokens, vocabulary, where)
                if len(tokens) > 1:
                    prompts.append(tokens)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    if not prompts:
        raise ValueError(f"{path} has no line of at least two tokens")
    return prompts


def _check(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: token {wrong} is not one of the base model's {vocabulary}; was the text made for another model?"
        )


def _object(line: str, where: str) -> str | list[int]:
    try:
        return _sequence(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fields = '"text", "prompt" and "completion", or "tokens"'
        raise ValueError(f"{where}: expected a JSON object with {fields}") from error


def _sequence(value: dict[str, Any]) -> str | list[int]:
    if "tokens" in value:
        if not all(type(token) is int for token in value["tokens"]):
            raise TypeError("not token ids")
        return list(value["tokens"])
    text = value["text"] if "text" in value else value["prompt"] + value["completion"]
    if not isinstance(text, str):
        raise TypeError("not a string")
    return text


def _tokenizer_of(base: Path) -> Tokenize:
    """Loads the tokenizer with the first text: a file of token ids needs none."""
    loaded: list[Any] = []

    def tokenize(text: str) -> Sequence[int]:
        if not loaded:
            from transformers import AutoTokenizer  # slow to import

            try:
                loaded.append(AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False))
            except Exception as error:  # transformers raises whatever comes of the files and of what is installed
                reason = " ".join(str(error).split())
                raise ValueError(f"{base} has no tokenizer that can be loaded, so give token ids: {reason}") from error
        ids: Sequence[int] = loaded[0](text)["input_ids"]
        return ids

    return tokenize
