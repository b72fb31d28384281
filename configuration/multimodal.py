"""Configuration of the multimodal model: a vision tower, a projector and a text decoder.

Field names and defaults are those of transformers' `Llama4Config`, so a published `config.json` of Llama 4 is valid
input. Nested configurations are built here, not by transformers, whose way of building them differs between supported
releases.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from .base import LlamoeBaseConfig, as_dict
from .checks import fail
from .fields import field
from .mixture import LlamoeTextConfig
from .vision import LlamoeVisionConfig

_LABELS = ("id2label", "label2id", "problem_type")


class LlamoeConfig(LlamoeBaseConfig):
    """Llama 4 as a whole.

    Fields of transformers' `Llama4Config`, same names and defaults:
        text_config: A `LlamoeTextConfig`, or a dictionary or stock configuration from which one is made; None for the
            defaults.
        vision_config: The same for a `LlamoeVisionConfig`.
        boi_token_index, eoi_token_index: Tokens around a picture (also readable as `boi_token_id`,
            `eoi_token_id`).
        image_token_index: The token that a picture's features replace (also readable as `image_token_id`).
        tie_word_embeddings: As in stock: the text configuration's field of the same name decides for its head.

    Labels (`num_labels`, `id2label`, `label2id`, `problem_type`) given for the whole are passed to the text
    configuration, whose classifier they describe, and so is an assigned `skip_logits`: the text part has the head.
    """

    model_type = "llamoe"
    stock_model_type: ClassVar[str] = "llama4"
    # transformers' default names a decoder's children.
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {}
    attribute_map: ClassVar[dict[str, str]] = {
        "image_token_id": "image_token_index",
        "boi_token_id": "boi_token_index",
        "eoi_token_id": "eoi_token_index",
    }
    sub_configs: ClassVar[dict[str, type[LlamoeBaseConfig]]] = {
        "text_config": LlamoeTextConfig,
        "vision_config": LlamoeVisionConfig,
    }

    # Assigned values are converted to these types.
    if TYPE_CHECKING:
        vision_config: LlamoeVisionConfig
        text_config: LlamoeTextConfig
    else:
        vision_config: dict | PreTrainedConfig | None = field(None, "structure")
        text_config: dict | PreTrainedConfig | None = field(None, "structure")
    boi_token_index: int = field(200080, "none")
    eoi_token_index: int = field(200081, "none")
    image_token_index: int = field(200092, "none")
    tie_word_embeddings: bool = field(False, "none")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build a configuration as `LlamoeBaseConfig.from_dict` does; fields of training go to its text part."""
        text, vision = LlamoeTextConfig.meanings, LlamoeVisionConfig.meanings
        of_training = [
            name for name, meaning in text.items() if meaning.effect == "training" and name not in vision
        ]
        passed_on = {name: kwargs.pop(name) for name in of_training if name in kwargs}
        if passed_on and isinstance(kwargs.get("text_config", {}), dict):
            kwargs["text_config"] = {**passed_on, **kwargs.get("text_config", {})}
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        """Fill in the nested configurations that were not given."""
        for name in self.sub_configs:
            if getattr(self, name) is None:
                setattr(self, name, {})
        text = self.text_config
        labels = {name: getattr(text, name) for name in _LABELS}
        # Fills in labels if none were given, and passes them on.
        super().__post_init__(**kwargs)
        if "num_labels" not in kwargs and self.id2label == PreTrainedConfig().id2label:
            labels["problem_type"] = self.problem_type or labels["problem_type"]
        else:
            labels = {name: getattr(self, name) for name in _LABELS}
        for name, value in labels.items():
            setattr(text, name, value)

    def __setattr__(self, name, value):
        """Set an attribute; a dictionary or stock configuration becomes a nested configuration of ours."""
        text = self.__dict__.get("text_config")
        if name == "skip_logits" and isinstance(text, LlamoeTextConfig):
            # The output head belongs to the text part, which reads this field.
            text.skip_logits = value
            return
        if name in _LABELS and isinstance(text, LlamoeTextConfig):
            setattr(text, name, value)
        config_class = self.sub_configs.get(name)
        if config_class is not None and value is not None and not isinstance(value, config_class):
            value = config_class(**(as_dict(value) if isinstance(value, PreTrainedConfig) else value))
        super().__setattr__(name, value)

    @classmethod
    def _from_stock(cls, data):
        for name, config_class in cls.sub_configs.items():
            if isinstance(data.get(name), dict):
                data[name] = {"model_type": config_class.stock_model_type} | data[name]
        return data

    def validate_architecture(self) -> None:
        """Check the nested configurations, which may have changed since they were built."""
        for name, config_class in self.sub_configs.items():
            part = getattr(self, name)
            if part is None:
                fail(self, name, part, "a multimodal model has both parts", f"a {config_class.__name__}")
            part.validate()

    def check_multimodal(self) -> None:
        """Check that tower, projector and decoder fit together; `ValueError` if they do not.

        The class defaults do not, as in stock (the tower ends with 4096 channels, the projector reads 7680). So this
        is not a part of `validate`; a model's constructor calls it.
        """
        vision = self.vision_config
        # Fields may have been assigned after the constructor checked them.
        vision.validate()
        if not vision.use_adapter:
            problem = "the projector reads what the adapter makes"
            fail(self, "vision_config.use_adapter", False, problem, "True, or the tower by itself")
        if vision.projector_output_dim != vision.vision_output_dim:
            problem = f"differs from vision_config.projector_output_dim = {vision.projector_output_dim}"
            valid = f"{vision.projector_output_dim} (or change both)"
            fail(self, "vision_config.vision_output_dim", vision.vision_output_dim, problem, valid)
