"""Which adapter each row of a batch gets (`adapter_names`), where a layer's first axis is not the batch.

peft hands the names to all adapted layers, one for each entry of their first axis. A tower sees tiles, of which a row
has any number, and `generate` repeats rows for beams. All layers are given one list, whose content follows. It is an
attribute of the model during a pass, as peft's hooks are: compilers read attributes, but no context variables.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def dealing_names(enable_hooks: Callable, tuner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Run a pass with `adapter_names` inside of peft's hooks, which are removed also if it raises."""
    kwargs["adapter_names"] = names = list(kwargs["adapter_names"])
    if kwargs.get("alora_offsets") is None:
        # Rows are repeated when they are, for any reason.
        kwargs.pop("num_beams", None)
    hooks = enable_hooks(tuner, *args, **kwargs)
    hooks.__enter__()
    outer, tuner.model.row_names = tuner.model.row_names, names
    try:
        yield
    finally:
        tuner.model.row_names = outer
        # Without the error, at which peft would leave its hooks behind.
        hooks.__exit__(None, None, None)


@contextmanager
def names_of_tiles(model: Any, tiles_of_rows: Callable[[], Sequence[Sequence[int]]]) -> Iterator[None]:
    """Let layers see tiles, each by the name of its row.

    Args:
        model: the model of the pass, whose `row_names` are followed.
        tiles_of_rows: gives the indices of the tiles of each row; called where rows have names.

    Raises:
        ValueError: more or fewer names than rows.
    """
    names = model.row_names
    if names is None:
        yield
        return
    of_rows, tiles = names[:], tiles_of_rows()
    if len(of_rows) != len(tiles):
        raise ValueError(f"adapter_names has {len(of_rows)} names for {len(tiles)} rows.")
    names[:] = [name for name, mine in zip(of_rows, tiles, strict=True) for _ in mine]
    try:
        yield
    finally:
        names[:] = of_rows


def repeat_names(model: Any, times: int) -> None:
    """Follow a model's rows that are repeated, each `times` times in succession."""
    if times > 1 and (names := model.row_names) is not None:
        names[:] = [name for name in names for _ in range(times)]


def scales_of_rows(wrapper: Any, adapter_names: Sequence[str], num_rows: int) -> dict[str, torch.Tensor]:
    """The adapters of a batch that a layer of peft has, each with its scaling for its rows and 0 for others, `[N, 1]`.

    Each row of the batch has an equal part of the layer's N rows.
    """
    if wrapper.merged:
        raise ValueError(
            "adapter_names while adapters are merged into the weights: call unmerge_adapter() first."
        )
    if num_rows % len(adapter_names):
        raise ValueError(f"adapter_names has {len(adapter_names)} names for {num_rows} rows of tokens.")
    scales = {}
    for name in dict.fromkeys(adapter_names):
        if name in wrapper.lora_A:
            device = wrapper.lora_A[name].weight.device
            chosen = torch.tensor([other == name for other in adapter_names], device=device)
            repeated = chosen.repeat_interleave(num_rows // len(adapter_names))
            scales[name] = repeated[:, None] * wrapper.scaling[name]
    return scales
