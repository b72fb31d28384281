"""Plans for several machines: how their accelerators share a model, and the bytes that each holds."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration import LlamoeConfig, LlamoeVisionConfig, cache_bytes
from ..configuration.parallel import check_parallel
from ..configuration.sizes import GB
from ..modeling.registration import empty_model
from .shares import card_bytes, groups_of_fsdp, layers_of_stages, padded_numbers
from .units import Sizes

# Of a parameter in training: its float32 weight and gradient, and two float32 averages of AdamW.
_TRAINED_BYTES = 16
_FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_offload_params": False,
}


@dataclass(frozen=True)
class NodesPlan:
    """How a model is shared by the accelerators of one or more nodes. Sizes are bytes.

    Attributes:
        nodes, gpus: nodes, and accelerators of each.
        is_training: whether it is for training (FSDP2), else for inference.
        sizes: for `DistributedConfig`: tp_size, ep_size and pp_size, or fsdp_size and dp_replicate_size.
        copies: of the model. For inference each generates by itself; in training they are `dp_replicate_size` replicas.
        room: of an accelerator: its memory without headroom.
        weights: on the accelerator that has most; in training with gradients and AdamW's averages.
        cache: of keys and values there; in training, where activations take the headroom, the largest gathered modules.
        notes: what else to know, in sentences.
    """

    nodes: int
    gpus: int
    is_training: bool
    sizes: dict[str, int]
    copies: int
    room: int
    weights: int
    cache: int
    notes: list[str]

    @property
    def remaining(self) -> int:
        """Bytes of an accelerator's room that nothing takes."""
        return self.room - self.weights - self.cache

    def distributed_config(self) -> dict[str, int]:
        """Arguments of transformers' `DistributedConfig`."""
        return {name: size for name, size in self.sizes.items() if size > 1}

    def save_accelerate_config(self, path: str | os.PathLike) -> None:
        """Write a file for `accelerate launch --config_file`: for training, or to start the processes of one copy."""
        import yaml

        content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
        if self.is_training:
            content |= {"distributed_type": "FSDP", "fsdp_config": _FSDP, "mixed_precision": "bf16"}
            if self.sizes["dp_replicate_size"] > 1:
                content["parallelism_config"] = {
                    "parallelism_config_dp_replicate_size": self.sizes["dp_replicate_size"],
                    "parallelism_config_dp_shard_size": self.sizes["fsdp_size"],
                }
            machines, processes = self.nodes, self.nodes * self.gpus
        else:
            content |= {"distributed_type": "MULTI_GPU", "mixed_precision": "no"}
            machines, processes = self.sizes["pp_size"], self.sizes["pp_size"] * self.sizes["tp_size"]
        if processes == 1:
            content["distributed_type"] = "NO"
        content |= {"machine_rank": 0, "num_machines": machines, "num_processes": processes}
        more = " --machine_rank N --main_process_ip IP --main_process_port 29500" if machines > 1 else ""
        lines = [f"# accelerate launch --config_file {Path(path).name}{more} your_script.py"]
        if machines > 1:
            lines.append("# on each node, with its own N from 0, and the address IP of node 0.")
        if config := {} if self.is_training else self.distributed_config():
            arguments = ", ".join(f"{name}={size}" for name, size in config.items())
            lines.append(
                f"# The script loads by from_pretrained(folder, distributed_config=DistributedConfig({arguments}))."
            )
        text = "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines = [
            f"{self.nodes} nodes x {self.gpus} accelerators: {shares}, {self.copies} copies",
            f"an accelerator: {self.weights / GB:.2f} GB of weights and what belongs to them, {self.cache / GB:.2f} GB "
            f"of {'gathered weights' if self.is_training else 'cache'}, {self.remaining / GB:.2f} GB of "
            f"{self.room / GB:.2f} left",
        ]
        return "\n".join([*lines, *self.notes])


def plan_nodes(
    config: Any,
    sizes: Sizes,
    nodes: int,
    gpus: int,
    room: int,
    training: bool,
    cache: tuple[int | None, int, int | None],
) -> NodesPlan:
    """Plan how the equal accelerators of several nodes share a model.

    Args:
        config: of the model.
        sizes: of its parts.
        nodes, gpus: nodes, and accelerators of each.
        room: bytes of each accelerator.
        training: whether it is for training.
        cache: tokens of context, rows, and tokens of the prompt in one pass.

    Raises:
        ValueError: a tower; quantized weights, which no processes share; or too little memory, with the sizes.
    """
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError("A vision tower alone is planned for one machine: leave nodes and training out.")
    if sizes.form not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{sizes.form}: quantized weights cannot be shared by processes: give bits=16, or no nodes."
        )
    if training:
        return _training(config, nodes, gpus, room)
    return _inference(config, sizes, nodes, gpus, room, cache)


