"""The corruption case of a seed: which folder is damaged, how, and what reads it."""

import json
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from . import damage
from .damage import Damage
from .differential import Outcome, describe
from .judge import Wrong
from .originals import Original, draw_original
from .reading import READERS, Unclean, bounded, check_error, check_tensors

KINDS = {"weights": 45, "index": 11, "config": 22, "companions": 4, "adapter": 8, "meta": 10}
LOADERS = ["from_pretrained", "from_pretrained", "AutoModel", "convert", "convert", "inspect", "verify"]
FOLDERS = ["one", "shards", "shards", "stock", "pictures", "bin", "bins", "legacy", "split"]


def kind_of(seed: int) -> str:
    return random.Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def draw(rng: random.Random, kind: str) -> tuple[Original, Damage, str]:
    """Draw a folder, its damage and its reader."""
    match kind:
        case "weights":
            original = draw_original(rng, *FOLDERS)
            return original, rng.choice(damage.WEIGHTS)(rng, original), rng.choice(LOADERS)
        case "index":
            original = draw_original(rng, "shards", "bins", "pictures", "split")
            return original, damage_index(rng, original), rng.choice(LOADERS)
        case "config":
            original = draw_original(rng, "one", "shards", "stock", "pictures", "bin")
            how, content = damage.change_json(rng, original.files["config.json"], fields_of(original))
            made = Damage(f"config.json: {how}", {"config.json": content}, is_config=True)
            return original, made, rng.choice([*LOADERS, "AutoConfig"])
        case "companions":
            original = draw_original(rng, "pictures")
            name = rng.choice(
                [name for name in original.json_files if name != "config.json" and "index" not in name]
            )
            how, content = damage.change_json(rng, original.files[name], [])
            return (
                original,
                Damage(f"{name}: {how}", {name: content}),
                rng.choice(["from_pretrained", "convert", "convert", "inspect"]),
            )
        case "meta":
            original = draw_original(rng, "meta", "meta4")
            ways = [
                damage.flip_structure,
                damage.flip_structure,
                damage.cut,
                damage.extend,
                damage.lose,
                damage.pickle,
            ]
            made = rng.choice([*ways, damage_params, damage_tokenizer])(rng, original)
            return original, made, rng.choice(["convert", "convert", "convert", "inspect", "verify"])
    original = draw_original(rng, "adapter", "adapter", "adapter-bin")
    reader = rng.choice(["PeftModel", "load_adapter"])
    # What is in an adapter's config is peft's to check.
    ways = [damage.flip, damage.flip, damage.cut, damage.extend, damage.lose, damage.header, damage.archive]
    return original, rng.choice(ways)(rng, original), reader


def fields_of(original: Original) -> list[str]:
    """Fields of the configuration and its parts, and fields that transformers gives a meaning."""
    config = original.model_class.config_class
    classes = [config, *getattr(config, "sub_configs", {}).values()]
    names = {name for each in classes for name in each.__dataclass_fields__}
    more = {
        "model_type",
        "architectures",
        "quantization_config",
        "torch_dtype",
        "rope_scaling",
        "rope_theta",
        "auto_map",
    }
    return sorted((names | more) - {"_name_or_path"})


def damage_params(rng: random.Random, original: Original) -> Damage:
    how, content = damage.change_json(
        rng, original.files["params.json"], ["n_kv_heads", "head_dim", "rope_theta"]
    )
    return Damage(f"params.json: {how}", {"params.json": content}, is_config=True)


def damage_tokenizer(rng: random.Random, original: Original) -> Damage:
    name = "tokenizer.model"
    return Damage(f"bytes of {name}", {name: damage.changed(rng, original.files[name])})


