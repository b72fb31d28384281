"""The list of merges with which the library `tokenizers` joins pieces as SentencePiece and tiktoken do.

Both merge the two neighbours whose concatenation has the best rank, the leftmost first; `tokenizers` merges the pair
that stands first in a list. The list holds every way to split a piece in two, pieces in order of their ranks.
"""

from collections.abc import Collection


def merges_of(pieces: Collection[str]) -> list[tuple[str, str]]:
    """Pairs that merge into one of the pieces: best piece first, then the longer left part, which begins further left.

    Args:
        pieces: the best rank first.
    """
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]
