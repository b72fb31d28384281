"""Every branch on a library's version, and the few touches of transformers and peft that are not public API.

Supported: torch >= 2.11 and transformers >= 5.17, < 6. The rest of the library is written against what both
ends of that range share.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


def grouped_mm_waits(device: "torch.device") -> bool:
    """Whether `grouped_mm` copies the groups' ends to the host, which no CUDA graph can hold, in bfloat16 too.

    `_grouped_mm_cuda` (ATen/native/cuda/GroupedBlas.cpp, torch 2.11 to 2.15) has a kernel of its own for bfloat16 on
    devices of capability 9 and 10. For everything else it loops over the groups on the host.
    """
    import torch

    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] not in (9, 10)


def grouped_mm_takes(weight: "torch.Tensor", device: "torch.device") -> bool:
    """Whether `grouped_mm` takes a stack of matrices as it lies, on a device: by strides and address alone.

    From ATen/native/GroupedMMUtils.h: numbers of a row, or of a column, are neighbours, and the next one begins a
    multiple of 16 bytes later. On a GPU so does the next matrix (torch 2.15 says so, earlier releases fail), and the
    first one begins at such an address. Its kernel for bfloat16 (GroupMM.cu) takes fewer than 1024 matrices.
    """
    import torch

    apart, rows, columns = weight.stride()
    if 1 not in (rows, columns) or max(rows, columns) * weight.itemsize % 16:
        return False
    if device.type != "cuda":
        return True
    # torch's memory on a GPU begins at multiples of 512 bytes. torch 2.11's compiler cannot read the offset.
    offset = 0 if torch.compiler.is_compiling() else weight.storage_offset()
    return len(weight) < 1024 and all(start * weight.itemsize % 16 == 0 for start in (offset, apart))


def open_archive(path: str | os.PathLike) -> None:
    """Have torch read the directory of one of its archives, as `torch.load` does before it reads a tensor.

    Raises:
        RuntimeError: torch will not read this file.
        UnicodeDecodeError: what should be a text is none.
    """
    import torch

    reader = torch._C.PyTorchFileReader(os.fspath(path))
    reader.serialization_id()
    reader.get_all_records()


def is_under_functorch() -> bool:
    """Whether a transform of `torch.func` is at work (grad, vmap, jvp): it sees through torch's own operators only."""
    import torch

    return torch._C._are_functorch_transforms_active()


def is_exporting() -> bool:
    """Whether `torch.export` reads along.

    `torch.compiler.is_exporting` says so in every compilation of torch 2.11; the flag behind it is right everywhere.
    """
    import torch

    return torch.compiler._is_exporting_flag


def register_model(auto_class: type, config_class: type, model_class: type) -> None:
    """Make `auto_class` give `model_class` for a config of ours.

    Past `auto_class.register`, for two reasons. It insists that the model's own config class is the key, yet the auto
    classes know text models of multimodal configs (transformers maps `llama4` to `Llama4ForCausalLM`). And it leaves
    out the table of names by model type, in which `transformers serve`, Trainer's label smoothing and lm-eval look up
    what a language model is.
    """
    mapping = auto_class._model_mapping
    mapping.register(config_class, model_class)
    mapping._model_mapping[config_class.model_type] = model_class.__name__


