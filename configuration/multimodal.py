"""Configuration of the multimodal model: a vision tower, a projector and a text decoder.

Names and defaults of the fields are those of transformers' `Llama4Config`, so a `config.json` of Llama 4 is valid
input. The nested configurations are built here, because transformers' releases build them in different ways.
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
    """The configuration of Llama 4 with vision tower and decoder.

    Fields of transformers' `Llama4Config`, same names and defaults:
        text_config: A `LlamoeTextConfig`, or a dictionary or transformers configuration to make one of; None for the
            defaults.
        vision_config: A `LlamoeVisionConfig`, in the same forms.
        boi_token_index, eoi_token_index: Ids of the tokens around a picture (also readable as `boi_token_id`,
            `eoi_token_id`).
        image_token_index: Id of the token that a picture's features replace (also readable as `image_token_id`).
        tie_word_embeddings: Without effect, as in transformers: the field of `text_config` decides.

    Labels (`num_labels`, `id2label`, `label2id`, `problem_type`) and an assigned `skip_logits` are passed to
    `text_config`, because the decoder has the head that uses them.
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

    # For type checkers: `__setattr__` converts assigned values to these types.
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
        """Build a configuration as `LlamoeBaseConfig.from_dict` does; pass fields of training to `text_config`."""
        text, vision = LlamoeTextConfig.meanings, LlamoeVisionConfig.meanings
        of_training = [
            name for name, meaning in text.items() if meaning.effect == "training" and name not in vision
        ]
        passed_on = {name: kwargs.pop(name) for name in of_training if name in kwargs}
        if passed_on and isinstance(kwargs.get("text_config", {}), dict):
            kwargs["text_config"] = {**passed_on, **kwargs.get("text_config", {})}
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        """Create the nested configurations that are not given."""
        for name in self.sub_configs:
            if getattr(self, name) is None:
                setattr(self, name, {})
        text = self.text_config
        labels = {name: getattr(text, name) for name in _LABELS}
        # Sets default labels if none are given, also in `text_config`.
        super().__post_init__(**kwargs)
        if "num_labels" not in kwargs and self.id2label == PreTrainedConfig().id2label:
            labels["problem_type"] = self.problem_type or labels["problem_type"]
        else:
            labels = {name: getattr(self, name) for name in _LABELS}
        for name, value in labels.items():
            setattr(text, name, value)

    def __setattr__(self, name, value):
        """Set an attribute; convert a nested dictionary or transformers configuration to llamoe's class."""
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
        """Check that tower, projector and decoder fit together; raise a `ValueError` if they do not.

        The class defaults do not fit, as in transformers (the tower ends with 4096 channels, the projector reads 7680).
        So a model's constructor calls this method, but `validate` does not.
        """
        vision = self.vision_config
        # Fields may have been assigned after the constructor checked them.
        vision.validate()
        if not vision.use_adapter:
            problem = "the projector reads the adapter's output"
            fail(self, "vision_config.use_adapter", False, problem, "True; use the tower alone without it")
        if vision.projector_output_dim != vision.vision_output_dim:
            problem = f"differs from vision_config.projector_output_dim = {vision.projector_output_dim}"
            valid = f"{vision.projector_output_dim} (or change both)"
            fail(self, "vision_config.vision_output_dim", vision.vision_output_dim, problem, valid)
