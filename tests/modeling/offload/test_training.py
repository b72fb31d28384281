"""LoRA on offloaded experts gives the losses, weights and tokens of experts in memory, with no unneeded reads."""

import re
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from support import programs
from support.killed_training import trainer_of
from support.offload import (
    KINDS,
    asked_in,
    counts,
    expert_bytes,
    load_both,
    put_in_store,
    simulate_lru,
    train,
    without_kernels,
)
from transformers import Trainer

import llamoe
from llamoe.modeling.offload.store import Store

pytestmark = pytest.mark.slow

# Options of a LoraConfig for stacks; the cases of the tests take them in turn.
CONFIGS = (
    {},
    {"use_rslora": True, "dropout": 0.0},
    {"r": 4, "rank_pattern": {r".*layers\.1\..*experts\.down_proj": 6}},
)


def same_bits(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == its.keys() and all(torch.equal(tensor, its[name]) for name, tensor in mine.items())


def tokens(model, ids):
    return model.generate(input_ids=ids[:, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_bit_for_bit(kind, checkpointing, folders, ids):
    number = KINDS.index(kind)
    config = dict(CONFIGS[number % 3])
    if number > 3:
        # Packed weights allow no other initialization.
        config.pop("init_lora_weights", None)
    results = []
    for model in load_both(folders[kind], (1, 3, 99)[(number + checkpointing) % 3]):
        if checkpointing:
            model.gradient_checkpointing_enable()
        adapted, losses, trained = train(model, ids, **config)
        # Generate right after training, without `eval()`.
        results.append((losses, trained, tokens(adapted, ids)))
    (losses, resident, expected), (other_losses, offloaded, answer) = results
    assert losses == other_losses
    assert same_bits(offloaded, resident)
    assert torch.equal(answer, expected)
    # Two layers have two stacks with two factors each.
    assert sum(".experts." in name for name in offloaded) == 8


def test_adapters_train_beside_experts_in_ram(folders, ids, monkeypatch):
    without_kernels(monkeypatch)
    resident, offloaded = load_both(folders["mixtral"])
    put_in_store(offloaded, "cpu", 2 * expert_bytes(resident), is_remote=True)
    _, expected, weights = train(resident, ids)
    _, losses, trained = train(offloaded, ids)
    assert losses == expected
    assert same_bits(trained, weights)


def file_bytes() -> int:
    """Return the number of bytes that this process has read from files."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("room", [1, 5, 9])
def test_each_expert_is_read_once_a_pass(room, checkpointing, folders, ids):
    """Backward passes request in reverse order; layers that are computed again read nothing if a layer has slots."""
    resident, model = load_both(folders["mixtral"], room)
    if checkpointing:
        model.gradient_checkpointing_enable()
    adapted = peft.get_peft_model(model, llamoe.lora_config(model, r=3)).train()
    model.experts_statistics(reset=True)
    with llamoe.trace_experts(model) as trace:
        adapted(input_ids=ids, labels=ids).loss.backward()
        # In the first step libraries read files of their own.
        before = file_bytes() - counts(model).bytes_read
        adapted(input_ids=ids, labels=ids).loss.backward()
    in_all, statistics = file_bytes() - before, counts(model)
    order, backward = [], 0
    for forward in asked_in(trace)[:2]:
        order += forward
        for layer in (1, 0):
            experts = [key for key in forward if key[0] == layer]
            order += (experts if checkpointing else []) + experts[::-1]
            backward += len(experts)
    hits, misses = simulate_lru(order, room)
    assert (statistics.hits, statistics.misses) == (hits, misses)
    assert statistics.bytes_read == misses * expert_bytes(resident)
    # Python reads a little beside, such as the numbers of `file_bytes`.
    assert statistics.bytes_read <= in_all < statistics.bytes_read + 10_000
    if room >= 5 or not checkpointing:
        assert misses <= 2 * backward - min(room, 5)


def result_of(trainer: Trainer) -> tuple[list, dict[str, torch.Tensor]]:
    log = [(row.get("loss"), row.get("eval_loss"), row.get("grad_norm")) for row in trainer.state.log_history]
    named = trainer.model.named_parameters()
    return log, {name: p.detach().clone() for name, p in named if p.requires_grad}


def test_trainer_resumes_after_a_kill(folders, tmp_path):
    """Offloaded experts in 4 bits can be trained; accelerate refuses 4-bit layers that its hooks read from disk."""
    folder = folders["mixtral in nf4"]
    killed = programs.call(
        "support.killed_training", "train_until_killed", str(folder), str(tmp_path / "killed")
    )
    resident, offloaded = load_both(folder, 2)
    unstopped = trainer_of(resident, tmp_path / "unstopped")
    unstopped.train()
    killed.join(200)
    assert killed.exitcode == -9
    again = trainer_of(offloaded, tmp_path / "killed")
    again.train(resume_from_checkpoint=True)
    (log, weights), (expected_log, expected) = result_of(again), result_of(unstopped)
    assert log == expected_log
    assert same_bits(weights, expected)


@pytest.mark.parametrize("kind", ["mixtral", "int4"])
def test_adapters_of_offloaded_experts_load_anywhere(kind, folders, ids, tmp_path):
    """Also a second adapter beside the first; accelerate's hooks are not added."""
    _, model = load_both(folders[kind], 2)
    adapted, *_ = train(model, ids, steps=2)
    adapted.save_pretrained(tmp_path)
    expected = tokens(adapted.eval(), ids)
    logits = []
    for model in load_both(folders[kind], 2):
        places = getattr(model, "hf_device_map", None)
        opened = peft.PeftModel.from_pretrained(model, tmp_path).eval()
        assert torch.equal(tokens(opened, ids), expected)
        opened.load_adapter(tmp_path, "second")
        with torch.no_grad():
            for module in opened.modules():
                if hasattr(module, "lora_B") and "second" in module.lora_B:
                    module.lora_B["second"].weight.mul_(-1.5)
            opened.set_adapter("second")
            logits.append(opened(input_ids=ids).logits)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
        assert getattr(model, "hf_device_map", None) == places
    assert torch.equal(*logits)


def test_prepare_model_for_kbit_training_reads_no_experts(folders):
    _, model = load_both(folders["text of 16 bits"], 2)
    experts = {name: p.data_ptr() for name, p in model.named_parameters() if ".experts." in name}
    prepared = peft.prepare_model_for_kbit_training(model)
    named = dict(prepared.named_parameters())
    assert {name: named[name].data_ptr() for name in experts} == experts
    assert not any(p.requires_grad for p in named.values())
    assert named["lm_head.weight"].dtype == torch.float32


def test_merging_is_refused(folders):
    _, model = load_both(folders["mixtral"], 2)
    adapted = peft.get_peft_model(model, llamoe.lora_config(model, r=2))
    for merge in (adapted.merge_and_unload, adapted.merge_adapter):
        with pytest.raises(ValueError, match="is on 'disk': packed or offloaded weights cannot be changed"):
            merge()


def test_the_next_expert_is_read_during_a_product(folders, ids, monkeypatch):
    """In forward and backward passes: when a matrix is yielded, the next one is being read."""
    _, model = load_both(folders["mixtral"], 3)
    events, start, walk = [], Store._start, Store.walk

    def notice_reading(store, slots, entry):
        events.append(("read", entry.key[0], slots.stack, entry.key[1]))
        return start(store, slots, entry)

    def notice_matrices(store, layer, stack, hit, *args, **options):
        with closing(walk(store, layer, stack, hit, *args, **options)) as matrices:
            for number, (expert, parts) in enumerate(zip(hit, matrices, strict=True)):
                events.append(("yielded", layer, stack, expert, [*hit][number + 1 : number + 2]))
                yield parts

    monkeypatch.setattr(Store, "_start", notice_reading)
    monkeypatch.setattr(Store, "walk", notice_matrices)
    adapted = peft.get_peft_model(model, llamoe.lora_config(model, r=3)).train()
    adapted(input_ids=ids, labels=ids).loss.backward()
    ahead = {True: 0, False: 0}
    for at, (what, layer, stack, expert, *following) in enumerate(events):
        for later in following[0] if what == "yielded" else ():
            read = ("read", layer, stack, later)
            # A matrix that was in a slot already is read only before.
            assert read in events[:at] and read not in events[at : at + 1]
            ahead[later > expert] += 1
    assert min(ahead.values()) > 8
