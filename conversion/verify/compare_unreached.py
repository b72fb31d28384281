"""Compares what random tokens do not reach: embedding rows that no token read, experts that no token was sent to.

Where two models' outputs agree, their weights may still differ in such places:

* An embedding row is compared by its largest difference, divided by `sqrt(mean(row ** 2) + rms_norm_eps)`, the
  divisor of the first norm.
* An expert is compared by its outputs for a few random rows that went through the norm before it: their difference,
  divided by the outputs' root mean square. A router row is compared by the length of the difference, divided by its
  own length. Permuted experts with equally permuted router rows are the same function, and so are experts with
  permuted inner channels.
* Experts that only one side has, or that both have in different numbers, change nothing if their outputs are zero.

This holds where both models' hidden states are equal. Where outputs agree and hidden states differ, the function may be
written in another basis, and rows and experts cannot be compared one by one.
"""

from collections.abc import Mapping, Sequence

import torch

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.checks import listed
from ...modeling.moe import MixtureOfExperts
from .report import Verification
from .run_streamed import ExpertsOnDemand, Weights

# Names listed in a sentence.
_SHOWN = 8
# Random rows for each expert.
_ROWS = 8
# Largest mean difference of hidden states in the same basis, in standard deviations; in another basis it is about one.
_SAME_BASIS = 0.1
_EXPERTS = ".experts.gate_up_proj"
_OF_PICTURES = ("vision_model.", "multi_modal_projector")
_EMBEDDING = "embed_tokens.weight"

Answer = tuple[bool | None, str]
"""Whether the function is the same, None if unknown; and the reason."""


def compare_unreached(
    sides: tuple[Weights, Weights],
    result: Verification,
    inputs: Mapping[str, torch.Tensor],
    rows: torch.Tensor | None,
    experts: Mapping[str, set[int]],
    seed: int,
) -> list[Answer]:
    """Compare what the run did not reach; both models' outputs agree.

    Args:
        sides: both models after the run.
        result: findings of the comparison of weights and of the run.
        inputs: the first model's inputs of the run.
        rows: difference of each common embedding row, or None where the embeddings' widths differ.
        experts: key of a stack to the experts whose elements differ.
        seed: random seed of the rows that experts are compared with.

    Returns:
        an answer for each part that differs, or may differ. The tolerance has the units of the module's docstring.
    """
    if isinstance(sides[0].config, LlamoeVisionConfig):
        # A picture reaches every weight of a tower.
        return []
    is_one_basis = bool(result.layers) and all(
        part.mean_abs <= _SAME_BASIS * part.std
        for part in result.layers
        if not part.name.startswith(_OF_PICTURES)
    )
    answers: list[Answer] = []
    differing = [*result.tensors, *result.shapes, *result.only_in_a, *result.only_in_b]
    keys = [key for key in differing if key.startswith(_OF_PICTURES)]
    if keys and "pixel_values" not in inputs and all(isinstance(side.config, LlamoeConfig) for side in sides):
        found = "no picture was run, since a vocabulary has no token for it, and these differ"
        answers.append((None, f"{found}: {listed(keys, _SHOWN)}"))
    if inputs["input_ids"].shape[1] < 2:
        answers.append((None, "a row of one token shows nothing of queries, keys and positions"))
    tokens = set(inputs["input_ids"].unique().tolist())
    if rows is not None:
        answers += _of_embeddings(sides, rows, tokens, result.tolerance, is_one_basis)
    elif any(key.endswith(_EMBEDDING) for key in differing):
        found = "the embeddings have rows of two widths"
        answers.append((None, f"{found}: other tokens than the {len(tokens)} were not compared"))
    names = {
        key.removesuffix(".gate_up_proj"): None
        for side in sides
        for key in side.tensors
        if key.endswith(_EXPERTS)
    }
    for name in names:
        layer = _Layer(name, sides, seed)
        if answer := layer.compare(experts, result.tolerance, is_one_basis):
            answers.append(answer)
            if answer[0] is False:
                break
    return answers


def wanted_tokens(rows: torch.Tensor | None) -> list[int]:
    """Embedding rows that differ, the largest difference first."""
    if rows is None:
        return []
    order = rows.argsort(descending=True, stable=True)
    return order[: int((rows > 0).sum())].tolist()


def _of_embeddings(
    sides: tuple[Weights, Weights], rows: torch.Tensor, tokens: set[int], tolerance: float, is_one_basis: bool
) -> list[Answer]:
    # Picture features replace the embedding of the image token, so its row is never read.
    known = tokens | {getattr(side.config, "image_token_index", -1) for side in sides}
    beyond = [row for row in wanted_tokens(rows) if row not in known and not rows[row] <= tolerance]
    if not beyond:
        return []
    worst = f"{_names('embedding row', sorted(beyond))}, which no random token read, differ by as much as "
    worst += f"{rows[beyond[0]].item():.3g} of the row's size"
    return [_difference(worst, is_one_basis)]


def _difference(found: str, is_one_basis: bool) -> Answer:
    if is_one_basis:
        return False, found
    return None, f"{found}; hidden states differ, so that this may be another basis of the same function"


