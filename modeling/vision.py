"""The vision tower: Llama 4's image encoder or, by the config's switches, MetaCLIP's.

Both are the same pre-norm ViT (Dosovitskiy et al. 2020, arXiv 2010.11929). Llama 4's encoder adds 2-D rotary positions
in every layer, and after the last layer an adapter that folds blocks of neighbouring patches into one token. MetaCLIP's
(Xu et al. 2023, arXiv 2309.16671) has no rotary positions, may use QuickGELU, and projects its class token to an image
embedding. Sources: Meta's llama-models, `models/llama4/vision`, and open_clip's `VisionTransformer`.

The layout is that of Llama 4's checkpoints: patches row by row, then the class token. open_clip has the class token
first, one weight for query, key and value, and a convolution for the patches; conversion rearranges these weights.

Shapes: N tiles (images, or parts of one), C channels, G patches along a side, T = G * G + 1 tokens, D hidden size,
H heads, K head_dim, P patch side in pixels, S patches along the side of a block that becomes one output token.
"""

import math
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from ..configuration.vision import LlamoeVisionConfig
from .attention import eager_attention_forward, implementation_on
from .base import LlamoePreTrainedModel
from .kernels import widened
from .layers import Linear, activation, rotary_2d_cos_sin, rotate


class PatchEmbedding(nn.Module):
    """Cuts a tile into patches of P x P pixels and maps each to D channels, as a strided convolution without bias does.

    The map is a linear layer, so that LoRA adapts it like all others. `weight.reshape(D, -1)` converts a convolution's
    weight.
    """

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        # The config has turned a pair, as [14, 14], into an integer.
        self.patch_size = cast(int, config.patch_size)
        self.linear = Linear(config.num_channels * self.patch_size**2, config.hidden_size, bias=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Map `[N, C, G * P, G * P]` to `[N, G * G, D]`, patches row by row."""
        size = self.patch_size
        x_NCGPGP = pixel_values.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        x_NGGCPP = x_NCGPGP.permute(0, 2, 4, 1, 3, 5)
        return self.linear(x_NGGCPP.flatten(3).flatten(1, 2))


class VisionAttention(nn.Module):
    """Multi-head attention over the tokens of one tile, without a mask, optionally with 2-D rotary positions."""

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False

        hidden, bias = config.hidden_size, config.attention_bias
        inner = config.num_attention_heads * self.head_dim
        self.q_proj = Linear(hidden, inner, bias=bias)
        self.k_proj = Linear(hidden, inner, bias=bias)
        self.v_proj = Linear(hidden, inner, bias=bias)
        self.o_proj = Linear(inner, hidden, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
        with_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within each tile.

        Args:
            hidden_states: `[N, T, D]`.
            cos_sin: each `[1, T, 1, K]` float32, or None for no rotation.
            with_weights: use the implementation `eager`, whatever the config says, since no other returns weights.

        Returns:
            `[N, T, D]`, and the attention weights `[N, H, T, T]` under `eager`, else None.
        """
        # The number of heads follows from the tensor: under tensor parallelism each process has only some heads.
        heads = (-1, self.head_dim)
        q_NTHK, k_NTHK, v_NTHK = (
            linear(hidden_states).unflatten(-1, heads) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cos_sin is not None:
            q_NTHK, k_NTHK = (rotate(x, *cos_sin, interleave=True) for x in (q_NTHK, k_NTHK))

        implementation = "eager" if with_weights else implementation_on(q_NTHK.device, self.config)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        out_NTHK, weights = widened(attend, q_NTHK.transpose(1, 2))(
            self,
            q_NTHK.transpose(1, 2),
            k_NTHK.transpose(1, 2),
            v_NTHK.transpose(1, 2),
            None,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(out_NTHK.flatten(2)), weights


class VisionFeedForward(nn.Module):
    """`fc2(act(fc1(x)))`, the feed-forward of an encoder layer."""

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., D]` to the same shape."""
        return self.fc2(self.act_fn(self.fc1(hidden_states)))


class VisionEncoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = VisionAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = VisionFeedForward(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
        with_weights: bool = False,
    ) -> torch.Tensor:
        """Map `[N, T, D]` to the same shape; `cos_sin` and `with_weights` as in `VisionAttention.forward`."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), cos_sin, with_weights)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class VisionEncoder(nn.Module):
    """The stack of the tower's layers."""

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        self.layers = nn.ModuleList([VisionEncoderLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
        depth: int,
        run_all: bool,
        with_weights: bool = False,
    ) -> torch.Tensor:
        """Return the output of one of the layers, `[N, T, D]`.

        Args:
            hidden_states: `[N, T, D]`.
            cos_sin: as in `VisionAttention.forward`.
            depth: return the output of this layer, counted from 1; 0 means the input.
            run_all: run the later layers, too, for callers that record the output of every layer.
            with_weights: as in `VisionAttention.forward`.
        """
        selected = hidden_states
        for number, layer in enumerate(self.layers, start=1):
            if number > depth and not run_all:
                break
            hidden_states = layer(hidden_states, cos_sin, with_weights)
            if number == depth:
                selected = hidden_states
        return selected


def pixel_shuffle(patches: torch.Tensor, ratio: float) -> torch.Tensor:
    """Fold each block of S x S neighbouring patches into the channels of one token.

    Args:
        patches: `[N, G * G, D]`, row by row, without the class token.
        ratio: 1 / S. With 0.5 there are a quarter of the tokens, with four times the channels.

    Returns:
        `[N, (G / S) ** 2, S * S * D]`, row by row; each token has the channels of its patches, row by row.

    Raises:
        ValueError: the patches form no square, or 1 / ratio is not an integer that divides the square's side.
    """
    # Under `torch.jit.trace` sizes are tensors.
    num_patches = int(patches.shape[1])
    side, block = math.isqrt(num_patches), round(1 / ratio)
    if side * side != num_patches or side % block or abs(block * ratio - 1) > 1e-6:
        raise ValueError(
            f"pixel_shuffle folds a square of patches by whole blocks, but {num_patches} patches have the side "
            f"{num_patches**0.5:g}, and with ratio {ratio} blocks have the side {1 / ratio:g}. Choose image_size, "
            "patch_size and pixel_shuffle_ratio so that the first side is a multiple of the second."
        )
    x_NGSGSD = patches.unflatten(1, (side // block, block, side // block, block))
    x_NGGSSD = x_NGSGSD.permute(0, 1, 3, 2, 4, 5)
    return x_NGGSSD.flatten(3).flatten(1, 2)


class VisionAdapterFeedForward(nn.Module):
    """Two linear layers, with GELU and dropout between them and, as the config says, GELU at the end.

    It is the exact GELU, whatever the encoder's activation is, since Llama 4's adapter was trained with it.
    """

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        bias = config.multi_modal_projector_bias
        self.fc1 = Linear(config.adapter_input_dim, config.projector_input_dim, bias=bias)
        self.fc2 = Linear(config.projector_input_dim, config.projector_output_dim, bias=bias)
        self.dropout = config.projector_dropout
        self.final_act = config.projector_final_act

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., adapter_input_dim]` to `[..., projector_output_dim]`."""
        hidden_states = nn.functional.gelu(self.fc1(hidden_states))
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        return nn.functional.gelu(hidden_states) if self.final_act else hidden_states


class VisionAdapter(nn.Module):
    """Turns patches into fewer tokens with more channels: pixel shuffle, then a feed-forward."""

    def __init__(self, config: LlamoeVisionConfig):
        super().__init__()
        self.ratio = config.pixel_shuffle_ratio
        self.mlp = VisionAdapterFeedForward(config)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Map `[N, G * G, D]` to `[N, (G / S) ** 2, projector_output_dim]`."""
        return self.mlp(pixel_shuffle(patches, self.ratio))


class LlamoeVisionModel(LlamoePreTrainedModel):
    """Maps image tiles to visual tokens, and to a CLIP embedding if the config has `projection_dim`.

    Tiles do not see each other, so the tiles of all images of all rows are one batch; the caller puts their tokens into
    the text. The class also reads its part of multimodal folders.
    """

    config_class = LlamoeVisionConfig
    config: LlamoeVisionConfig
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    _no_split_modules = ["VisionEncoderLayer"]
    # Under gradient checkpointing transformers makes the output of this module require a gradient.
    _input_embed_layer = "patch_embedding"
    # Prefix of the tower's keys in multimodal folders.
    _checkpoint_prefixes = {r"vision_model\.": ""}
    _keys_passed_over = [r"^language_model\.", r"^multi_modal_projector\."]
    _can_record_outputs = {"hidden_states": VisionEncoderLayer, "attentions": VisionAttention}
    # transformers' quantizers leave these modules plain, whatever a user's own list says. A patch of 14 x 14 pixels in
    # three colours has 588 numbers, but quanto's int8 kernel reads blocks of 64, and crashes the process on a CPU.
    # In spite of this attribute's name, the base class's `_get_dtype_plan` loads them in the model's dtype.
    _keep_in_fp32_modules = [r"(.*\.)?patch_embedding"]

    def __init__(self, config: PreTrainedConfig):
        config = cast(LlamoeVisionConfig, self.resolve_config(config))
        super().__init__(config)
        hidden, eps = config.hidden_size, config.norm_eps
        self.patch_embedding = PatchEmbedding(config)
        self.class_embedding = nn.Parameter(torch.empty(hidden))
        self.positional_embedding_vlm = nn.Parameter(torch.empty(config.num_patches + 1, hidden))
        self.layernorm_pre = nn.LayerNorm(hidden, eps=eps) if config.use_pre_layernorm else nn.Identity()
        self.model = VisionEncoder(config)
        self.layernorm_post = nn.LayerNorm(hidden, eps=eps) if config.use_post_layernorm else nn.Identity()
        if config.use_adapter:
            self.vision_adapter = VisionAdapter(config)
        if config.projection_dim is not None:
            self.visual_projection = Linear(hidden, config.projection_dim, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamoeVisionModel):
            std = module.config.hidden_size**-0.5
            init.normal_(module.class_embedding, std=std)
            init.normal_(module.positional_embedding_vlm, std=std)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """Encode tiles.

        Args:
            pixel_values: `[N, C, image_size, image_size]`, floating, normalized; cast to the weights' dtype.
            **kwargs: `output_hidden_states`, `output_attentions` (attention then uses `eager`), `return_dict`. All
                others are ignored: a multimodal model passes keywords that describe its text.

        Returns:
            `last_hidden_state`: with an adapter `[N, tokens_per_tile, projector_output_dim]`. Without one the states
            after `layernorm_post`: `[N, G * G, D]`, or with `vision_feature_select_strategy="full"` `[N, T, D]`, the
            class token last.
            `pooler_output`: with `projection_dim` the projected class token `[N, projection_dim]`, not normalized;
            otherwise without an adapter the class token's state `[N, D]`; otherwise None.
            `hidden_states`: the first layer's input and every layer's output, before `layernorm_post`.

        Raises:
            ValueError: pixel_values have a wrong shape, or an integer dtype.
        """
        self.check_pixel_values(pixel_values)
        config = self.config
        patches_NTD = self.patch_embedding(pixel_values.to(self._pixel_dtype()))
        class_N1D = self.class_embedding.expand(patches_NTD.shape[0], 1, -1)
        x_NTD = torch.cat([patches_NTD, class_N1D.to(patches_NTD.device)], dim=1)
        x_NTD = self.layernorm_pre(x_NTD + self.positional_embedding_vlm.to(x_NTD))

        cos_sin = None
        if config.use_rope:
            theta = cast(dict, config.rope_parameters)["rope_theta"]
            cos_sin = rotary_2d_cos_sin(config.grid_size, config.head_dim, theta, x_NTD.device)
        # `vision_feature_layer` is an index into `hidden_states`: 0 is the first layer's input, -1 the last output.
        depth = range(len(self.model.layers) + 1)[config.vision_feature_layer]
        with_states, with_weights = (
            kwargs.get(name, getattr(config, name, False)) not in (None, False)
            for name in ("output_hidden_states", "output_attentions")
        )
        x_NTD = self.model(x_NTD, cos_sin, depth, with_states or with_weights, with_weights)
        x_NTD = self.layernorm_post(x_NTD)

        patches, class_token = x_NTD[:, :-1], x_NTD[:, -1]
        if config.use_adapter:
            last_hidden_state, pooled = self.vision_adapter(patches), None
        else:
            full = config.vision_feature_select_strategy == "full"
            last_hidden_state, pooled = x_NTD if full else patches, class_token
        if config.projection_dim is not None:
            pooled = self.visual_projection(class_token)
        return BaseModelOutputWithPooling(last_hidden_state=last_hidden_state, pooler_output=pooled)

    def _pixel_dtype(self) -> torch.dtype:
        # A quantized weight has a dtype for storage, such as uint8 or float8, to which pixels must not be rounded.
        dtype = self.patch_embedding.linear.weight.dtype
        is_compute_dtype = dtype.is_floating_point and dtype.itemsize > 1
        return dtype if is_compute_dtype else self.class_embedding.dtype

    def check_pixel_values(self, pixel_values: torch.Tensor) -> None:
        """Raise a `ValueError` for pixels that are not floating, or not `[tiles, C, image_size, image_size]`."""
        config = self.config
        expected = (config.num_channels, config.image_size, config.image_size)
        if tuple(pixel_values.shape[1:]) != expected or not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values are {pixel_values.dtype} of shape {list(pixel_values.shape)}; expected: floating, "
                f"[tiles, {', '.join(map(str, expected))}], as this checkpoint's image processor makes them. Position "
                "embeddings are not interpolated: for another size convert the checkpoint to another image_size."
            )
