"""Upcycling: make a mixture of experts that computes the same as a dense LLaMA: `llamoe upcycle`.

The method is that of Komatsuzaki et al. 2022, arXiv:2212.05055. Llama 4's mixture maps a token x to

    y(x) = shared(x) + sum of e_i(s_i x) over the chosen experts i,    s_i = sigmoid(w_i . x).

The shared expert gets the dense feed-forward f. Routed experts get the gate and up projections of f, and a down
projection of zero. So e_i is 0, and y = f for any router, number of chosen experts, jitter, dropout or capacity. Copies
of f as routed experts, as in the paper, would not compute the same, since SwiGLU is not homogeneous: f(s x) is no
multiple of f(x).

In training, the down projections learn first. Their gradient h(s x)^T dL/dy, with h the inner state of an expert, is
not zero, and differs between experts, which get different tokens. Gates, up projections and routers get gradients
through the down projections, so from the second step on.

Feed-forwards are equal bit by bit. Llama 4 rotates neighbouring channels and Hugging Face's LLaMA rotates channels half
a head apart, so rows of q and k are permuted within their heads. Their products are then summed in another order, so
logits differ by rounding (about 1e-6 in float32).

In Mixtral's mixture, scores multiply the experts' outputs, and the scores of the chosen experts sum to 1:

    y(x) = sum of p_i e_i(x) over the chosen experts i,    p = softmax of the logits / its sum over the chosen.

Every e_i is f, as in the paper, so y = f for any router, up to rounding. Rows of q and k, and windows, are unchanged.
While the experts are equal, the router's gradient is zero. Experts get gradients of different tokens, so they differ,
and routers learn, from the second step on.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig
from ..configuration.mixture import MixtureConfig
from ..configuration.parameter_count import count_parameters
from ..configuration.sizes import count_of
from .checkpoint import Checkpoint, Report
from .hf import save_hf
from .io import Computed, LazyTensor, Progress, WriteOptions, join, permute_pairs, stack
from .open import family_of, open_source

# Number of random elements that are drawn at once.
_PIECE = 1 << 20
_PARTS = ("gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def upcycle(
    source: str | Path,
    target: str | Path,
    *,
    experts: int,
    family: str | None = None,
    interleave: int = 1,
    top_k: int | None = None,
    seed: int = 0,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Make a mixture of experts from a dense LLaMA.

    The result computes the same as the source, whatever its routers choose; the module's docstring shows why.
    Tokenizer, chat template and generation configuration are copied.

    Args:
        source: a dense LLaMA of any format that `open_checkpoint` reads.
        target: the folder to write.
        experts: number of routed experts in each mixture layer, at least 1.
        family: "llama4" adds routed experts to a shared expert with the dense weights; "mixtral" makes experts that are
            copies of the dense feed-forward, and keeps a sliding window. None is mixtral for a source with a window,
            else llama4.
        interleave: distance between mixture layers, counted as in Llama 4: 1 makes all layers mixtures, 2 makes layers
            1, 3, 5 and so on mixtures. Mixtral needs 1.
        top_k: number of experts to which a token is sent, from 1 to `experts`; None is 1 for llama4, 2 for mixtral.
        seed: random seed of routers, at least 0. Each tensor depends on the seed and its own name alone.
        layout, dtype, shard_size, resume, dry_run, progress: as in `WriteOptions`.

    Returns:
        a report, whose notes name the new weights.

    Raises:
        ValueError: the source is no dense LLaMA, or options do not fit it or each other.
        CheckpointError: a missing or damaged file (also a ValueError).
    """
    options = WriteOptions(layout, dtype, shard_size, resume, dry_run, progress)
    count_of("experts", experts)
    count_of("interleave", interleave)
    count_of("top_k", 1 if top_k is None else top_k)
    count_of("seed", seed, 0)
    if family not in (None, "llama4", "mixtral"):
        raise ValueError(f"upcycle: family = {family!r}: valid are 'llama4' and 'mixtral', or none.")
    dense = open_source(source, target, resume)
    if not isinstance(dense.config, LlamoeDenseConfig):
        raise ValueError(
            f"upcycle: {source} is no dense LLaMA but {family_of(dense.config)}; give a llama, mistral or llamoe_dense."
        )
    has_window = "sliding_attention" in dense.config.attention_types()
    family = family or ("mixtral" if has_window else "llama4")
    if has_window and family == "llama4":
        raise ValueError(
            f"upcycle: {source} has sliding_window = {dense.config.sliding_window}, and layers of Llama 4's family "
            "have no window; choose the family mixtral."
        )
    top_k = top_k or (1 if family == "llama4" else 2)
    layers = dense.config.num_hidden_layers
    if interleave > layers:
        raise ValueError(f"upcycle: interleave = {interleave}, but {source} has {layers} layers.")
    mixture = Mixture(experts, interleave, top_k, seed)
    result = (as_text_model if family == "llama4" else as_mixtral)(dense, mixture)
    before, after = count_parameters(dense.config), count_parameters(result.config)
    identity = {"upcycle": {"family": family, **asdict(mixture)}}
    report = save_hf(result, target, options, identity=identity)
    std, routers = dense.config.initializer_range, len(result.config.moe_layers)
    copies = "copies of the dense feed-forward" if family == "mixtral" else "zero by their down_proj"
    report.notes += [
        f"{experts} experts, {top_k} a token, in {routers} of {layers} layers: {before.total:,} parameters became "
        f"{after.total:,}, {after.active:,} active",
        f"{routers} routers are fresh: normal, deviation {std:g}, seed {seed}",
        f"the experts are {copies}: the function is the source's until they are trained",
    ]
    if family == "mixtral" and top_k == 1:
        report.notes.append(
            "one expert a token: its score is always 1, so that routers learn only from the balancing loss"
        )
    return report


