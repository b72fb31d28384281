"""Small complete folders of every kind that is damaged, as bytes, with their tensors."""

import copy
import functools
import json
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.conversions import META_LLAMA_2, META_MAVERICK

import llamoe
from llamoe.conversion import convert

from .draw import draw_weights
from .kinds.adapters import draw_factors

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llamoe-tiny"
COMPANIONS = ("chat_template.jinja", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
DENSE = dict(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)
TEXT = DENSE | dict(
    intermediate_size=12,
    intermediate_size_mlp=28,
    num_hidden_layers=3,
    num_local_experts=3,
    interleave_moe_layer_step=2,
    attention_chunk_size=16,
)
VISION = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=28,
    patch_size=7,
    projector_input_dim=20,
    projector_output_dim=20,
    vision_output_dim=20,
)
META_MOE = {"num_experts": 3, "top_k": 1, "interleave_moe_layer_step": 2}
EXPERTS = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]


@dataclass
class Original:
    """A folder.

    Attributes:
        name: name of its kind.
        files: file name to content.
        tensors: key in the file to tensor.
        model_class: class that loads it; for an adapter, the class of its base model; None for Meta's folders.
        base: base model of an adapter.
    """

    name: str
    files: dict[str, bytes]
    tensors: dict[str, torch.Tensor]
    model_class: Any
    base: Any = None

    @property
    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith((".safetensors", ".bin", ".pth"))]

    @property
    def json_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(".json")]

    def write(self, folder: Path, changes: dict[str, bytes | None]) -> Path:
        """Write the folder with some files changed; None for a missing file."""
        folder.mkdir(parents=True)
        for name, content in (self.files | changes).items():
            if content is not None:
                (folder / name).write_bytes(content)
        return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def save_bin(model: Any, folder: Path, shards: int, legacy: bool = False) -> None:
    """Write pickles as torch does; for several, also the index that transformers reads."""
    model.config.save_pretrained(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(state)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = names[number::shards]
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@functools.cache
def originals() -> dict[str, Original]:
    """All originals, by name."""
    torch.manual_seed(0)
    dense = draw_weights(llamoe.LlamoeDenseForCausalLM(llamoe.LlamoeDenseConfig(**DENSE)), 1)
    text = draw_weights(llamoe.LlamoeForCausalLM(llamoe.LlamoeTextConfig(**TEXT)), 2)
    whole_config = llamoe.LlamoeConfig(
        text_config=TEXT | {"vocab_size": 259}, vision_config=VISION, image_token_index=200
    )
    whole = draw_weights(llamoe.LlamoeForConditionalGeneration(whole_config), 3)
    result = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, model, options in (
            ("one", dense, {}),
            ("shards", text, {"max_shard_size": "12KB"}),
            ("stock", text, {"layout": "stock"}),
            ("pictures", whole, {"max_shard_size": "60KB"}),
        ):
            model.generation_config.max_new_tokens = 5
            model.save_pretrained(folder / name, **options)
            if name == "pictures":
                for file in COMPANIONS:
                    shutil.copy(EXAMPLE / file, folder / name / file)
            result[name] = Original(name, read(folder / name), _state(model), type(model))
        for name, model, shards, legacy in (
            ("bin", dense, 1, False),
            ("bins", text, 3, False),
            ("legacy", dense, 1, True),
        ):
            (folder / name).mkdir()
            save_bin(model, folder / name, shards, legacy)
            result[name] = Original(name, read(folder / name), _state(model), type(model))
        convert(folder / "shards", folder / "split", experts="split", shard_size="12KB")
        result["split"] = Original("split", read(folder / "split"), _state(text), type(text))
        for name, case, params, shards in (
            ("meta", META_LLAMA_2, {}, 2),
            ("meta4", META_MAVERICK, {"head_dim": 4, "n_kv_heads": 2, "moe_args": META_MOE}, 1),
        ):
            params = case.params | {"dim": 24, "n_layers": 2, "multiple_of": 4} | params
            case = replace(case, params=params, vocabulary=2305 if name == "meta4" else case.vocabulary)
            case.write(folder / name, case.weights(), shards)
            convert(folder / name, folder / f"{name} converted")
            tensors = load_file(folder / f"{name} converted" / "model.safetensors")
            result[name] = Original(name, read(folder / name), tensors, None)
        for name, safe in (("adapter", True), ("adapter-bin", False)):
            config = LoraConfig(
                r=2, target_modules=["q_proj", "up_proj"], target_parameters=EXPERTS, task_type="CAUSAL_LM"
            )
            adapted = draw_factors(get_peft_model(copy.deepcopy(text), config), 4)
            adapted.save_pretrained(folder / name, safe_serialization=safe)
            tensors = {key: value.clone() for key, value in adapted.state_dict().items() if ".lora_" in key}
            result[name] = Original(name, read(folder / name), tensors, type(text), text)
    for original in result.values():
        original.files.pop("README.md", None)
    return result


def _state(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def draw_original(rng: random.Random, *names: str) -> Original:
    return originals()[rng.choice(names or list(originals()))]
