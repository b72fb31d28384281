"""A GPU that is not there: whole models run on fake CUDA tensors of a chosen capability, and what they ask is counted.

`pretend` makes shapes, devices and strides real, and nothing else: tensors have no numbers. Integers and flags have,
in the host's memory beside each tensor, as far as they follow from the inputs; so what depends on a mask or on
positions happens as on a card, and each read of a value by the host is counted. Experts are chosen in turn.

What is counted is what eager torch would launch: operators that are not views. torch's own functions that choose by the
device, `scaled_dot_product_attention` and the grouped product, choose by `cards`, since fake tensors have no choice.
"""

import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .cards import Card

_LARGEST_SHADOW = 1 << 22
_ATEN = torch.ops.aten
# They make memory, and write nothing to it.
_NO_LAUNCH = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.lift_fresh.default,
    _ATEN._unsafe_view.default,
    _ATEN._local_scalar_dense.default,
    torch.ops.prim.device.default,
}
# Their results' sizes, or what the host does next, depend on values.
_OF_ROWS = {_ATEN.embedding.default, _ATEN.index_select.default, _ATEN.index.Tensor, _ATEN.gather.default}
_READS = {_ATEN.nonzero.default, _ATEN._local_scalar_dense.default, _ATEN.equal.default}


@dataclass
class Counts:
    """What a pass asked of a card.

    Attributes:
        launches: kernels.
        waits: times that the host waited for a value.
        on_host: results that were computed in the host's memory, but for single numbers.
        kernels: how often each kernel of `scaled_dot_product_attention` was taken.
        operators: launches by operator.
        reasons: where the host waited.
        moved: bytes that operators read and write; of stacks of experts, those of the hit ones.
        peak: most bytes of tensors beside those that were there before.
    """

    launches: int = 0
    waits: int = 0
    on_host: int = 0
    kernels: Counter = field(default_factory=Counter)
    operators: Counter = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    moved: float = 0.0
    peak: int = 0

    def launch(self, name: str, times: int = 1) -> None:
        """Count a kernel."""
        self.launches += times
        self.operators[name] += times

    def wait(self, name: str) -> None:
        """Count a wait, with the line of llamoe or transformers that asked."""
        self.waits += 1
        frame, where = sys._getframe(1), "?"
        while frame is not None:
            path = frame.f_code.co_filename
            if "/modeling/" in path or "/transformers/" in path:
                where = f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"
                break
            frame = frame.f_back
        self.reasons.append(f"{name} at {where}")


