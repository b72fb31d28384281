"""A decoder in float64 that computes one sequence at a time, without batch, padding, cache or special masks.

A sequence in a padded, packed or cached batch must give the results that it gives here alone. Nothing of llamoe is
used. Frequencies of scaled rotary embeddings are transformers'. Weights have the names of a causal language model's
checkpoint.

n tokens, H hidden size, h heads, d head size, k experts a token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

DENSE = ("llama", "mistral", "ministral")
# The routing rules of stock's mixtures, in llamoe's fields.
RULES: dict[str, dict[str, Any]] = {
    "llama4_text": dict(
        router_score_function="sigmoid",
        router_pre_softmax=False,
        norm_topk_prob=False,
        apply_router_weight_on_input=True,
        use_shared_expert=True,
    ),
    "mixtral": dict(
        router_score_function="softmax",
        router_pre_softmax=True,
        norm_topk_prob=True,
        apply_router_weight_on_input=False,
        use_shared_expert=False,
    ),
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class Result:
    """The outputs for one sequence.

    Attributes:
        logits: `[n, vocabulary]`.
        hidden_states: the input of each layer and the output of the last norm, `[n, H]`.
        router_logits: `[n, experts]` of each mixture layer.
    """

    logits: torch.Tensor
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    router_logits: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Blur:
    """Adds random relative errors of a dtype's size, where a model rounds, to show what rounding alone may change."""

    epsilon: float
    generator: torch.Generator

    def __call__(self, x: torch.Tensor, epsilon: float | None = None) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 0.5
        return x * (1 + (self.epsilon if epsilon is None else epsilon) * noise)


def layer_kinds(config: Mapping[str, Any], idx: int) -> tuple[bool, str | None, bool]:
    """Return whether a layer rotates q and k, its limit ("chunk", "window" or None), and whether it is a mixture."""
    if config["model_type"] != "llama4_text":
        types = config.get("layer_types")
        windowed = config.get("sliding_window") is not None
        windowed = windowed and (types is None or types[idx] == "sliding_attention")
        return True, "window" if windowed else None, config["model_type"] not in DENSE
    if config.get("no_rope_layers"):
        rotates = bool(config["no_rope_layers"][idx])
    else:
        interval = config["no_rope_layer_interval"]
        rotates = not interval or (idx + 1) % interval != 0
    if config.get("layer_types") is not None:
        chunked = config["layer_types"][idx] == "chunked_attention"
    else:
        chunked = rotates
    if config.get("moe_layers") is not None:
        is_moe = idx in config["moe_layers"]
    else:
        is_moe = (idx + 1) % config["interleave_moe_layer_step"] == 0
    return rotates, "chunk" if chunked and config["attention_chunk_size"] else None, is_moe


def rotate(x: torch.Tensor, angles: torch.Tensor, factor: float, interleaved: bool) -> torch.Tensor:
    """Rotate the pairs of channels of `x` `[n, h, d]` by `angles` `[n, d / 2]`."""
    cos, sin = angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = first * cos - second * sin, first * sin + second * cos
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide `x` by the root of its mean square over the last axis."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


