"""Every code of refusal with its meaning and what to do: `scute refusals` and docs/refusals.md are made of it."""

from dataclasses import dataclass

from scute.errors import Code


@dataclass(frozen=True, slots=True)
class Entry:
    """meaning: what is wrong; remedy: what the owner of the adapter or of the server can do."""

    meaning: str
    remedy: str


GROUPS = {
    "source": "Where the adapter comes from",
    "folder": "The folder",
    "config": "adapter_config.json",
    "method": "The method",
    "init": "The initialisation",
    "tensor": "adapter_model.safetensors",
    "compiled": "manifest.json of a compiled folder",
    "stack": "Several adapters, one after the other",
    "module": "The adapted modules",
    "capacity": "The sizes that the engine was started with",
    "peer": "Other ranks",
    "conversion": "Conversion to LoRA",
}

CATALOGUE: dict[Code, Entry] = {
    Code.SOURCE_NAME: Entry(
        "A name that no folder or repository is looked up for: it breaks the rules of names, or allowed_names.",
        "Rename the adapter; see the page on the life cycle for the rules.",
    ),
    Code.SOURCE_NOT_ALLOWED: Entry(
        "The path, or where a link in it leads, is outside of allowed_roots and allowed_repositories.",
        "Put the files under an allowed root, or add their place to the options in additional_config['scute'].",
    ),
    Code.SOURCE_TOO_LARGE: Entry(
        "The files of the adapter are larger than adapter_file_gib, or the hub does not say how large they are.",
        "Raise adapter_file_gib in additional_config['scute'], or train a smaller adapter.",
    ),
    Code.FOLDER_MISSING: Entry(
        "The folder does not exist.",
        "Give the path, as the engine sees it, of the folder that PEFT's save_pretrained wrote.",
    ),
    Code.FOLDER_INCOMPLETE: Entry(
        "The folder has no adapter_config.json or no adapter_model.safetensors.",
        "Give the folder that PEFT's save_pretrained wrote; another adapter name has a folder of its own in it.",
    ),
    Code.FOLDER_PICKLE: Entry(
        "The tensors are in adapter_model.bin, a pickle, which can run code and is never read.",
        "Load the adapter in PEFT and call save_pretrained again; it writes safetensors.",
    ),
    Code.FOLDER_UNREADABLE: Entry(
        "A file is cut off, damaged, not JSON or safetensors, names something twice, or is not allowed to be read.",
        "Copy the folder again and check its permissions.",
    ),
    Code.CONFIG_INVALID: Entry(
        "A field is missing or holds a value that has no meaning.",
        "Correct the field that the sentence names, or save the adapter again.",
    ),
    Code.CONFIG_UNKNOWN_FIELD: Entry(
        "A field that Scute does not know is switched on; it may change the result.",
        "Switch it off if it has no effect on the adapter, or use a Scute that knows it.",
    ),
    Code.CONFIG_UNSUPPORTED_FIELD: Entry(
        "A field that Scute knows and does not serve is switched on.",
        "Train without the feature that the sentence names.",
    ),
    Code.CONFIG_MISMATCH: Entry(
        "The config and the tensors, or the config and the base model, say different things.",
        "Serve the config that was saved with these tensors, on the base model that they were trained on.",
    ),
    Code.METHOD_UNSUPPORTED: Entry(
        "The peft_type, or the convention of a tensor, is not one that Scute serves.",
        "See `scute methods`; merge the adapter into the base model to serve it alone.",
    ),
    Code.METHOD_OLD_FORMAT: Entry(
        "An OFT adapter from PEFT before 0.16, whose rotation means something else.",
        "Train it again with PEFT 0.16 or later.",
    ),
    Code.INIT_CHANGED_BASE: Entry(
        "The initialisation (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) changed the base weight that the adapter needs.",
        "Save it again with path_initial_model_for_weight_conversion, which makes a plain LoRA of it.",
    ),
    Code.TENSOR_PREFIX: Entry(
        "A tensor is not named as PEFT names it when it saves.",
        "Save with save_pretrained, not from the state dict of a wrapped, compiled or sharded model.",
    ),
    Code.TENSOR_NO_MODULE: Entry(
        "A tensor adapts a projection that the base model does not have.",
        "Serve the adapter on the base model that it was trained on.",
    ),
    Code.TENSOR_MISSING: Entry(
        "A tensor that the config calls for is not in the file.",
        "The save is incomplete: save the adapter again.",
    ),
    Code.TENSOR_LEFT_OVER: Entry(
        "The file holds a tensor that the config gives no meaning to.",
        "Serve the folder as save_pretrained wrote it.",
    ),
    Code.TENSOR_SHAPE: Entry(
        "A tensor has another shape than the base model and the config call for.",
        "Check the base model, and gather sharded weights before saving.",
    ),
    Code.TENSOR_DTYPE: Entry(
        "A tensor is not float16, bfloat16, float32 or float64.",
        "Save the adapter unquantised.",
    ),
    Code.TENSOR_NOT_FINITE: Entry(
        "A tensor holds NaN or infinity, or is beyond the range of the LoRA dtype.",
        "Train it again; a value beyond float16 can be served with --dtype bfloat16.",
    ),
    Code.COMPILED_VERSION: Entry(
        "The folder was written in a format that this Scute does not read.",
        "Compile the adapter again with this Scute, or serve it with the one that wrote it.",
    ),
    Code.COMPILED_MANIFEST: Entry(
        "A field of the manifest is missing, unknown or contradicts another.",
        "Compile the adapter again; the manifest is not made to be edited.",
    ),
    Code.COMPILED_HASH: Entry(
        "The tensors, or the manifest itself, are not those that were written together.",
        "Copy the folder again, or compile the adapter again.",
    ),
    Code.COMPILED_BASE: Entry(
        "The folder was compiled for a base model with other projections.",
        "Compile the adapter for this base model.",
    ),
    Code.STACK_PATH: Entry(
        "A path starts with scute+stack: and no JSON array of two to sixteen paths follows.",
        'Write scute+stack:["/first", "/second"], in the order in which they are applied.',
    ),
    Code.STACK_BIAS: Entry(
        "Two adapters of a stack replace the same base bias.",
        "Train all but one of them with bias='none'.",
    ),
    Code.STACK_ROTATION: Entry(
        "The input transform of a later adapter meets a shared factor of an earlier one, or the blocks of several "
        "input transforms are wider than 128 together.",
        "Convert the earlier one to LoRA at its own rank, which is exact, or use block sizes that divide each other.",
    ),
    Code.STACK_SHARED: Entry(
        "Two adapters of a stack have shared factors (VeRA).",
        "Convert all but one to LoRA at their own rank, which is exact.",
    ),
    Code.STACK_MAGNITUDE: Entry(
        "A stack with DoRA and another adapter on one projection cannot be written as a compiled folder.",
        "Serve it by its path; the engine knows the base weights that it depends on.",
    ),
    Code.MODULE_UNSUPPORTED: Entry(
        "The adapter changes something that is no plain linear projection of this engine.",
        "Train without embeddings, heads, experts and whole modules; check --lora-target-modules.",
    ),
    Code.CAPACITY_RANK: Entry(
        "The rank is greater than 512, or than a --max-lora-rank other than vLLM's default.",
        "Start vLLM with a larger --max-lora-rank, or without one; beyond 512, convert the adapter with scute convert.",
    ),
    Code.CAPACITY_ROTATION: Entry(
        "The blocks of the input transform R are wider than rotation_width, or the layer has no room for R.",
        "Raise rotation_width in additional_config['scute'], at most 128.",
    ),
    Code.CAPACITY_SHARED: Entry(
        "VeRA is switched off, its rank exceeds shared_rank, or all shared_pairs places are taken.",
        "Raise shared_rank or shared_pairs in additional_config['scute'], or unload an adapter that holds a place.",
    ),
    Code.CAPACITY_DEVICE: Entry(
        "The largest max_loras of all admitted adapters would not fit the device memory for adapters together.",
        "Raise adapter_memory_gib in additional_config['scute'], lower --max-loras, or unload an adapter.",
    ),
    Code.CAPACITY_HOST: Entry(
        "The files of all admitted adapters would exceed host_memory_gib, or one would take a quarter of the memory.",
        "Raise host_memory_gib in additional_config['scute'], or unload an adapter.",
    ),
    Code.CAPACITY_PINNED: Entry(
        "All --max-loras slots are pinned. A pinned adapter that is replaced while requests use it takes one more.",
        "Raise --max-loras, or remove a pinned adapter; its slot is free once its last request has ended.",
    ),
    Code.PEER_RANK_FAILED: Entry(
        "Another tensor-parallel rank could not admit the adapter, so no rank does.",
        "Read the log of the other ranks; the same files must be on every host.",
    ),
    Code.CONVERSION_BIAS: Entry(
        "The adapter changes a bias, and the factors A and B of LoRA cannot.",
        "Serve the adapter as it is, or train it without biases.",
    ),
    Code.CONVERSION_WEIGHT: Entry(
        "The base model's folder has no plain weight of a projection that the adapter changes.",
        "Give the base model's safetensors folder, unquantised, and all of its shards.",
    ),
}
