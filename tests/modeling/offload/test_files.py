"""Experts are read whole from every kind of file; if a file changes, shrinks, vanishes or fails, a call is an error."""

import errno
import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import run
from support.offload import check_equal, counts, expert_bytes, load_both, mixtral, text_model

import llamoe
from llamoe.modeling.offload import reading

pytestmark = pytest.mark.slow

CAUSAL, TINY = llamoe.LlamoeForCausalLM, "examples/llamoe-tiny"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


@pytest.fixture(params=[True, False], ids=["direct", ""])
def direct(request, monkeypatch):
    """True if files are read without the page cache, where the file system supports that."""
    monkeypatch.setattr(reading, "LEAST_BYTES_OF_DIRECT", 0 if request.param else math.inf)
    return request.param


def reads_directly(model) -> bool:
    """Return True if files are read without the page cache."""
    (store,) = model._stores()
    return any(file.direct is not None for file in store.reader.files.values())


def apart(folder: Path, target: Path) -> Path:
    """Copy a folder with its experts in a file of their own, and return the path of that file.

    Other weights of a loaded model may be memory maps of their file, so a test must not cut that file.
    """
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    tensors = load_file(folder / "model.safetensors")
    weight_map = {name: ("experts" if ".experts." in name else "rest") + ".safetensors" for name in tensors}
    for file in {*weight_map.values()}:
        content = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(content, target / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target / "experts.safetensors"


def write_at_odd_bytes(tensors, path: Path, pad: int) -> None:
    """Write a safetensors file whose tensors begin at any byte; the last expert ends with the file."""
    order = sorted(tensors, key=lambda name: ("experts" in name, name))
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        size = tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    text += b" " * ((pad - len(text) - 8) % 64)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("threads", [1, 32])
@pytest.mark.parametrize("kind", ["text", "mixtral"])
def test_ways_to_read_are_equal(kind, direct, threads, folders, ids, monkeypatch):
    monkeypatch.setattr(reading, "_THREADS", threads)
    resident, model = load_both(folders[kind], 2)
    is_direct = reads_directly(model)
    assert not is_direct or direct
    check_equal(resident, model, ids)
    statistics = counts(model)
    needed = statistics.misses * expert_bytes(resident)
    assert statistics.bytes_read >= needed if is_direct else statistics.bytes_read == needed


@pytest.mark.parametrize("pad", [0, 8, 3])
def test_experts_begin_anywhere_and_end_with_the_file(pad, direct, text_folder, ids, tmp_path):
    shutil.copy(text_folder / "config.json", tmp_path)
    tensors = load_file(text_folder / "model.safetensors")
    write_at_odd_bytes(tensors, tmp_path / "model.safetensors", pad)
    resident, model = load_both(tmp_path, 2)
    if pad % 4 == 0:
        check_equal(resident, model, ids)
    else:
        # The model in memory multiplies floats at odd addresses, and rounds otherwise: 2e-6 measured, logits up to 8.
        torch.testing.assert_close(run(model, input_ids=ids), run(resident, input_ids=ids), rtol=0, atol=2e-5)


def split(source, folder):
    from llamoe.conversion import convert

    convert(source, folder / "split", to="hf", experts="split")
    assert any(".experts.3." in name for name in load_file(folder / "split" / "model.safetensors"))
    return folder / "split"


# By kind of folder: a function of the folder of a model and an empty folder, which fills the empty one or returns
# another; and arguments of `load_both`.
FOLDERS = {
    "several files": (lambda _, folder: text_model().save_pretrained(folder, max_shard_size="60KB"), {}),
    "files of single experts": (
        lambda _, folder: mixtral().save_pretrained(folder, layout="stock", max_shard_size="60KB"),
        {},
    ),
    "single experts of Llama 4": (split, {"cls": CAUSAL}),
    "variant": (lambda _, folder: text_model().save_pretrained(folder, variant="fp32"), {"variant": "fp32"}),
    "subfolder": (
        lambda _, folder: text_model().save_pretrained(folder / "inner"),
        {"subfolder": "inner", "cls": CAUSAL},
    ),
    "text part, single experts": (lambda _, folder: split(TINY, folder), {"cls": CAUSAL}),
    "multimodal, single experts": (
        lambda _, folder: split(TINY, folder),
        {"cls": llamoe.LlamoeForConditionalGeneration},
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_equal(kind, text_folder, ids, tmp_path):
    make, how = FOLDERS[kind]
    resident, model = load_both(make(text_folder, tmp_path) or tmp_path, 2, **how)
    check_equal(resident, model, ids)
    assert "files" not in kind or len(list(tmp_path.glob("*.safetensors"))) > 4


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_systems_without_direct_reads_fall_back(error, text_folder, ids, monkeypatch):
    open_file = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error))
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(reading, "LEAST_BYTES_OF_DIRECT", 0)
    resident, model = load_both(text_folder, 2)
    assert not reads_directly(model)
    check_equal(resident, model, ids)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_cast_as_in_memory(stored, ids, tmp_path):
    """Each stored dtype is cast to each dtype; each family takes part."""
    makers = (text_model, mixtral) if stored != torch.bfloat16 else (mixtral, text_model)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        folder = tmp_path / str(number)
        makers[number % 2]().to(stored).save_pretrained(folder)
        check_equal(*load_both(folder, 2, dtype=dtype), ids)


# Tests of files that change, and drives that fail.


@pytest.fixture
def experts_file(text_folder, tmp_path):
    """The file with the experts of a checkpoint; the other weights are in another file beside it."""
    return apart(text_folder, tmp_path / "apart")


def rewrite(path):
    """Write other values, without a change of the size."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"\x01" * 4096)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path):
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    other.replace(path)


def shrink(path):
    os.truncate(path, path.stat().st_size - 5000)


CHANGES = {
    "rewritten": (rewrite, "has changed"),
    "replaced": (replace, "has changed"),
    "shrunk": (shrink, "has changed|was cut short"),
    "emptied": (lambda path: os.truncate(path, 0), "has changed|was cut short"),
    "gone": (lambda path: path.unlink(), "has changed"),
}


@pytest.mark.parametrize(
    ("when", "change"),
    [
        *(("before", change) for change in CHANGES),
        ("between two reads", "shrunk"),
        ("after the last read", "rewritten"),
    ],
)
def test_changed_files_are_errors(when, change, direct, experts_file, ids, monkeypatch):
    monkeypatch.setattr(reading, "_THREADS", 1)
    make, message = CHANGES[change]
    _, model = load_both(experts_file.parent, 2)
    with torch.no_grad():
        model(ids)
    read, calls = os.preadv, []

    def strike(descriptor, *args):
        calls.append(None)
        if when == "between two reads" and len(calls) == 2:
            make(experts_file)
        got = read(descriptor, *args)
        if when == "after the last read" and len(calls) == 1:
            make(experts_file)
        return got

    if when == "before":
        make(experts_file)
    monkeypatch.setattr(os, "preadv", strike)
    with pytest.raises(llamoe.CheckpointError, match=message) as error, torch.no_grad():
        model(ids)
    assert str(experts_file) in str(error.value)
    assert ".feed_forward.experts" in str(error.value)
    # The next call is an error, too.
    with pytest.raises(llamoe.CheckpointError), torch.no_grad():
        model(ids)


def test_a_file_replaced_while_the_model_loads_is_refused(experts_file, monkeypatch):
    from llamoe.modeling import base

    size = 2 * expert_bytes(text_model())
    attach_stores = base.attach_stores

    def late(model):
        replace(experts_file)
        attach_stores(model)

    monkeypatch.setattr(base, "attach_stores", late)
    with pytest.raises(llamoe.CheckpointError, match="experts.safetensors: has changed"):
        CAUSAL.from_pretrained(experts_file.parent, experts_memory=size)


def test_short_reads_are_completed(direct, text_folder, ids, monkeypatch):
    resident, model = load_both(text_folder, 2)
    read = os.preadv

    def short(descriptor, buffers, offset):
        # Network file systems return fewer bytes than were asked for; never 0, and not up to a block's end.
        (buffer,) = buffers
        return min(read(descriptor, buffers, offset), max(1, len(buffer) // 2 + 3))

    monkeypatch.setattr(os, "preadv", short)
    check_equal(resident, model, ids)


def test_reads_that_end_early_are_errors(direct, text_folder, ids, monkeypatch):
    _, model = load_both(text_folder, 2)
    read = os.preadv

    def early(descriptor, buffers, offset):
        return min(read(descriptor, buffers, offset), 4096) if len(buffers[0]) > 8192 else 0

    monkeypatch.setattr(os, "preadv", early)
    message = r"model.safetensors: expert \d of model.layers.1.*cannot be read: [\d,]+ bytes came of"
    with pytest.raises(llamoe.CheckpointError, match=message):
        model(ids)


@pytest.mark.parametrize("broken", [range(1), range(1, 9999, 2)])
def test_errors_that_go_away_leave_nothing_behind(broken, direct, text_folder, ids, monkeypatch):
    resident, model = load_both(text_folder, 2)
    read, calls, answers, messages = os.preadv, itertools.count(), [], []

    def fail(*args):
        if next(calls) in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(os, "preadv", fail)
        for _ in range(3):
            try:
                answers.append(model(ids).logits)
            except llamoe.CheckpointError as error:
                messages.append(str(error))
    wanted = r"model.safetensors: expert \d of model.layers.\d.*Input/output.*bytes [\d,]+ to [\d,]+"
    assert all(re.search(wanted, message) for message in messages)
    assert next(calls) > min(broken)
    # If only one read fails, it may be one ahead of need, which is repeated without an error.
    if len(broken) > 1:
        assert not answers
    with torch.no_grad():
        assert all(torch.equal(resident(ids).logits, logits) for logits in answers)
    check_equal(resident, model, ids)


@pytest.mark.parametrize(
    "how",
    [{"layout": "stock"}, {"max_shard_size": "60KB"}, {"variant": "other"}],
    ids=lambda how: next(iter(how)),
)
def test_saved_folders_load_again(how, text_folder, ids, tmp_path):
    resident, model = load_both(text_folder, 2)
    model.save_pretrained(tmp_path, **how)
    variant = {"variant": how["variant"]} if "variant" in how else {}
    again = CAUSAL.from_pretrained(tmp_path, **variant).eval()
    # On some processors the address of numbers in a mapped file decides on last bits of products.
    for loaded in (resident, again):
        for weight in loaded.parameters():
            weight.data = weight.data.clone()
    check_equal(resident, again, ids)
