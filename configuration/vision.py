"""Configuration of the vision tower: exactly Llama 4's, and with its switches exactly MetaCLIP's.

Field names and defaults are those of transformers' `Llama4VisionConfig`, with two deliberate differences. Stock
declares `hidden_act`, `norm_eps`, `multi_modal_projector_bias` and `vision_feature_select_strategy` but always
computes with GELU, 1e-5, no bias and "default"; ours are honoured, so reading a stock configuration sets them to what
stock computes. And stock takes the adapter's input width from `intermediate_size`, which is right only if that is
`hidden_size / pixel_shuffle_ratio**2`; ours is derived.

Sources: Meta's reference implementation of Llama 4; CLIP (Radford et al., 2021, arXiv:2103.00020); MetaCLIP
(Xu et al., 2023, arXiv:2309.16671) and its configurations in open_clip.
"""

from typing import ClassVar

from .base import LlamoeBaseConfig
from .checks import fail
from .fields import field
from .parallel import VISION_FSDP, VISION_TP


class LlamoeVisionConfig(LlamoeBaseConfig):
    """A vision transformer with learned positions, optional 2-D rotary embedding and a pixel-shuffle adapter.

    Fields of transformers' `Llama4VisionConfig`, same names and defaults:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: Shape of the transformer.
        hidden_act: Activation of the blocks by transformers' name; "gelu" in Llama 4, "quick_gelu" in most
            MetaCLIP towers. The adapter keeps GELU.
        num_channels, image_size, patch_size: Picture and patch, in pixels; square, an integer after construction.
        norm_eps: Added to the variance in every layer norm.
        vision_output_dim: Width of the adapter's output.
        vision_feature_select_strategy: "default" drops the class token, "full" keeps it (without adapter only).
        pixel_shuffle_ratio: The adapter merges squares of `1 / ratio` by `1 / ratio` patches into one token.
        projector_input_dim, projector_output_dim: Inner and outer width of the adapter.
        projector_dropout: Probability of dropping an inner channel of the adapter in training.
        multi_modal_projector_bias: Whether the adapter has biases.
        attention_dropout: Probability of dropping an attention weight in training.
        initializer_range: Standard deviation of fresh weights.
        rope_parameters: `rope_type` and `rope_theta` of the 2-D rotary embedding.

    Fields of ours:
        use_rope: Whether patches are rotated by their place in the grid.
        use_pre_layernorm, use_post_layernorm: Norms before and after the blocks.
        vision_feature_layer: Which hidden state the tower returns, as an index into the embeddings followed by the
            output of each block: -1 is the last block, -2 the one before.
        projection_dim: Width of CLIP's joint space; None for a tower without that head.
        use_adapter: Whether the adapter follows. Without it any grid is valid and the tower returns its own tokens.
        projector_final_act: Whether the adapter ends with the activation too.
        attention_bias: Whether the attention's projections have biases.
    """

    model_type = "llamoe_vision"
    stock_model_type: ClassVar[str] = "llama4_vision_model"
    base_config_key: ClassVar[str] = "vision_config"
    base_model_tp_plan = VISION_TP
    base_model_fsdp_plan = VISION_FSDP

    hidden_size: int = field(768, "structure", least=1)
    hidden_act: str = field("gelu", "function", stock="ignored")
    num_hidden_layers: int = field(34, "structure", least=1, most=4096)
    num_attention_heads: int = field(16, "structure", least=1)
    num_channels: int = field(3, "function", least=1)
    intermediate_size: int = field(5632, "structure", least=1)
    vision_output_dim: int = field(7680, "structure", part="adapter", least=1)
    image_size: int | list[int] | tuple[int, int] = field(448, "function", least=1, most=1 << 16)
    patch_size: int | list[int] | tuple[int, int] = field(14, "function", least=1, most=1 << 16)
    norm_eps: float = field(1e-5, "function", stock="ignored", least=0)
    vision_feature_select_strategy: str = field(
        "default", "function", stock="ignored", choices=("default", "full")
    )
    initializer_range: float = field(0.02, "none", least=0)
    pixel_shuffle_ratio: float = field(0.5, "function", part="adapter")
    projector_input_dim: int = field(4096, "structure", part="adapter", least=1)
    projector_output_dim: int = field(4096, "structure", part="adapter", least=1)
    multi_modal_projector_bias: bool = field(False, "structure", stock="ignored")
    projector_dropout: float = field(0.0, "training", least=0, below=1)
    attention_dropout: float = field(0.0, "training", least=0, below=1)
    rope_parameters: dict | None = field(None, "function")

    use_rope: bool = field(True, "function")
    use_pre_layernorm: bool = field(True, "function")
    use_post_layernorm: bool = field(True, "function")
    vision_feature_layer: int = field(-1, "function")
    projection_dim: int | None = field(None, "structure", least=1)
    use_adapter: bool = field(True, "function")
    projector_final_act: bool = field(True, "function", part="adapter")
    attention_bias: bool = field(True, "structure")

    def __post_init__(self, **kwargs):
        """Make square pairs integers."""
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if not isinstance(value, int):
                if len(value) != 2 or value[0] != value[1]:
                    fail(self, name, value, "must be square", "an integer, or a pair of equal ones")
                setattr(self, name, value[0])
        super().__post_init__(**kwargs)

    def parts(self) -> set[str]:
        """Return the names of the tower's parts, as `Meaning.part` spells them."""
        return {"adapter"} if self.use_adapter else set()

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def grid_size(self) -> int:
        """Patches along a side of the picture."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches in a picture; the tower has one position more, for the class token."""
        return self.grid_size**2

    @property
    def shuffle_size(self) -> int:
        """Patches along a side of the square that the adapter merges into one token."""
        return round(1 / self.pixel_shuffle_ratio)

    @property
    def adapter_input_dim(self) -> int:
        """Channels of a merged square of patches."""
        return self.hidden_size * self.shuffle_size**2

    @property
    def tokens_per_tile(self) -> int:
        """Tokens that the tower returns for one picture or tile."""
        if self.use_adapter:
            return (self.grid_size // self.shuffle_size) ** 2
        return self.num_patches + (self.vision_feature_select_strategy == "full")

    def validate_architecture(self) -> None:
        """Check heads, the grid and the adapter."""
        for name, divisor in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
            if getattr(self, name) % getattr(self, divisor):
                problem = f"must be a multiple of {divisor} = {getattr(self, divisor)}"
                fail(self, name, getattr(self, name), problem, f"a multiple of {getattr(self, divisor)}")
        count, strategy = self.num_hidden_layers, self.vision_feature_select_strategy
        if not -count - 1 <= self.vision_feature_layer <= count:
            problem = f"no such hidden state among num_hidden_layers + 1 = {count + 1}"
            fail(self, "vision_feature_layer", self.vision_feature_layer, problem, f"{-count - 1} to {count}")
        if not self.use_adapter:
            return
        ratio = self.pixel_shuffle_ratio
        if not 1 / self.image_size <= ratio <= 1 or abs(ratio * self.shuffle_size - 1) > 1e-6:
            problem, valid = "must be one over an integer", "1.0, 0.5, 0.25 and so on"
            fail(self, "pixel_shuffle_ratio", ratio, problem, valid)
        if self.grid_size % self.shuffle_size:
            step = self.shuffle_size * self.patch_size
            problem = (
                f"its grid of {self.grid_size} by {self.grid_size} patches is not divided by the pixel "
                f"shuffle, which merges {self.shuffle_size} by {self.shuffle_size}"
            )
            fail(
                self, "image_size", self.image_size, problem, f"a multiple of {step}, or use_adapter = False"
            )
        if strategy != "default":
            problem = "the pixel shuffle has no place for the class token"
            valid = "'default', or use_adapter = False"
            fail(self, "vision_feature_select_strategy", strategy, problem, valid)

    def _rotary_multiple(self) -> int:
        return 4 if self.use_rope else 0

    def validate_rope(self) -> None:
        """Check the rotary embedding, which has no scaling: unlike a text, a grid does not grow."""
        super().validate_rope()
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if self.use_rope and rope_type != "default":
            problem = "the grid's rotary embedding has no scaling"
            fail(self, "rope_parameters['rope_type']", rope_type, problem, "'default'")
