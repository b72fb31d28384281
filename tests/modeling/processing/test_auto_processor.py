"""Auto classes return our classes for our folders, without a question or a warning."""

import json
import logging

import pytest
import transformers
from support.models import make_asymmetric, stock_multimodal_config
from support.paths import TINY
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    Llama4Config,
    PreTrainedTokenizerFast,
    pipeline,
)

import llamoe

pytest.importorskip("PIL", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from support.pictures import make_processor
from transformers import Llama4Processor


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders whose processor stock saved, so that each names `Llama4Processor`."""
    root = tmp_path_factory.mktemp("folders")
    model = llamoe.LlamoeForConditionalGeneration(stock_multimodal_config())
    make_asymmetric(model).save_pretrained(root / "ours")
    model.save_pretrained(root / "stock", layout="stock")
    for name in ("ours", "stock", "alone"):
        make_processor().save_pretrained(root / name)
        content = json.loads((root / name / "processor_config.json").read_text())
        assert content["processor_class"] == "Llama4Processor" and "auto_map" not in content
    return root


def found(folder, **options):
    return type(AutoProcessor.from_pretrained(folder, **options))


def test_our_processor_for_folders_of_ours(folders):
    assert found(folders / "ours") is llamoe.LlamoeProcessor
    assert found(str(folders / "ours"), trust_remote_code=False) is llamoe.LlamoeProcessor
    assert found(folders, subfolder="ours") is llamoe.LlamoeProcessor
    # A named class, a class derived from stock's, and a config of stock's are taken as they are.
    assert type(Llama4Processor.from_pretrained(folders / "ours")) is Llama4Processor
    mine = type("Mine", (Llama4Processor,), {})
    assert type(mine.from_pretrained(folders / "ours", _from_auto=True)) is mine
    assert found(folders / "stock", config=Llama4Config.from_pretrained(folders / "stock")) is Llama4Processor
    assert type(llamoe.LlamoeProcessor.from_pretrained(folders / "stock")) is llamoe.LlamoeProcessor


def test_stocks_for_folders_of_stock_unless_adopted(folders):
    assert found(folders / "stock") is found(folders / "alone") is Llama4Processor
    for names, given in (
        (["llama4"], llamoe.LlamoeProcessor),
        ([], llamoe.LlamoeProcessor),
        (["llama"], Llama4Processor),
        (["llama4_text"], Llama4Processor),
    ):
        with llamoe.adopt(*names):
            assert found(folders / "stock") is given and found(folders / "alone") is Llama4Processor
            with llamoe.adopt("llama"):
                assert found(folders / "stock") is given
        assert found(folders / "stock") is Llama4Processor


GIVEN = {
    "AutoTokenizer": "TokenizersBackend",
    "AutoProcessor": "LlamoeProcessor",
    "AutoImageProcessor": "Llama4ImageProcessor",
    "AutoConfig": "LlamoeConfig",
    "AutoModelForImageTextToText": "LlamoeForConditionalGeneration",
    "pipeline": ["LlamoeForConditionalGeneration", "LlamoeProcessor"],
    "text pipeline": ["LlamoeForCausalLM", "TokenizersBackend"],
}


@pytest.mark.parametrize("what", GIVEN)
def test_nothing_is_asked_or_warned_of(what, monkeypatch, caplog, recwarn):
    """With llamoe imported; `test_processor.py` and `registration/test_hub.py` load without it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    if what == "pipeline":
        made = pipeline("image-text-to-text", model=str(TINY))
        given = [type(part).__name__ for part in (made.model, made.processor)]
    elif what == "text pipeline":
        made = pipeline("text-generation", model=str(TINY))
        given = [type(part).__name__ for part in (made.model, made.tokenizer)]
    else:
        given = type(getattr(transformers, what).from_pretrained(TINY)).__name__
    assert given == GIVEN[what]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told += [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]
    assert not told


@pytest.mark.parametrize("layout", ["llamoe", "stock"])
def test_text_models_give_the_tokenizer(folders, tmp_path, layout):
    """The tokenizer's config names the processor's class, but the folder has no image processor."""
    AutoProcessor.from_pretrained(folders / "ours").save_pretrained(tmp_path / "processor")
    AutoTokenizer.from_pretrained(tmp_path / "processor").save_pretrained(tmp_path / "text")
    content = json.loads((tmp_path / "text/tokenizer_config.json").read_text())
    assert content["processor_class"] == "LlamoeProcessor"
    with pytest.raises(OSError, match="image processor"):
        found(tmp_path / "text")
    model = llamoe.LlamoeForConditionalGeneration(stock_multimodal_config())
    model.language_model.save_pretrained(tmp_path / "text", layout=layout)
    tokenizer = AutoProcessor.from_pretrained(tmp_path / "text")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (
        tokenizer("what is").input_ids == AutoTokenizer.from_pretrained(folders / "ours")("what is").input_ids
    )
    with pytest.raises(OSError, match="image processor"):
        llamoe.LlamoeProcessor.from_pretrained(tmp_path / "text")
    # For a model with pictures the missing image processor is an error.
    model.save_pretrained(tmp_path / "text", layout=layout)
    with pytest.raises(OSError, match="image processor"):
        found(tmp_path / "text")
