"""A short run of the fuzzer, and that it would notice: `python tests/admission/fuzz.py` runs longer ones."""

import dataclasses

import fuzz
import pytest
from fuzz import MUTATIONS, Fuzzer, Tally

COUNT, SEED = 1_500, 0


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.filterwarnings("ignore")
def test_every_mutated_folder_is_refused_or_computes_what_it_should(fuzzer):
    tally = fuzzer.run(COUNT, SEED)
    assert tally.findings == []
    assert tally.folders == COUNT
    assert {name for name, outcomes in tally.outcomes.items() if not outcomes} == set()
    assert sum(tally.oracles.values()) >= COUNT / 10, "it shows nothing of what is accepted"
    assert len(tally.codes) >= 15


def test_good_folders_are_accepted(fuzzer):
    for kind, good in fuzzer.good.items():
        tally, folder = Tally(), good.copy()
        folder.rehash = folder.is_compiled
        folder.write(fuzzer.place)
        outcome, form = fuzzer._compiled(kind, tally)
        assert outcome == "accepted", tally.findings
        fuzzer._check(kind, form, kind, good, True, tally)
        assert tally.findings == []


def test_a_compiler_that_errs_is_found(fuzzer, monkeypatch):
    """One term that is a little larger, and an exception that is no refusal."""
    right = fuzz.compile_adapter

    def wrong(folder, base):
        form = right(folder, base)
        members = {
            name: dataclasses.replace(m, terms=tuple(dataclasses.replace(t, c=1.001 * t.c) for t in m.terms))
            for name, m in form.members.items()
        }
        return dataclasses.replace(form, members=members)

    good = fuzzer.good["lora"]
    for compiler, finding in ((wrong, "computes something else"), (lambda *_: 1 / 0, "ZeroDivisionError")):
        monkeypatch.setattr(fuzz, "compile_adapter", compiler)
        tally = Tally()
        good.copy().write(fuzzer.place)
        _, form = fuzzer._compiled("lora", tally)
        if form is not None:
            fuzzer._check("lora", form, "lora", good, True, tally)
        assert finding in "".join(tally.findings)


def test_a_folder_is_the_same_in_every_run(fuzzer):
    contents = []
    for _ in range(2):
        fuzzer.try_one(7, SEED, Tally())
        contents.append({p.name: p.read_bytes() for p in fuzzer.place.iterdir() if p.is_file()})
    assert contents[0] == contents[1]


def test_every_mutation_has_a_name_of_its_own():
    parts = (fuzz.fuzz_configs, fuzz.fuzz_files, fuzz.fuzz_places)
    assert len(MUTATIONS) == sum(len(part.MUTATIONS) for part in parts)