@dataclass(frozen=True)
class Mixture:
    """The mixture layers of an upcycled model; see `upcycle` for the fields."""

    experts: int
    interleave: int
    top_k: int
    seed: int

    def tensors(
        self, name: str, dense: Mapping[str, LazyTensor], config: MixtureConfig
    ) -> dict[str, LazyTensor]:
        """Make router and experts of a mixture layer. Shapes: E experts, H hidden size, I inner size of an expert.

        Args:
            name: the layer's feed-forward, such as "model.layers.3.feed_forward".
            dense: the dense feed-forward's gate_proj and up_proj, `[I, H]`, and down_proj, `[H, I]`.
            config: configuration of the mixture; if it has a shared expert, routed experts compute zero.

        Returns:
            key to tensor: the router `[E, H]`, and the experts' stacks `[E, H, 2 I]` and `[E, I, H]`, with the last two
            axes swapped in Mixtral's family.
        """
        gate, up, down = (dense[part] for part in _PARTS)
        if config.use_shared_expert:
            down = zeros(down.shape, down.dtype, f"{name}.experts.down_proj (zero)")
        if config.experts_are_output_first:
            gate_up = join([gate, up], 0)
        else:
            gate_up, down = join([gate.transpose(), up.transpose()], 1), down.transpose()
        router = f"{name}.{config.router_name}.weight"
        shape = (self.experts, config.hidden_size)
        return {
            f"{name}.experts.gate_up_proj": stack([gate_up] * self.experts),
            f"{name}.experts.down_proj": stack([down] * self.experts),
            router: fresh(shape, gate.dtype, config.initializer_range, self.seed, router),
        }


def as_text_model(dense: Checkpoint, mixture: Mixture | None = None) -> Checkpoint:
    """Make a decoder of Llama 4's family that computes the same as a dense LLaMA, with mixture layers if given.

    All its layers have rotary positions, full attention, and queries that are neither normed nor scaled.
    """
    kept = _fields_of(dense, LlamoeTextConfig)
    kept.update(
        architectures=["LlamoeForCausalLM"],
        rope_interleave=True,
        intermediate_size_mlp=dense.config.intermediate_size,
        moe_layers=[],
        no_rope_layers=[1] * dense.config.num_hidden_layers,
        no_rope_layer_interval=None,
        attention_chunk_size=None,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        # Without effect if there are no mixture layers.
        num_local_experts=1,
        num_experts_per_tok=1,
    )
    if mixture is not None:
        kept.update(
            moe_layers=None,
            interleave_moe_layer_step=mixture.interleave,
            num_local_experts=mixture.experts,
            num_experts_per_tok=mixture.top_k,
        )
    return _with_config(LlamoeTextConfig(**kept), dense, mixture)


