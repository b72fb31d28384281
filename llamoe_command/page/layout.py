"""The page: a conversation, and the experts of its last answer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

import llamoe

from .chat_model import ChatModel
from .expert_record import ExpertRecord
from .expert_view import answer_table, coloured_answer, colours, heat_map, overlay

_NO_ANSWER = "Ask something: the experts of the last answer are shown here."
_QUESTION = "What is in the picture?"


def make_page(chat: ChatModel, pictures: Sequence[Path] = ()) -> gr.Blocks:
    """The page of a model; `launch` starts it.

    Args:
        chat: the model.
        pictures: to click on, for a model that sees them.
    """
    with gr.Blocks(title=f"llamoe: {chat.name}", analytics_enabled=False, fill_height=True) as page:
        gr.Markdown(f"## {chat.name}")
        record = gr.State(None)
        with gr.Tabs():
            with gr.Tab("Chat"):
                _chat(chat, record, pictures)
            if chat.has_experts:
                with gr.Tab("Experts"):
                    _experts(chat, record)
    return page


def _chat(chat: ChatModel, record: gr.State, pictures: Sequence[Path]) -> None:
    placeholder = "Drop a picture here, and ask about it." if chat.sees_pictures else "Ask something."
    box = {"placeholder": placeholder, "stop_btn": True, "autofocus": True, "elem_id": "question"}
    if chat.sees_pictures:
        textbox = gr.MultimodalTextbox(file_types=["image"], file_count="single", sources=["upload"], **box)
    else:
        textbox = gr.Textbox(submit_btn=True, **box)

    def check(message: Any, *_: Any) -> dict[str, Any]:
        try:
            _read(message)
        except ValueError as error:
            return gr.validate(False, str(error))
        return gr.validate(True, "")

    def answer(
        message: Any, history: list[dict[str, Any]], max_new_tokens: int, temperature: float
    ) -> Iterator[tuple[str, ExpertRecord | None]]:
        try:
            messages = [*map(_as_chat_message, history), {"role": "user", "content": _read(message)}]
            yield from chat.answer(_plain_text(messages, chat), max_new_tokens, temperature)
        except (OSError, ValueError, RuntimeError) as error:
            raise gr.Error(" ".join(str(error).split()), print_exception=False) from error

    gr.ChatInterface(
        answer,
        multimodal=chat.sees_pictures,
        chatbot=gr.Chatbot(show_label=False, scale=1, elem_id="conversation"),
        textbox=textbox,
        validator=check,
        examples=[[{"text": _QUESTION, "files": [str(path)]}] for path in pictures] or None,
        run_examples_on_click=False,
        additional_inputs=[
            gr.Slider(1, min(4096, chat.max_tokens), value=min(256, chat.max_tokens), step=1, label="Longest answer, in tokens"),
            gr.Slider(0, 2, value=0, step=0.05, label="Temperature (0: always the most probable token)"),
        ],
        additional_inputs_accordion=gr.Accordion("Settings", open=False),
        additional_outputs=[record],
        api_name="chat",
    )  # fmt: skip


def _experts(chat: ChatModel, record: gr.State) -> None:
    config = chat.model.config.get_text_config()
    layers = [(f"layer {layer}", index) for index, layer in enumerate(config.moe_layers)]
    color_map = colours(config.num_local_experts)
    note = gr.Markdown(_NO_ANSWER)
    with gr.Column(visible=False) as column:
        layer = gr.Dropdown(layers, value=0, label="Mixture layer", interactive=True, elem_id="layer")
        with gr.Row():
            picture = gr.AnnotatedImage(
                label="Which expert took which part of the picture", color_map=color_map, elem_id="overlay",
                visible=chat.sees_pictures,
            )  # fmt: skip
            answered = gr.HighlightedText(
                label="Which expert took which token of the answer", color_map=color_map, show_legend=True,
                elem_id="answered",
            )  # fmt: skip
        load = gr.Plot(label="Shares of the tokens", elem_id="load")
        table = gr.Dataframe(
            label="Experts of each token, with the router's weights",
            interactive=False,
            wrap=True,
            elem_id="table",
        )

    def show(found: ExpertRecord | None, index: int) -> dict[Any, Any]:
        if found is None:
            return {note: gr.Markdown(visible=True), column: gr.Column(visible=False)}
        return {
            note: gr.Markdown(visible=False),
            column: gr.Column(visible=True),
            picture: gr.AnnotatedImage(overlay(found, index), visible=found.picture is not None),
            answered: coloured_answer(found, index),
            load: heat_map(found),
            table: answer_table(found),
        }

    shown = [note, column, picture, answered, load, table]
    record.change(show, [record, layer], shown, show_progress="hidden", api_visibility="private")
    layer.change(show, [record, layer], shown, show_progress="hidden", api_visibility="private")


def _read(message: Any) -> list[dict[str, Any]]:
    """The typed parts of what was typed and dropped.

    Raises:
        ValueError: a picture that cannot be read, or no question.
    """
    text, files = (message, []) if isinstance(message, str) else (message["text"], message["files"])
    if not text.strip():
        raise ValueError("The question is empty: type what you want to know.")
    return [*map(_picture, files), {"type": "text", "text": text}]


def _picture(path: str) -> dict[str, Any]:
    try:
        return {"type": "image", "image": llamoe.read_picture(path)}
    except ValueError as error:
        # Uploads lie in long folders that say nothing to who sent them.
        raise ValueError(str(error).replace(str(Path(path)), Path(path).name)) from error


def _as_chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of gradio's history in transformers' form."""
    content = [
        _picture(part["file"]["path"]) if part["type"] == "file" else {"type": "text", "text": part["text"]}
        for part in message["content"]
    ]
    return {"role": message["role"], "content": content}


def _plain_text(messages: list[dict[str, Any]], chat: ChatModel) -> list[dict[str, Any]]:
    """Texts in place of typed parts for a tokenizer, which knows no pictures."""
    if chat.sees_pictures:
        return messages
    return [
        message | {"content": "".join(part["text"] for part in message["content"])} for message in messages
    ]