def publish(model_classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`.

    `transformers serve` and vLLM look there, and nowhere else, for what config.json calls the architecture. The module
    is two: transformers puts a second one into `sys.modules` while it is being imported, and who came earlier keeps
    the first.
    """
    bound = [getattr(module, "__dict__", {}).get("transformers") for module in list(sys.modules.values())]
    for module in [sys.modules["transformers"], *bound]:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            for model_class in model_classes:
                setattr(module, model_class.__name__, model_class)


_ABSENT = object()


def point_at(auto_class: type, config_class: type, model_class: type) -> Callable[[], None]:
    """Make `auto_class` give `model_class` for a stock config; transformers offers no public way.

    Returns:
        what undoes it. It leaves an entry alone that somebody else has made since.
    """
    entries = auto_class._model_mapping._extra_content
    before = entries.get(config_class, _ABSENT)
    entries[config_class] = model_class

    def undo() -> None:
        if entries.get(config_class) is not model_class:
            return
        if before is _ABSENT:
            del entries[config_class]
        else:
            entries[config_class] = before

    return undo


def choose_processor(stock_class: type, choose: Callable[..., type | None]) -> None:
    """Have `AutoProcessor` ask `choose(name_or_path, **kwargs)` where a folder's files name `stock_class`.

    It goes by that name alone and looks into its registry only where no file names a class, so that there is no
    public way. The class's own `from_pretrained` is wrapped; a call from `AutoProcessor` is known by `_from_auto`.

    Args:
        stock_class: a processor class of transformers.
        choose: gives the class that shall load the folder, or None for `stock_class`.
    """
    original = stock_class.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        if cls is stock_class and kwargs.get("_from_auto"):
            cls = choose(pretrained_model_name_or_path, **kwargs) or cls
        return original(cls, pretrained_model_name_or_path, *args, **kwargs)

    stock_class.from_pretrained = classmethod(from_pretrained)


def shifts_assistant_masks() -> bool:
    """Whether a processor's `apply_chat_template` knows that pictures lengthen the text behind them.

    Early releases look for what the assistant wrote at its place in the short text, and find other tokens or none. The
    releases that shift it are known by the method that does.
    """
    from transformers import ProcessorMixin

    return hasattr(ProcessorMixin, "_adjust_assistant_masks_indices")


def register_parallel_style(name: str, style: object) -> None:
    """Add a parallel style to transformers' registry where the release has none of that name.

    `ep_dispatch_experts` came with 5.19. The registry stayed importable from here when it moved to another file.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if name not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(name, style)


def parallel_sizes(distributed_config: Any) -> tuple[int, int]:
    """Give the devices that share attention heads, and those that share experts; 1 where they are not shared.

    Releases before `ep_size` have a flag instead; with it the tensor-parallel devices share the experts only. Later
    ones set that flag, too, but share what both plans name, unless the tensor-parallel plan is given as empty.
    """
    tp_size = distributed_config.tp_size or 1
    if hasattr(distributed_config, "ep_size"):
        return 1 if distributed_config.tp_plan == {} else tp_size, distributed_config.ep_size or 1
    return (1, tp_size) if distributed_config.enable_expert_parallel else (tp_size, 1)


def is_tensor_parallel_only(distributed_config: Any) -> bool:
    """Whether a model is sharded by tensor or expert parallelism and not by FSDP2 besides.

    A model that was not loaded into shards has no such configuration; sizes that are not asked for are None or 1.
    """
    tp_size, *others = (
        getattr(distributed_config, name, None) or 1 for name in ("tp_size", "fsdp_size", "dp_replicate_size")
    )
    return tp_size > 1 and others == [1, 1]


def shards_unevenly() -> bool:
    """Whether a layer may be split into parts that differ in size.

    Not so in 5.17, which takes every device's part to be as large as its own. The releases that can are known by a
    class that came with it.
    """
    from transformers.distributed import tensor_parallel

    return hasattr(tensor_parallel, "EmbeddingParallel")


def gather(tensor: "torch.Tensor") -> "torch.Tensor":
    """Join a tensor that is sharded over one line of devices; others are given back as they are.

    torch 2.11's `full_tensor` refuses packed columns (gate and up, each split by itself), whatever made them.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError:
        placement: Any = tensor.placements[0]
        mesh = tensor.device_mesh
        if tensor.shape[placement.dim] % (mesh.size() * placement.split_factor):
            raise
        local = tensor.to_local().contiguous()
        shards = [local.new_empty(local.shape) for _ in range(mesh.size())]
        dist.all_gather(shards, local, group=mesh.get_group())
        pieces = [shard.chunk(placement.split_factor, placement.dim) for shard in shards]
        return torch.cat([shard[i] for i in range(placement.split_factor) for shard in pieces], placement.dim)


def adapts_shards() -> bool:
    """Whether peft makes an adapter of a sharded weight in the size of the weight.

    Before 0.21.1 it takes the size of this process's part, in each process for itself. The releases that do not are
    known by a function that came with it.
    """
    return hasattr(importlib.import_module("peft.tuners.lora.model"), "get_tp_plan_and_mesh")


def default_store() -> "torch.distributed.Store":
    """Give the store through which the processes of a job have found each other.

    torch keeps it for itself; another one would need an address of its own. Unlike a barrier it works on every
    backend, and can be asked who is missing.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def has_part(module: "torch.nn.Module", rule: str) -> bool:
    """Tell whether a rule of a plan names a module or parameter inside of `module`; `*` stands for a layer's number.

    torch's dicts of a module are asked, for there is no public way to ask for one child: `getattr` finds properties
    as well.
    """
    if not rule:
        return True
    name, _, rest = rule.partition(".")
    if not rest and module._parameters.get(name) is not None:
        return True
    if name == "*":
        children = [child for number, child in module._modules.items() if number.isdecimal()]
    else:  # a number never stands as such in a plan
        children = [] if name.isdecimal() else [module._modules.get(name)]
    return any(child is not None and has_part(child, rest) for child in children)


def parameter_shapes(module: "torch.nn.Module") -> dict[str, "torch.Size"]:
    """Give the shape of each parameter by its full name, also by each of several names.

    It is `named_parameters(remove_duplicate=False)` in half of the time, whose generators hand each name on
    through every module that it lies in.
    """
    found: dict[str, torch.Size] = {}

    def collect(part: "torch.nn.Module", prefix: str) -> None:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                found[prefix + name] = parameter.shape
        for name, child in part._modules.items():
            if child is not None:
                collect(child, f"{prefix}{name}.")

    collect(module, "")
    return found


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


def watch_adapter_files(before: Callable, after: Callable) -> None:
    """Call `before(model, model_id, **kwargs)` and `after(tensors, model_id, **kwargs)` where peft reads an adapter.

    `before` comes before layers are made for the adapter, with what they are made in: a `PeftModel` or its base. Where
    an adapter of that name exists already, peft reads the file's weights without its config.
    """
    peft_model = importlib.import_module("peft.peft_model")
    hotswap = importlib.import_module("peft.utils.hotswap")
    load_weights = peft_model.load_peft_weights
    from_pretrained = peft_model.PeftModel.from_pretrained.__func__
    load_adapter = peft_model.PeftModel.load_adapter
    hotswap_adapter = hotswap.hotswap_adapter

    @functools.wraps(load_weights)
    def read(model_id, *args, **kwargs):
        tensors = load_weights(model_id, *args, **kwargs)
        after(tensors, model_id, **kwargs)
        return tensors

    @functools.wraps(from_pretrained)
    def make(cls, model, model_id, *args, **kwargs):
        before(model, model_id, **kwargs)
        return from_pretrained(cls, model, model_id, *args, **kwargs)

    @functools.wraps(load_adapter)
    def add(self, model_id, *args, **kwargs):
        before(self, model_id, **kwargs)
        return load_adapter(self, model_id, *args, **kwargs)

    @functools.wraps(hotswap_adapter)
    def swap(model, model_name_or_path, *args, **kwargs):
        before(model, model_name_or_path, **kwargs)
        return hotswap_adapter(model, model_name_or_path, *args, **kwargs)

    vars(peft_model)["load_peft_weights"] = read
    peft_model.PeftModel.from_pretrained = classmethod(make)
    peft_model.PeftModel.load_adapter = add
    vars(hotswap)["hotswap_adapter"] = swap


def before_hotswap(prepare: Callable) -> None:
    """Have `prepare(model, tensors, adapter_name, config)` give the tensors that peft swaps into a `PeftModel`."""
    hotswap = importlib.import_module("peft.utils.hotswap")
    original = hotswap.hotswap_adapter_from_state_dict

    @functools.wraps(original)
    def swap(model, state_dict, adapter_name, config, *args, **kwargs):
        return original(
            model, prepare(model, state_dict, adapter_name, config), adapter_name, config, *args, **kwargs
        )

    vars(hotswap)["hotswap_adapter_from_state_dict"] = swap


def turn_update_of_one_expert(is_input_first: Callable[["torch.nn.Module"], bool]) -> None:
    """Have peft add LoRA's update to a stack of one expert the right way round.

    peft takes a parameter `[1, in, out]` for a linear layer's weight and makes an update `[out, in]`: an error in the
    first forward pass, or, where both sizes are the same, another function without a word. With more experts it
    heeds `is_transposed`, and its update has three axes.

    Args:
        is_input_first: whether a module's stacks are `[E, in, out]`.
    """
    wrapper = importlib.import_module("peft.tuners.lora.layer").ParamWrapper
    original = wrapper.get_delta_weight

    @functools.wraps(original)
    def get_delta_weight(self, *args, **kwargs):
        update = original(self, *args, **kwargs)
        return update.T[None] if update.ndim == 2 and is_input_first(self.get_base_layer()) else update

    wrapper.get_delta_weight = get_delta_weight


def name_causal_model(model_type: str, class_name: str) -> None:
    """Enter a class among those that transformers knows for causal language models by their names.

    By these names `Trainer` decides whether label smoothing shifts the labels; else it would train to repeat the
    token that was read. A multimodal model is a language model in this, although its Auto class is another.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = class_name


def dispatches_whole_models_to_disk() -> bool:
    """Whether accelerate takes a device map in which everything is on disk; up to 1.12 it pointed to `disk_offload`.

    That function cannot be used in its place: it writes the weights to disk once more.
    """
    from accelerate import dispatch_model

    return "trying to offload the whole model" not in inspect.getsource(dispatch_model)


def reads_tied_weights_from_disk() -> bool:
    """Whether accelerate reads tied weights that are on disk.

    Up to 1.12 it knew a tied tensor by the address of its data, which for everything that is on disk is zero, and
    so gave one weight for another.
    """
    from accelerate import dispatch_model

    return 'device.type != "meta"' in inspect.getsource(dispatch_model)


@contextmanager
def reading_when_needed() -> Iterator[None]:
    """Inside, have transformers read and cast a tensor when its turn comes, and no thread do so long before.

    Threads are faster where a tensor is used as it is. Where many are fused into one, they hold the checkpoint in
    memory a second time: all layers are read while the first is being fused.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def load_without_storage(path: Any) -> Any:
    """Unpickle a torch file with `weights_only=True`, with tensors whose numbers stay in the file.

    They are on the meta device, and torch notes where in the file their storages begin. `FakeTensorMode`, with which
    torch's documentation of serialization does this, gives the same in ten times the time.
    """
    import torch

    return torch.load(path, map_location="meta", weights_only=True)


def save_without_storage(content: dict[str, "torch.Tensor"], path: Any) -> None:
    """Write a torch file with room for the numbers of tensors that have none.

    The entries are tensors of `meta`; the room is filled afterwards, at what `storage_offset` says of the file's
    tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in content.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, path)


def storage_offset(tensor: "torch.Tensor") -> int:
    """Where the storage of a tensor of `load_without_storage` begins in its file, in bytes."""
    offset = tensor.untyped_storage()._checkpoint_offset  # pyright: ignore[reportAttributeAccessIssue]
    assert offset is not None
    return offset