def damage_index(rng: random.Random, original: Original) -> Damage:
    """One change of an index: another shard, a file outside the folder, an extra or missing key, or a wrong type."""
    name = next(name for name in original.files if name.endswith(".index.json"))
    if rng.random() < 0.3:
        how, content = damage.change_json(rng, original.files[name], ["metadata", "weight_map"])
        return Damage(f"{name}: {how}", {name: content})
    index = json.loads(original.files[name])
    weight_map = index["weight_map"]
    key = rng.choice(list(weight_map))
    shards = sorted(set(weight_map.values()))
    way = rng.choice(["other", "outside", "absolute", "gone", "more", "all", "nothing", "odd", "renamed"])
    match way:
        case "other":
            weight_map[key] = rng.choice([shard for shard in shards if shard != weight_map[key]])
        case "outside":
            weight_map[key] = f"../secret/{weight_map[key]}"
        case "absolute":
            weight_map[key] = f"/tmp/{weight_map[key]}"
        case "gone":
            weight_map[key] = "model-00099-of-00099.safetensors"
        case "more":
            weight_map["model.layers.7.mlp.x.weight"] = rng.choice(shards)
        case "all":
            index["weight_map"] = dict.fromkeys(weight_map, shards[0])
        case "nothing":
            index["weight_map"] = {}
        case "odd":
            weight_map[key] = rng.choice(
                [None, 3, [], {}, "", ".", "config.json", "model.safetensors.index.json"]
            )
        case "renamed":
            weight_map[key + "x"] = weight_map.pop(key)
    return Damage(f"{name}: {way} of {key}", {name: json.dumps(index).encode()})


def run(seed: int) -> Outcome:
    """Run the case of a seed."""
    outcome = Outcome(kind_of(seed))
    rng = random.Random(seed)
    torch.manual_seed(seed)
    original, made, reader = draw(rng, outcome.kind)
    if reader == "AutoModel" and original.name in ("stock", "split"):
        # The Auto classes would load stock's models from these folders.
        reader = "from_pretrained"
    outcome.notes = {"folder": original.name, "damage": made.how, "reader": reader}
    with tempfile.TemporaryDirectory() as place:
        folder = original.write(Path(place) / "folder", made.changes)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        try:
            outcome.verdict = judge(original, made, reader, folder)
        except Wrong as error:
            outcome.verdict, outcome.text = "failed", f"silently wrong: {error}"
        except Unclean as error:
            cause = error.__cause__ or error.__context__
            text = describe(cause) if isinstance(cause, Exception) else ""
            frames = our_frames(cause)
            outcome.text = f"{error}: {text} (through {frames[-1]})" if frames else f"{error}: {text}"
            # Errors of a transformers Auto class before it calls ours are not our faults.
            is_theirs = not frames and reader in ("AutoModel", "AutoConfig", "PeftModel")
            outcome.verdict = "library" if is_theirs else "failed"
        if {path.name: path.read_bytes() for path in folder.iterdir()} != before:
            outcome.verdict, outcome.text = "failed", "reading changed the folder"
    return outcome


def our_frames(error: BaseException | None) -> list[str]:
    """Places in the package that an error passed, without those that only forward peft's errors."""
    roots = [
        Path(sys.modules[f"llamoe.{name}"].__path__[0])
        for name in ("configuration", "serving", "modeling", "planning", "conversion")
    ]
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if any(Path(frame.filename).is_relative_to(root) for root in roots)
        and "_private_api" not in frame.filename
    ]


def judge(original: Original, made: Damage, reader: str, folder: Path) -> str:
    try:
        with bounded():
            given: Any = READERS[reader](original, folder)
    except (Wrong, Unclean):
        raise
    except Exception as error:
        check_error(error, original, folder)
        return "refused"
    if given is None:
        return "passed"
    is_config = made.is_config
    if is_config and reader in ("from_pretrained", "AutoModel", "convert"):
        # The damaged configuration may tie the head.
        given = {name: value for name, value in given.items() if name != "lm_head.weight"}
    payload, others = check_tensors(given, original, made.numbers, is_config)
    if others > made.tensors_changed:
        raise Wrong(f"{others} tensors hold other numbers")
    return "payload" if payload or others else "passed"