class Recorder(TorchDispatchMode):
    """Counts operators, and keeps the values of integers and flags beside fake tensors."""

    def __init__(self, card: Card):
        super().__init__()
        self.card, self.counts, self.live = card, Counts(), 0
        self._experts = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_card = any(each.device.type == "cuda" for each in given)
        if func in _READS:
            return self._read(func, args, on_card)
        if func in (torch.ops.llamoe.grouped_product.default, torch.ops.llamoe.device_product.default):
            return self._inside(func, args)
        if func is _ATEN.index.Tensor and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        ):
            args = (args[0], [self._places(each) for each in args[1]])
        if func is _ATEN._grouped_mm.default:
            # torch knows the shape of results of bfloat16 alone.
            out = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            out = func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self._count(func, args, given, made, on_card)
        self._follow(func, args, kwargs, given, made)
        for each in made:
            self._hold(each)
        return out

    def _count(self, func: Any, args: Any, given: list, made: list, on_card: bool) -> None:
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        )
        to_card = any(each.device.type == "cuda" for each in made)
        name = func._schema.name
        if func is _ATEN._to_copy.default and on_card and not to_card:
            self.counts.wait("copy to the host")
        elif func is _ATEN._to_copy.default and to_card and not on_card:
            # From memory that is not pinned.
            self.counts.wait("copy from the host")
        if is_view or func in _NO_LAUNCH:
            return
        if not (on_card or to_card):
            self.counts.on_host += any(each.ndim for each in made)
            return
        if func is _ATEN._grouped_mm.default:
            x, stack = args[0], args[1]
            self.counts.moved += stack.nbytes * min(1.0, len(x) / len(stack)) + 2 * x.nbytes
            if self.card.grouped_product_waits(x.dtype):
                self.counts.wait("grouped product")
                self.counts.launch(name, len(stack))
            else:
                # The groups' ends become pointers first.
                self.counts.launch(name, 2)
            return
        self.counts.launch(name)
        self.counts.moved += self._bytes(func, args, given, made)

    def _bytes(self, func: Any, args: Any, given: list, made: list) -> float:
        written = sum(each.nbytes for each in made)
        if func in _OF_ROWS:
            # It reads what it writes, and no more of a table.
            return 2.0 * written
        return float(sum(each.nbytes for each in {id(each): each for each in given}.values()) + written)

    # Values of integers and flags.

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor holds, if it is known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        return getattr(tensor, "known_values", None)

    def tell(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Say what a fake tensor holds."""
        tensor.known_values = value  # pyright: ignore[reportAttributeAccessIssue]

    def _follow(self, func: Any, args: Any, kwargs: Any, given: list, made: list) -> None:
        if not made or made[0].numel() > _LARGEST_SHADOW or self.value(made[0]) is not None:
            return
        if func is _ATEN.topk.default or func is _ATEN.argmax.default:
            # The choice of experts, and of tokens: each in its turn.
            chosen, most = made[-1], args[0].shape[-1]
            with on_host():
                turns = torch.arange(chosen.numel()) + next(self._experts)
                self.tell(chosen, (turns % most).view(chosen.shape))
            return
        values = [self.value(each) for each in given]
        if any(each is None for each in values):
            return
        if not given and (made[0].is_floating_point() or func in _NO_LAUNCH):
            return
        by_id = {id(each): value for each, value in zip(given, values, strict=True)}

        def real(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return by_id[id(each)]
            return torch.device("cpu") if isinstance(each, torch.device) else each

        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        with on_host():
            found = tree_leaves(func(*tree_map(real, args), **tree_map(real, kwargs)))
        for each, value in zip(made, found, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(each, FakeTensor):
                self.tell(each, value)

    def _read(self, func: Any, args: Any, on_card: bool) -> Any:
        values = [self.value(each) for each in args if isinstance(each, torch.Tensor)]
        if on_card:
            self.counts.wait(func._schema.name)
        if any(each is None for each in values):
            raise NotImplementedError(f"{func} reads numbers that a fake card has not")
        with on_host():
            found = func(*values)
        return self._on(args[0].device, found) if isinstance(found, torch.Tensor) else found

    def _on(self, device: torch.device, value: torch.Tensor) -> torch.Tensor:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self.tell(fake, value)
        self._hold(fake)
        return fake

    def _places(self, index: torch.Tensor | None) -> torch.Tensor | None:
        """The places that a mask of flags chooses, which the host waits for."""
        if index is None or index.dtype != torch.bool:
            return index
        if index.ndim != 1:
            raise NotImplementedError("a mask of several axes as an index")
        return self._read(_ATEN.nonzero.default, (index,), index.device.type == "cuda").squeeze(1)

    def _inside(self, func: Any, args: Any) -> torch.Tensor:
        """An operator of llamoe's by what it does, loops of the host among it."""
        from llamoe.modeling.moe import grouped_product

        loops = func is torch.ops.llamoe.grouped_product.default
        with self:
            return (grouped_product.product_operator if loops else grouped_product.device_operator)._init_fn(
                *args
            )

    def multiply_packed(
        self,
        x: torch.Tensor,
        matrix: Any,
        groups: Any = None,
        num_experts: int = 1,
        by_id: bool = False,
        transposed: bool = False,
        tile_rows: int | None = None,
        is_summed: bool = True,
    ) -> torch.Tensor:
        """`kernels.packed_product`: each hit expert is read once for each tile of rows; split sums are added after."""
        from llamoe.modeling.kernels import packed_rows

        by, columns = 0 if groups is None else 2 if by_id else 1, matrix.sizes[1 if transposed else 0]
        rows = tile_rows or packed_rows.rows_of_tile(len(x), num_experts, by)
        tile = packed_rows.tile_of(matrix, x.itemsize, transposed, rows)
        row_tiles = (
            len(x) if by == 2 else -(-len(x) // tile.rows) + (min(len(x), num_experts) - 1 if by else 0)
        )
        programs = row_tiles * -(-columns // tile.columns)
        splits = -(-x.shape[1] // packed_rows._split_size(x.shape[1], programs, tile, x.device))
        hit = min(num_experts, len(x)) if by else 1
        reads = max(hit, row_tiles) / num_experts if by == 1 else hit / num_experts * -(-len(x) // tile.rows)
        read = [matrix.codes, matrix.scales, matrix.nested]
        self.counts.moved += reads * sum(each.nbytes for each in read if each is not None) + x.nbytes
        self.counts.launch("llamoe:packed_product", 2 if splits > 1 and is_summed else 1)
        if is_summed or splits == 1:
            y = x.new_empty(len(x), columns)
            return y if is_summed else y[None]
        return x.new_empty(splits, len(x), columns, dtype=torch.float32)

    def launch_of_layer(self, name: str, grid: Any, *arguments: Any, **constants: Any) -> None:
        """`gpu_layer.launch`: of experts' factors, those of the rows' experts are read."""
        self.counts.launch(f"llamoe:{name}")
        given = {id(each): each for each in arguments if isinstance(each, torch.Tensor)}
        for each in given.values():
            is_stack = constants.get("BY_ID") and each.dim() == 3 and len(each) > grid[0]
            self.counts.moved += each.nbytes * (grid[0] / len(each) if is_stack else 1)

    # Memory.

    def _hold(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if getattr(storage, "_is_held", False):
            return
        storage._is_held = True  # pyright: ignore[reportAttributeAccessIssue]
        size = storage.nbytes()
        self.live += size
        self.counts.peak = max(self.counts.peak, self.live)
        weakref.finalize(storage, self._let_go, size)

    def _let_go(self, size: int) -> None:
        self.live -= size

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts of what happens inside, the peak beside what was held before."""
        counts, before = Counts(peak=self.live), self.live
        self.counts = counts
        try:
            yield counts
        finally:
            counts.peak -= before
            # What follows belongs to nobody.
            self.counts = Counts()

    # torch's attention.

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` by the kernel that the card's torch would take."""
        shares_keys, (*_, heads, length, head_dim) = query.shape[1] != key.shape[1], query.shape
        assert enable_gqa or not shares_keys, "torch refuses fewer key heads without enable_gqa"
        is_below = isinstance(attn_mask, CausalBias)
        is_square = is_below or not is_causal or length == key.shape[2]
        has_mask = attn_mask is not None and not is_below
        kernel = self.card.sdpa_kernel(query.dtype, head_dim, shares_keys, is_square, has_mask)
        self.counts.kernels[kernel] += 1
        if kernel != "math":
            self.counts.launch(f"attention:{kernel}")
            self.counts.moved += 2 * query.nbytes + key.nbytes + value.nbytes
            return torch.empty_like(query)
        if shares_keys:
            key, value = (each.repeat_interleave(heads // key.shape[1], 1) for each in (key, value))
        scores = query @ key.transpose(2, 3)
        if attn_mask is not None or is_causal:
            shape = scores.shape[-2:]
            mask = (
                torch.ones(shape, dtype=torch.bool, device=query.device).tril() if not has_mask else attn_mask
            )
            scores = scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ value


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """No pretence inside: ordinary tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def _everywhere(stack: contextlib.ExitStack, name: str, module: str, replacement: Callable) -> None:
    """Replace a function in each module of llamoe and transformers that has it."""
    original = getattr(sys.modules[module], name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(("llamoe", "transformers")) and (
            vars(other).get(name) is original
        ):
            stack.enter_context(mock.patch.object(other, name, replacement))


@contextlib.contextmanager
def pretend(card: Card) -> Iterator[Recorder]:
    """A card for everything inside: tensors on "cuda" are fake, and count as those of a running model."""
    recorder = Recorder(card)
    tracing = "llamoe.modeling.kernels.tracing"
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context

        def is_recorded(x: torch.Tensor) -> bool:
            return torch.compiler.is_compiling() or torch.jit.is_tracing()

        _everywhere(stack, "is_recorded", tracing, is_recorded)
        _everywhere(stack, "is_tracing", tracing, is_recorded)
        _everywhere(stack, "is_readable", tracing, lambda x: not is_recorded(x) and x.is_cpu)
        _everywhere(stack, "is_fake_tensor", "transformers.utils.import_utils", lambda x: False)
        _everywhere(stack, "kernels_are_right", "llamoe.modeling.formats.gpu_kernels", lambda *_, **__: True)
        _everywhere(stack, "packed_product", "llamoe.modeling.kernels.packed_rows", recorder.multiply_packed)
        _everywhere(
            stack, "_multiprocessors", "llamoe.modeling.kernels.packed_rows", lambda _: card.processors
        )
        gpu_layer = "llamoe.modeling.kernels.gpu_layer"
        _everywhere(stack, "launch", gpu_layer, recorder.launch_of_layer)
        _everywhere(stack, "_serves", gpu_layer, lambda _: card.capability >= (8, 0))
        _everywhere(stack, "is_right", gpu_layer, lambda *_: True)
        _everywhere(stack, "is_ordinary", gpu_layer, lambda _: True)
        _everywhere(stack, "torch_modes_active", gpu_layer, lambda **_: False)
        _everywhere(stack, "has_gpu", "llamoe.modeling.kernels.packed_rows", lambda: True)
        for name, answer in {
            "get_device_capability": card.capability,
            "is_current_stream_capturing": False,
            "is_bf16_supported": True,
        }.items():
            enter(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        enter(mock.patch.object(nn.functional, "scaled_dot_product_attention", recorder.attend))
        enter(mock.patch.object(FakeTensor, "tolist", lambda x: _listed(recorder, x)))
        enter(FakeTensorMode())
        enter(recorder)
        yield recorder


def _listed(recorder: Recorder, tensor: torch.Tensor) -> Any:
    value = recorder.value(tensor)
    if tensor.device.type == "cuda":
        recorder.counts.wait("tolist")
    if value is None:
        raise NotImplementedError("a list of numbers that a fake card has not")
    with on_host():
        return value.tolist()
