"""Reports on routers in training, and their balancing by a bias."""

import pytest
import torch
from support.models import SHALLOW, stock_text_config

import llamoe
from llamoe.conversion import convert
from llamoe.modeling.moe import Router
from llamoe.modeling.moe.losses import logger


def make(balancing="bias", seed=0, skewed=True, **changes):
    """Return a mixture in training mode; skewed routers send nearly all tokens to one expert."""
    torch.manual_seed(seed)
    config = llamoe.from_stock(stock_text_config(**changes))
    config.router_balancing = balancing
    model = llamoe.LlamoeForCausalLM(config).train()
    if not skewed:
        return model
    for layer in model.model.layers:
        if hasattr(layer.feed_forward, "router"):
            weight = layer.feed_forward.router.weight.data
            weight.mul_(4)
            layer.post_attention_layernorm.weight.data += 0.5
            # All hidden states have a common direction, for which one expert has high logits.
            weight[1] += 0.5 * model.model.embed_tokens.weight.mean(0).sign()
    model.model.embed_tokens.weight.data += 0.1 * model.model.embed_tokens.weight.mean(0).sign()
    return model


def batch(model, seed, rows=8, length=29):
    generator = torch.Generator().manual_seed(seed)
    size = model.config.vocab_size
    start = torch.randint(size, (rows, 1), generator=generator)
    # Sequences that a model can learn: each token follows from the previous one.
    return (start + 7 * torch.arange(length)) % size


def test_a_bias_chooses_and_does_not_score():
    logits = torch.tensor([[1.0, 0.5, -2.0], [0.0, 3.0, 2.5]])
    sizes = dict(num_local_experts=3, num_experts_per_tok=2, router_balancing="bias")
    for config_class in (llamoe.LlamoeTextConfig, llamoe.LlamoeMixtralConfig):
        router = Router(config_class(**sizes, num_hidden_layers=1))
        router.balancing_bias = torch.tensor([0.0, -1.0, 2.6])
        scores, chosen = router.choose(logits)
        assert chosen.tolist() == [[0, 2], [2, 1]]
        kept = torch.tensor([[1.0, -2.0], [2.5, 3.0]])
        is_llama4 = config_class is llamoe.LlamoeTextConfig
        torch.testing.assert_close(scores, kept.sigmoid() if is_llama4 else kept.softmax(-1))


def test_a_bias_of_zero_changes_nothing():
    model = make(None)
    router = model.model.layers[model.config.moe_layers[0]].feed_forward.router
    assert router.balancing_bias is None and not any("balancing" in name for name in model.state_dict())
    biased = make("bias")
    tokens = batch(model, 1)
    assert torch.equal(model.eval()(tokens).logits, biased.eval()(tokens).logits)


