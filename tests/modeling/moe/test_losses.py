"""Router losses and loads, compared with formulas written out and with transformers' loss of Mixtral."""

import pytest
import torch
from support.models import MULTIMODAL, make_asymmetric, stock_text_config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import llamoe
from llamoe.modeling.moe.losses import router_z_loss

E = 5


MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])


def model_of(**overrides):
    config = llamoe.from_stock(stock_text_config())
    for name, value in overrides.items():
        setattr(config, name, value)
    return make_asymmetric(llamoe.LlamoeForCausalLM(config))


IDS = torch.randint(1, 97, (2, 6), generator=torch.Generator().manual_seed(3))


def test_the_model_returns_and_adds_the_losses():
    """Losses are computed if an argument or the config asks for them; `test_judged.py` tests their gradients."""
    model = model_of(router_aux_loss_coef=0.3)
    plain = model(IDS, labels=IDS, attention_mask=MASK)
    asked = model(IDS, labels=IDS, attention_mask=MASK, output_router_logits=True)
    assert plain.aux_loss is None and plain.router_logits is None
    # Layers 1 and 3 of five are mixtures.
    assert len(asked.router_logits) == 2
    assert asked.router_logits[0].shape == (12, E)
    by_hand = sum(load_balancing_loss_func((layer,), E, 1, MASK) for layer in asked.router_logits) / 2
    assert asked.aux_loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert (asked.loss - plain.loss).item() == pytest.approx(0.3 * asked.aux_loss.item(), rel=1e-4)
    model.config.output_router_logits = True
    assert model(IDS, labels=IDS).aux_loss is not None
    assert model(IDS, labels=IDS, output_router_logits=False).aux_loss is None
    z_loss = model_of(router_z_loss_coef=0.01)(IDS, labels=IDS, attention_mask=MASK)
    expected = 0.01 * router_z_loss(asked.router_logits, MASK).item()
    assert (z_loss.loss - plain.loss).item() == pytest.approx(expected, rel=1e-3)
    assert z_loss.router_logits is None


def test_the_model_returns_the_load():
    """The load counts tokens that are not padding; with a cache only the new ones."""
    model = model_of(num_experts_per_tok=2)
    model.config.output_expert_load = True
    out = model(IDS[:, :4], attention_mask=MASK[:, :4], use_cache=True, output_router_logits=True)
    is_real = MASK[:, :4].flatten() == 1
    chosen = [logits[is_real].topk(2).indices.flatten() for logits in out.router_logits]
    assert torch.equal(out.expert_load, torch.stack([layer.bincount(minlength=E) for layer in chosen]))
    out = model(IDS[:, 4:], attention_mask=MASK, past_key_values=out.past_key_values)
    assert out.router_logits is None
    assert out.expert_load.sum(-1).tolist() == [2 * int(MASK[:, 4:].sum())] * 2


def test_router_options_of_a_multimodal_config_have_an_effect(tmp_path):
    """As attributes of the model's config, and as arguments of `from_pretrained`."""
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs()
    assert model(**inputs).aux_loss is None
    model.save_pretrained(tmp_path)
    options = dict(output_router_logits=True, router_aux_loss_coef=0.25)
    loaded = MULTIMODAL.model_class.from_pretrained(tmp_path, **options)
    assert loaded.config.text_config.router_aux_loss_coef == 0.25
    model.config.output_router_logits = True
    outputs = [it(**inputs).aux_loss for it in (model, loaded)]
    assert torch.equal(*outputs)
