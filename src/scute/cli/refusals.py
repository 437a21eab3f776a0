"""`scute refusals`: every code of refusal, as a table, as JSON, or as the page docs/refusals.md."""

from typing import Annotated

import typer

from scute.cli.catalogue import CATALOGUE, GROUPS
from scute.cli.output import print_json, print_table

INTRODUCTION = """\
# Refusals

An adapter that cannot be served exactly is refused, and the engine goes on without it. The error starts with
`[scute:<code>]`, so that a client can match on the code, and goes on with a sentence that names the file, the tensor
or the field. Over HTTP it is a 400 (404 for `folder.missing`); in Python it is `scute.errors.Refusal`, a `ValueError`,
with `.code` and `.sentence`. Codes do not change between releases; sentences may.

An engine names the first reason. `scute inspect FOLDER --base MODEL` tells all of them without an engine, but for what
depends on how one was started: codes that start with `capacity.` or `peer.`, a projection that the engine does not
adapt (`module.unsupported`), and a value that its dtype does not hold (`tensor.not_finite`). It reads headers; what the
values decide (`tensor.not_finite`, `compiled.hash` of tensors, whether a copy of a base weight is one) needs `--deep`.
Codes that start with `conversion.` come from `scute convert` alone; such an adapter can be served.

This page is made by `scute refusals --markdown > docs/refusals.md`.
"""


def refusals(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/refusals.md.")] = False,
) -> None:
    """List every reason for which an adapter may be refused, and what to do about it."""
    rows = [(str(code), entry.meaning, entry.remedy) for code, entry in CATALOGUE.items()]
    if json:
        print_json([{"code": code, "meaning": meaning, "remedy": remedy} for code, meaning, remedy in rows])
    elif markdown:
        typer.echo(page(), nl=False)
    else:
        print_table(("code", "meaning", "what to do"), rows)


def page() -> str:
    """The text of docs/refusals.md."""
    lines = [INTRODUCTION]
    for group, heading in GROUPS.items():
        lines += [f"## {heading}", "", "| code | meaning | what to do |", "| --- | --- | --- |"]
        lines += [
            f"| `{code}` | {entry.meaning} | {entry.remedy} |"
            for code, entry in CATALOGUE.items()
            if code.partition(".")[0] == group
        ]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"