class Decoder:
    """A decoder with weights in float64, by name, and a configuration in stock's fields.

    `stock_config` is a configuration of transformers with the same fields, for scaled rotary embeddings.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], stock_config: Any):
        self.weights, self.config, self.stock_config = weights, config, stock_config
        is_llama4 = config["model_type"] == "llama4_text"
        self.interleaved = config.get("rope_interleave", is_llama4)
        self.feed_forward_name = "feed_forward" if is_llama4 else "mlp"
        self.router_name = "router" if is_llama4 else "gate"
        self.experts_are_output_first = not is_llama4
        self.rule = RULES.get(config["model_type"], {}) | config
        self.act = ACTIVATIONS[config["hidden_act"]]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        result = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.weights["model.embed_tokens.weight"]
        rows = table[ids]
        # torch's embedding gives the row of the padding token no gradient.
        if self.config.get("pad_token_id") is not None:
            is_padding = (ids == self.config["pad_token_id"])[:, None]
            rows = torch.where(is_padding, rows.detach(), rows)
        return rows

    def frequencies(self, reach: int | None) -> tuple[torch.Tensor, float]:
        """Return the frequencies of the rotary embedding, `[d / 2]`, and the factor of cosine and sine."""
        rope, dim = self.config["rope_parameters"], self.config["head_dim"]
        if rope["rope_type"] == "default":
            return rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
        compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        angles, factor = compute(self.stock_config, "cpu", seq_len=reach)
        # transformers computes this factor when the model is built, without a length.
        if rope["rope_type"] == "longrope":
            factor = compute(self.stock_config, "cpu")[1]
        return angles.double(), factor

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        reach: int | None = None,
        visible: torch.Tensor | None = None,
        choices: list[torch.Tensor] | None = None,
        blur: Callable | None = None,
        places: torch.Tensor | None = None,
    ) -> Result:
        """Run a sequence.

        Args:
            x: embeddings `[n, H]`.
            positions: `[n]`.
            reach: length of the forward, on which some types of rotary scaling depend.
            visible: `[n, n]` bool, in place of causal, chunked and windowed attention.
            choices: the tokens' experts `[n, k]` of each mixture layer; None: those with the largest logits.
            blur: called on every result that a model rounds; None: nothing is rounded.
            places: `[n]`, the tokens' columns in their row, by which windows count; None: 0, 1, 2, …
        """
        config, result = self.config, Result(x)
        blur = blur or (lambda x, epsilon=None: x)
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        for idx in range(config["num_hidden_layers"]):
            rotates, local, is_moe = layer_kinds(config, idx)
            result.hidden_states.append(x)
            sees = causal if visible is None else visible
            if local == "chunk" and visible is None:
                chunks = positions // config["attention_chunk_size"]
                sees = causal & (chunks[:, None] == chunks)
            if local == "window" and visible is None:
                index = torch.arange(len(x)) if places is None else places
                sees = causal & (index[:, None] - index < config["sliding_window"])
            name = f"model.layers.{idx}"
            states = blur(self.norm(f"{name}.input_layernorm", x))
            x = blur(x + self._attend(f"{name}.self_attn", states, positions, reach, rotates, sees, blur))
            states = blur(self.norm(f"{name}.post_attention_layernorm", x))
            name = f"{name}.{self.feed_forward_name}"
            if is_moe:
                given = None if choices is None else choices[len(result.router_logits)]
                added, logits = self._mix(name, states, given, blur)
                result.router_logits.append(logits)
            else:
                added = self._feed_forward(name, states, blur)
            x = blur(x + added)
        x = blur(self.norm("model.norm", x))
        result.hidden_states.append(x)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        result.logits = blur(x @ head.T)
        return result

    def _attend(self, name, x, positions, reach, rotates, sees, blur) -> torch.Tensor:
        config, dim = self.config, self.config["head_dim"]
        q, k, v = (
            blur(self.linear(f"{name}.{part}_proj", x)).unflatten(-1, (-1, dim)) for part in ("q", "k", "v")
        )
        if rotates:
            angles, factor = self.frequencies(reach)
            # Models of all dtypes compute angles in float32.
            angles = blur(positions[:, None] * angles, 2.0**-22)
            q, k = (blur(rotate(y, angles, factor, self.interleaved)) for y in (q, k))
            if config.get("use_qk_norm"):
                q, k = (blur(normed(y, config["rms_norm_eps"])) for y in (q, k))
        elif config.get("attn_temperature_tuning"):
            steps = torch.floor((positions + 1) / config["floor_scale"]).double()
            q = blur(q * (1 + config["attn_scale"] * torch.log(1 + steps))[:, None, None])
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = blur(torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim))
        weights = blur(scores.masked_fill(~sees, -math.inf).softmax(-1))
        return blur(self.linear(f"{name}.o_proj", blur(torch.einsum("hqk,khd->qhd", weights, v)).flatten(1)))

    def _feed_forward(self, name: str, x: torch.Tensor, blur: Callable) -> torch.Tensor:
        gate, up = (blur(self.linear(f"{name}.{part}_proj", x)) for part in ("gate", "up"))
        return blur(self.linear(f"{name}.down_proj", blur(blur(self.act(gate)) * up)))

    def _mix(self, name, x, choices, blur) -> tuple[torch.Tensor, torch.Tensor]:
        rule = self.rule
        logits = blur(x @ self.weights[f"{name}.{self.router_name}.weight"].T)
        if choices is None:
            choices = logits.topk(self.config["num_experts_per_tok"]).indices
        scores = self._scores(logits, choices)
        result = torch.zeros_like(x)
        if rule["use_shared_expert"]:
            result = self._feed_forward(f"{name}.shared_expert", x, blur)
        gate_ups, downs = (self.weights[f"{name}.experts.{stack}_proj"] for stack in ("gate_up", "down"))
        if self.experts_are_output_first:
            gate_ups, downs = gate_ups.mT, downs.mT
        for expert in choices.unique().tolist():
            rows, ranks = (choices == expert).nonzero(as_tuple=True)
            scale = scores[rows, ranks][:, None]
            given = blur(x[rows] * scale) if rule["apply_router_weight_on_input"] else x[rows]
            gate, up = blur(given @ gate_ups[expert]).chunk(2, -1)
            added = blur(blur(blur(self.act(gate)) * up) @ downs[expert])
            added = added if rule["apply_router_weight_on_input"] else blur(added * scale)
            result = result.index_add(0, rows, added)
        return result, logits

    def _scores(self, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        rule, chosen = self.rule, logits.gather(1, choices)
        if rule["router_score_function"] == "sigmoid":
            scores = torch.sigmoid(chosen)
        elif rule["router_pre_softmax"]:
            scores = logits.softmax(-1).gather(1, choices)
        else:
            scores = chosen.softmax(-1)
        return scores / scores.sum(-1, keepdim=True) if rule["norm_topk_prob"] else scores
