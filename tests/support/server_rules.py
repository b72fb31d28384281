"""What servers do with a model of ours before they run it: their rules for names of weights and for plans.

The rules are written again here: vLLM and SGLang are no dependencies, and cannot be imported without what they need on
a GPU. Where one of them is on the path, `published` reads the few functions of a rule out of its source, and runs them
without the rest, so that the rules here can be compared with it.

Sources: vLLM 0.33.0, `model_executor/models/transformers/base.py` (`Base._create_hf_to_vllm_mapper`) and
`model_executor/models/utils.py` (`WeightsMapper`); SGLang 0.5.23, `srt/models/transformers.py`.
"""

import ast
import collections.abc
import dataclasses
import itertools
import re
import typing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from transformers import conversion_mapping, core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def vllm_name(model, key: str, architectures: list[str]) -> str | None:
    """What vLLM's transformers backend calls a checkpoint's tensor; None where it drops it.

    Args:
        model: what `AutoModel.from_config` gives.
        key: of the checkpoint.
        architectures: of its config.json.
    """
    for renaming in _vllm_conversions(model, architectures):
        if isinstance(renaming, WeightRenaming):
            key, _ = renaming.rename_source_key(key)
    rules = dict.fromkeys(model._keys_to_ignore_on_load_unexpected or ())
    prefix = model.base_model_prefix
    if prefix and prefix != "model":
        rules[rf"^{prefix}\.(.+)"] = r"model.\1"
    own = [*model._modules, *model._parameters, *model._buffers]
    children = "|".join(name for name in own)
    rules[rf"^(?!model\.)(({children}).*)"] = r"model.\1"
    rules[rf"^(model\.)((?!{children}).+)"] = r"\2"
    rules[r"^model\.(.+\.)*(lm_head.+)"] = r"\2"
    for pattern, new in rules.items():
        if re.search(pattern, key):
            if new is None:
                return None
            key = re.sub(pattern, new, key)
    return key


def _vllm_conversions(model, architectures):
    conversions = list(get_model_conversion_mapping(model))
    present = {type(module).__name__ for module in model.modules()}
    for name in architectures:
        if name not in present:
            conversions.extend(get_checkpoint_conversion_mapping(name) or [])
    return conversions


# What the functions that `published` reads use of other modules.
NAMES_IN_SOURCES = {
    name: getattr(module, name)
    for module, names in (
        (collections.abc, ("Iterable", "Mapping")),
        (dataclasses, ("dataclass", "field", "replace")),
        (itertools, ("chain",)),
        (typing, ("Any", "Literal")),
        (core_model_loading, ("WeightRenaming",)),
        (conversion_mapping, ("get_checkpoint_conversion_mapping", "get_model_conversion_mapping")),
    )
    for name in names
} | {"re": re}


SGLANG_STYLES = {"colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate"}
SGLANG_OTHER_NAMES = {
    "colwiseparallel": "colwise",
    "packed_colwise": "colwise",
    "local_colwise": "colwise",
    "rowwiseparallel": "rowwise",
    "packed_rowwise": "rowwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "rowwise",
    "embedding_rowwise": "replicate",
    "isolated": "replicate",
    "local": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "moe_tp_experts": "replicate",
}


def sglang_style(style: str) -> str:
    """What SGLang's transformers backend makes of a style of a tensor parallel plan.

    Raises:
        ValueError: a style that it does not know, which ends the server.
    """
    style = style.lower().replace("-", "_")
    style = SGLANG_OTHER_NAMES.get(style, style)
    if style not in SGLANG_STYLES:
        raise ValueError(f"Unsupported TP style '{style}' for Transformers backend.")
    return style


# Beginnings of keys to what SGLang calls them, `MultiModalMixin` and `TransformersBase.hf_to_sglang_mapper`; of several
# that fit, the longest counts. Those that no model of ours has are left out.
SGLANG_MULTIMODAL_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "vision_model.": "model.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
}
SGLANG_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "model.model.": "model.",
    "model.lm_head.": "lm_head.",
    "model.score.": "classifier.",
    "transformer.": "model.",
    "model.": "model.",
    "lm_head.": "lm_head.",
    "score.": "classifier.",
    "": "model.",
}


def sglang_name(key: str, has_images: bool) -> str:
    """What SGLang's transformers backend calls a checkpoint's tensor."""
    prefixes = SGLANG_PREFIXES | (SGLANG_MULTIMODAL_PREFIXES if has_images else {})
    old = max(filter(key.startswith, prefixes), key=len)
    return prefixes[old] + key.removeprefix(old)


def published(package: str, file: str, *names: str) -> SimpleNamespace | None:
    """Functions and classes of an installed package, run from their source alone; None where it is not installed."""
    tree = _syntax_tree(package, file)
    if tree is None:
        return None
    chosen = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
    for node in chosen:
        node.returns = None
    source = ast.Module([ast.parse("from __future__ import annotations").body[0], *chosen], [])
    scope = dict(NAMES_IN_SOURCES)
    exec(compile(ast.fix_missing_locations(source), file, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def sglangs_own_mappers() -> dict[str, typing.Any] | None:
    """SGLang's mappers of names by the class that declares them; None where it is not installed."""
    tree = _syntax_tree("sglang", "srt/models/transformers.py")
    if tree is None:
        return None
    scope = vars(published("sglang", "srt/models/utils.py", "WeightsMapper"))
    return {
        part.name: eval(compile(ast.Expression(statement.value), part.name, "eval"), scope)
        for part in tree.body
        if isinstance(part, ast.ClassDef)
        for statement in part.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "hf_to_sglang_mapper"
    }


def _syntax_tree(package, file):
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / file
    return ast.parse(path.read_text(encoding="utf-8"))