class _Layer:
    """The experts and routers of one layer in both models; one of the models may have none."""

    def __init__(self, name: str, sides: tuple[Weights, Weights], seed: int):
        self.name, self.sides = name, sides
        self.label = name.removeprefix("language_model.").removeprefix("model.").removesuffix(".experts")
        stacks = [side.tensors.get(f"{name}.gate_up_proj") for side in sides]
        self.counts = [0 if stack is None else stack.shape[0] for stack in stacks]
        # Of the sides that have experts here.
        self.modules: dict[int, ExpertsOnDemand] = {}
        self.inputs: dict[int, torch.Tensor] = {}
        self.routers: dict[int, torch.Tensor] = {}
        for index, side in enumerate(sides):
            if not self.counts[index]:
                continue
            config = side.config.get_text_config()
            with torch.device("meta"):
                self.modules[index] = ExpertsOnDemand(MixtureOfExperts(config).experts, name, side)
            # Scaled by the norm's weight, which may instead have been multiplied into the matrices after the norm.
            feed_forward = name.removesuffix(".experts")
            scale = side.read(f"{feed_forward.rpartition('.')[0]}.post_attention_layernorm.weight")
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randn(_ROWS, config.hidden_size, generator=generator)
            self.inputs[index] = rows.to(side.device) * scale
            self.routers[index] = side.read(f"{feed_forward}.{config.router_name}.weight") * scale

    def compare(
        self, differing: Mapping[str, set[int]], tolerance: float, is_one_basis: bool
    ) -> Answer | None:
        """The difference between the layer's experts; None if there is none."""
        texts = [side.config.get_text_config() for side in self.sides]
        if self.counts[0] != self.counts[1]:
            return self._compare_numbers(f"other numbers of experts ({self.counts[0]} and {self.counts[1]})")
        if texts[0].num_experts_per_tok != texts[1].num_experts_per_tok:
            return self._compare_numbers("tokens that are sent to other numbers of experts")
        if texts[0].hidden_size != texts[1].hidden_size:
            return self._compare_numbers("other hidden sizes")
        partners, alone = _pair(self.routers[0], self.routers[1], tolerance)
        if alone:
            if all(self._are_zero(side, range(self.counts[side])) for side in (0, 1)):
                return None
            found = f"{self.label}: rows of the router differ ({_names('expert', alone)})"
        else:
            unequal = {
                *differing.get(f"{self.name}.gate_up_proj", ()),
                *differing.get(f"{self.name}.down_proj", ()),
            }
            beyond = self._compare_experts(partners, unequal, tolerance)
            if not beyond:
                return None
            worst = max(beyond.values(), key=lambda size: (size != size, size))
            found = f"{self.label}: {_names('expert', sorted(beyond))}, to which no token was sent: "
            found += f"outputs for random rows differ by as much as {worst:.3g} of their size"
        return _difference(found, is_one_basis)

    def _compare_experts(
        self, partners: Sequence[int], unequal: set[int], tolerance: float
    ) -> dict[int, float]:
        """Experts of the first side whose outputs differ from their partners', with the difference."""
        shapes = [side.tensors[f"{self.name}.down_proj"].shape for side in self.sides]
        is_all = shapes[0] != shapes[1] or not torch.equal(self.inputs[0], self.inputs[1])
        used = [side.used.get(self.name, set()) for side in self.sides]
        beyond = {}
        for expert, partner in enumerate(partners):
            is_reached = expert in used[0] and partner in used[1]
            if is_reached or not (is_all or expert != partner or expert in unequal):
                continue
            mine, its = self._output(0, expert), self._output(1, partner)
            size = max(mine.square().mean().sqrt().item(), its.square().mean().sqrt().item())
            difference = (mine - its).abs().max().item()
            if not difference <= tolerance * size:
                beyond[expert] = difference / size
        return beyond

    def _compare_numbers(self, what: str) -> Answer | None:
        """Compare experts without partners: experts whose outputs are zero change nothing."""
        used = [side.used.get(self.name, set()) for side in self.sides]
        both, all_known = all(self.counts), True
        for side, count in enumerate(self.counts):
            others = sorted(set(range(count)) - used[side])
            if not count or not (both or others):
                # The outputs have compared all experts of this side.
                continue
            for expert in others:
                if self._are_zero(side, [expert]):
                    continue
                found = f"{self.label}: there are {what}, and expert {expert} of {'ab'[side]}, to which no token was "
                found += "sent, "
                if not both and self._are_zero(side, used[side]):
                    return False, f"{found}is not zero, as the others are"
                return None, f"{found}cannot be compared"
            all_known = all_known and self._are_zero(side, used[side])
        return (
            None if all_known else (None, f"{self.label}: there are {what}, and not all tokens can be tried")
        )

    def _are_zero(self, side: int, experts: Sequence[int] | set[int]) -> bool:
        return not any(self._output(side, expert).any() for expert in experts)

    def _output(self, side: int, expert: int) -> torch.Tensor:
        """Outputs `[_ROWS, H]` of an expert for the random rows."""
        rows = self.inputs[side]
        chosen = torch.full((len(rows), 1), expert, device=rows.device)
        return self.modules[side](rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))


def _pair(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> tuple[list[int], list[int]]:
    """Match each row of a router `[E, H]` with an equal row of another router: the same index, else any row left over.

    Returns:
        the partner of each row, and the rows without a partner.
    """
    partners = list(range(len(a)))
    sizes = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
    alone = [row for row in partners if not (a[row] - b[row]).norm() <= tolerance * sizes[row]]
    free, without = list(alone), []
    for row in alone:
        size = a[row].norm().clamp_min(1e-30)
        distances = [(a[row] - b[other]).norm() / size for other in free]
        nearest = min(range(len(free)), key=lambda at: distances[at])
        if not distances[nearest] <= tolerance:
            without.append(row)
            continue
        partners[row] = free.pop(nearest)
    return partners, without


def _names(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {listed([f'{number:,}' for number in numbers], _SHOWN)}"
