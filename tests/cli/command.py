"""The `scute` command in this process."""

from typer.testing import CliRunner

from scute.cli.main import app


def scute(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])