def as_mixtral(dense: Checkpoint, mixture: Mixture) -> Checkpoint:
    """Make a decoder of Mixtral's family that computes the same as a dense LLaMA, with or without a window."""
    if mixture.interleave != 1:
        raise ValueError(
            f"upcycle: interleave = {mixture.interleave}, but every layer of Mixtral's family is a mixture; "
            "choose 1, or the family llama4."
        )
    kept = _fields_of(dense, LlamoeMixtralConfig)
    kept.update(
        architectures=["LlamoeMixtralForCausalLM"],
        rope_interleave=False,
        num_local_experts=mixture.experts,
        num_experts_per_tok=mixture.top_k,
    )
    return _with_config(LlamoeMixtralConfig(**kept), dense, mixture)


def _fields_of(dense: Checkpoint, config_class: type[MixtureConfig]) -> dict[str, Any]:
    """Return the fields of a dense configuration that `config_class` also has, with copies of their values."""
    config = dense.config
    shared = {field.name for field in fields(config_class)}
    return {
        field.name: copy.deepcopy(getattr(config, field.name))
        for field in fields(config)
        if field.name in shared
    }


def _with_config(config: MixtureConfig, dense: Checkpoint, mixture: Mixture | None) -> Checkpoint:
    """Rename and permute the dense tensors for a mixture's configuration, and add the mixture layers."""
    tensors = {}
    for key, tensor in dense.tensors.items():
        match = _LAYER.fullmatch(key)
        if match:
            is_moe = int(match[1]) in config.moe_layers
            # Without a shared expert, the dense feed-forward is only in the routed experts.
            if is_moe and not config.use_shared_expert and match[2].startswith("mlp."):
                continue
            feed_forward = (
                f"{config.feed_forward_name}.shared_expert." if is_moe else f"{config.feed_forward_name}."
            )
            key = f"model.layers.{match[1]}.{re.sub(r'^mlp[.]', feed_forward, match[2])}"
            if dense.config.rope_interleave != config.rope_interleave:
                tensor = _reorder(match[2], tensor, config)
        tensors[key] = tensor
    for index in config.moe_layers:
        assert mixture is not None
        matrices = {part: dense.tensors[f"model.layers.{index}.mlp.{part}.weight"] for part in _PARTS}
        name = f"model.layers.{index}.{config.feed_forward_name}"
        tensors.update(mixture.tensors(name, matrices, config))
    return replace(dense, config=config, tensors=tensors)


def _reorder(rest: str, tensor: LazyTensor, config: MixtureConfig) -> LazyTensor:
    """Permute the rows of q and k, weights and biases, for the rotary pairing of a configuration."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module, _, name = rest.rpartition(".")[0].rpartition(".")
    if module != "self_attn" or name not in heads:
        return tensor
    return permute_pairs(tensor, heads[name], to_halves=not config.rope_interleave)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, std: float, seed: int, name: str) -> LazyTensor:
    """View normal random numbers with mean 0, drawn in float32; they depend only on seed and name."""

    def draw() -> torch.Tensor:
        # Each name has its own random stream.
        stream = np.random.default_rng([seed, *name.encode()])
        drawn = torch.empty(shape, dtype=dtype)
        for piece in drawn.view(-1).split(_PIECE):
            piece.copy_(std * torch.from_numpy(stream.standard_normal(piece.numel(), dtype=np.float32)))
        return drawn

    return Computed(draw, [], shape, dtype, f"{name} (fresh)")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> LazyTensor:
    """Return a lazy tensor of zeros."""
    return Computed(lambda: torch.zeros(shape, dtype=dtype), [], shape, dtype, name)