def train(model, watch, steps, report_before=()):
    """Train, and return the mean of the last 20 losses, and the reports before some steps and at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, reports = [], []
    for step in range(steps):
        if step in report_before:
            reports.append(watch.report())
        tokens = batch(model, step)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20, [*reports, watch.report()]


def violation(report):
    return max(value for name, value in report.items() if name.endswith("/max_violation"))


@pytest.mark.slow
def test_balancing_shares_tokens_without_higher_loss():
    """At the start one of five experts gets nearly all tokens; without the bias this remains so."""
    losses, violations = {}, {}
    for balancing in (None, "bias"):
        model = make(balancing, **SHALLOW)
        watch = llamoe.RouterWatch(model)
        losses[balancing], reports = train(model, watch, 90, report_before=(1, 70))
        violations[balancing] = violation(reports[-1])
        assert violation(reports[0]) > 3
    assert violations["bias"] < 0.1 and violations[None] > 1
    assert losses["bias"] <= losses[None]


def test_padding_is_not_counted():
    model = make(skewed=False, **SHALLOW)
    router = model.model.layers[1].feed_forward.router
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(1))
        router.balancing_bias.copy_(torch.tensor([0.0, -3.0, 9.0, 0.0, 2.0]))
    tokens = batch(model, 0, rows=3, length=11)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    watch = llamoe.RouterWatch(model)
    expected = model(tokens, attention_mask=mask, output_expert_load=True).expert_load[0]
    # In eval mode nothing is counted.
    model.eval()(tokens)
    shares = watch.step()
    assert expected.sum() == mask.sum() and expected.max() < expected.sum()
    assert torch.allclose(shares[0], expected / mask.sum())
    assert watch.step() is None
    report = watch.report()
    assert report["router/layer_1/max_load"] == pytest.approx(expected.max().item() / mask.sum().item())
    assert report["router/layer_1/dead_experts"] == (expected == 0).sum()
    assert report["router/layer_1/max_violation"] == pytest.approx(5 * shares.max().item() - 1)
    assert 0 < report["router/layer_1/entropy"] < 1.61
    assert watch.report() == {}


@pytest.mark.parametrize("odd", ["one expert", "nothing but padding", "no numbers"])
def test_the_bias_stays_zero_if_there_is_nothing_to_balance(odd):
    changes = dict(num_local_experts=1, num_experts_per_tok=1) if odd == "one expert" else {}
    model = make(skewed=False, **changes, **SHALLOW)
    watch = llamoe.RouterWatch(model)
    tokens = batch(model, 0)
    with torch.no_grad():
        # Forward passes without gradients are not counted.
        model(tokens)
    assert watch.step() is None and watch.report() == {}
    if odd == "no numbers":
        model.model.embed_tokens.weight.data[5] = float("inf")
    model(tokens, attention_mask=torch.zeros_like(tokens) if odd == "nothing but padding" else None)
    shares = watch.step()
    if odd != "no numbers":
        assert shares.tolist() == ([[1.0]] if changes else [[0.0] * 5])
        assert watch.report()["router/layer_1/dead_experts"] == (0 if changes else 5)
    assert not model.model.layers[1].feed_forward.router.balancing_bias.any()


@pytest.mark.parametrize(
    "way", [pytest.param("compiled", marks=pytest.mark.slow), "checkpointed", "checkpointed again"]
)
def test_counts_under_compilers_and_checkpointing(way):
    shares, tokens = [], batch(make(**SHALLOW), 1)
    for changed in (False, True):
        model = call = make(**SHALLOW)
        if changed and way == "compiled":
            torch._dynamo.reset()
            call = torch.compile(model, fullgraph=True, backend="eager")
            # Without a watch the model is one graph.
            assert call(tokens, labels=tokens).loss == model(tokens, labels=tokens).loss
            call = torch.compile(model, backend="eager")
        elif changed:
            model.gradient_checkpointing_enable({"use_reentrant": way.endswith("again")})
            model.enable_input_require_grads()
        watch = llamoe.RouterWatch(model)
        call(tokens, labels=tokens).loss.backward()
        shares.append(watch.step())
    assert torch.equal(*shares)


def test_saved_bias_stays_float32(tmp_path):
    model = make(head_dim=12, **SHALLOW)
    train(model, llamoe.RouterWatch(model), 2)
    bias = model.model.layers[1].feed_forward.router.balancing_bias.clone()
    assert bias.abs().max() > 0
    tokens = batch(model, 5)
    model.bfloat16().save_pretrained(tmp_path / "model")
    again = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    router = again.model.layers[1].feed_forward.router
    assert again.dtype == torch.bfloat16 and router.balancing_bias.dtype == torch.float32
    assert torch.equal(router.balancing_bias, bias)
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)
    with pytest.raises(llamoe.ConfigurationError, match="router_balancing"):
        model.save_pretrained(tmp_path / "stock", layout="stock")
    with pytest.raises(llamoe.ConfigurationError, match="router_balancing = 'bias': Meta's params.json"):
        convert(tmp_path / "model", tmp_path / "meta", to="meta")
    assert not (tmp_path / "stock").exists() and not (tmp_path / "meta").exists()
    make(None, **SHALLOW).save_pretrained(tmp_path / "plain")
    begun = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "plain", router_balancing="bias")
    assert begun.model.layers[1].feed_forward.router.balancing_bias.tolist() == [0.0] * 5


@pytest.mark.parametrize(("strategy", "makes_model"), [("steps", True), ("epoch", False)])
def test_the_trainer_reports_and_balances(strategy, makes_model, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in batch(make(**SHALLOW), 0, rows=16)]
    options = TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=2,
        logging_strategy=strategy, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    if makes_model:
        trainer = Trainer(model_init=lambda: make(**SHALLOW), args=options, train_dataset=rows)
    else:
        trainer = Trainer(make(**SHALLOW), options, train_dataset=rows)
    watch = llamoe.watch_routers(trainer)
    trainer.train()
    history, logged = trainer.state.log_history, [4, 8] if strategy == "epoch" else [2, 4, 6, 8]
    for name in ("router/layer_1/max_violation", "loss"):
        assert [entry["step"] for entry in history if name in entry] == logged
    assert trainer.model.model.layers[1].feed_forward.router.balancing_bias.abs().max() > 0
    trainer.model(rows[0]["input_ids"][None])
    assert watch.step() is None


def test_a_frozen_router_keeps_its_bias(caplog):
    """An adapter's file cannot store its bias; a copy of the router in `modules_to_save` is trained, and stored."""
    from peft import LoraConfig, get_peft_model

    logger.warning_once.cache_clear()
    tokens = batch(make(**SHALLOW), 0)
    for options, name in (
        (dict(target_modules=["q_proj"]), None),
        (dict(modules_to_save=["router"]), "default"),
    ):
        base = make(**SHALLOW)
        model = get_peft_model(base, LoraConfig(**{"target_modules": ["q_proj"], **options})).train()
        loss = model(tokens, labels=tokens, output_router_logits=True).loss
        assert ("call llamoe.watch_routers" in caplog.text) is (name is not None)
        watch = llamoe.RouterWatch(model)
        model(tokens, labels=tokens, output_router_logits=True).loss.backward()
        assert loss.isfinite() and watch.step() is not None
        router = base.model.layers[1].feed_forward.router
        assert (router.modules_to_save[name] if name else router).balancing_bias.any() == bool(name)
        if name:
            assert not router.original_module.balancing_bias.any()


def test_only_the_last_watch_of_a_model_counts():
    model = make(**SHALLOW)
    first, second = llamoe.RouterWatch(model), llamoe.RouterWatch(model)
    first.close()
    model(batch(model, 0))
    assert first.step() is None and second.step() is not None
    with pytest.raises(ValueError, match="Linear has no routers"):
        llamoe.RouterWatch(torch.nn.Linear(2, 3))
