"""Record which experts were chosen for each token of an answer and for each part of its picture.

Shapes: L mixture layers, T tokens of prompt and answer, K experts of a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from llamoe import ExpertTrace


# Compared by identity: gradio hashes values that it stores, and `==` of tensors returns a tensor.
@dataclass(frozen=True, eq=False)
class ExpertRecord:
    """The experts of every token of a prompt and its answer.

    Attributes:
        layers: names of the mixture layers.
        num_experts: number of routed experts of a layer.
        experts: the chosen experts, best first, int64 `[L, T, K]`. The last token of the answer is missing: it was
            generated, but no forward pass computed it.
        scores: the router's weights of these experts, float32 `[L, T, K]`.
        num_prompt: number of tokens of the prompt.
        is_image: whether a token stands for a part of a picture, bool `[T]`.
        answer: text of each token of the answer.
        picture: the last picture of the prompt, resized to one tile; None without a picture.
        side: number of tokens along a side of `picture`, which has the last tokens of `is_image`; 0 without a picture.
    """

    layers: list[str]
    num_experts: int
    experts: torch.Tensor
    scores: torch.Tensor
    num_prompt: int
    is_image: torch.Tensor
    answer: list[str]
    picture: Image.Image | None = None
    side: int = 0

    def shares(self) -> dict[str, torch.Tensor]:
        """Return each expert's share of the choices, `[L, num_experts]`, for tokens of picture, prompt and answer."""
        in_prompt = torch.arange(len(self.is_image)) < self.num_prompt
        kinds = {"picture": self.is_image, "prompt": in_prompt & ~self.is_image, "answer": ~in_prompt}
        return {
            kind: torch.stack(
                [layer[chosen].flatten().bincount(minlength=self.num_experts) for layer in self.experts]
            )
            / (int(chosen.sum()) * self.experts.shape[-1])
            for kind, chosen in kinds.items()
            if chosen.any()
        }

    def patches(self, layer: int) -> torch.Tensor:
        """Return the best expert of each part of the picture in mixture layer `layer`, `[side, side]`."""
        return self.experts[layer, self.is_image, 0][-(self.side**2) :].view(self.side, self.side)

    def answered(self, layer: int) -> list[tuple[str, list[tuple[int, float]]]]:
        """Return each token of the answer with its experts and their weights; the last token has none."""
        rows = zip(
            self.experts[layer, self.num_prompt :].tolist(),
            self.scores[layer, self.num_prompt :].tolist(),
            strict=True,
        )
        chosen = [list(zip(experts, scores, strict=True)) for experts, scores in rows]
        chosen += [[] for _ in range(len(self.answer) - len(chosen))]
        return list(zip(self.answer, chosen, strict=True))


def layer_names(config: Any) -> list[str]:
    """Return the names of a model's mixture layers in their order."""
    return [f"layer {index}" for index in sorted(config.get_text_config().moe_layers)]


def make_record(
    trace: ExpertTrace, config: Any, processor: Any, inputs: dict[str, torch.Tensor], answer: list[str]
) -> ExpertRecord:
    """Build the record of an answer.

    Args:
        trace: trace of the generation, for one row.
        config: configuration of the model.
        processor: processor of the model; used only if there is a picture.
        inputs: inputs of the model; with `pixel_values` if there is a picture.
        answer: text of each token of the answer.
    """
    experts = trace.experts()
    prompt = inputs["input_ids"][0].cpu()
    is_image = torch.zeros(experts.shape[1], dtype=torch.bool)
    picture, side = None, 0
    if "pixel_values" in inputs:
        is_image[: len(prompt)] = prompt == config.image_token_id
        # The last tile of the last picture is the whole picture, even if it is split into parts.
        picture = _picture_of(inputs["pixel_values"][-1], processor.image_processor)
        side = round(config.vision_config.tokens_per_tile**0.5)
    return ExpertRecord(
        layer_names(config),
        config.get_text_config().num_local_experts,
        experts,
        trace.scores(),
        len(prompt),
        is_image,
        answer,
        picture,
        side,
    )


def _picture_of(pixels: torch.Tensor, image_processor: Any) -> Image.Image:
    """Convert normalized pixels `[3, size, size]` to a picture."""
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (image_processor.image_mean, image_processor.image_std)
    )
    shown = (pixels.float().cpu() * std + mean).clamp(0, 1) * 255
    return Image.fromarray(shown.round().byte().permute(1, 2, 0).numpy())
