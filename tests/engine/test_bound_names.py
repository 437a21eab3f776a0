"""The list of what Scute replaces in vLLM is complete: every name is compared before and after."""

import os
import subprocess
import sys
import textwrap

import pytest

from scute.engine import upstream
from scute.engine.environment import is_scutes

SCRIPT = """
    import sys
    import vllm.v1.engine.core
    from scute.engine import plugin, upstream
    from scute.engine.environment import is_scutes

    for table in (upstream.SIGNATURES, upstream.FRONT_END_SIGNATURES):
        upstream.check_signatures(table)
    for path in upstream.BOUND:
        upstream.resolve(path)

    def names():
        found = {}
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm."):
                for key, value in list(vars(module).items()):
                    found[f"{name}:{key}"] = value
                    if isinstance(value, type) and value.__module__ == name:
                        found |= {f"{name}:{value.__qualname__}.{k}": v for k, v in list(vars(value).items())}
        return found

    before = names()
    plugin.register()
    for name, value in names().items():
        if before.get(name) is not value:
            print(name, is_scutes(value), is_scutes(before.get(name)))
"""


@pytest.mark.engine
def test_the_list_of_bindings_is_complete():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    changed = {name: ["True", "False"] for name in upstream.BOUND}
    assert {name: whose for name, *whose in map(str.split, done.stdout.splitlines())} == changed


def test_whose_a_value_is():
    assert is_scutes(is_scutes)
    assert is_scutes((str, upstream.Incompatible))
    assert not is_scutes(pytest.fixture)
    assert not is_scutes((str, int))
    assert not is_scutes(None)
