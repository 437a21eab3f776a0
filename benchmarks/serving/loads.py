"""Streams of requests: lengths, arrivals and tenants, drawn in advance and shared by all arms of a repetition."""

from dataclasses import dataclass, replace

import numpy as np

LENGTHS = {"decode": (8, 128), "prefill": (256, 8)}
FIRST_TOKEN = 3  # below are the ids that models use for padding and ends
ZIPF_EXPONENT = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """kind: a key of LENGTHS. rate: requests a second of a Poisson process, None for all at once.

    popularity: "turns" gives the tenants requests in turn, "zipf" the k-th a share of 1 / k.
    """

    kind: str
    rate: float | None = None
    popularity: str = "turns"

    @classmethod
    def parse(cls, text: str) -> "Load":
        """From KIND:RATE[:POPULARITY], as in decode:burst or prefill:16:zipf."""
        kind, rate, *popularity = text.split(":")
        if kind not in LENGTHS or popularity not in ([], ["turns"], ["zipf"]):
            raise ValueError(f"{text!r} is no load: KIND:RATE[:turns|zipf], with KIND one of {', '.join(LENGTHS)}")
        return cls(kind, None if rate == "burst" else float(rate), *popularity)

    @property
    def name(self) -> str:
        rate = "burst" if self.rate is None else f"{self.rate:g}"
        return ":".join([self.kind, rate, *([self.popularity] if self.popularity != "turns" else [])])


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds after the start of the stream. tenant: position in the pool. tokens: the prompt."""

    arrival: float
    tenant: int
    tokens: list[int]
    output_tokens: int


def draw(load: Load, count: int, tenants: int, vocabulary: int, repetition: int) -> list[Request]:
    """`count` requests over `tenants` positions; the same arguments give the same requests."""
    kind = list(LENGTHS).index(load.kind)
    generator = np.random.default_rng([repetition + 1, kind, count, tenants, int(1000 * (load.rate or 0))])
    prompt_tokens, output_tokens = LENGTHS[load.kind]
    prompts = generator.integers(FIRST_TOKEN, vocabulary, (count, prompt_tokens))
    gaps = np.zeros(count) if load.rate is None else generator.exponential(1 / load.rate, count)
    if load.popularity == "turns":
        turns = np.arange(count) % tenants
    else:
        shares = np.arange(1, tenants + 1) ** -ZIPF_EXPONENT
        turns = generator.choice(tenants, count, p=shares / shares.sum())
    arrivals = np.cumsum(gaps)
    return [
        Request(float(arrival), int(tenant), prompt.tolist(), output_tokens)
        for arrival, tenant, prompt in zip(arrivals, turns, prompts, strict=True)
    ]


def touch(load: Load, tenants: int, vocabulary: int) -> list[Request]:
    """One short request to every position at once, so that every adapter is resident and the GPU awake."""
    drawn = draw(Load(load.kind), tenants, tenants, vocabulary, -1)
    return [replace(request, output_tokens=2) for request in drawn]
