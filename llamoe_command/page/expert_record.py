"""Record which experts were chosen for each token of an answer and for each part of its picture.

Shapes: L mixture layers, T tokens of prompt and answer, K experts of a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from llamoe import ExpertTrace


@dataclass(frozen=True)
class Picture:
    """The last picture of a prompt as the model sees it.

    Attributes:
        tiles: pictures of equal size: first the parts of the picture, row by row, last the whole picture.
        firsts: position of each tile's first token in the prompt; its other tokens follow.
        rows: number of rows of parts; 0 if the picture was not split.
        side: number of tokens along the side of a tile.
    """

    tiles: list[Image.Image]
    firsts: list[int]
    rows: int
    side: int

    def cut(self, is_whole: bool) -> list[list[int]]:
        """Return the indices of tiles by rows: of the whole picture alone, or of the parts it was split into."""
        if is_whole or not self.rows:
            return [[len(self.tiles) - 1]]
        columns = (len(self.tiles) - 1) // self.rows
        return [list(range(row * columns, (row + 1) * columns)) for row in range(self.rows)]


# Compared by identity: gradio hashes values that it stores, and `==` of tensors returns a tensor.
@dataclass(frozen=True, eq=False)
class ExpertRecord:
    """The experts of every token of a prompt and its answer.

    Attributes:
        layers: names of the mixture layers.
        num_experts: routed experts of a layer.
        experts: the chosen experts, best first, int64 `[L, T, K]`. The last token of an answer is missing: it was
            generated, but no forward pass computed it.
        scores: the router's weights of these experts, float32 `[L, T, K]`.
        num_prompt: number of tokens of the prompt.
        is_image: whether a token stands for a part of a picture, bool `[T]`.
        answer: text of each token of the answer.
        picture: the last picture of the prompt, or None.
    """

    layers: list[str]
    num_experts: int
    experts: torch.Tensor
    scores: torch.Tensor
    num_prompt: int
    is_image: torch.Tensor
    answer: list[str]
    picture: Picture | None

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

    def patches(self, layer: int, is_whole: bool = True) -> torch.Tensor:
        """Return the best expert of each token of the tiles of `Picture.cut`, `[rows * side, columns * side]`."""
        firsts, side, chosen = self.picture.firsts, self.picture.side, self.experts[layer, :, 0]
        tiles = [
            [chosen[firsts[tile] : firsts[tile] + side * side].view(side, side) for tile in row]
            for row in self.picture.cut(is_whole)
        ]
        return torch.cat([torch.cat(row, 1) for row in tiles])

    def answered(self, layer: int) -> list[tuple[str, list[tuple[int, float]]]]:
        """Return each token of the answer with its experts and their weights; none for tokens not computed."""
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
        trace: of the generation, for one row.
        config: of the model.
        processor: of the model; used only if there is a picture.
        inputs: of the model; with `pixel_values` if there is a picture.
        answer: text of each token of the answer.
    """
    text = config.get_text_config()
    experts = trace.experts()
    prompt = inputs["input_ids"][0].cpu()
    is_image = torch.zeros(experts.shape[1], dtype=torch.bool)
    picture = None
    if "pixel_values" in inputs:
        is_image[: len(prompt)] = prompt == config.image_token_id
        picture = _last_picture(prompt, is_image, config, processor, inputs["pixel_values"])
    return ExpertRecord(
        layer_names(config),
        text.num_local_experts,
        experts,
        trace.scores(),
        len(prompt),
        is_image,
        answer,
        picture,
    )


def _last_picture(
    prompt: torch.Tensor, is_image: torch.Tensor, config: Any, processor: Any, pixels: torch.Tensor
) -> Picture:
    ids = processor.tokenizer.convert_tokens_to_ids
    begin = int((prompt == ids(processor.start_of_img_token)).nonzero()[-1])
    size = config.vision_config.tokens_per_tile
    firsts = is_image[begin:].nonzero()[::size, 0] + begin
    return Picture(
        [_tile_of(tile, processor.image_processor) for tile in pixels[-len(firsts) :]],
        firsts.tolist(),
        int((prompt[begin:] == ids(processor.tile_global_token)).sum()),
        round(size**0.5),
    )


def _tile_of(pixels: torch.Tensor, image_processor: Any) -> Image.Image:
    """Convert normalized pixels `[3, size, size]` to a picture."""
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (image_processor.image_mean, image_processor.image_std)
    )
    shown = (pixels.float().cpu() * std + mean).clamp(0, 1) * 255
    return Image.fromarray(shown.round().byte().permute(1, 2, 0).numpy())
