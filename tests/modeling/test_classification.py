"""Heads for sequences, tokens and answers, compared with stock's, or with a computation in the test."""

import pytest
import torch
import transformers
from support.models import (
    DENSE,
    LENGTH,
    SHALLOW,
    SHALLOW_VISION,
    assert_same_weights,
    draw,
    load_whole,
    max_abs,
    multimodal_config,
    stock_dense_config,
    stock_mixtral_config,
    stock_model,
    stock_multimodal_config,
    stock_text_config,
    text_config,
)
from support.tables import in_turn
from torch.nn import functional as F
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
    LlamaModel,
)

import llamoe

AUTO = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
    "QuestionAnswering": AutoModelForQuestionAnswering,
}
KINDS = list(AUTO)
for_kinds = pytest.mark.parametrize("kind", KINDS)
FAMILIES = [*(("Dense", kind) for kind in KINDS), *(("Mixtral", kind) for kind in KINDS[:2])]
NUM_LABELS = 5


def ours(kind, family="Dense"):
    return getattr(llamoe, f"Llamoe{family}For{kind}")


def stock(kind, family="Dense"):
    return getattr(transformers, f"{'Llama' if family == 'Dense' else family}For{kind}")


def pair(kind, family="Dense", **overrides):
    """Return stock's model and ours with the same weights."""
    make_config = stock_dense_config if family == "Dense" else stock_mixtral_config
    config = make_config(num_labels=NUM_LABELS, **overrides)
    reference = stock_model(stock(kind, family), config)
    model = ours(kind, family)(llamoe.from_stock(config))
    model.load_state_dict(reference.state_dict())
    return reference, model.eval()


