"""Kernels by their names: which kind of work a device event is."""

import re

RULES: tuple[tuple[str, str], ...] = (
    ("copies", r"^(memcpy|memset)"),
    # Inductor names a kernel after everything that it fuses, so it is asked for before the words are.
    ("Inductor", r"^triton_"),
    (
        r"Scute \g<0>",
        r"^(shrink_rows|expand_rows|turn_and_shrink|rotate|copy_and_rotate|fused_gemm)$"
        r"|^(shrink_tiles|shrink_pair_tiles|expand_tiles|finish_pair_shrink|expand_pair_tiles)$",
    ),
    (r"vLLM \g<0>", r"lora_(shrink|expand)"),
    ("KV cache write", r"reshape_and_cache"),
    # FlashAttention is made of CUTLASS, so it comes before the GEMMs.
    ("attention", r"flash|attn|attention"),
    ("GEMM", r"nvjet|gemm|cutlass|splitk|aten::(linear|mm|addmm|matmul|bmm)\b|onednn"),
    ("sampling", r"argmax|topk|softmax|sampl|multinomial"),
)
"""(family, regular expression): the first that matches a name, in any case, decides; a family may quote the match."""

_RULES = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in RULES]
_LONGEST = 40


def family_of(name: str) -> str:
    """The family of a kernel, or its own name without arguments where no rule matches."""
    for family, pattern in _RULES:
        if found := pattern.search(name):
            return found.expand(family)
    return re.split(r"[<(]", name.removeprefix("void "))[0][-_LONGEST:]
