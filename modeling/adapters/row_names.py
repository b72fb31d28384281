"""Which adapter each row of a batch gets (`adapter_names`), where a layer's first axis is not the batch.

peft hands the names to all adapted layers, one for each entry of their first axis. A tower sees tiles, of which a row
has any number, and `generate` repeats rows for beams. All layers are given one list, whose content follows. It is an
attribute of the model during a pass, as peft's hooks are: compilers read attributes, but no context variables.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def dealing_names(enable_hooks: Callable, tuner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Run a pass inside of peft's hooks, which are removed also if it raises.

    Args:
        enable_hooks: peft's method, whose arguments follow.
        tuner: peft's tuner around a model of ours.
        args: the pass's.
        kwargs: the pass's; `adapter_names`, which is not None, and `num_beams` count.

    Raises:
        ValueError: an adapter changes a parameter in a way that knows one adapter for a batch.
    """
    kwargs["adapter_names"] = names = list(kwargs["adapter_names"])
    _refuse_parameters(tuner.model)
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


def _refuse_parameters(model: nn.Module) -> None:
    from . import expert_lora, router_lora

    for place, module in model.named_modules():
        ours = expert_lora.ParamWrapper, router_lora.ParamWrapper
        if hasattr(module, "parameter_name") and not isinstance(module, ours):
            place = place.replace(".base_layer", "")
            raise ValueError(
                f"adapter_names: an adapter changes the parameter {place}.{module.parameter_name}, and peft has no "
                "batches of several adapters for parameters (llamoe has for stacks of experts and routers). Run the "
                "rows of each adapter by themselves (set_adapter), or name the layer in target_modules."
            )


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
