"""Measure decoders at the sizes of 7B models in each format: a token after cached ones, also with LoRA, and a prompt.

The models have random weights: Mistral 7B with three layers, and Mixtral with two layers and four experts, each with
embedding and head. Outputs are not compared, as quantized models compute different functions. llama.cpp takes part if
it is installed. Its q4_1 is like our int4: 5 bits a weight, with a scale and an offset for each 32 weights. q4_0 has no
offsets: 4.5 bits a weight.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import (
    AutoTokenizer,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import llamoe

from .harness import OURS, STOCK, Case, LeftOut
from .llama_cpp_models import LlamaCppModel, find_converter, make_files
from .random_models import build
from .weights import Setting

SETTING = Setting(torch.device("cpu"), torch.bfloat16)
# Numbers of cached tokens, lengths of prompts, and number of tokens decoded in a run.
BEHIND, PROMPTS, STEPS = (64, 2048), (64, 512), 4
TOKENIZER = Path(__file__).parents[1] / "examples/llamoe-tiny"


def sizes_of_7b() -> Iterator[Case]:
    """Yield the cases of Mistral and Mixtral with layers of 7B's sizes."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    sizes |= dict(vocab_size=32000, max_position_embeddings=4096, sliding_window=None, head_dim=128)
    yield from cases("Mistral", MistralForCausalLM, MistralConfig(**sizes, num_hidden_layers=3))
    mixture = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    yield from cases("Mixtral", MixtralForCausalLM, mixture)


def cases(name: str, stock_class: type[PreTrainedModel], config: Any) -> Iterator[Case]:
    """Yield one model's cases: transformers' in bfloat16, ours in bfloat16, int8 and int4, llama.cpp's in its types."""
    ours = {
        weights: from_files(build(SETTING, llamoe.from_stock(config), weights))
        for weights in ("bf16", "int8", "int4")
    }
    with torch.device("meta"):
        stock = stock_class(config)
    stock.load_state_dict(dict(ours["bf16"].named_parameters()), assign=True)
    # Build the rotary tables again: on the meta device they have no values.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    models: dict[str, Any] = {STOCK: stock.eval(), OURS: ours["bf16"]}
    models |= {f"{OURS}, {weights}": ours[weights] for weights in ("int8", "int4")}
    with tempfile.TemporaryDirectory() as folder:
        models |= in_llama_cpp(ours["bf16"], Path(folder) / name)
        for past in BEHIND:
            ids = SETTING.tokens(1, past, config.vocab_size)
            yield _case(
                f"{name}, a token behind {past}", models, lambda each, ids=ids: token(each, ids), STEPS
            )
        for length in PROMPTS:
            ids = SETTING.tokens(1, length, config.vocab_size)
            yield _case(f"{name}, a prompt of {length}", models, lambda each, ids=ids: prompt(each, ids), 1)
    ids = SETTING.tokens(1, BEHIND[0], config.vocab_size)
    for weights in ("bf16", "int4"):
        plain = token(ours[weights], ids)
        adapted = get_peft_model(ours[weights], llamoe.lora_config(ours[weights])).eval()
        runs = {"without adapters": plain, OURS: token(adapted, ids)}
        yield Case(
            f"{name}, a token with LoRA, {weights}", runs, None, "without adapters", {OURS: 1.25}, parts=STEPS
        )


def from_files(model: PreTrainedModel) -> PreTrainedModel:
    """Save a model, and load it as users do, and as llama.cpp does: its weights are mapped files.

    Drawn weights lie in memory that torch allocates, whose small pages take longer to read.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=SETTING.dtype).eval()


def _case(name: str, models: dict[str, Any], run: Callable[[Any], Callable[[], Any]], parts: int) -> Case:
    runs = {who: run(model) for who, model in models.items()}
    return Case(name, runs, None, at_most={OURS: 1.03}, parts=parts)


def in_llama_cpp(model: PreTrainedModel, folder: Path) -> dict[str, LlamaCppModel]:
    """Return the model in llama.cpp, by GGUF type; no entries if llama.cpp is missing."""
    try:
        find_converter()
    except LeftOut as reason:
        print(f"llama.cpp is left out: {reason}", flush=True)
        return {}
    model.save_pretrained(folder, layout="stock")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return {f"llama.cpp, {kind}": LlamaCppModel(path) for kind, path in make_files(folder).items()}


def token(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that decodes `STEPS` tokens after the cached tokens `ids`, `[1, past]`."""
    if isinstance(model, LlamaCppModel):
        return model.token(ids[0].tolist(), STEPS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            model(input_ids=ids[:, :1], past_key_values=cache)
        cache.crop(-STEPS)

    return run


def prompt(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """Return a function that computes the logits of all tokens of a prompt `[1, length]`.

    All, as for the last token's logits llama.cpp would skip the last layer's feed-forward of other tokens: a quarter of
    the work of these models of three layers, but nearly nothing in a model of 32.
    """
    if isinstance(model, LlamaCppModel):
        return model.prompt(ids[0].tolist())
    return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False).logits)
