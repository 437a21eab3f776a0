"""Table 2 and the predicted columns of Tables A9 and A10, to their printed digits; and the page that lists them."""

import re
from pathlib import Path

import pytest
from paper import NOT_REPRODUCED, Figure, figures

FIGURES = list(figures())
PAGE = (Path(__file__).parents[2] / "docs" / "byte_model.md").read_text()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.place}: {f.quantity}")
def test_printed_digits(figure):
    if figure.quantity not in NOT_REPRODUCED:
        assert figure.rounded == figure.printed
        return
    model, _, reading = NOT_REPRODUCED[figure.quantity]
    assert figure.rounded == model != figure.printed
    assert Figure(figure.place, figure.quantity, figure.printed, reading()).agrees


def test_only_these_are_not_reproduced():
    assert len(FIGURES) == 34
    assert [figure.quantity for figure in FIGURES if not figure.agrees] == list(NOT_REPRODUCED)


def test_the_page_lists_every_figure():
    listed = re.findall(r"^\| (Table \w+|Section \d) \| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert listed == [(f.place, f.quantity, f.printed, f.rounded) for f in FIGURES]
    for _, why, _ in NOT_REPRODUCED.values():
        assert why in " ".join(PAGE.split())
