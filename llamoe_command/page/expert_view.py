"""Turn an expert record into pictures and tables for gradio's components.

An expert has the same colour everywhere on the page. Experts with consecutive numbers have very different colours.
"""

import colorsys
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from .expert_record import ExpertRecord

# Least side of the overlay in pixels: smaller pictures are enlarged, so that patches have sharp borders.
_SIDE = 480
# Opacity of the colours, under which the picture stays visible.
_OPACITY = 0.6
_GOLDEN_RATIO = 0.6180339887


def name_of(expert: int) -> str:
    """Return the label of an expert on the page."""
    return f"expert {expert}"


def colours(num_experts: int) -> dict[str, str]:
    """Return the colour of each expert, such as `#ff8800`, by its label."""
    by_name = {}
    for expert in range(num_experts):
        parts = colorsys.hsv_to_rgb(expert * _GOLDEN_RATIO % 1, 0.65, 0.9)
        by_name[name_of(expert)] = "#" + "".join(f"{round(part * 255):02x}" for part in parts)
    return by_name


def overlay(record: ExpertRecord, layer: int) -> tuple[Image.Image, list[tuple[np.ndarray, str]]] | None:
    """Return the picture and a mask of each expert's patches, for gradio's `AnnotatedImage`; None without a picture."""
    if record.picture is None:
        return None
    patches = record.patches(layer).numpy()
    size = record.picture.width * -(-_SIDE // record.picture.width)
    shown = record.picture.resize((size, size), Image.Resampling.BICUBIC)
    # The size may not be a multiple of the number of patches, so each pixel is assigned to its patch.
    patch_of_pixel = np.arange(size) * record.side // size
    experts = patches[patch_of_pixel][:, patch_of_pixel]
    return shown, [((experts == expert) * _OPACITY, name_of(expert)) for expert in np.unique(patches)]


def coloured_answer(record: ExpertRecord, layer: int) -> list[tuple[str, str | None]]:
    """Return each token of the answer with the label of its best expert, for gradio's `HighlightedText`."""
    return [(token, name_of(experts[0][0]) if experts else None) for token, experts in record.answered(layer)]


def answer_table(record: ExpertRecord) -> dict[str, Any]:
    """Return the chosen experts for gradio's `Dataframe`: a row for each token and a column for each layer."""
    of_layers = [record.answered(layer) for layer in range(len(record.layers))]
    rows = []
    for index, token in enumerate(record.answer):
        cells = [
            ", ".join(f"{expert} ({score:.2f})" for expert, score in answered[index][1]) or "not computed"
            for answered in of_layers
        ]
        # `repr` adds quotes, which show spaces at the ends of a token.
        rows.append([repr(token), *cells])
    return {"headers": ["token", *record.layers], "data": rows}


def heat_map(record: ExpertRecord) -> Figure:
    """Draw each expert's share of the tokens in each layer, with a panel for picture, prompt and answer."""
    shares = record.shares()
    figure = Figure(figsize=(3.4 * len(shares) + 0.8, 1.6 + 0.25 * len(record.layers)), layout="constrained")
    panels = figure.subplots(1, len(shares), squeeze=False)[0]
    highest = max(float(share.max()) for share in shares.values())
    for panel, (kind, share) in zip(panels, shares.items(), strict=True):
        drawn = panel.imshow(share.numpy(), aspect="auto", vmin=0, vmax=highest, cmap="viridis")
        panel.set(title=kind, xlabel="expert")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_yticks(range(len(record.layers)), record.layers if panel is panels[0] else [])
    figure.colorbar(drawn, ax=list(panels), format=PercentFormatter(1, decimals=0))
    return figure
