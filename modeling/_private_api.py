"""Every use of private functions of torch and transformers, with its reason; those of peft are in `adapters`.

Private methods of transformers' classes that llamoe overrides are in the derived classes. All were checked with torch
2.13 and 2.15 and transformers 5.24.
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

# Called at every product of matrices, so often that torch's public functions, written in Python, are too slow.
is_traced_by_jit: Callable[[], bool] = torch._C._is_tracing
is_any_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Whether a transform of `torch.func` (grad, vmap, jvp) is active, under which only torch's own operators work.
is_under_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def has_modes() -> bool:
    """Return True if a torch function mode or dispatch mode is active; tracers of torch.fx use them."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


def is_under_vmap() -> bool:
    """Return True under `torch.func.vmap`, where values cannot be read."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    stack = functorch.get_interpreter_stack() or ()
    return any(level.key() == functorch.TransformType.Vmap for level in stack)


def torch_modes_active() -> bool:
    """Return True if a transform of `torch.func`, forward-mode differentiation, a mode or a global hook is active.

    Each of these works only on torch's own operators, in place of which our compiled kernels would run.
    """
    is_forward_ad = forward_ad._current_level >= 0
    return is_under_functorch() or is_forward_ad or has_modes() or bool(_has_any_global_hook())


def has_mkldnn_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies matrices of this dtype, float16 or bfloat16, on this CPU."""
    mkldnn = torch.ops.mkldnn
    return (
        mkldnn._is_mkldnn_fp16_supported if dtype == torch.float16 else mkldnn._is_mkldnn_bf16_supported
    )()


def load_without_storage(path: str | os.PathLike) -> Any:
    """Load a file of `torch.save` without its tensors' data.

    The attribute `_checkpoint_offset` of each tensor's storage is the offset of its data in the file, in bytes.
    """
    with FakeTensorMode():
        return torch.load(path, weights_only=True)


def save_without_storage(content: dict[str, torch.Tensor], path: Any) -> None:
    """Write a file of `torch.save` for meta tensors, with room for their data, which the caller writes afterwards."""
    with FakeTensorMode():
        fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in content.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, path)


def mask_implementations() -> Mapping[str, Callable]:
    """Return transformers' functions that make masks, by attention implementation.

    dynamo can trace `in` on this dict, but not on the registry around it.
    """
    return ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


@contextmanager
def registered_conversions(model: Any) -> Iterator[None]:
    """Enter a context in which saving reverses the conversion rules that are registered for the model type.

    By default transformers reverses the rules by which the model was loaded.
    """
    used = getattr(model, "_weight_conversions", None)
    model._weight_conversions = None
    try:
        yield
    finally:
        model._weight_conversions = used


def replace_quantizer(name: str, quantizer_class: type) -> None:
    """Replace transformers' quantizer of the quantization method `name`.

    transformers' `register_quantizer` refuses a method that has a quantizer already.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    AUTO_QUANTIZER_MAPPING[name] = quantizer_class


def register_model(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` return `model_class` for a config of ours.

    `auto_class.register` has two faults. It refuses config classes other than the model's own, but a text model is
    registered for multimodal configs, too. And it leaves out the table of class names by model type, in which
    `transformers serve`, Trainer's label smoothing and lm-eval look for language models.
    """
    mapping = auto_class._model_mapping
    mapping.register(config_class, model_class)
    mapping._model_mapping[config_class.model_type] = model_class.__name__


def name_causal_model(model_type: str, class_name: str) -> None:
    """Add a class to transformers' table of causal language models by model type.

    By this table `Trainer` decides whether label smoothing shifts the labels; unshifted, a model learns to repeat the
    input token. Our multimodal model needs the shift, too, although it is of another Auto class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = class_name


def publish(model_classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`.

    `transformers serve` and vLLM look only there for the architecture that config.json names. There are two modules of
    this name: while transformers is imported, it replaces the first in `sys.modules`, which earlier importers keep.
    """
    imported = [getattr(module, "__dict__", {}).get("transformers") for module in list(sys.modules.values())]
    for module in [sys.modules["transformers"], *imported]:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for model_class in model_classes:
                setattr(module, model_class.__name__, model_class)


def point_at(auto_class: type, config_class: type, model_class: type) -> Callable[[], None]:
    """Make `auto_class` return `model_class` for a stock config, which `auto_class.register` refuses.

    Returns:
        a function that restores the entry, unless another library has replaced it since.
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
    """Let `choose` decide which class `AutoProcessor` returns for folders whose files name `stock_class`.

    `AutoProcessor` takes the named class, and asks its registry only if no file names one. So `from_pretrained` of the
    named class is wrapped here; `AutoProcessor` calls it with the argument `_from_auto`.

    Args:
        stock_class: a processor class of transformers.
        choose: gets `from_pretrained`'s arguments, and returns the class that loads the folder; None: `stock_class`.
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

    The flags follow those of the backend, and are part of the cache's key.
    """
    # The import warns of a CUDA toolkit without a GPU, which does not matter here.
    extension = logging.getLogger("torch.utils.cpp_extension")
    level = extension.level
    extension.setLevel(logging.ERROR)
    try:
        from torch._inductor import config
        from torch._inductor.codecache import CppCodeCache

        # Otherwise the backend adds flags for the widest vectors of the processor.
        with config.patch({"cpp.simdlen": 1}):
            return CppCodeCache.load(source, extra_flags=flags)
    finally:
        extension.setLevel(level)
