"""Build small models of all families, their inputs and adapters; logits have a deviation of about one."""

from pathlib import Path
from typing import Any

import torch

import llamoe

SMALL = dict(
    hidden_size=128, intermediate_size=192, num_attention_heads=8, num_key_value_heads=2, head_dim=32
)
SMALL |= dict(vocab_size=503, num_hidden_layers=4, max_position_embeddings=512, pad_token_id=0)
MIXTURE = dict(num_local_experts=6, intermediate_size_mlp=320, attention_chunk_size=32, floor_scale=8)
VISION = dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=56
)
VISION |= dict(patch_size=14, projector_input_dim=64, projector_output_dim=64, vision_output_dim=64)


def configs() -> dict[str, tuple[type, Any]]:
    """Return the class and the configuration of a small model of each family, by the family's name."""
    text = {**SMALL, **MIXTURE}
    multimodal = llamoe.LlamoeConfig(
        text_config={**text, "num_experts_per_tok": 1},
        vision_config=VISION,
        image_token_index=501,
        boi_token_index=499,
        eoi_token_index=500,
    )
    mixtral = {**SMALL, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}
    return {
        "dense": (llamoe.LlamoeDenseForCausalLM, llamoe.LlamoeDenseConfig(**SMALL)),
        "mixtral": (llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig(**mixtral)),
        "llama4": (llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig(**text)),
        "llama4-pictures": (llamoe.LlamoeForConditionalGeneration, multimodal),
    }


def small_model(family: str) -> Any:
    """Build a small model on the CPU with random weights, scaled so that logits have a deviation of about one."""
    model_class, config = configs()[family]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                inputs = (
                    weight.shape[-2] if ".experts." in name and "mixtral" not in family else weight.shape[-1]
                )
                weight.normal_(std=1.0 if "embed_tokens" in name else inputs**-0.5)
            elif not name.endswith("bias"):
                weight.normal_(1.0, 0.1)
    return model


def inputs_of(family: str, length: int = 45) -> dict[str, torch.Tensor]:
    """Draw the inputs of two rows; the second has left padding, the first a picture if the family takes pictures."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 490, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family == "llama4-pictures":
        ids[0, 2:6] = 501
        inputs["pixel_values"] = torch.randn(1, 3, 56, 56, generator=generator)
    return inputs


def adapted(model: Any) -> Any:
    """Add LoRA adapters to a model; their B factors are random, since zeros would change no output."""
    from peft import get_peft_model

    torch.manual_seed(2)
    with_lora = get_peft_model(model, llamoe.lora_config(model, r=8))
    with torch.no_grad():
        for name, weight in with_lora.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    return with_lora.eval()


def saved(parent: Path, family: str) -> Path:
    """Return the folder of a saved small model in `parent`; write it if it is missing."""
    folder = parent / family
    if not folder.exists():
        small_model(family).save_pretrained(folder)
    return folder
