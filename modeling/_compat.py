"""Every branch on a library's version, and the few touches of transformers and peft that are not public API.

Supported: torch >= 2.11 and transformers >= 5.17, < 6. The rest of the library is written against what both
ends of that range share.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIN_TRANSFORMERS = (5, 17)
NEXT_TRANSFORMERS_MAJOR = 6


def require_supported_transformers() -> None:
    """Refuse a transformers that llamoe was not written for, before anything of it is used.

    Raises:
        ImportError: the installed transformers is absent, older than 5.17, or 6 and newer.
    """
    wanted = f"transformers>={MIN_TRANSFORMERS[0]}.{MIN_TRANSFORMERS[1]},<{NEXT_TRANSFORMERS_MAJOR}"
    try:
        import transformers

        found = transformers.__version__
    except ImportError:
        found = _metadata_version("transformers")
    release = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not MIN_TRANSFORMERS <= release < (NEXT_TRANSFORMERS_MAJOR,):
        raise ImportError(
            f'llamoe needs {wanted}, but transformers {found} is installed: pip install "{wanted}".'
        )


def _metadata_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(none)"


def grouped_mm_exists(device: "torch.device") -> bool:
    """Whether `torch.nn.functional.grouped_mm` has a kernel for a device: the CPU, and CUDA from Ampere on."""
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type in ("cpu", "meta")


def register_text_model_for_composite(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` give a text-only model for a multimodal config.

    `auto_class.register` insists that the model's own config class is the key, yet `from_pretrained` of the
    auto classes knows the case (it swaps in the text config when the model's config class is
    `config.sub_configs["text_config"]`): transformers maps `llama4` to `Llama4ForCausalLM` in the same way.
    """
    auto_class._model_mapping.register(config_class, model_class)


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once the module is imported, at once if it is already.

    The standard library has no such hook. The finder asks the others for this one module's spec and runs the callback
    behind the module's own code; then it takes itself away. To ask whether the module could be found, as transformers
    does, imports nothing and changes nothing.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return

    class Finder(MetaPathFinder):
        asking_others = False

        def find_spec(self, fullname, path=None, target=None):
            if fullname != name or self.asking_others:
                return None
            self.asking_others = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.asking_others = False
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    if self in sys.meta_path:
                        sys.meta_path.remove(self)
                        callback(module)

                spec.loader.exec_module = exec_module  # of this loader only, which belongs to this one spec
            return spec

    sys.meta_path.insert(0, Finder())


def replace_all_linear(replacement: Callable) -> None:
    """Put `replacement(original, peft_config, model)` in the place of peft's expansion of "all-linear".

    peft asks no model which of its layers that means. The function is imported by name into several of its modules,
    which all share one original.
    """
    tuners_utils = importlib.import_module("peft.tuners.tuners_utils")
    original = tuners_utils._maybe_include_all_linear_layers

    @functools.wraps(original)
    def expand(peft_config, model):
        return replacement(original, peft_config, model)

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("peft.") and (
            vars(module).get("_maybe_include_all_linear_layers") is original
        ):
            vars(module)["_maybe_include_all_linear_layers"] = expand


def watch_adapter_files(watcher: Callable) -> None:
    """Call `watcher(tensors, model_id, **kwargs)` for each adapter file that a `PeftModel` reads.

    Where an adapter of that name exists already, peft reads the file's weights without its config.
    """
    peft_model = importlib.import_module("peft.peft_model")
    original = peft_model.load_peft_weights

    @functools.wraps(original)
    def read(model_id, *args, **kwargs):
        tensors = original(model_id, *args, **kwargs)
        watcher(tensors, model_id, **kwargs)
        return tensors

    vars(peft_model)["load_peft_weights"] = read


def name_causal_models(names: Mapping[str, str]) -> None:
    """Enter class names, by model type, among those that transformers knows for causal language models.

    By these names `Trainer` decides whether label smoothing shifts the labels (it would train to repeat the token
    that was read), and pipelines and the server whether a model generates text. `AutoModelForCausalLM.register` does
    not write there.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(names)