def _training(config: Any, nodes: int, gpus: int, room: int) -> NodesPlan:
    model = empty_model(config)
    groups = groups_of_fsdp(model)
    # A module is gathered in 16 bits while the one before it is still there.
    largest = sum(sorted(2 * sum(map(math.prod, shapes)) for shapes in groups)[-2:])
    # Weights are gathered three times as often as gradients cross over; so inside of a node, if they fit there.
    for shards in (gpus, gpus * nodes):
        numbers = sum(padded_numbers(shape, shards) for shapes in groups for shape in shapes)
        weights = numbers // shards * _TRAINED_BYTES
        if weights + largest <= room:
            break
    else:
        raise ValueError(
            f"training takes {weights / GB:.1f} GB of weights, gradients and AdamW's averages on each of "
            f"{nodes * gpus} accelerators, and {largest / GB:.1f} GB of gathered weights, and there are "
            f"{room / GB:.1f}: take more or larger ones"
        )
    replicas = gpus * nodes // shards
    return NodesPlan(
        nodes=nodes,
        gpus=gpus,
        is_training=True,
        sizes={"fsdp_size": shards, "dp_replicate_size": replicas},
        copies=replicas,
        room=room,
        weights=weights,
        cache=largest,
        notes=["Activations beyond the headroom are not in this plan."],
    )


def _inference(
    config: Any,
    sizes: Sizes,
    nodes: int,
    gpus: int,
    room: int,
    cache: tuple[int | None, int, int | None],
) -> NodesPlan:
    context, batch, prefill = cache
    notes: list[str] = []
    least = None
    for stages in (n for n in range(1, nodes + 1) if nodes % n == 0):
        own = config
        if stages > 1 and isinstance(config, LlamoeConfig):
            own = config.text_config
        layers = own.get_text_config().num_hidden_layers
        if stages > layers:
            break
        per_layer = cache_bytes(own, context, batch, sizes.element_size, prefill)
        for tp in (n for n in range(gpus, 0, -1) if gpus % n == 0 and _divides(own, n)):
            has_experts = bool(getattr(own.get_text_config(), "moe_layers", None))
            num_experts = own.get_text_config().num_local_experts if has_experts else 0
            ep = tp if stages == 1 and num_experts and num_experts % tp == 0 else 1
            model: Any = empty_model(own)
            model.keep_uneven_experts(tp)
            each = card_bytes(model, tp, ep, stages, sizes.element_size)
            held = [sum(per_layer[a:b]) // tp for a, b in layers_of_stages(layers, stages)]
            most = max(range(stages), key=lambda stage: each[stage] + held[stage])
            needed = each[most] + held[most]
            least = needed if least is None else min(least, needed)
            if needed > room:
                continue
            if stages > 1:
                notes.append(
                    "Stages are not joined with expert parallelism in transformers: each expert's width is shared."
                    if num_experts
                    else "Stages wait for each other: they are for memory, not for speed."
                )
                if own is not config:
                    notes.append(
                        "Stages are for text: LlamoeForCausalLM loads the text model of this folder."
                    )
            elif num_experts and ep == 1 and tp > 1:
                notes.append(f"{num_experts} experts are not divided by {tp}: each expert's width is shared.")
            return NodesPlan(
                nodes=nodes,
                gpus=gpus,
                is_training=False,
                sizes={"tp_size": tp, "ep_size": ep, "pp_size": stages},
                copies=nodes * gpus // (tp * stages),
                room=room,
                weights=each[most],
                cache=held[most],
                notes=notes,
            )
    raise ValueError(
        f"an accelerator would have at least {(least or 0) / GB:.1f} GB of weights and cache on {nodes} nodes of "
        f"{gpus}, and has room for {room / GB:.1f}: take more or larger ones, or a smaller context"
    )


def _divides(config: Any, tp: int) -> bool:
    try:
        check_parallel(config, tp, 1)
    except ValueError:
        return False
    return True
