"""The tokenizer of LLaMA 1 and 2: a SentencePiece model to tokenizer.json.

SentencePiece always puts a space before a text. transformers' own `LlamaTokenizer` adds it only where the text does not
begin with one, and so loses a piece. Here the normalizer adds it. Nothing splits the text into words, as in
SentencePiece, whose high-ranked pieces may span words.

SentencePiece (Kudo and Richardson, 2018, arXiv:1808.06226) ranks pieces by their scores. Each conversion is compared
with SentencePiece itself before it is used.
"""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from ...configuration.errors import CheckpointError
from .source_tokenizer import SourceTokenizer, begin_with, merges_of, refuse

# SentencePiece writes this for a space.
SPACE = "\u2581"
# Piece types of sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_BPE = 2
# Where the dummy prefix goes if a model has symbols of its own, see _normalizer.
_PREFIX_BUT_FOR = r"\A(?!(?:{})\z)(?=[\s\S])"
_PROBES = (
    "", " ", "   ", " leading", "trailing ", "two  spaces", "a b", "\n", "\n\n x", "\t tab", "line\r\nline", "<s>",
    "</s>", "<unk>", "<0x0A>", SPACE, f"a{SPACE}b", "Grüße, 世界! 🙂", "e\u0301", "\u00a0", "\u200b", "1234567890",
    "aaaaaaaaaaaaaaaaa", "def f(x):\n        return x", "[INST] hi [/INST] ", "x" * 70, " " * 33,
)  # fmt: skip


def read(content: bytes, origin: str, family: str) -> SourceTokenizer:
    """Read a SentencePiece model.

    Raises:
        CheckpointError: it is damaged, of a kind that LLaMA does not use, or a library is missing.
    """
    proto = _parse(content, origin)
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk")}
    for name, index in ids.items():
        kind = UNKNOWN if name == "unk" else CONTROL
        if not 0 <= index < len(proto.pieces) or proto.pieces[index].type != kind:
            raise CheckpointError(
                f"{origin}: its {name}_id is {index}, and none of its {len(proto.pieces)} pieces is that token; a "
                "LLaMA tokenizer has all of unk, bos and eos."
            )
    # Meta's files have no padding token, and `<unk>` stands in. A model with byte fallback never produces it from text,
    # so batches can be padded without a new row in the embedding, and a loss that ignores padding does not ignore the
    # end of text.
    padding = proto.trainer_spec.pad_id
    ids["pad"] = padding if 0 <= padding < len(proto.pieces) else ids["unk"]
    special = {
        piece.piece: index for index, piece in enumerate(proto.pieces) if piece.type in (CONTROL, UNKNOWN)
    }
    return SourceTokenizer(
        "sentencepiece",
        family,
        content,
        len(proto.pieces),
        special,
        {f"{name}_token": proto.pieces[index].piece for name, index in ids.items()},
        lambda: to_json(proto, origin),
        version=7 if "[SYSTEM_PROMPT]" in special else 3 if "[INST]" in special else 1,
    )


def _parse(content: bytes, origin: str) -> Any:
    library, messages = _libraries(origin)
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(content)
        parts = [name for name in ("trainer_spec", "normalizer_spec") if not proto.HasField(name)]
        if parts or not proto.pieces:
            missing, count = " and ".join(parts) or "pieces", len(proto.pieces)
            refuse(origin, f"a SentencePiece model of {count} pieces without {missing}, as if cut short")
        # Pieces that are not UTF-8 are bytes.
        if not all(isinstance(piece.piece, str) for piece in proto.pieces):
            refuse(origin, "a SentencePiece model with a piece that is not a text")
        library.SentencePieceProcessor(model_proto=content)
    except CheckpointError:
        raise
    # protobuf and sentencepiece raise errors of their own.
    except Exception as error:
        problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
        refuse(origin, f"a damaged SentencePiece model ({problem})")
    kind = proto.trainer_spec.model_type
    if kind != _BPE:
        raise CheckpointError(
            f"{origin}: a SentencePiece model of model_type {kind}; {_BPE}, byte-pair encoding, was expected."
        )
    return proto


def to_json(proto: Any, origin: str) -> bytes:
    """Build tokenizer.json; ids equal SentencePiece's for every text, with `<s>` in front.

    Raises:
        CheckpointError: SentencePiece itself gives other ids for one of a list of texts.
    """
    trainer = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges_of(sorted(scores, key=scores.__getitem__, reverse=True)),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )
    tokenizer.normalizer = _normalizer(proto)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # Tokens that a text may spell, in the order of their ids within a kind.
    for kind in (CONTROL, UNKNOWN, USER_DEFINED):
        own = kind == USER_DEFINED
        tokens = [piece.piece for piece in proto.pieces if piece.type == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=own, special=not own) for token in tokens])
    tokenizer.post_processor = begin_with(pieces[trainer.bos_id], trainer.bos_id)
    _compare(tokenizer, proto, origin)
    return tokenizer.to_str(pretty=True).encode()


def extended(content: bytes, tokens: Mapping[str, int], origin: str) -> bytes:
    """A SentencePiece model with special tokens, name to id, appended as control pieces."""
    proto = _parse(content, origin)
    for name, index in sorted(tokens.items(), key=lambda item: item[1]):
        if index != len(proto.pieces):
            raise CheckpointError(
                f"{origin}: has {len(proto.pieces)} pieces, and the tokenizer.json beside it gives {name!r} the id "
                f"{index}: the two do not belong together."
            )
        proto.pieces.add(piece=name, score=0.0, type=CONTROL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString()


def _libraries(origin: str) -> tuple[Any, Any]:
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise CheckpointError(
            f"{origin}: SentencePiece models need the libraries sentencepiece and protobuf ({error}). Install them "
            "with: pip install 'llamoe[tokenizers]'"
        ) from error
    return sentencepiece, sentencepiece_model_pb2


def _normalizer(proto: Any) -> Any:
    settings = proto.normalizer_spec
    steps: list[Any] = []
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.add_dummy_prefix:
        symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
        if symbols:
            # tokenizers normalizes each symbol before searching for it; the prefix must not become a part of it.
            names = "|".join(re.escape(symbol) for symbol in symbols)
            steps.append(normalizers.Replace(Regex(_PREFIX_BUT_FOR.format(names)), SPACE))
        else:
            steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _compare(tokenizer: Tokenizer, proto: Any, origin: str) -> None:
    """Compare with SentencePiece itself on fixed texts and on texts made of the model's own pieces.

    Raises:
        CheckpointError: the ids of a text differ.
    """
    library, _ = _libraries(origin)
    reference = library.SentencePieceProcessor(model_proto=proto.SerializeToString())
    normal = [piece.piece for piece in proto.pieces if piece.type == NORMAL]
    stride = max(1, len(normal) // 2000)
    own = [
        "".join(normal[start :: stride * 31][:24]).replace(SPACE, " ")
        for start in range(0, stride * 31, stride)
    ]
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    tokenizer.encode_special_tokens = True
    for text in [*_PROBES, *own]:
        expected = reference.encode(text)
        given = tokenizer.encode(text, add_special_tokens=False).ids
        if given != expected and text not in symbols:
            raise CheckpointError(
                f"{origin}: tokenizer.json and the SentencePiece model give different ids for {text!r}: {given} and "
                f"{expected}. This tokenizer cannot be converted without changing what the model reads."
            )
    tokenizer.encode_special_tokens = False
