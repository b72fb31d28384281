"""LoRA adapters of peft equal the reference with merged weights; saved, loaded, moved to stock and back.

Shapes and suffixes: E experts, r rank.
"""

import copy
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ..batch import Fed, check, draw_batch
from ..draw import chance
from ..judge import LOG, JudgeIsWrong, Wrong
from ..subject import Subject, draw_subject

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FACTOR = re.compile(r"^base_model\.model\.(.+?)((?:\.base_layer)*)\.lora_A\.[^.]+\.weight$")


def linear_names(subject: Subject) -> list[str]:
    return LINEAR if subject.has_linear_feed_forward else LINEAR[:4]


def draw_lora(rng: random.Random, subject: Subject) -> LoraConfig:
    linear, is_mixtral = linear_names(subject), subject.fields["model_type"] == "mixtral"
    options: dict[str, Any] = {
        "r": rng.choice([1, 2, 3, 4]),
        "lora_alpha": rng.choice([1, 6, 8]),
        "use_rslora": chance(rng, 0.2),
        "task_type": rng.choice(["CAUSAL_LM", None]),
        "target_modules": sorted(rng.sample(linear, rng.randint(1, len(linear))))
        if chance(rng, 0.7)
        else "all-linear",
    }
    if subject.has_mixture and chance(rng, 0.6):
        # Of Mixtral peft takes "all-linear" for experts and routers, too, and knows their names of transformers 4.
        if not is_mixtral:
            options["target_parameters"] = rng.sample(EXPERTS, rng.choice([1, 2, 2]))
        elif options["target_modules"] != "all-linear":
            if chance(rng, 0.6):
                options["target_parameters"] = rng.sample(EXPERTS, rng.choice([1, 2, 2]))
            else:
                options["target_modules"] += rng.choice(
                    [["w1", "w3"], ["w2"], ["gate"], ["gate", "w1", "w2", "w3"]]
                )
    return LoraConfig(**options)


def draw_factors(model: nn.Module, seed: int) -> nn.Module:
    """Draw all factors, since new adapters have one factor at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.6 * noise * parameter.shape[-1] ** -0.5)
    return model.eval()


def scaling(config: LoraConfig, times: int = 1) -> float:
    """Factor of a product; `times` is 2 where peft joins two matrices of Mixtral, and doubles rank and alpha."""
    return times * config.lora_alpha / ((times * config.r) ** 0.5 if config.use_rslora else times * config.r)


def merged(
    subject: Subject,
    weights: dict[str, torch.Tensor],
    adapted: nn.Module,
    config: LoraConfig,
    is_ours: bool = True,
) -> dict[str, torch.Tensor]:
    """Weights with the adapter's product added; of a stack each expert's own.

    For stacks `[E, in, out]`, our A `[E * r, in]` is on the input side, with the expert as the slower index. Our B
    `[out, r * E]` is on the output side, with the expert as the faster index. peft does not know that stock's stacks
    are input-first, and swaps the two. Mixtral's stacks `[E, out, in]` are alike in both.
    """
    is_output_first = subject.judge.decoder.experts_are_output_first
    result, state = (
        dict(weights),
        {name: value.detach().double() for name, value in adapted.state_dict().items()},
    )
    for key, a in state.items():
        match = FACTOR.match(key)
        if match is None:
            continue
        b = state[key.replace("lora_A", "lora_B")]
        name = match[1]
        if not name.endswith("experts"):
            result[f"{name}.weight"] = result[f"{name}.weight"] + scaling(config) * b @ a
            continue
        sizes = a.shape[1], b.shape[0]
        for target in ("gate_up_proj", "down_proj"):
            stack = result[f"{name}.{target}"]
            experts, rows, columns = stack.shape
            is_turned = is_ours and not is_output_first
            if sizes == ((rows, columns) if is_turned else (columns, rows)):
                a_E, b_E = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
                change = (b_E @ a_E).mT if is_turned else b_E @ a_E
                result[f"{name}.{target}"] = stack + scaling(config, len(a_E[0]) // config.r) * change
                break
    return result


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Sizes that tell the two stacks and their sides apart; other tests cover equal sizes.
    width = rng.choice([4, 7, 12])
    subject = draw_subject(
        rng,
        seed,
        dtypes=["float32"],
        intermediate_size=width,
        experts=[None],
    )
    if subject.fields["hidden_size"] in (width, 2 * width):
        return
    config = draw_lora(rng, subject)
    batch = draw_batch(
        rng,
        generator,
        subject.fields["vocab_size"],
        ["plain", "left", "packed"],
        30,
        subject.fields["pad_token_id"],
    )
    notes |= {**subject.notes, "batch": batch.kind, "number": subject.fields.get("num_local_experts")}
    notes |= {
        "modules": sorted(config.target_modules)
        if isinstance(config.target_modules, set)
        else config.target_modules,
        "parameters": config.target_parameters,
    }
    plain = copy.deepcopy(subject.model)
    model = draw_factors(get_peft_model(subject.model, copy.deepcopy(config)), seed)
    weights = subject.judge.decoder.weights
    subject.judge.decoder.weights = merged(subject, weights, model, config)
    with torch.no_grad():
        compare(subject, model, batch, "adapted")
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            model.save_pretrained(place / "adapter")
            again = copy.deepcopy(plain)
            if chance(rng, 0.5):
                again = PeftModel.from_pretrained(again, place / "adapter")
            else:
                again.load_adapter(place / "adapter")
            compare(subject, again, batch, "loaded again")
            if chance(rng, 0.5):
                compare(subject, model.merge_and_unload(), batch, "merged")
            if subject.is_stock_right(batch):
                stock = subject.stock_of(plain)
                across(rng, subject, config, batch, plain, stock, place, weights, seed)


def compare(
    subject: Subject, model: nn.Module, batch: Any, what: str, error: type[Exception] = Wrong
) -> None:
    with LOG.recording() as calls:
        logits = model(**batch.inputs()).logits
    fed = Fed.of(batch, logits, calls, batch.reach())
    if error is JudgeIsWrong or len(calls) == 0:
        fed.choices = None
    check(fed, subject.judge, what, error)


def across(rng, subject, config, batch, plain, stock, place, weights, seed) -> None:
    """Train on ours and read with stock, which knows our experts' adapters of Mixtral only; and the other way round."""
    is_mixtral = subject.fields["model_type"] == "mixtral"
    if (is_mixtral or not config.target_parameters) and chance(rng, 0.5):
        compare(
            subject,
            PeftModel.from_pretrained(copy.deepcopy(stock), place / "adapter"),
            batch,
            "ours on stock",
            JudgeIsWrong,
        )
    options = {
        name: getattr(config, name)
        for name in ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
    }
    options["task_type"] = "CAUSAL_LM"
    if options["target_modules"] == "all-linear" and not is_mixtral:
        # Stock's router is a linear layer that peft cannot wrap.
        options["target_modules"] = linear_names(subject)
    trained = LoraConfig(**copy.deepcopy(options))
    other = draw_factors(get_peft_model(stock, copy.deepcopy(trained)), seed + 1)
    subject.judge.decoder.weights = merged(subject, weights, other, trained, is_ours=False)
    compare(subject, other, batch, "stock with its adapter", JudgeIsWrong)
    other.save_pretrained(place / "other")
    again = copy.deepcopy(plain)
    again = (
        PeftModel.from_pretrained(again, place / "other")
        if chance(rng, 0.5)
        else _loaded(again, place / "other")
    )
    compare(subject, again, batch, "stock's on ours")


def _loaded(model: Any, folder: Path) -> Any:
    model.load_adapter(folder)
    return model
