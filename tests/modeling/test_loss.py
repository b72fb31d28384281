"""The loss by pieces of tokens, compared with transformers' loss of all logits, and when it is used."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import IMAGE_TOKEN, MODELS, assert_same_gradients, for_models, loss_and_gradients, max_abs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import slice_logits_to_keep

import llamoe
from llamoe.modeling import loss as module
from llamoe.modeling.loss import loss_without_logits

DENSE, MIXTRAL, _, MULTIMODAL = [case for case in MODELS if case.is_head]
# Logits of four tokens of three rows, with a vocabulary of 101: there are several pieces, the last a shorter one.
PIECE = 3 * 101 * 4
# Arguments of a forward without logits, and of one with logits; gradients differ by the order of sums.
BY_PIECES = ({"skip_logits": True}, {})
ROUNDING = 2e-6


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_LOGITS", PIECE)


def labelled(case):
    """Return inputs with padding, and labels, of which those of padding and of five more tokens are -100."""
    inputs = case.inputs(length=43)
    labels = inputs["input_ids"].clone()
    labels[inputs["attention_mask"] == 0] = -100
    labels[:, 20:25] = -100
    return inputs, labels


@for_models("is_head")
def test_it_is_stocks_loss(case):
    """Loss and gradients are those of stock's model, by its own mean and with `num_items_in_batch`."""
    ours, (inputs, labels) = case.make_small(), labelled(case)
    inputs.pop("attention_mask")  # Stock's Llama 4 gives other positions to padded rows.
    stock = case.stock_of(ours)
    for more in ({}, {"num_items_in_batch": torch.tensor(301)}):
        given = loss_and_gradients(ours.train(), inputs, labels=labels, skip_logits=True, **more)
        expected = loss_and_gradients(stock.train(), inputs, labels=labels, **more)
        assert_same_gradients(given, expected, 1e-4, of_loss=1e-5)


KEPT = {
    "all": 0,
    "last": 5,
    "positions": torch.tensor([2, 41, 30]),
    "flags": torch.tensor([True, False] * 21 + [True]),
    "positions of each row": torch.tensor([[0, 3, 2], [5, 5, 1], [41, 42, 7]]),
    "mask": torch.arange(3 * 43).view(3, 43) % 7 < torch.tensor([[1], [5], [3]]),
}


@for_models("is_head")
@pytest.mark.parametrize("kept", KEPT)
def test_labels_of_kept_tokens(case, kept):
    """Logits and loss of kept tokens are stock's, also if indices differ by row, or a mask keeps any number of them."""
    ours, ids = case.make_small(), case.inputs(padding=(0, 0, 0), length=43)["input_ids"]
    ids[ids == IMAGE_TOKEN] = 5
    kept = KEPT[kept]
    labels = slice_logits_to_keep(ids[..., None], kept)[..., 0]
    inputs = {"input_ids": ids, "labels": labels, "logits_to_keep": kept}
    shifted = {"shift_labels": labels.roll(1)}
    for more in ({}, {"num_items_in_batch": torch.tensor(301)}, shifted):
        given, expected = (model(**inputs, **more) for model in (ours, case.stock_of(ours)))
        assert given.logits.shape == expected.logits.shape == (*labels.shape, 101)
        assert max_abs(given.logits, expected.logits) < 1e-5
        assert given.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


class Biased(nn.Linear):
    """A head that is more than a product: it has a bias, and limits its logits."""

    def forward(self, x):
        return 7 * torch.tanh(super().forward(x) / 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": 23, "ignore_index": 5},
        {"shift_labels": torch.arange(3 * 17).view(3, 17) % 90},
    ],
    ids=str,
)
def test_any_head_and_dtype(dtype, options):
    head = Biased(24, 101, dtype=dtype)
    x = torch.randn(3, 17, 24, dtype=dtype)
    labels = torch.randint(0, 101, (3, 17))
    labels[1, 4:9] = -100
    if "ignore_index" in options:
        labels[labels == -100] = 5
    results = []
    for compute in (
        lambda x: loss_without_logits(head, x, labels, 101, **options),
        lambda x: ForCausalLMLoss(head(x), labels, 101, **options),
    ):
        leaf = x.clone().requires_grad_()
        head.zero_grad()
        loss = compute(leaf)
        (3 * loss).backward()
        results.append((loss, leaf.grad, head.weight.grad.clone(), head.bias.grad.clone()))
    (loss, *given), (expected_loss, *expected) = results
    assert loss.dtype == expected_loss.dtype == torch.float32
    # A product of fewer rows may round a logit differently.
    few = max(1e-6, torch.finfo(dtype).eps / 50)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=few)
    # A weight's gradient is the sum of one rounded term for each piece.
    tolerance = 8 * torch.finfo(dtype).eps
    for mine, its in zip(given, expected, strict=True):
        assert max_abs(mine, its) <= tolerance * its.abs().max()
    with torch.no_grad():
        assert compute(x).item() == pytest.approx(loss.item(), rel=few)


def test_rows_without_labels_have_no_mean():
    """Without labels the loss is NaN, as the plain loss; with `num_items_in_batch` it is 0."""
    head, x, labels = nn.Linear(8, 100), torch.randn(2, 9, 8), torch.full((2, 9), -100)
    assert loss_without_logits(head, x, labels, 100).isnan()
    assert loss_without_logits(head, x, labels, 100, num_items_in_batch=11).item() == 0


