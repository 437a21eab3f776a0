"""`scute verify`: adapters in a vLLM engine against the PEFT library, for a bug report."""

import json as jsons
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from scute.cli.base import base_model
from scute.cli.output import print_json, print_refusal
from scute.cli.verdicts import as_json, is_above, print_text
from scute.errors import Refusal


class Dtype(StrEnum):
    """What vLLM takes for --dtype."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def verify(
    folders: Annotated[list[Path], typer.Argument(help="Adapter folders, or folders that hold adapter folders.")],
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The base model's folder, with weights.")],
    bound: Annotated[float, typer.Option(min=0, help="Largest error / effect, in percent.")] = 2.0,
    dtype: Annotated[Dtype, typer.Option(help="As vLLM's --dtype.")] = Dtype.AUTO,
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as a JSON object.")] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve adapters in vLLM and run them in the PEFT library in float32, and say how far the two are apart.

    For an adapter above the bound, every projection is compared too: the normal form in torch against PEFT's layer, on
    the same inputs. If those agree, it is the engine that errs. Exits with 1 if an adapter is refused or above the
    bound.
    """
    if find_spec("peft") is None:
        typer.echo("scute verify needs the PEFT library, which is not installed: pip install peft==0.21.2", err=True)
        raise typer.Exit(2)
    from scute.admission.inspection import adapters_in
    from scute.verify.verify import verify as run
    from scute.verify.versions import versions

    options = {"dtype": str(dtype), **_arguments(engine)}
    try:
        paths = list(adapters_in(folders))
        done = run(paths, base_model(base), base, bound / 100, options, lambda step: typer.echo(step, err=True))
    except Refusal as refusal:
        print_refusal(refusal, done="verified", json=json)
        raise typer.Exit(1) from refusal
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    found, wrong = versions() | {"dtype": str(options["dtype"])}, [v for v in done.verdicts if is_above(v, bound)]
    print_json(as_json(done, found, bound)) if json else print_text(done, found, bound)
    raise typer.Exit(1 if wrong else 0)


def _arguments(text: str) -> dict[str, Any]:
    """Raises BadParameter for what is no JSON object, and for what vLLM has no argument for."""
    try:
        found = jsons.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--engine") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f'{text!r} is not a JSON object, as {{"max_model_len": 64}}', param_hint="--engine")
    if found:
        from scute.engine.offline import check_arguments  # imports vLLM, which only the engine's process needs else

        try:
            check_arguments(found)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--engine") from error
    return found
