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

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from ...configuration.errors import CheckpointError
from .merges import merges_of

# SentencePiece writes this for a space.
SPACE = "\u2581"
# Piece types of sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_MODEL_TYPES = {1: "unigram", 2: "byte-pair encoding", 3: "words", 4: "characters"}
_BPE = 2
# Where the dummy prefix goes if a model has symbols of its own, see _normalizer.
_PREFIX_BUT_FOR = r"\A(?!(?:{})\z)(?=[\s\S])"
_PROBES = (
    "", " ", "   ", " leading", "trailing ", "two  spaces", "a b", "\n", "\n\n x", "\t tab", "line\r\nline", "<s>",
    "</s>", "<unk>", "<0x0A>", SPACE, f"a{SPACE}b", "Grüße, 世界! 🙂", "e\u0301", "\u00a0", "\u200b", "1234567890",
    "aaaaaaaaaaaaaaaaa", "def f(x):\n        return x", "[INST] hi [/INST] ", "x" * 70, " " * 33,
)  # fmt: skip


def read(content: bytes, origin: str) -> Any:
    """The `ModelProto` of a SentencePiece model, checked.

    Raises:
        CheckpointError: it is damaged, of a kind that LLaMA does not use, or a library is missing.
    """
    library, messages = _libraries(origin)
    proto = messages.ModelProto()
    advice = "Take the file from the release again."
    try:
        proto.ParseFromString(content)
        parts = [name for name in ("trainer_spec", "normalizer_spec") if not proto.HasField(name)]
        if parts or not proto.pieces:
            missing = " and ".join(parts) or "pieces"
            raise CheckpointError(
                f"{origin}: a SentencePiece model of {len(proto.pieces)} pieces without {missing}, as if cut short. "
                + advice
            )
        # Pieces that are not UTF-8 are bytes.
        if not all(isinstance(piece.piece, str) for piece in proto.pieces):
            raise CheckpointError(
                f"{origin}: a SentencePiece model with a piece that is not a text. {advice}"
            )
        library.SentencePieceProcessor(model_proto=content)
    except CheckpointError:
        raise
    # protobuf and sentencepiece raise errors of their own.
    except Exception as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{origin}: a damaged SentencePiece model ({problem}). {advice}") from error
    trainer = proto.trainer_spec
    if trainer.model_type != _BPE:
        raise CheckpointError(
            f"{origin}: a SentencePiece model of the type {_MODEL_TYPES.get(trainer.model_type, trainer.model_type)}; "
            f"{_MODEL_TYPES[_BPE]}, as LLaMA's, was expected."
        )
    if trainer.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise CheckpointError(
            f"{origin}: a SentencePiece model that writes spaces as no LLaMA tokenizer does "
            "(treat_whitespace_as_suffix, escape_whitespaces); tokenizer.json cannot say that."
        )
    unused = [piece.piece for piece in proto.pieces if piece.type == UNUSED]
    if unused:
        raise CheckpointError(
            f"{origin}: {len(unused)} pieces are marked as unused (the first is {unused[0]!r}), which tokenizer.json "
            "cannot say."
        )
    for name in ("bos", "eos", "unk"):
        number = getattr(trainer, f"{name}_id")
        if not 0 <= number < len(proto.pieces):
            raise CheckpointError(
                f"{origin}: its {name}_id is {number}, and it has {len(proto.pieces)} pieces; a LLaMA tokenizer has "
                "all of unk, bos and eos."
            )
        piece = proto.pieces[number]
        if piece.type != (UNKNOWN if name == "unk" else CONTROL):
            raise CheckpointError(
                f"{origin}: its {name}_id is {number}, but that piece, {piece.piece!r}, is an ordinary one. {advice}"
            )
    return proto


def special_tokens(proto: Any) -> dict[str, str]:
    """Tokens by transformers' roles: bos_token, eos_token, unk_token and pad_token.

    Meta's files have no padding token; `<unk>` stands in. A model with byte fallback never produces it from text, so
    batches can be padded without a new row in the embedding, and a loss that ignores padding does not ignore the end
    of text.
    """
    trainer = proto.trainer_spec
    names = {
        f"{name}_token": proto.pieces[getattr(trainer, f"{name}_id")].piece for name in ("bos", "eos", "unk")
    }
    padding = trainer.pad_id if 0 <= trainer.pad_id < len(proto.pieces) else trainer.unk_id
    return {**names, "pad_token": proto.pieces[padding].piece}


def to_json(proto: Any, origin: str) -> bytes:
    """Build tokenizer.json; ids equal SentencePiece's for every text, with `<s>` in front.

    Raises:
        CheckpointError: SentencePiece itself gives other ids for one of a list of texts.
    """
    trainer = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    if len(set(pieces)) != len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if piece in pieces[:index])
        raise CheckpointError(
            f"{origin}: the piece {twice!r} is there twice. Take the file from the release again."
        )
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
        tokenizer.add_tokens(
            [
                AddedToken(piece.piece, normalized=kind == USER_DEFINED, special=kind != USER_DEFINED)
                for piece in proto.pieces
                if piece.type == kind
            ]
        )
    bos = pieces[trainer.bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, trainer.bos_id)],
    )
    _try(tokenizer, proto, origin)
    return tokenizer.to_str(pretty=True).encode()


def extended(content: bytes, tokens: Mapping[str, int], origin: str) -> bytes:
    """A SentencePiece model with special tokens, name to id, appended as control pieces."""
    proto = read(content, origin)
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


def _try(tokenizer: Tokenizer, proto: Any, origin: str) -> None:
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
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    for text in [*_PROBES, *own]:
        expected = reference.encode(text)
        given = tokenizer.encode(text, add_special_tokens=False).ids
        if given != expected and text not in symbols:
            raise CheckpointError(
                f"{origin}: tokenizer.json and the SentencePiece model give different ids for {text!r}: {given} and "
                f"{expected}. This tokenizer cannot be converted without changing what the model reads."
            )
    tokenizer.encode_special_tokens = before