def lora(model):
    config = LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def tied(case):
    return case.make_small(tie_word_embeddings=True)


@pytest.mark.parametrize(
    "make", [tied, lambda case: lora(case.make_small())], ids=["tied", "LoRA on the head"]
)
def test_heads_that_are_more_than_a_weight(make):
    model, (inputs, labels) = make(DENSE).train(), labelled(DENSE)
    given, expected = (loss_and_gradients(model, inputs, labels=labels, **more) for more in BY_PIECES)
    assert_same_gradients(given, expected, ROUNDING)


def test_checkpointed_layers_and_router_losses():
    """Loss and gradients are right with checkpointed layers, LoRA on experts and `num_items_in_batch`."""
    model = MIXTRAL.make_small()
    model.config.output_router_logits = True
    model = get_peft_model(model, llamoe.lora_config(model, r=2)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    inputs, labels = labelled(MIXTRAL)
    options = {"labels": labels, "num_items_in_batch": torch.tensor(201)}
    given, expected = (loss_and_gradients(model, inputs, **options, **more) for more in BY_PIECES)
    assert_same_gradients(given, expected, ROUNDING)
    assert model(**inputs, **options).aux_loss.item() > 0


def test_the_head_is_called_as_a_module():
    """Hooks of the head, such as accelerate's and FSDP's, run for each piece."""
    model, (inputs, labels) = DENSE.make_small().train(), labelled(DENSE)
    expected = loss_and_gradients(model, inputs, labels=labels)
    seen = []
    model.lm_head.register_forward_hook(lambda head, args, output: seen.append(output.shape) or output * 1)
    given = loss_and_gradients(model, inputs, labels=labels, skip_logits=True)
    assert_same_gradients(given, expected, ROUNDING)
    assert {shape[1] for shape in seen} == {4, 43 % 4} and len(seen) == 2 * -(-43 // 4)


@pytest.mark.slow
def test_one_graph(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(module, "PIECE_LOGITS", 5 * PIECE)
    model, (inputs, labels) = DENSE.make_small(num_hidden_layers=1).train(), labelled(DENSE)
    model.config.skip_logits = True
    expected = loss_and_gradients(model, inputs, labels=labels)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_gradients(loss_and_gradients(model, inputs, compiled, labels=labels), expected)


class Bytes(TorchDispatchMode):
    """Records the largest number of bytes of tensors that were alive together, of those made in the context."""

    def __init__(self):
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and function.namespace == "aten":
                storage = tensor.untyped_storage()
                if not hasattr(storage, "counted"):
                    storage.counted = Freed(self, storage.nbytes())
        self.most = max(self.most, self.alive)
        return result


class Freed:
    def __init__(self, counter, size):
        self.counter, self.size = counter, size
        counter.alive += size

    def __del__(self):
        self.counter.alive -= self.size


@pytest.mark.slow
def test_memory_of_scouts_vocabulary(monkeypatch):
    """For 4,096 tokens and a vocabulary of 202,048 the loss takes 0.6 GB in place of 10; counted on fake tensors."""
    monkeypatch.undo()
    most = []
    for by_pieces in (False, True):
        with FakeTensorMode():
            head = nn.Linear(64, 202_048, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            x = torch.randn(1, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(1, 4096, dtype=torch.long)
            with Bytes() as counter:
                if by_pieces:
                    loss = loss_without_logits(head, x, labels, 202_048)
                else:
                    loss = ForCausalLMLoss(head(x), labels, 202_048)
                loss.backward()
        most.append(counter.most)
    assert most[0] > 9e9 and most[1] < 0.7e9


# When the loss is computed by pieces


def test_the_config_asks_for_training(caplog):
    model, (inputs, labels) = DENSE.make_small(skip_logits=True), labelled(DENSE)
    assert model.train()(**inputs, labels=labels).logits is None
    assert model(**inputs).logits is not None
    assert model(**inputs, labels=labels, skip_logits=False).logits is not None
    assert model(**inputs, labels=labels, logits_to_keep=torch.arange(43)).logits is not None
    assert model.eval()(**inputs, labels=labels).logits is not None
    assert model(**inputs, labels=labels, skip_logits=True).logits is None
    model.config.skip_logits = "always"
    output = model(**inputs, labels=labels)
    assert output.logits is None and output.loss.item() > 0
    assert "set it to True: in training only" in caplog.text
    model.loss_function = lambda logits, **kwargs: logits.mean()
    assert model(**inputs, labels=labels).logits is not None


def test_the_whole_of_a_multimodal_config_asks_its_text_part(tmp_path):
    model, (inputs, labels) = MULTIMODAL.make_small().train(), labelled(MULTIMODAL)
    model.config.skip_logits = True
    assert model.config.text_config.skip_logits and model(**inputs, labels=labels).logits is None
    model.save_pretrained(tmp_path)
    assert llamoe.LlamoeConfig.from_pretrained(tmp_path).text_config.skip_logits is True
    assert not llamoe.LlamoeConfig.from_pretrained(tmp_path, skip_logits=False).text_config.skip_logits


def test_another_loss_reads_the_logits():
    def mean_of(logits, **kwargs):
        return logits.mean()

    model, (inputs, labels) = DENSE.make_small(), labelled(DENSE)
    model.loss_function = mean_of
    with pytest.raises(ValueError, match="the model's loss_function is mean_of"):
        model(**inputs, labels=labels, skip_logits=True)
