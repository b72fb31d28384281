"""What the Auto classes give for a folder of ours, and that they neither ask nor warn where there is no reason to."""

import json

import pytest
from support import programs
from support.models import make_asymmetric, stock_multimodal_config
from support.paths import TINY, environment
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedTokenizerFast,
)

import llamoe

pytest.importorskip("PIL", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from support.pictures import make_processor
from transformers import Llama4Processor


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved by stock's processor, so that every folder names `Llama4Processor`."""
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
    # Who names a class gets it.
    assert type(Llama4Processor.from_pretrained(folders / "ours")) is Llama4Processor
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


def test_settings_of_the_folder_and_of_the_call_arrive(folders):
    stock, ours = (
        Llama4Processor.from_pretrained(folders / "ours"),
        AutoProcessor.from_pretrained(folders / "ours"),
    )
    assert ours.image_processor.to_dict() == stock.image_processor.to_dict()
    assert ours.tokenizer.get_vocab() == stock.tokenizer.get_vocab()
    assert (ours.patch_size, ours.downsample_ratio) == (stock.patch_size, stock.downsample_ratio) == (14, 4)
    changed = AutoProcessor.from_pretrained(folders / "ours", max_patches=3)
    assert changed.image_processor.max_patches == 3


def test_subclass_of_stocks_processor_keeps_its_class(folders):
    class Mine(Llama4Processor):
        pass

    assert type(Mine.from_pretrained(folders / "ours", _from_auto=True)) is Mine


# In processes of their own. Each case is a fork of one that has imported transformers alone.

CASES = """
import json, os, sys, tempfile, traceback
import torch, transformers, torchvision
# What the cases need, loaded before the fork.
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers import Llama4ForConditionalGeneration, Llama4ImageProcessor, Llama4Processor, pipeline
assert "llamoe" not in sys.modules
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 2  # not 15 s
# Somebody is there who answers nothing.
read_end, write_end = os.pipe()
os.dup2(read_end, 0)
sys.stdin = open(0)
folder, cases = sys.argv[1], json.loads(sys.argv[2])

def load(what, options):
    if what == "pipeline":
        made = pipeline("image-text-to-text", model=folder, **options)
        return [type(part).__name__ for part in (made.model, made.processor)]
    if what == "text pipeline":
        made = pipeline("text-generation", model=folder, **options)
        return [type(part).__name__ for part in (made.model, made.tokenizer)]
    return type(getattr(transformers, what).from_pretrained(folder, **options)).__name__

results = []
for what, is_imported, trust in cases:
    told = tempfile.TemporaryFile("w+")
    answer = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        try:
            if is_imported:
                import llamoe
            for stream in (1, 2):
                os.dup2(told.fileno(), stream)
            options = {} if trust is None else {"trust_remote_code": trust}
            json.dump(load(what, options), answer)
        except BaseException as error:
            json.dump(type(error).__name__, answer)
        finally:
            for file in (sys.stdout, sys.stderr, answer):
                file.flush()
            os._exit(0)
    os.waitpid(child, 0)
    told.seek(0), answer.seek(0)
    results.append([json.load(answer), told.read()])
print()
print(json.dumps(results))
"""


def ask(folder, cases, modules):
    """For each case what was given, and what was printed; somebody is there who answers nothing."""
    done = programs.run(
        ["-c", CASES, folder, json.dumps(cases)], env=environment(HF_MODULES_CACHE=str(modules)), timeout=500
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(map(tuple, cases), results, strict=True))


GIVEN = {
    "AutoTokenizer": "TokenizersBackend",
    "AutoProcessor": "LlamoeProcessor",
    "AutoImageProcessor": "Llama4ImageProcessor",
    "AutoConfig": "LlamoeConfig",
    "AutoModelForImageTextToText": "LlamoeForConditionalGeneration",
    "pipeline": ["LlamoeForConditionalGeneration", "LlamoeProcessor"],
    "text pipeline": ["LlamoeForCausalLM", "TokenizersBackend"],
}


def is_complaint(line):
    return any(
        word in line for word in ("y/N", "custom code", "model of type", "Warning", "warning", "Error")
    )


@pytest.mark.slow
def test_trusted_or_imported_loads_are_silent(tmp_path):
    imported = [(what, True, None) for what in ("AutoTokenizer", "AutoProcessor", "text pipeline")]
    trusted = [(what, False, True) for what in GIVEN]
    results = ask(TINY, imported + trusted, tmp_path / "modules")
    for (what, is_imported, trust), (given, told) in results.items():
        complaints = [line for line in told.splitlines() if is_complaint(line)]
        assert given == GIVEN[what] and not complaints, (what, is_imported, trust, given, told)


@pytest.mark.slow
def test_where_transformers_asks(tmp_path):
    """The README says so. AutoImageProcessor reads no configuration, and asks nothing."""
    cases = [(what, False, None) for what in ("AutoTokenizer", "AutoImageProcessor")] + [
        ("AutoTokenizer", False, False)
    ]
    results = ask(TINY, cases, tmp_path / "modules")
    given, told = results["AutoTokenizer", False, None]
    assert given == "TokenizersBackend" and "[y/N]" in told
    given, told = results["AutoTokenizer", False, False]
    assert given == "TokenizersBackend" and "[y/N]" not in told and "model of type" in told
    given, told = results["AutoImageProcessor", False, None]
    assert given == "Llama4ImageProcessor" and not is_complaint(told)


def test_a_stock_config_by_hand_stays_stocks(folders):
    config = Llama4Config.from_pretrained(folders / "stock")
    assert type(AutoProcessor.from_pretrained(folders / "stock", config=config)) is Llama4Processor
    assert Llama4ForConditionalGeneration.config_class is Llama4Config


@pytest.mark.parametrize("layout", ["llamoe", "stock"])
def test_text_models_give_the_tokenizer(folders, tmp_path, layout):
    """The tokenizer's file names the processor's class, but nothing of a processor is there."""
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
    # A model with pictures needs what is missing.
    model.save_pretrained(tmp_path / "text", layout=layout)
    with pytest.raises(OSError, match="image processor"):
        found(tmp_path / "text")
