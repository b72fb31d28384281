"""Configuration of the vision tower, which is Llama 4's by default, and MetaCLIP's with other values.

Names and defaults of the fields are those of transformers' `Llama4VisionConfig`. There are two differences:

* transformers' class has the fields `hidden_act`, `norm_eps`, `multi_modal_projector_bias` and
  `vision_feature_select_strategy`, but always computes with GELU, 1e-5, no bias and "default". llamoe computes with the
  values of these fields. When it reads a transformers configuration, it sets them to what transformers computes.
* transformers takes the adapter's input width from `intermediate_size`, which is right only if that is `hidden_size /
  pixel_shuffle_ratio**2`. llamoe computes the width.

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
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: Sizes of the transformer.
        hidden_act: Activation function of the transformer's layers by transformers' name: "gelu" in Llama 4,
            "quick_gelu" in most MetaCLIP towers. The adapter always has GELU.
        num_channels: Number of colour channels of a picture.
        image_size, patch_size: Sides of the square pictures and patches in pixels; pairs of equal numbers become one.
        norm_eps: Number that every layer norm adds to the variance.
        vision_output_dim: Width of the adapter's output, which the multimodal projector reads.
        vision_feature_select_strategy: "default" drops the class token. "full" keeps it, which needs `use_adapter`
            False.
        pixel_shuffle_ratio: The adapter merges squares of `1 / ratio` by `1 / ratio` patches into one token.
        projector_input_dim, projector_output_dim: Inner width, and output width, of the adapter.
        projector_dropout: Probability of dropping an inner channel of the adapter in training.
        multi_modal_projector_bias: Whether the adapter has biases.
        attention_dropout: Probability of dropping an attention weight in training.
        initializer_range: Standard deviation of new weights.
        rope_parameters: `rope_type` and `rope_theta` of the 2-D rotary embedding.

    Fields that only llamoe has:
        use_rope: Whether patches get rotary embeddings by row and column.
        use_pre_layernorm, use_post_layernorm: Whether there is a norm before, or after, the transformer's layers.
        vision_feature_layer: Index of the hidden state that the tower returns: 0 is the input of the first layer, -1
            the output of the last, -2 the output of the layer before it.
        projection_dim: Width of CLIP's embedding of pictures; None for a tower without that head.
        use_adapter: Whether the tower has the adapter. Without it the tower returns a token for each patch.
        projector_final_act: Whether the adapter's output also goes through the activation function.
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
        """Convert pairs of equal sides to one integer."""
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if not isinstance(value, int):
                if len(value) != 2 or value[0] != value[1]:
                    fail(self, name, value, "must be square", "an integer, or a pair of equal ones")
                setattr(self, name, value[0])
        super().__post_init__(**kwargs)

    def parts(self) -> set[str]:
        """Return the parts that the tower has, by their names in `Meaning.part`."""
        return {"adapter"} if self.use_adapter else set()

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def grid_size(self) -> int:
        """Return the number of patches along a side of the picture."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Return the number of patches in a picture; the tower has one more position, for the class token."""
        return self.grid_size**2

    @property
    def shuffle_size(self) -> int:
        """Return the number of patches along a side of the square that the adapter merges into one token."""
        return round(1 / self.pixel_shuffle_ratio)

    @property
    def adapter_input_dim(self) -> int:
        """Return the number of channels of a merged square of patches."""
        return self.hidden_size * self.shuffle_size**2

    @property
    def tokens_per_tile(self) -> int:
        """Return the number of tokens that the tower returns for one picture or tile."""
        if self.use_adapter:
            return (self.grid_size // self.shuffle_size) ** 2
        return self.num_patches + (self.vision_feature_select_strategy == "full")

    def validate_architecture(self) -> None:
        """Check heads, the grid, the hidden state that is returned, and the adapter."""
        for name, divisor in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
            if getattr(self, name) % getattr(self, divisor):
                problem = f"must be a multiple of {divisor} = {getattr(self, divisor)}"
                fail(self, name, getattr(self, name), problem, f"a multiple of {getattr(self, divisor)}")
        layer, count = self.vision_feature_layer, self.num_hidden_layers
        if not -count - 1 <= layer <= count:
            problem = f"there are {count + 1} hidden states"
            fail(self, "vision_feature_layer", layer, problem, f"{-count - 1} to {count}")
        if not self.use_adapter:
            return
        ratio = self.pixel_shuffle_ratio
        if not 1 / self.image_size <= ratio <= 1 or abs(ratio * self.shuffle_size - 1) > 1e-6:
            problem, valid = "must be one over an integer", "1.0, 0.5, 0.25 and so on"
            fail(self, "pixel_shuffle_ratio", ratio, problem, valid)
        block, grid = self.shuffle_size, self.grid_size
        if grid % block:
            problem = f"the adapter merges {block} by {block} patches, and the picture has {grid} by {grid}"
            valid = f"a multiple of {block * self.patch_size}, or use_adapter = False"
            fail(self, "image_size", self.image_size, problem, valid)
        if (strategy := self.vision_feature_select_strategy) != "default":
            problem = "the adapter does not take the class token"
            valid = "'default', or use_adapter = False"
            fail(self, "vision_feature_select_strategy", strategy, problem, valid)

    def _rotary_multiple(self) -> int:
        return 4 if self.use_rope else 0

    def validate_rope(self) -> None:
        """Check the rotary embedding, which cannot be scaled: scaling is for long texts."""
        super().validate_rope()
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if self.use_rope and rope_type != "default":
            problem = "the tower's rotary embedding has no scaling"
            fail(self, "rope_parameters['rope_type']", rope_type, problem, "'default'")
