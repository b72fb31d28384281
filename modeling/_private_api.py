"""Every use of private functions of Python, torch and transformers, with its reason; those of peft are in `adapters`.

Overridden private methods of transformers' classes are in the derived classes. A function here is removed once there is
a public way. All were checked with torch 2.13 and 2.15, transformers 5.24.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

# These are called for every product, and torch's public functions are slower: they check more, in Python.
is_traced_by_jit: Callable[[], bool] = torch._C._is_tracing
is_any_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Whether a transform of `torch.func` (grad, vmap, jvp) is active: it supports only torch's own operators.
is_under_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def has_modes() -> bool:
    """Return True if a function or dispatch mode is active, as under every tracer of torch.fx."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


def is_under_vmap() -> bool:
    """Return True under `torch.func.vmap`, where no values can be read (torch 2.15)."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    stack = functorch.get_interpreter_stack() or ()
    return any(level.key() == functorch.TransformType.Vmap for level in stack)


def torch_modes_active() -> bool:
    """Return True if a transform of `torch.func`, forward-mode differentiation, a mode or a global hook is active.

    Each of them must see torch's own operators, which a shortcut does not call.
    """
    is_forward_ad = forward_ad._current_level >= 0
    return is_under_functorch() or is_forward_ad or has_modes() or bool(_has_any_global_hook())


def has_mkldnn_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies matrices of this 16-bit dtype on this CPU."""
    is_half = dtype == torch.float16
    known = torch.ops.mkldnn
    return (known._is_mkldnn_fp16_supported if is_half else known._is_mkldnn_bf16_supported)()


def load_without_storage(path: str | os.PathLike) -> Any:
    """Load a file of `torch.save` without its tensors' data.

    The attribute `_checkpoint_offset` of each storage is the offset of its data in the file.
    """
    with FakeTensorMode():
        return torch.load(path, weights_only=True)


def save_without_storage(content: dict[str, torch.Tensor], path: Any) -> None:
    """Write a torch file for meta tensors, with space for their data, which the caller writes afterwards."""
    with FakeTensorMode():
        fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in content.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, path)


def mask_implementations() -> Mapping[str, Callable]:
    """Return the functions that make masks, by attention implementation.

    The registry is a class of its own, and dynamo cannot trace `in` on it.
    """
    return ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


@contextmanager
def registered_conversions(model: Any) -> Iterator[None]:
    """Make saving reverse, within the context, the conversion rules that are registered for the model type.

    By default transformers reverses those that were used when the model was loaded.
    """
    used = getattr(model, "_weight_conversions", None)
    model._weight_conversions = None
    try:
        yield
    finally:
        model._weight_conversions = used


def replace_quantizer(name: str, quantizer_class: type) -> None:
    """Replace transformers' quantizer of this name.

    `register_quantizer` refuses existing names, but configurations contain this name.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    AUTO_QUANTIZER_MAPPING[name] = quantizer_class


def register_model(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` return `model_class` for a config of ours.

    `auto_class.register` cannot be used, for two reasons. It requires the model's own config class as the key, yet
    the Auto classes accept multimodal configs for text models (transformers maps `llama4` to `Llama4ForCausalLM`).
    And it omits the table of names by model type, in which `transformers serve`, Trainer's label smoothing and
    lm-eval look up language models.
    """
    mapping = auto_class._model_mapping
    mapping.register(config_class, model_class)
    mapping._model_mapping[config_class.model_type] = model_class.__name__


def name_causal_model(model_type: str, class_name: str) -> None:
    """Add a class to those that transformers knows as causal language models, by their names.

    By these names `Trainer` decides whether label smoothing shifts the labels; unshifted, it would train to repeat
    the input token. A multimodal model counts as a language model here, although its Auto class is another.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = class_name


def publish(model_classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`.

    `transformers serve` and vLLM look only there for the architecture that config.json names. There are two such
    modules: transformers puts a second one into `sys.modules` while it is imported, and earlier importers keep the
    first.
    """
    bound = [getattr(module, "__dict__", {}).get("transformers") for module in list(sys.modules.values())]
    for module in [sys.modules["transformers"], *bound]:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for model_class in model_classes:
                setattr(module, model_class.__name__, model_class)


def point_at(auto_class: type, config_class: type, model_class: type) -> Callable[[], None]:
    """Make `auto_class` return `model_class` for a stock config; transformers has no public way.

    Returns:
        a function that undoes it, unless something else has replaced the entry since.
    """
    entries = auto_class._model_mapping._extra_content
    before = entries.get(config_class)
    entries[config_class] = model_class

    def undo() -> None:
        if entries.get(config_class) is model_class:
            del entries[config_class]
            if before is not None:
                entries[config_class] = before

    return undo


def choose_processor(stock_class: type, choose: Callable[..., type | None]) -> None:
    """Make `AutoProcessor` ask `choose(name_or_path, **kwargs)` where a folder's files name `stock_class`.

    `AutoProcessor` goes by that name alone and reads its registry only where no file names a class, so there is no
    public way. The class's own `from_pretrained` is wrapped; `_from_auto` marks calls from `AutoProcessor`.

    Args:
        stock_class: a processor class of transformers.
        choose: returns the class that loads the folder, or None for `stock_class`.
    """
    original = stock_class.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        if cls is stock_class and kwargs.get("_from_auto"):
            cls = choose(pretrained_model_name_or_path, **kwargs) or cls
        return original(cls, pretrained_model_name_or_path, *args, **kwargs)

    stock_class.from_pretrained = classmethod(from_pretrained)


def compile_cpp(source: str, flags: Sequence[str]) -> Any:
    """Compile and load a library of `extern "C"` functions by `torch.compile`'s C++ backend, which caches it on disk.

    The flags are appended to those of the backend, and are part of the cache key.
    """
    # Its import warns of a CUDA toolkit without a GPU, which does not matter here.
    chatty = logging.getLogger("torch.utils.cpp_extension")
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        from torch._inductor import config
        from torch._inductor.codecache import CppCodeCache

        # Without this the backend would append its own flags for the widest vectors.
        with config.patch({"cpp.simdlen": 1}):
            return CppCodeCache.load(source, extra_flags=flags)
    finally:
        chatty.setLevel(level)
