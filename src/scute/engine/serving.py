"""The API server's part: loading, unloading and looking up adapters, with the reason where one is refused."""

import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from scute.engine import loads, upstream
from scute.engine.admissions import Admissions
from scute.engine.name_locks import NameLocks
from scute.engine.options import Options
from scute.engine.refusals import find_refusal
from scute.engine.resolvers import resolvers_of
from scute.engine.sources import check_name
from scute.engine.stack_names import with_paths
from scute.errors import Code, Refusal

logger = init_logger("vllm.scute")

Call = Callable[..., Any]

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def bind() -> None:
    """Wrap the model list of the API server, and what attaches SageMaker's routes."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.sagemaker import api_router

    OpenAIServingModels.__init__ = with_resolvers(OpenAIServingModels.__init__)
    OpenAIServingModels.load_lora_adapter = replace_or_refuse(OpenAIServingModels.load_lora_adapter)
    OpenAIServingModels.unload_lora_adapter = release_unloaded(OpenAIServingModels.unload_lora_adapter)
    OpenAIServingModels.resolve_lora = resolve_or_refuse(OpenAIServingModels.resolve_lora)
    api_router.attach_router = keep_models(api_router.attach_router)


def with_resolvers(init: Call) -> Call:
    """Add the resolvers that the options call for, after those of plugins; and locks that go when they are free."""

    @functools.wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.lora_resolver_lock = NameLocks()
        resolvers = resolvers_of(Options.read(self.engine_client.vllm_config))
        self.lora_resolvers += resolvers
        if resolvers and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            logger.warning(
                "Requests cannot name adapters of allowed_roots and allowed_repositories, and get a 404: set "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to have them looked up."
            )

    return initialise


def replace_or_refuse(load_lora_adapter: Call) -> Call:
    """A refusal is a 400 where vLLM answers 500, and a folder that is not there a 404, as in vLLM.

    An adapter that takes over a name is loaded beside the old one, which goes when its last request ends.
    A stack may name adapters that are loaded.
    """

    @functools.wraps(load_lora_adapter)
    async def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        request.lora_path = with_paths(request.lora_path, self.lora_requests)
        with loads.begin(self) as load:
            result = await load_lora_adapter(self, *args, **kwargs)
        error = getattr(result, "error", None)
        if error is not None:
            refusal = load.refusal or find_refusal(error.message)
            return result if refusal is None else _refused(result, refusal, request.lora_name)
        old = load.replaced
        if old is not None:
            new, old_id = self.lora_requests[request.lora_name], old.lora_int_id
            old.lora_int_id, old.lora_path = new.lora_int_id, new.lora_path  # for requests that are not queued yet
            Admissions.of(self.engine_client).retire(old_id)
            await self.engine_client.remove_lora(old_id)
        return result

    return loading


def release_unloaded(unload_lora_adapter: Call) -> Call:
    """vLLM only forgets the name: also remove the adapter from the engine, which waits for its requests."""

    @functools.wraps(unload_lora_adapter)
    async def unloading(self: Any, request: Any) -> Any:
        adapter = self.lora_requests.get(request.lora_name)
        result = await unload_lora_adapter(self, request)
        if adapter is not None and getattr(result, "error", None) is None:
            Admissions.of(self.engine_client).retire(adapter.lora_int_id)
            await self.engine_client.remove_lora(adapter.lora_int_id)
        return result

    return unloading


def resolve_or_refuse(resolve_lora: Call) -> Call:
    """A 400 with the reason, for a name that breaks the rules and for an adapter that cannot be loaded.

    vLLM would answer 500 for what a resolver raises, keeps the reason of a failed load to itself, and blames the
    adapter where the engine has died. Raises EngineDeadError then.
    """

    @functools.wraps(resolve_lora)
    async def resolving(self: Any, lora_name: str) -> Any:
        options = Options.read(self.engine_client.vllm_config)
        with loads.begin(self) as load:
            try:
                if options.restricts_sources and lora_name not in self.lora_requests:
                    check_name(lora_name, options)  # before any resolver, of other plugins too
                result = await resolve_lora(self, lora_name)
            except Refusal as refusal:
                load.refusal = refusal
                result = _error()
        if getattr(result, "error", None) is not None and load.refusal is not None:
            return _refused(result, load.refusal, lora_name, missing=HTTPStatus.BAD_REQUEST)
        if isinstance(load.error, EngineDeadError):
            raise load.error
        return result

    return resolving


def keep_models(attach_router: Call) -> Call:
    """Where SageMaker's header names no adapter, the body's `model` counts. vLLM would ask the base model.

    vLLM undoes what importing SageMaker's package does to the loggers, so it is imported after that.
    """

    @functools.wraps(attach_router)
    def attaching(*args: Any, **kwargs: Any) -> Any:
        result = attach_router(*args, **kwargs)
        upstream.check_signatures(upstream.SAGEMAKER_SIGNATURES)
        transform = upstream.resolve(upstream.SAGEMAKER_TRANSFORM)
        transform.transform_request = inject_what_is_given(transform.transform_request)
        return result

    return attaching


def inject_what_is_given(transform_request: Call) -> Call:
    """Of what puts the header into the body: leave the body as it is where the header is not there, or empty."""
    unchanged = upstream.resolve(upstream.SAGEMAKER_OUTPUT)

    @functools.wraps(transform_request)
    async def transforming(self: Any, raw_request: Any) -> Any:
        if not raw_request.headers.get(ADAPTER_HEADER):
            return unchanged(raw_request=raw_request)
        return await transform_request(self, raw_request)

    return transforming


def _error() -> Any:
    from vllm.entrypoints.serve import create_error_response

    return create_error_response("")


def _refused(response: Any, refusal: Refusal, name: str, *, missing: HTTPStatus = HTTPStatus.NOT_FOUND) -> Any:
    """The response with the refusal in it. missing: status for a folder that is not there."""
    status = missing if refusal.code is Code.FOLDER_MISSING else HTTPStatus.BAD_REQUEST
    response.error.message = f"{refusal} (adapter {name!r})"
    response.error.type = "NotFoundError" if status is HTTPStatus.NOT_FOUND else "BadRequestError"
    response.error.code = status.value
    return response
