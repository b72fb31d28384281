"""Write small tokenizers in Meta's and Mistral AI's formats."""

import base64
import io
import random


def some_lines(words, lines, seed=0):
    """Return `lines` lines of 12 words, drawn from `words` random words."""
    dice = random.Random(seed)
    vocabulary = ["".join(dice.choices("abcdehilnorstuw", k=dice.randint(1, 9))) for _ in range(words)]
    return [" ".join(dice.choices(vocabulary, k=12)) for _ in range(lines)]


def sentencepiece_model(lines, vocab_size, **options):
    """Train a SentencePiece model as LLaMA's: BPE, byte fallback, no normalisation; return its bytes."""
    import sentencepiece

    written = io.BytesIO()
    settings = dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=vocab_size, **{**settings, **options}
    )
    return written.getvalue()


def rank_table(tokens=tuple(bytes([byte]) for byte in range(256))):
    """Return the bytes of a tiktoken file of these tokens, by default the 256 single bytes."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def write_files(folder, files, config=None, layout=None):
    """Write files by name, and a model's configuration, into a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if config is not None:
        config.save_pretrained(folder, **({"layout": layout} if layout else {}))
    return folder
