"""Two small models in folders, as a user would have them: what llama.cpp's converter and `from_pretrained` read.

Their weights are random. The tokenizer is that of examples/llamoe-tiny, since llama.cpp wants one; its small vocabulary
keeps embedding and head below 2 % of the weights, as in large models.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Llama4ForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import llamoe

from .shapes import Setting
from .shared_weights import draw_weights, made_in

TOKENIZER = Path(__file__).parents[1] / "examples/llamoe-tiny"
FLOAT32 = Setting(torch.device("cpu"), torch.float32)
ATTENTION = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64)


@dataclass(frozen=True)
class SavedModel:
    """A model to be saved.

    Attributes:
        name: name in the results.
        ours: our class.
        stock: transformers' class for the same folder.
        fields: of our configuration, without those of the vocabulary.
    """

    name: str
    ours: type[PreTrainedModel]
    stock: type[PreTrainedModel]
    fields: dict[str, Any]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.fields["num_hidden_layers"]

    def config(self) -> PreTrainedConfig:
        """The configuration, with the tokenizer's vocabulary."""
        return self.ours.config_class(
            vocab_size=len(tokenizer()), bos_token_id=0, eos_token_id=None, pad_token_id=None, **self.fields
        )

    def on_meta(self) -> PreTrainedModel:
        """Our model without weights."""
        with torch.device("meta"):
            return self.ours(self.config())

    def save(self, folder: Path) -> None:
        """Draw the weights and save them in float32 with the stock layout, and the tokenizer."""
        with made_in(FLOAT32):
            model = self.ours(self.config())
        draw_weights(model, FLOAT32)
        model.save_pretrained(folder, layout="stock")
        tokenizer().save_pretrained(folder)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer."""
    return AutoTokenizer.from_pretrained(TOKENIZER)


# 114 million parameters.
DENSE = SavedModel(
    "dense",
    llamoe.LlamoeDenseForCausalLM,
    LlamaForCausalLM,
    dict(ATTENTION, intermediate_size=2816, num_hidden_layers=10, max_position_embeddings=2048),
)
# 197 million, of which a token meets 55: every other layer is a mixture.
MIXTURE = SavedModel(
    "mixture",
    llamoe.LlamoeForCausalLM,
    Llama4ForCausalLM,
    dict(
        ATTENTION,
        intermediate_size=1024,
        intermediate_size_mlp=2048,
        num_hidden_layers=6,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=2048,
        max_position_embeddings=2048,
    ),
)


def nbytes(model: PreTrainedModel) -> int:
    """Bytes of the parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def load_ours(model: SavedModel, folder: Path, precision: str, **options) -> PreTrainedModel:
    """Load a folder into our class.

    Args:
        model: the saved model.
        folder: its folder.
        precision: "float32", "bfloat16", "int8" or "int4"; the last two quantize while they load.
        options: of `QuantizationConfig`.
    """
    if precision in ("int4", "int8"):
        config = llamoe.QuantizationConfig(precision, **options)
        loaded = model.ours.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    else:
        loaded = model.ours.from_pretrained(folder, dtype=getattr(torch, precision))
    return loaded.eval()


def load_packed(model: SavedModel, folder: Path, precision: str) -> PreTrainedModel:
    """As `load_ours`, from a folder in this precision beside the first one, which is written if it is not there.

    So are models that people have, and llama.cpp's files: mapped, and not made of others while they load.
    """
    if precision == "float32":
        return load_ours(model, folder, precision)
    own = folder.with_name(f"{folder.name}-{precision}")
    if not own.exists():
        load_ours(model, folder, precision).save_pretrained(own)
    return model.ours.from_pretrained(own, dtype="auto").eval()
