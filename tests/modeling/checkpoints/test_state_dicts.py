"""State dicts of files through every door: a model has all of their weights, or an error says why not."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.models import MODELS
from support.tables import in_turn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.trainer_utils import load_sharded_checkpoint

import llamoe
from llamoe.configuration.errors import CheckpointError

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in MODELS}
MIXTRAL, TEXT = BY_NAME["LlamoeMixtralForCausalLM"], BY_NAME["LlamoeForCausalLM"]
OTHERS = {
    "LlamoeMixtralModel": MIXTRAL,
    "LlamoeMixtralForSequenceClassification": MIXTRAL,
    "LlamoeForTokenClassification": TEXT,
}
CASES = [*MODELS, *(replace(case, name=name) for name, case in OTHERS.items())]
MIXTURES = [case for case in CASES if case.has_experts]
ids = {"ids": lambda case: case.name}


def split(state):
    """The stacks of Llama 4 as linear layers `[out, in]`, in the two spellings in turn."""
    result = {}
    for name, tensor in state.items():
        experts, _, stack = name.rpartition(".")
        if not experts.endswith("feed_forward.experts"):
            result[name] = tensor
            continue
        parts = ("gate", "up") if stack == "gate_up_proj" else ("down",)
        for number, matrix in enumerate(tensor):
            for part, columns in zip(parts, matrix.chunk(len(parts), dim=1), strict=True):
                name = f"{number}.{part}_proj" if number % 2 else f"{part}_projs.{number}"
                result[f"{experts}.{name}.weight"] = columns.t().contiguous()
    return result


class Kept:
    """A model and its weights as files have them, each expert by itself; in one file and in many."""

    def __init__(self, case, place):
        self.case, self.model = case, case.make_small()
        self.model.save_pretrained(place)
        self.state = split(load_file(place / "model.safetensors"))
        save_file(self.state, place / "model.safetensors", {"format": "pt"})
        self.folder, self.shards = place, place / "shards"
        # Some files have only a few experts of one layer.
        size = sum(tensor.nbytes for tensor in self.state.values()) // 24
        self.model.save_pretrained(self.shards, max_shard_size=size)

    def other(self):
        """A model of the same sizes with other weights."""
        return self.case.make_small(seed=5)

    def empty(self):
        with init_empty_weights():
            return type(self.model)(copy.deepcopy(self.model.config))

    def check(self, model):
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


@pytest.fixture(scope="module")
def keep(tmp_path_factory):
    kept = {}

    def keep(case):
        if case not in kept:
            kept[case] = Kept(case, tmp_path_factory.mktemp(case.name))
        return kept[case]

    return keep


def through_load_state_dict(kept, strict):
    model = kept.other()
    assert not any(model.load_state_dict(kept.state, strict=strict))
    return model


def by_assigning(kept):
    model = kept.empty()
    model.load_state_dict(kept.state, assign=True)
    return model


def inside_another(kept):
    model = nn.ModuleDict({"inner": nn.Sequential(kept.other())})
    model.load_state_dict({f"inner.0.{name}": tensor for name, tensor in kept.state.items()})
    return model["inner"][0]


def by_torchs_function(kept):
    model = kept.other()
    set_model_state_dict(model, dict(kept.state), options=StateDictOptions(full_state_dict=True))
    return model


def by_accelerate(kept, folder=None, **options):
    model = kept.other()
    load_checkpoint_in_model(model, folder or kept.folder, **options)
    return model


def by_trainers_shards(kept):
    model = kept.other()
    assert not any(load_sharded_checkpoint(model, kept.shards))
    return model


DOORS = {
    "strict": lambda kept: through_load_state_dict(kept, True),
    "not strict": lambda kept: through_load_state_dict(kept, False),
    "assign": by_assigning,
    "inside another": inside_another,
    "torch": by_torchs_function,
    "accelerate, strict, of shards": lambda kept: by_accelerate(kept, kept.shards, strict=True),
    "accelerate": by_accelerate,
    "accelerate with a device map": lambda kept: by_accelerate(kept, device_map={"": "cpu"}),
    "accelerate's dispatch": lambda kept: load_checkpoint_and_dispatch(
        kept.empty(), kept.folder, device_map={"": "cpu"}
    ),
    "accelerate's dispatch of shards": lambda kept: load_checkpoint_and_dispatch(
        kept.empty(), kept.shards, device_map={"": "cpu"}
    ),
    "Trainer's shards": by_trainers_shards,
}


# accelerate's and Trainer's loaders collect garbage after each file: one family's experts for each of them.
SLOW = [door for door in DOORS if door.startswith(("accelerate", "Trainer"))]
THROUGH = [
    *((door, case) for door in DOORS if door not in SLOW for case in (MIXTRAL, TEXT)),
    *in_turn(SLOW, [MIXTRAL, TEXT]),
    *in_turn(DOORS, [case for case in CASES if case not in (MIXTRAL, TEXT)]),
]


@pytest.mark.parametrize(("door", "case"), THROUGH, ids=lambda value: getattr(value, "name", value))
def test_every_layout_comes_through_every_door(door, case, keep):
    kept = keep(case)
    kept.check(DOORS[door](kept))


@pytest.mark.parametrize("case", MIXTURES, **ids)
def test_adapted_layers_take_the_names_of_files(case, keep):
    """peft's wrappers stand around linear layers, and two of them around the experts."""
    kept = keep(case)
    model = kept.other()
    stacks = [f"{name}_proj" for name in ("gate_up", "down")]
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks)
    )
    adapted.load_state_dict(
        {f"base_model.model.{name}": tensor for name, tensor in kept.state.items()}, strict=False
    )
    kept.check(adapted.unload())


