"""The token sequences that a conversion is fitted and measured on: a user's file, or random token ids."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

LONGEST = 512
"""Tokens of a sequence; what is behind them is cut off."""

Tokenize = Callable[[str], Sequence[int]]


def random_prompts(vocabulary: int, count: int = 8, length: int = 32, seed: int = 0) -> list[list[int]]:
    """`count` sequences of `length` token ids, drawn evenly from the vocabulary; the same seed draws the same."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocabulary, (count, length), generator=generator).tolist()
    return prompts


def read_prompts(path: Path, base: Path, limit: int) -> list[list[int]]:
    """The first `limit` sequences of a file as token ids of the base model's tokenizer.

    A .jsonl file holds one object a line: {"text": ...}, {"prompt": ..., "completion": ...} or {"tokens": [ids]}. Any
    other file is text, one sequence a line. Sequences of fewer than two tokens have nothing to predict and are left
    out. Raises ValueError for a line that is neither, and for a file without any sequence; OSError if it, or the base
    model's tokenizer, cannot be read.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    sequences = _objects(path, lines) if path.suffix == ".jsonl" else iter(lines)
    tokenize = _tokenizer_of(base)
    prompts = []
    for sequence in sequences:
        tokens = list(tokenize(sequence) if isinstance(sequence, str) else sequence)[:LONGEST]
        if len(tokens) > 1:
            prompts.append(tokens)
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValueError(f"{path} has no line of at least two tokens")
    return prompts


def _objects(path: Path, lines: Sequence[str]) -> Iterator[str | list[int]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _sequence(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            fields = '"text", "prompt" and "completion", or "tokens"'
            raise ValueError(f"{path}, line {number}: expected a JSON object with {fields}") from error


def _sequence(value: dict[str, Any]) -> str | list[int]:
    if "tokens" in value:
        return [int(token) for token in value["tokens"]]
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

            loaded.append(AutoTokenizer.from_pretrained(base, local_files_only=True))
        ids: Sequence[int] = loaded[0](text)["input_ids"]
        return ids

    return tokenize
