"""The differential case of a seed: its kind, and its outcome."""

import gc
import importlib
import random
import re
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from .judge import JudgeIsWrong, Refused, TooClose, Wrong

# Weight of each kind of case in the draw, by the name of its file.
KINDS = {"forward": 22, "cached": 18, "training": 14, "generation": 8}

# Refusals that state what is not supported and why. Any other error that stock does not raise is a fault.
DOCUMENTED = [
    r"the KV cache has forgotten tokens that may still be needed",
    r"position_ids of a row with padding behind cached tokens",
    r"transformers' llama demands a multiple of num_attention_heads",
]


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: kind of case.
        verdict: "passed", "refused", "too close", "failed" or "judge".
        text: text of the error, if there was one.
        notes: what was drawn.
    """

    kind: str
    verdict: str = "passed"
    text: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def kind_of(seed: int) -> str:
    return random.Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def run(seed: int) -> Outcome:
    """Run the case of a seed."""
    outcome = Outcome(kind_of(seed))
    case = importlib.import_module(f"fuzz.kinds.{outcome.kind}").case
    torch.manual_seed(seed)
    try:
        case(random.Random(seed), seed, outcome.notes)
    except Refused as error:
        outcome.verdict, outcome.text = "refused", str(error)
    except TooClose:
        outcome.verdict = "too close"
    except JudgeIsWrong as error:
        outcome.verdict, outcome.text = "judge", str(error)
    except Wrong as error:
        outcome.verdict, outcome.text = "failed", str(error)
    except Exception as error:
        outcome.text = describe(error)
        is_documented = isinstance(error, ValueError) and any(
            re.search(text, str(error)) for text in DOCUMENTED
        )
        outcome.verdict = "refused" if is_documented else "failed"
    finally:
        gc.collect() if seed % 50 == 0 else None
    return outcome


def describe(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]} [{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}]"