def rows(padding="both"):
    """Return three rows, one of them padded on the left, one on the right; or none. Padding is token 0."""
    ids = torch.randint(3, 90, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    if padding == "both":
        ids[0, :9] = ids[1, -6:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def targets(kind):
    if kind == "SequenceClassification":
        return {"labels": torch.tensor([4, 0, 2])}
    if kind == "TokenClassification":
        labels = torch.randint(0, NUM_LABELS, (3, LENGTH), generator=torch.Generator().manual_seed(2))
        return {"labels": labels.masked_fill(rows()["input_ids"] == 0, -100)}
    return {"start_positions": torch.tensor([11, 3, 0]), "end_positions": torch.tensor([20, 3, 52])}


def real(name, tensor, mask):
    """Return a tensor's values for tokens that are not padding."""
    return tensor[mask.bool()] if tensor.ndim > 1 and tensor.shape[:2] == mask.shape else tensor


def assert_outputs_agree(given, expected, mask, tolerance=2e-5):
    assert given.keys() == expected.keys()
    for name, theirs in expected.items():
        if isinstance(theirs, torch.Tensor):
            mine, theirs = (real(name, tensor, mask) for tensor in (given[name], theirs))
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert max_abs(mine, theirs) < tolerance * theirs.std(correction=0).clamp(min=1), name


# Families with heads in stock


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
@pytest.mark.parametrize("padding", ["none", "both"])
def test_heads_equal_stock(family, kind, padding, record_parity):
    reference, model = pair(kind, family)
    inputs = rows(padding)
    with torch.no_grad():
        expected, given = (m(**inputs, **targets(kind)) for m in (reference, model))
    assert_outputs_agree(given, expected, inputs["attention_mask"])
    for name in ("logits", "start_logits", "end_logits"):
        if name in expected:
            mine, theirs = (real(name, each[name], inputs["attention_mask"]) for each in (given, expected))
            assert 0.3 < theirs.std() < 3
            names = ours(kind, family).__name__, stock(kind, family).__name__
            record_parity(*names, "float32", max_abs(mine, theirs))


@pytest.mark.parametrize(("heads", "max_shard_size"), in_turn(FAMILIES, ["5GB", "40KB"]))
def test_folders_go_both_ways(heads, max_shard_size, tmp_path):
    family, kind = heads
    reference, _ = pair(kind, family, num_hidden_layers=2)
    reference.save_pretrained(tmp_path / "stock", max_shard_size=max_shard_size)
    model = load_whole(ours(kind, family), tmp_path / "stock")
    assert model.num_labels == NUM_LABELS if kind != "QuestionAnswering" else True
    model.save_pretrained(tmp_path / "ours", max_shard_size=max_shard_size)
    again = load_whole(AUTO[kind], tmp_path / "ours")
    assert type(again) is ours(kind, family)
    model.save_pretrained(tmp_path / "back", layout="stock")
    back = load_whole(AUTO[kind], tmp_path / "back")
    assert type(back) is stock(kind, family)
    for other in (model, again, back):
        assert_same_weights(other.state_dict(), reference.state_dict())
    assert back.config.id2label == reference.config.id2label


@for_kinds
def test_a_head_has_its_models_dtype(kind):
    """Head and model have torch's default dtype; in stock's class they have two dtypes here, and cannot run."""
    model = ours(kind)(llamoe.LlamoeDenseConfig(**DENSE, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model(**rows())


def test_mistrals_answering_head_is_only_read(tmp_path):
    """A folder of stock's Mistral loads; saving in stock's layout is refused, since it has other names of weights."""
    reference = stock_model(transformers.MistralForQuestionAnswering, transformers.MistralConfig(**DENSE))
    reference.save_pretrained(tmp_path / "stock")
    model = ours("QuestionAnswering").from_pretrained(tmp_path / "stock")
    with torch.no_grad():
        given, expected = (m(**rows("none")).end_logits for m in (model, reference))
    assert max_abs(given, expected) < 2e-5
    with pytest.raises(ValueError, match="layout"):
        model.save_pretrained(tmp_path / "back", layout="stock")
    assert not (tmp_path / "back").exists()


# The mixture

MIXTURE = llamoe.LlamoeForSequenceClassification


def mixture(**text):
    return draw(MIXTURE, text_config(num_labels=NUM_LABELS, **{**SHALLOW, **text}))


def written_out(model, inputs, pad=0):
    """Compute logits by the base model, a linear layer, and each row's rightmost token that is not padding."""
    hidden = model.model(**inputs).last_hidden_state
    last = [max(i for i, token in enumerate(row.tolist()) if token != pad) for row in inputs["input_ids"]]
    return torch.stack([F.linear(hidden[row, i], model.score.weight) for row, i in enumerate(last)])


@pytest.mark.parametrize("padding", ["none", "both"])
def test_mixture_head_reads_the_last_token(padding):
    model, inputs = mixture(), rows(padding)
    labels = torch.tensor([4, 0, 2])
    with torch.no_grad():
        output, expected = model(**inputs, labels=labels), written_out(model, inputs)
    assert output.logits.shape == (3, NUM_LABELS) and 0.3 < expected.std() < 3
    assert max_abs(output.logits, expected) < 1e-5
    assert output.loss.item() == pytest.approx(F.cross_entropy(expected, labels).item(), rel=1e-5)
    assert output.router_logits is None and output.aux_loss is None


STOCK_WHOLE = stock_multimodal_config(SHALLOW, SHALLOW_VISION)
WHOLE = multimodal_config(SHALLOW_VISION, **SHALLOW)
TWO_LAYERS = stock_dense_config(num_hidden_layers=2)
# The class that saved a folder, and its config.
SOURCES = {
    "stock_lm": (LlamaForCausalLM, TWO_LAYERS),
    "stock_base": (LlamaModel, TWO_LAYERS),
    "answers": (stock("QuestionAnswering"), TWO_LAYERS),
    "lm": (llamoe.LlamoeDenseForCausalLM, TWO_LAYERS),
    "base": (llamoe.LlamoeDenseModel, TWO_LAYERS),
    "stock_multimodal": (Llama4ForConditionalGeneration, STOCK_WHOLE),
    "stock_text": (Llama4ForCausalLM, stock_text_config(**SHALLOW)),
    "multimodal": (llamoe.LlamoeForConditionalGeneration, WHOLE),
    "multimodal_base": (llamoe.LlamoeModel, WHOLE),
    "text": (llamoe.LlamoeForCausalLM, text_config(**SHALLOW)),
    "text_base": (llamoe.LlamoeTextModel, text_config(**SHALLOW)),
}


def layers_of(model):
    """Return the tensors of the decoder's layers, by their names after "layers"."""
    state = model.state_dict().items()
    return {
        key.split("layers.")[1]: value for key, value in state if "layers." in key and "vision" not in key
    }


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        *in_turn([*SOURCES][:5], KINDS),
        ("answers", "QuestionAnswering"),
        *((source, KINDS[0]) for source in [*SOURCES][5:]),
    ],
)
def test_head_over_other_folders_finds_the_model(source, kind, tmp_path):
    """A head loads the decoder from folders of other classes, and initializes itself alone."""
    model_class, config = SOURCES[source]
    reference, head = draw(model_class, config), ours(kind) if config is TWO_LAYERS else MIXTURE
    reference.save_pretrained(tmp_path)
    # For a folder of stock's, the Auto class returns stock's class.
    for auto in [head] if model_class.__name__ in dir(transformers) else [head, AUTO[kind]]:
        model, info = auto.from_pretrained(tmp_path, output_loading_info=True, num_labels=3)
        assert type(model) is head
        new = {key for key in model.state_dict() if key.startswith(("score", "qa_outputs"))}
        known = new if kind == "QuestionAnswering" and source == "answers" else set()
        assert info["missing_keys"] == new - known
        assert_same_weights(layers_of(model), layers_of(reference))
        if kind != "QuestionAnswering":
            assert model.num_labels == 3 and model.score.weight.shape == (3, 72)


def test_multimodal_labels_are_the_text_parts():
    config = multimodal_config()
    assert config.text_config.num_labels == 2
    config.num_labels = 7
    config.problem_type = "single_label_classification"
    model = AutoModelForSequenceClassification.from_config(config)
    assert type(model) is MIXTURE and model.score.weight.shape == (7, 72)
    assert model.config.problem_type == "single_label_classification"
    assert MIXTURE(config).num_labels == 7
    given = stock_multimodal_config({"num_labels": 4})
    assert MIXTURE(given).num_labels == 4  # set in the text config alone
    assert llamoe.LlamoeConfig(text_config=given.text_config, num_labels=2).text_config.num_labels == 2
    names = {0: "red", 1: "green", 2: "blue"}
    whole = llamoe.LlamoeConfig(text_config=given.text_config, id2label=names)
    assert whole.text_config.id2label == names and MIXTURE(whole).num_labels == 3


def test_mixture_head_has_no_stock_layout_class(tmp_path):
    """Stock has no such class: to save in stock's layout is an error that says so, and writes nothing."""
    with pytest.raises(ValueError, match="LlamoeForSequenceClassification"):
        mixture().save_pretrained(tmp_path / "stock", layout="stock")
    assert not (tmp_path / "stock").exists()


def test_router_losses_are_added():
    model, inputs = mixture(router_aux_loss_coef=0.7, router_z_loss_coef=0.3), rows("none")
    output = model(**inputs, labels=torch.tensor([4, 0, 2]), output_router_logits=True)
    assert len(output.router_logits) == len(model.config.moe_layers)
    z_loss = torch.stack([r.float().logsumexp(-1).square().mean() for r in output.router_logits]).mean()
    plain = F.cross_entropy(output.logits, torch.tensor([4, 0, 2]))
    whole = plain + 0.7 * output.aux_loss + 0.3 * z_loss
    assert output.aux_loss > 0 and output.loss.item() == pytest.approx(whole.item(), rel=1e-5)


# Bad input


@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_several_rows_need_a_padding_token(family):
    model = pair("SequenceClassification")[1] if family == "dense" else mixture()
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="padding token"):
        model(**rows())
    with pytest.raises(ValueError, match="padding token"):
        model(inputs_embeds=torch.randn(2, 9, 72))
    one = rows("none")["input_ids"][:1]
    with torch.no_grad():
        alone = model(one).logits
        model.config.pad_token_id = 0
        assert torch.equal(model(one).logits, alone)


ROW = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize("labels", [ROW, torch.full((3, LENGTH), 9)], ids=["shape", "class"])
def test_wrong_labels_of_tokens(labels):
    with pytest.raises(ValueError, match="labels"):
        pair("TokenClassification")[1](**rows(), labels=labels)
