"""The `vllm.general_plugins` entry point; vLLM calls it in every process it starts."""

_registered = False


def register() -> None:
    """Check that this vLLM is the one Scute knows, then bind. Idempotent; raises Incompatible.

    An import error here would only be logged by vLLM, so nothing is imported before this function runs.
    """
    global _registered
    if _registered:
        return
    from scute.engine import upstream

    upstream.check_version()
    from scute.engine import bind

    upstream.check_signatures()
    upstream.check_uses()
    bind.bind()
    _registered = True