def test_tied_weights_stay_one(tmp_path):
    """Files have the embeddings alone."""
    model = MIXTRAL.make(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    other = MIXTRAL.make(seed=5, tie_word_embeddings=True)
    other.load_state_dict(state, assign=True)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    third = MIXTRAL.make(seed=6, tie_word_embeddings=True)
    load_checkpoint_in_model(third, tmp_path, device_map={"": "cpu"})
    assert third.lm_head.weight is third.model.embed_tokens.weight
    assert torch.equal(third.lm_head.weight, model.lm_head.weight)


# Half of a mixture


def first(state, *words):
    return next(name for name in state if all(word in name for word in words))


def without(*words):
    def spoil(state):
        name = first(state, "experts", *words)
        del state[name]
        return name.partition("layers.")[2].partition(".")[0]

    return spoil


def twice(state):
    name = first(state, "experts", "2", "down" if "down" in str(state) else "w2")
    experts = name.partition(".experts.")[0].replace("block_sparse_moe", "mlp") + ".experts."
    state[f"{experts}down_proj"] = torch.zeros(2)
    return "second time"


def another_shape(state):
    name = first(state, "experts", "1")
    state[name] = state[name][:1]
    return "shape"


def of_integers(state):
    name = first(state, "experts", "1")
    state[name] = state[name].to(torch.int8)
    return "int8"


def one_too_many(state):
    name = first(state, ".experts.1.")
    state[name.replace("experts.1.", "experts.77.")] = state[name].clone()
    return "77"


def unknown_spelling(state):
    name = first(state, ".experts.", "1.")
    state[name.replace(".weight", ".qweight")] = state.pop(name)
    return "qweight"


def another_family(state):
    for name in [name for name in state if ".experts." in name]:
        new = name.replace("block_sparse_moe", "X").replace("feed_forward", "block_sparse_moe")
        state[new.replace("X", "feed_forward")] = state.pop(name)
    return "experts"


def no_router(state):
    name = first(state, "router") if "router" in str(state) else first(state, "moe.gate")
    del state[name]
    return "weight"


SPOILT = {
    "a matrix is missing": without("1"),
    "twice": twice,
    "shape": another_shape,
    "integers": of_integers,
    "one too many": one_too_many,
    "unknown spelling": unknown_spelling,
    "another family": another_family,
    "no router": no_router,
}


@pytest.mark.parametrize(
    ("fault", "case"),
    in_turn(SPOILT, [MIXTRAL, TEXT, BY_NAME["LlamoeForConditionalGeneration"]], times=2),
    ids=lambda value: getattr(value, "name", value),
)
def test_half_a_mixture_is_refused(fault, case, keep, tmp_path):
    """By `load_state_dict(strict=False)`, and by accelerate, which passes over what it does not know."""
    kept = keep(case)
    state = dict(kept.state)
    words = SPOILT[fault](state)
    with pytest.raises((CheckpointError, RuntimeError), match=words):
        kept.other().load_state_dict(state, strict=False)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((CheckpointError, RuntimeError), match=words):
        load_checkpoint_in_model(kept.other(), tmp_path, device_map={"": "cpu"})


@pytest.mark.parametrize("case", [MIXTRAL, TEXT], **ids)
def test_experts_of_a_layer_come_in_one_state_dict(case, keep):
    """But for loaders that read all files of a folder."""
    kept = keep(case)
    piece = dict(list(kept.state.items())[::3])
    with pytest.raises(CheckpointError, match="half a mixture: .*experts.* missing.*in one state dict"):
        kept.other().load_state_dict(piece, strict=False)


@pytest.mark.parametrize("case", [MIXTRAL, TEXT], **ids)
def test_attention_alone_may_be_loaded(case, keep):
    kept = keep(case)
    model, before = kept.other(), kept.other().state_dict()
    attention = {name: tensor for name, tensor in kept.state.items() if "self_attn" in name}
    model.load_state_dict(attention, strict=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept.model.state_dict()[name] if name in attention else before[name])


def test_weights_do_not_stay_behind_on_the_meta_device(keep):
    """Where torch would only warn."""
    kept = keep(MIXTRAL)
    with pytest.raises(CheckpointError, match="meta"):
        kept.empty().load_state_dict(kept.state, strict=False)


# Few bits


@pytest.mark.parametrize(
    ("case", "weights", "dtype"),
    [(MIXTRAL, "int8", "torch.int8"), (TEXT, "int4", "torch.uint8")],
    ids=lambda value: getattr(value, "name", value),
)
def test_packed_weights_are_of_packed_models(weights, dtype, case, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    plain = case.make_small(**sizes)
    plain.save_pretrained(tmp_path / "plain")
    form = llamoe.QuantizationConfig(weights, linears=False)
    packed = case.model_class.from_pretrained(tmp_path / "plain", quantization_config=form)
    packed.save_pretrained(tmp_path / "packed")
    state = load_file(tmp_path / "packed" / "model.safetensors")
    another = copy.deepcopy(packed)
    for parameter in another.parameters():
        parameter.data.zero_()
    assert not any(another.load_state_dict(state))
    for name, tensor in packed.state_dict().items():
        assert torch.equal(another.state_dict()[name], tensor), name
    with pytest.raises(CheckpointError, match=dtype):
        plain.load_state_dict(state, strict=False)
    with pytest.raises((CheckpointError, RuntimeError), match="experts"):
        packed.load_state_dict(split(load_file(tmp_path / "plain" / "model.safetensors")), strict=False)
