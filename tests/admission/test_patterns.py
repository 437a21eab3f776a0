"""Expressions of a config: read as `re` reads them or refused, in bounded time and memory."""

import re
import time
import tracemalloc
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scute.admission import patterns
from scute.admission.patterns import LONGEST, Expressions, end_of_name, layer_index
from scute.errors import Code, Refusal

NAMES = [
    "model.layers.11.self_attn.q_proj",
    "layers.0.mlp.up_proj",
    "a",
    "A",
    "ab",
    "a.b",
    "aab",
    "k_1",
    "S-a",
    "]}",
    ":",
]


def words(text: str) -> list[str]:
    return text.split()


OURS = words(
    r"a b A k s 1 _ . - ] } , : ^ $ ab proj \. \d \w \W \b \B \A \Z \- \] \{ [ab] [^a] [k-s] []a] [^]a] [\d.] [^\w] "
    "[a-] [_-a] [Z-a]"
)
THEIRS = words(
    r"{ [ {} {e} {e<=1} {1i+1d<2} {i,s<=1} {2 [[:alpha:]] [[a]] [a--b] [a&&b] [a||b] [a~~b] ( ) é \1 \K \X \R \G \m \M "
    r"\h \x41 \u0131 \N{SPACE} \p{L} \L<a> \Q (?R) (?1) (?#x) (?P=n) (*FAIL) ++"
)
REPEATS = words("* + ? *? +? ?? {2} {1,2} {,2} {2,} {,} {0} {2}? {1,}? ++ *+ ?+ {1,2}+ {e<=1}")
GROUPS = words("( (?: (?= (?! (?<= (?<! (?P<n> (?i) (?i: (?-i: (?s: (?x) (?x: (?a) (?m) (?> (?| (?(1) (?V1) (?r) (?<n>")


def combined(parts):
    """Parts in a row, as alternatives, repeated, and in groups."""
    rows = st.lists(parts, min_size=1, max_size=4).map("".join)
    repeated = st.tuples(parts, st.sampled_from(REPEATS)).map("".join)
    grouped = st.builds(
        lambda opening, first, more: f"{opening}{'|'.join([first, *more])})" if opening[-1] != ")" else opening + first,
        st.sampled_from(GROUPS),
        rows,
        st.lists(rows, max_size=1),
    )
    return rows | repeated | grouped


EXPRESSIONS = st.recursive(st.sampled_from(OURS) | st.sampled_from(OURS + THEIRS), combined, max_leaves=8)


@given(EXPRESSIONS, st.sampled_from([str, end_of_name, layer_index]))
@settings(deadline=None, max_examples=1500)
@example("a{e<=1}", str)
@example("[[:alpha:]]", str)
@example("(?i:a)?[^]a]", str)
@example("?>a*)|(a", end_of_name)
def test_what_is_read_is_read_as_re_reads_it(text, build):
    expression = build(text)
    try:
        Expressions().compile(expression)
    except ValueError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what a later `re` may read differently
        expected = re.compile(expression)
    ours = Expressions()
    for name in NAMES:
        for found, wanted in (
            (ours.fullmatch(expression, name), expected.fullmatch(name)),
            (ours.match(expression, name), expected.match(name)),
        ):
            assert (found and found.span()) == (wanted and wanted.span()), name
            assert "idx" not in expected.groupindex or (found and found["idx"]) == (wanted and wanted["idx"])


@pytest.mark.parametrize(
    "expression",
    [
        r"^(language_model(?=\.).*\.(q_proj|v_proj))$",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.up_proj)",
        r"^(?!.*(?:vision|lm_head)).*proj$",
        r"model\.layers\.(1[0-9]|2[0-7])\.mlp\.(gate|up)_proj",
        r".*\.layers\.\d{1,2}\.(self_attn|mlp)\.[a-z]+_proj",
        "(?i).*Q_PROJ",
        "|".join(rf"model\.layers\.{i}\.self_attn\.{p}_proj" for i in range(60) for p in "qkv"),
    ],
)
def test_what_users_write_is_read(expression):
    Expressions().compile(expression)


REFUSED = {
    "a{e<=1}": "from '{e<=1}' on",
    "b[[:alpha:]]": "from '[[:alpha:]]' on",
    "a++": "from '++' on",
    "é": "from 'é' on",
    "((a{1000}){1000}){1000}": "repetitions written out",
    "(){100000}": "repetitions written out",
    "(a|b)" * 200_000: "1000000 characters",
    "a{" + "9" * 5000 + "}": "not a regular expression",
    "(" * 4000 + ")" * 4000: "not a regular expression",
}


@pytest.mark.parametrize("expression", REFUSED, ids=lambda text: text[:12])
def test_what_is_not_read_is_refused_at_once(expression):
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(REFUSED[expression])):
        Expressions().compile(expression)
    assert time.monotonic() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


def test_the_length_with_repetitions_written_out():
    for expression, length in [
        ("ab", 2),
        ("a{3}b", 4),
        ("(ab{2}){3}c", 10),
        (r"\){3}[)]{2,}(?:a|b){,4}", 17),
        ("(?i)a", 2),
    ]:
        assert patterns._written_out(list(patterns._tokens(expression))) == length
    Expressions().compile(f"(a{{{LONGEST // 10}}}){{10}}")


def test_an_expression_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    expressions = Expressions()
    for name in ("a" * 200, "a"):  # the time is over for the next one too
        with pytest.raises(Refusal, match="nested repetitions") as refusal:
            expressions.fullmatch("([a-z]|[a-z0-9])*[A-Z]", name)
        assert refusal.value.code is Code.CONFIG_INVALID
    assert Expressions().fullmatch("a*", "a" * 200), "the time is that of one config"


@pytest.mark.parametrize("form", ["([a-z]|[a-z0-9])*{}[A-Z]", "a{}"], ids=["to match", "to compile"])
def test_many_expressions_share_one_time(monkeypatch, form):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    expressions, start = Expressions(), time.monotonic()
    many = (expressions.match(end_of_name(form.format(number)), "a" * 15) for number in range(100_000))
    with pytest.raises(Refusal, match="together"):
        list(many)
    assert time.monotonic() - start < 3
